"""What a model takes and answers, as JSON Schema, and its OpenAPI document of them.

`/openapi.json` describes routes, which take any model's name and so any body. In a model's own the
name stands in the paths, and the schemas are those of its handler and signature, so that a client
can be generated.
"""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelyard.archiver.signature import (
    OIP_DATATYPES,
    Dim,
    Signature,
    Size,
    TensorSpec,
    parse_signature,
)
from modelyard.serve.api import description
from modelyard.serve.control.registry import ModelVersion, Registry

NUMBER: description.Schema = {"type": "number"}
INTEGER: description.Schema = {"type": "integer"}
TEXT: description.Schema = {"type": "string"}
ANYTHING: description.Schema = {}
HANDLERS: Mapping[str, tuple[Mapping[str, description.Schema], description.Schema]] = {
    name: (form["takes"], form["answers"])
    for name, form in description.DOCUMENT["handlers"].items()
}
"""A built-in handler → what it takes by media type, and what it answers."""
OF_ANY_HANDLER = (
    description.DOCUMENT["any_handler"]["takes"],
    description.DOCUMENT["any_handler"]["answers"],
)


def listed(items: description.Schema) -> description.Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def fields(
    required: Mapping[str, description.Schema],
    optional: Mapping[str, description.Schema] | None = None,
) -> description.Schema:
    """Return the schema of an object."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties}


def by_name(values: description.Schema) -> description.Schema:
    """Return the schema of an object whose names are a model's own."""
    return {"type": "object", "additionalProperties": values}


def body_and_answer(
    handler: str, signature: Signature | None
) -> tuple[Mapping[str, description.Schema], description.Schema]:
    """Return what a prediction takes, by media type, and what it answers.

    Args:
        handler: handler as the manifest names it.
        signature: signature of the artifact, where it is known.
    """
    if handler == "base_handler" and signature is not None and signature.inputs:
        return {"application/json": _rows(signature.inputs)}, _rows(signature.outputs)
    return HANDLERS.get(handler, OF_ANY_HANDLER)


def _rows(specs: Iterable[TensorSpec]) -> description.Schema:
    """Return the schema of one row: of one tensor its numbers, of several an object by name."""
    rows = {spec.name: _nested(spec.shape[1:], _value(spec.dtype)) for spec in specs}
    if not rows:
        return ANYTHING
    return fields(rows) if len(rows) > 1 else next(iter(rows.values()))


def _nested(shape: tuple[Size, ...], value: description.Schema) -> description.Schema:
    schema = value
    for size in reversed(shape):
        schema = {**listed(schema), **_limits(size)}
    return schema


def _limits(size: Size) -> description.Schema:
    if isinstance(size, Dim):
        return {} if str(size) == size.name else {"minItems": size.min, "maxItems": size.max}
    return {"minItems": size, "maxItems": size}


def _value(dtype: str) -> description.Schema:
    if dtype == "bool":
        return {"type": "boolean"}
    return INTEGER if "int" in dtype else NUMBER


def tensor_schemas(signature: Signature) -> dict[str, description.Schema]:
    """Return components for requests and answers of the Open Inference Protocol."""
    components: dict[str, description.Schema] = {}
    sides = (("Input", signature.inputs), ("Output", signature.outputs))
    named: dict[str, list[str]] = {}
    for side, specs in sides:
        for spec in specs:
            name = f"{_title(spec.name)}{side}"
            components[name] = _tensor(spec, side)
            named.setdefault(side, []).append(name)
    components["InferRequest"] = fields(
        {"inputs": _one_of(named.get("Input", []))},
        {"id": TEXT, "parameters": by_name(ANYTHING),
         "outputs": listed(fields({"name": TEXT}, {"parameters": by_name(ANYTHING)}))},
    )  # fmt: skip
    components["InferResponse"] = fields(
        {"model_name": TEXT, "model_version": TEXT, "outputs": _one_of(named.get("Output", []))},
        {"id": TEXT, "parameters": by_name(ANYTHING)},
    )
    return components


