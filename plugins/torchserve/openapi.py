"""The OpenAPI documents that TorchServe answers to OPTIONS: of a port, of a model."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from modelyard.plugins.torchserve import TORCHSERVE_VERSION as VERSION

Document = dict[str, Any]

_PORT = "TorchServe is a flexible and easy to use tool for serving deep learning models"
_ERROR = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {"code": {"type": "integer"}}
    | {key: {"type": "string"} for key in ("type", "message")},
}


@cache
def _read() -> Document:
    document: Document = yaml.safe_load(Path(__file__).with_name("openapi.yaml").read_bytes())
    return document


def server(*sections: str) -> Document:
    """Return the document of a port with these sections of openapi.yaml, beside every port's."""
    about = {"title": "TorchServe APIs", "version": VERSION, "description": _PORT}
    return _document(about, ["port", *sections, "metrics"])


def model(name: str) -> Document:
    """Return the document of one model's predictions."""
    return _document(
        {"title": f"RESTful API for: {name}", "version": "1.0.0"}, ["predictions"], name
    )


def model_management(name: str) -> Document:
    """Return the document of one model's management."""
    return _document(
        {"title": f"RESTful Management API for: {name}", "version": VERSION}, ["one_model"]
    )


def _document(about: dict[str, str], sections: list[str], name: str = "") -> Document:
    paths = {
        path.replace("NAME", name): {
            method: _operation(path.replace("NAME", name), method, operation)
            for method, operation in methods.items()
        }
        for section in sections
        for path, methods in _read()["sections"][section].items()
    }
    return {"openapi": "3.0.1", "info": about, "paths": paths}


def _operation(path: str, method: str, said: Any) -> Document:
    """Return one operation; what stands in braces in a path is a parameter."""
    said = {"summary": said} if isinstance(said, str) else said
    answer = _read()["answers"].get(said.get("answer"), {})
    query = _read()["queries"].get(said.get("query"), {})
    parameters: list[Document] = [
        {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}
        for name in (part.partition("}")[0] for part in path.split("{")[1:])
    ]
    of_query = {"in": "query", "required": False}
    parameters += [
        {**of_query, "name": key, "schema": {"type": kind}, "description": text}
        for key, (kind, text) in query.items()
    ]
    operation: Document = {
        "summary": said["summary"],
        "operationId": "_".join([method, *path.strip("/").split("/")]),
        "parameters": parameters,
        "responses": {
            code: {"description": text, "content": {"application/json": {"schema": schema}}}
            for code, text, schema in (("200", "OK", answer), ("default", "Error", _ERROR))
        },
    }
    if said["summary"] in ("Predict", "Explain") and method != "get":
        binary = {"type": "string", "format": "binary"}
        operation["requestBody"] = {"content": {"*/*": {"schema": binary}}}
    return operation
