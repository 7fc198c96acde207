"""The OpenAPI document of one model: what it takes and answers, so that a client can be generated.

`/openapi.json` describes routes, which take any model's name and so any body. Here the name stands
in the paths, and the schemas are those of the model's handler and signature.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelyard.archiver.signature import parse_signature
from modelyard.serve.api.description import (
    DOCUMENT,
    EVERYWHERE,
    PARAMETERS,
    SCHEMAS,
    TIMEOUT_PARAMETER,
    ModelName,
    Schema,
    Version,
    error_responses,
)
from modelyard.serve.api.schemas import body_and_answer, tensor_schemas
from modelyard.serve.control.registry import ModelVersion, Registry

ERRORS = (400, 401, 404, 413, 415, 500, 503, 504, 507, *EVERYWHERE)


def model_docs_routes(registry: Registry) -> APIRouter:
    """Return the routes that describe a model."""
    router = APIRouter(tags=["documentation"], responses=error_responses(404))

    @router.get("/openapi/{model}.json", summary="A model's OpenAPI document")
    async def of_default(model: ModelName) -> JSONResponse:
        """Describe the default version's own bodies and answers."""
        return JSONResponse(describe_model(registry.get(model), is_versioned=False))

    @router.get("/openapi/{model}/{version}.json", summary="A version's OpenAPI document")
    async def of_version(model: ModelName, version: Version) -> JSONResponse:
        """Describe one version's own bodies and answers."""
        return JSONResponse(describe_model(registry.get(model, version), is_versioned=True))

    return router


def describe_model(model: ModelVersion, is_versioned: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a model version, under paths with or without its version."""
    manifest = model.manifest or {}
    seal = manifest.get("modelyard") or {}
    signature = parse_signature(seal["signature"]) if seal.get("signature") else None
    handler = str((manifest.get("model") or {}).get("handler") or "")
    bodies, answer = body_and_answer(handler, signature)
    name, number = quote(model.name, safe=""), quote(model.version, safe="")
    own, versions = (f"{name}/{number}", f"/versions/{number}") if is_versioned else (name, "")
    schemas = {"Error": SCHEMAS["Error"], "Prediction": answer}
    paths = {
        f"/predictions/{own}": _post(
            "predict", "Predict", bodies, _ref("Prediction"), [TIMEOUT_PARAMETER]
        )
    }
    if model.takes_our_options:
        schemas |= {name: each for name, each in SCHEMAS.items() if name.startswith("Explanation")}
        paths[f"/explanations/{own}"] = _post(
            "explain", "Explain", bodies, DOCUMENT["answers"]["explain"], PARAMETERS["explain"]
        )
    if signature is not None and model.takes_our_options:
        tensors = tensor_schemas(signature)
        schemas |= tensors
        body = {"application/json": _ref("InferRequest")}
        path = f"/v2/models/{name}{versions}"
        said = _ref("InferResponse")
        paths[f"{path}/infer"] = _post("infer", "Infer", body, said, [TIMEOUT_PARAMETER])
        schemas["Metadata"] = DOCUMENT["metadata"]
        paths[path] = {"get": _operation("metadata", "Inputs and outputs", _ref("Metadata"))}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": model.name,
            "version": model.version,
            "description": f"The model {model.name} {model.version}; its digest is {model.digest}.",
        },
        "servers": [{"url": "../.." if is_versioned else ".."}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(id: str, summary: str, answer: Schema) -> dict[str, Any]:
    """Return an operation whose errors are ours."""
    found = {str(code): each for code, each in error_responses(*ERRORS).items()}
    said = {"description": "Answered.", "content": {"application/json": {"schema": answer}}}
    return {"operationId": id, "summary": summary, "responses": {"200": said, **found}}


def _post(
    id: str, summary: str, bodies: Any, answer: Schema, parameters: list[dict[str, Any]]
) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in bodies.items()}
    return {
        "post": {
            **_operation(id, summary, answer),
            "parameters": parameters,
            "requestBody": {"required": True, "content": content},
        }
    }
