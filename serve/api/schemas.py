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

from modelyard.archiver.signature import OIP_DATATYPES, Dim, Signature, TensorSpec, parse_signature
from modelyard.serve.api import description
from modelyard.serve.api.description import DOCUMENT, SCHEMAS, Schema
from modelyard.serve.control.registry import ModelVersion, Registry

INTEGER: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object", "additionalProperties": {}}


def listed(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def fields(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """Return the schema of an object."""
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def body_and_answer(
    handler: str, signature: Signature | None
) -> tuple[Mapping[str, Schema], Schema]:
    """Return what a prediction takes, by media type, and what it answers.

    Args:
        handler: handler as the manifest names it.
        signature: signature of the artifact, where it is known.
    """
    if handler == "base_handler" and signature is not None and signature.inputs:
        return {"application/json": _rows(signature.inputs)}, _rows(signature.outputs)
    form = DOCUMENT["handlers"].get(handler, DOCUMENT["any_handler"])
    return form["takes"], form["answers"]


def _rows(specs: Iterable[TensorSpec]) -> Schema:
    """Return the schema of one row: of one tensor its numbers, of several an object by name."""
    rows = {spec.name: _row(spec) for spec in specs}
    return fields(rows, {}) if len(rows) > 1 else next(iter(rows.values()), {})


def _row(spec: TensorSpec) -> Schema:
    schema = _value(spec.dtype)
    for size in reversed(spec.shape[1:]):
        schema = listed(schema)
        if not isinstance(size, Dim):
            schema |= {"minItems": size, "maxItems": size}
        elif str(size) != size.name:
            schema |= {"minItems": size.min, "maxItems": size.max}
    return schema


def _value(dtype: str) -> Schema:
    if dtype == "bool":
        return {"type": "boolean"}
    return INTEGER if "int" in dtype else {"type": "number"}


def tensor_schemas(signature: Signature) -> dict[str, Schema]:
    """Return components for requests and answers of the Open Inference Protocol."""
    components: dict[str, Schema] = {}
    sides: list[Schema] = []
    for side, specs in (("Input", signature.inputs), ("Output", signature.outputs)):
        tensors = {f"{_title(spec.name)}{side}": _tensor(spec, side) for spec in specs}
        components |= tensors
        first, *others = [_ref(name) for name in tensors] or [OBJECT]
        sides.append(listed({"anyOf": [first, *others]} if others else first))
    inputs, outputs = sides
    wanted = listed(fields({"name": TEXT}, {"parameters": OBJECT}))
    about = {"id": TEXT, "parameters": OBJECT}
    components["InferRequest"] = fields({"inputs": inputs}, {**about, "outputs": wanted})
    components["InferResponse"] = fields(
        {"model_name": TEXT, "model_version": TEXT, "outputs": outputs}, about
    )
    return components


def _tensor(spec: TensorSpec, side: str) -> Schema:
    """Return the schema of one tensor; that of an output may come as bytes, without `data`."""
    rank, sizes = len(spec.shape), ", ".join(map(str, spec.shape))
    shape = {"minItems": rank, "maxItems": rank, "description": f"[{sizes}]"}
    stated = {
        "name": {"type": "string", "enum": [spec.name]},
        "shape": {**listed(INTEGER), **shape},
        "datatype": {"type": "string", "enum": [OIP_DATATYPES.get(spec.dtype, spec.dtype)]},
    }
    data, parameters = {"data": listed(_value(spec.dtype))}, {"parameters": OBJECT}
    if side == "Input":
        return fields(stated | data, parameters)
    return fields(stated, data | parameters)


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
    schemas = {"Error": SCHEMAS["Error"], "Prediction": answer}
    paths = {f"/predictions/{own}": _post("predict", bodies, _ref("Prediction"))}
    if model.takes_our_options:
        schemas |= {key: each for key, each in SCHEMAS.items() if key.startswith("Explanation")}
        paths[f"/explanations/{own}"] = _post("explain", bodies, DOCUMENT["answers"]["explain"])
    if signature is not None and model.takes_our_options:
        schemas |= tensor_schemas(signature) | {"Metadata": DOCUMENT["metadata"]}
        path, body = f"/v2/models/{name}{versions}", {"application/json": _ref("InferRequest")}
        paths[f"{path}/infer"] = _post("infer", body, _ref("InferResponse"))
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
        "components": {"schemas": schemas, **description.TOKEN_SCHEME},
        "security": description.SECURITY,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _operation(id: str, summary: str, answer: Schema) -> dict[str, Any]:
    """Return an operation whose errors are ours."""
    found = {str(code): each for code, each in description.error_responses(*ERRORS).items()}
    said = {"description": "Answered.", "content": {"application/json": {"schema": answer}}}
    return {"operationId": id, "summary": summary, "responses": {"200": said, **found}}


def _post(id: str, bodies: Mapping[str, Schema], answer: Schema) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in bodies.items()}
    return {
        "post": {
            **_operation(id, id.capitalize(), answer),
            "parameters": description.PARAMETERS.get(id, [description.TIMEOUT_PARAMETER]),
            "requestBody": {"required": True, "content": content},
        }
    }