def _tensor(spec: TensorSpec, side: str) -> description.Schema:
    """Return the schema of one tensor; that of an output may come as bytes, without `data`."""
    ranks = {"minItems": len(spec.shape), "maxItems": len(spec.shape)}
    sizes = ", ".join(map(str, spec.shape))
    stated = {
        "name": {"type": "string", "enum": [spec.name]},
        "shape": {**listed(INTEGER), **ranks, "description": f"[{sizes}]"},
        "datatype": {"type": "string", "enum": [OIP_DATATYPES.get(spec.dtype, spec.dtype)]},
    }
    data = {"data": listed(_value(spec.dtype))}
    parameters = {"parameters": by_name(ANYTHING)}
    if side == "Input":
        return fields({**stated, **data}, parameters)
    return fields(stated, {**data, **parameters})


def _one_of(names: list[str]) -> description.Schema:
    """Return the schema of a list of these tensors, each of them once."""
    each: list[description.Schema] = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    if not each:
        return listed(by_name(ANYTHING))
    return listed(each[0] if len(each) == 1 else {"anyOf": each})


def _title(name: str) -> str:
    """Return a name as names of classes are written: `input_ids` is `InputIds`."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


# -- the document of one model --------------------------------------------------------------------

ERRORS = (400, 401, 404, 413, 415, 500, 503, 504, 507, *description.EVERYWHERE)


def model_docs_routes(registry: Registry) -> APIRouter:
    """Return the routes that describe a model."""
    router = APIRouter(tags=["documentation"], responses=description.error_responses(404))

    @description.of_model(
        router, "GET", ("of_default", "/openapi/{model}.json", "A model's OpenAPI document"),
        ("of_version", "/openapi/{model}/{version}.json", "A version's OpenAPI document"),
    )  # fmt: skip
    async def document(model: description.ModelName, version: str | None) -> JSONResponse:
        """Describe a version's own bodies and answers."""
        return JSONResponse(describe_model(registry.get(model, version), version is not None))

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
    schemas = {"Error": description.SCHEMAS["Error"], "Prediction": answer}
    paths = {
        f"/predictions/{own}": _post(
            "predict", "Predict", bodies, _ref("Prediction"), [description.TIMEOUT_PARAMETER]
        )
    }
    if model.takes_our_options:
        schemas |= {
            name: each
            for name, each in description.SCHEMAS.items()
            if name.startswith("Explanation")
        }
        paths[f"/explanations/{own}"] = _post(
            "explain",
            "Explain",
            bodies,
            description.DOCUMENT["answers"]["explain"],
            description.PARAMETERS["explain"],
        )
    if signature is not None and model.takes_our_options:
        tensors = tensor_schemas(signature)
        schemas |= tensors
        body = {"application/json": _ref("InferRequest")}
        path = f"/v2/models/{name}{versions}"
        said = _ref("InferResponse")
        paths[f"{path}/infer"] = _post(
            "infer", "Infer", body, said, [description.TIMEOUT_PARAMETER]
        )
        schemas["Metadata"] = description.DOCUMENT["metadata"]
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


def _ref(name: str) -> description.Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(id: str, summary: str, answer: description.Schema) -> dict[str, Any]:
    """Return an operation whose errors are ours."""
    found = {str(code): each for code, each in description.error_responses(*ERRORS).items()}
    said = {"description": "Answered.", "content": {"application/json": {"schema": answer}}}
    return {"operationId": id, "summary": summary, "responses": {"200": said, **found}}


def _post(
    id: str, summary: str, bodies: Any, answer: description.Schema, parameters: list[dict[str, Any]]
) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in bodies.items()}
    return {
        "post": {
            **_operation(id, summary, answer),
            "parameters": parameters,
            "requestBody": {"required": True, "content": content},
        }
    }
