"""The OpenAPI documents that TorchServe answers to OPTIONS: of a port, of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelyard.plugins.torchserve import TORCHSERVE_VERSION as VERSION

Document = dict[str, Any]

_ERROR = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {
        "code": {"type": "integer"},
        "type": {"type": "string"},
        "message": {"type": "string"},
    },
}
_STATUS = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"type": "string"}},
}
_ANY: Document = {}
_INPUT = {"content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}}
_TEXT, _NUMBER, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_REGISTER = {
    "url": (_TEXT, "File in the model store, or a URL that the settings allow."),
    "model_name": (_TEXT, "Default: the archive's."),
    "handler": (_TEXT, "Default: the archive's."),
    "runtime": (_TEXT, "python or python3."),
    "batch_size": (_NUMBER, "Requests in one call of the handler; default 1."),
    "max_batch_delay": (_NUMBER, "Milliseconds that a batch waits for more; default 100."),
    "initial_workers": (_NUMBER, "Default: the server's."),
    "synchronous": (_FLAG, "Answer when the workers are ready; default true."),
    "response_timeout": (_NUMBER, "Seconds for one batch."),
    "startup_timeout": (_NUMBER, "Seconds for a worker to load."),
}
_SCALE = {
    "min_worker": (_NUMBER, "Workers to start; default 1."),
    "max_worker": (_NUMBER, "Workers that may stay; default min_worker."),
    "synchronous": (_FLAG, "Answer when that is done; default false."),
}
_LIST = {
    "limit": (_NUMBER, "Up to 100."),
    "next_page_token": (_NUMBER, "Of the answer before."),
}
_DESCRIBE = {"customized": (_FLAG, "Ask the handler too.")}


def server(
    inference: bool = False, management: bool = False, metrics: bool = False, oip: bool = False
) -> Document:
    """Return the document of a port, which may carry several of the APIs."""
    paths: dict[str, Any] = {}
    _add(paths, "/", "options", "Describe this port")
    _add(paths, "/api-description", "get", "Describe this port")
    if inference:
        _add(paths, "/ping", "get", "Healthy or Unhealthy", _STATUS)
        for method in ("get", "post", "put"):
            _add(paths, "/predictions/{model_name}", method, "Predict")
            _add(paths, "/predictions/{model_name}/{model_version}", method, "Predict")
            _add(paths, "/explanations/{model_name}", method, "Explain")
            _add(paths, "/explanations/{model_name}/{model_version}", method, "Explain")
        for path in (
            "/invocations",
            "/models/{model_name}/invoke",
            "/{model_name}/predict",
            "/{model_name}/{model_version}/predict",
            "/v1/models/{model_name}:predict",
            "/v1/models/{model_name}:explain",
            "/v2/models/{model_name}/infer",
            "/v2/models/{model_name}/explain",
        ):
            _add(paths, path, "post", "Explain" if path.endswith("explain") else "Predict")
    if oip:
        for path in (
            "/v2",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/{model_name}",
            "/v2/models/{model_name}/ready",
            "/v2/models/{model_name}/versions/{model_version}",
            "/v2/models/{model_name}/versions/{model_version}/ready",
        ):
            _add(paths, path, "get", "Open Inference Protocol")
        _add(paths, "/v2/models/{model_name}/versions/{model_version}/infer", "post", "Predict")
    if management:
        _add(paths, "/models", "get", "List models", query=_LIST)
        _add(paths, "/models", "post", "Register", _STATUS, _REGISTER)
        _add_model(paths)
        _add(paths, "/token", "get", "Replace a key", query={"type": (_TEXT, "of key")})
        _add(paths, "/v1/models/{model_name}", "get", "Ready")
    _add(paths, "/metrics", "get", "Prometheus metrics, on the metrics port")
    return _document(
        "TorchServe APIs",
        VERSION,
        paths,
        "TorchServe is a flexible and easy to use tool for serving deep learning models",
    )


def model(name: str) -> Document:
    """Return the document of one model's predictions; the first path is TorchServe's own slip."""
    paths: dict[str, Any] = {}
    _add(paths, f"/prediction/{name}", "post", "Predict")
    _add(paths, f"/predictions/{name}", "post", "Predict")
    _add(paths, f"/explanations/{name}", "post", "Explain")
    _add(paths, "/v1/models/{model_name}:predict", "post", "Predict")
    _add(paths, "/v2/models/{model_name}/infer", "post", "Predict")
    return _document(f"RESTful API for: {name}", "1.0.0", paths)


def model_management(name: str) -> Document:
    """Return the document of one model's management; the paths have no name, as TorchServe's."""
    paths: dict[str, Any] = {}
    _add_model(paths)
    return _document(f"RESTful Management API for: {name}", VERSION, paths)


def _add_model(paths: dict[str, Any]) -> None:
    """Add the routes of one model."""
    for path in ("/models/{model_name}", "/models/{model_name}/{model_version}"):
        _add(paths, path, "get", "Describe", query=_DESCRIBE)
        _add(paths, path, "put", "Scale", _STATUS, _SCALE)
        _add(paths, path, "delete", "Unregister", _STATUS)
    path = "/models/{model_name}/{model_version}/set-default"
    _add(paths, path, "put", "Set the default version", _STATUS)


def _document(
    title: str, version: str, paths: dict[str, Any], description: str | None = None
) -> Document:
    info = {"title": title, "version": version}
    if description:
        info["description"] = description
    return {"openapi": "3.0.1", "info": info, "paths": paths}


def _add(
    paths: dict[str, Any],
    path: str,
    method: str,
    summary: str,
    answer: Mapping[str, Any] = _ANY,
    query: Mapping[str, tuple[Mapping[str, Any], str]] | None = None,
) -> None:
    """Add one operation; what stands in braces in a path is a parameter."""
    parameters = [
        {"in": "path", "name": part.partition("}")[0], "required": True, "schema": _TEXT}
        for part in path.split("{")[1:]
    ]
    parameters += [
        {"in": "query", "name": name, "required": False, "schema": kind, "description": text}
        for name, (kind, text) in (query or {}).items()
    ]
    operation: Document = {
        "summary": summary,
        "operationId": "_".join([method, *path.strip("/").split("/")]),
        "parameters": parameters,
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": answer}}},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": _ERROR}},
            },
        },
    }
    if summary in ("Predict", "Explain") and method != "get":
        operation["requestBody"] = _INPUT
    paths.setdefault(path, {})[method] = operation
