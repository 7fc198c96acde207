"""What a model takes and answers, as JSON Schema: by its handler, and by its signature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from modelyard.archiver.signature import OIP_DATATYPES, Dim, Signature, Size, TensorSpec

Schema = dict[str, Any]

NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
TEXT: Schema = {"type": "string"}
FILE: Schema = {"type": "string", "format": "binary"}
ANYTHING: Schema = {}


def listed(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def fields(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties}


def by_name(values: Schema) -> Schema:
    """Return the schema of an object whose names are a model's own."""
    return {"type": "object", "additionalProperties": values}


def nullable(kind: str) -> Schema:
    """Return the schema of a value that may be missing."""
    return {"type": [kind, "null"]}


PROBABILITIES: Schema = {
    **by_name(NUMBER), "description": "Label → probability, the likeliest first.",
}  # fmt: skip
IMAGE = {"application/octet-stream": {**FILE, "description": "The file of a picture."}}
PICTURE: Schema = {"type": "string", "contentEncoding": "base64"}
SOUND = {"application/octet-stream": {**FILE, "description": "The file of a sound."}}
BOX = fields({side: NUMBER for side in ("xmin", "ymin", "xmax", "ymax")})
SPAN = {"start": INTEGER, "end": INTEGER}

HANDLERS: Mapping[str, tuple[Mapping[str, Schema], Schema]] = {
    "image_classifier": (IMAGE, PROBABILITIES),
    "object_detector": (
        IMAGE,
        listed(fields({"label": TEXT, "score": NUMBER, "box": BOX})),
    ),
    "image_segmenter": (
        IMAGE,
        fields({
            "size": listed(INTEGER),
            "segments": listed(fields({
                "label": TEXT, "index": INTEGER, "area": INTEGER, "counts": listed(INTEGER),
            })),
        }),
    ),
    "image_encoder": (IMAGE, listed(NUMBER)),
    "image_text": (
        {"application/json": fields({"image": PICTURE, "texts": listed(TEXT)})}, PROBABILITIES
    ),
    "audio_classifier": (SOUND, PROBABILITIES),
    "speech_recognizer": (
        SOUND,
        fields({"text": TEXT, "words": listed(fields({
            "word": TEXT, "start": NUMBER, "end": NUMBER,
        }))}),
    ),
    "forecaster": (
        {"application/json": listed(ANYTHING)},
        fields({}, {"forecast": listed(ANYTHING), "quantiles": by_name(listed(ANYTHING))}),
    ),
    "tabular": (
        {"application/json": by_name(ANYTHING)}, {"anyOf": [PROBABILITIES, listed(NUMBER)]}
    ),
    "text": ({"application/json": TEXT}, PROBABILITIES),
    "text_classifier": ({"application/json": TEXT}, PROBABILITIES),
    "token_classifier": (
        {"application/json": TEXT},
        listed(fields({"entity": TEXT, "score": NUMBER, **SPAN, "word": TEXT})),
    ),
    "question_answering": (
        {"application/json": fields({"question": TEXT, "context": TEXT})},
        fields({"answer": TEXT, "score": NUMBER, **SPAN}),
    ),
    "fill_mask": ({"application/json": TEXT}, ANYTHING),
    "text_encoder": ({"application/json": TEXT}, listed(NUMBER)),
    "generate": (
        {
            "application/json": fields({"prompt": TEXT}, {
                "max_new_tokens": INTEGER, "temperature": NUMBER, "seed": INTEGER,
                "stop": listed(TEXT), "stream": {"type": "boolean"},
            }),
        },
        fields({
            "text": TEXT, "tokens": INTEGER, "prompt_tokens": INTEGER, "finish_reason": TEXT,
        }),
    ),
}  # fmt: skip
"""A built-in handler → what it takes by media type, and what it answers. Of several forms of a body
the one that clients have at hand: generators make poor code of a choice between a file and JSON."""
OF_ANY_HANDLER: tuple[Mapping[str, Schema], Schema] = (
    {"application/octet-stream": FILE, "application/json": ANYTHING}, ANYTHING
)  # fmt: skip

ERROR = fields({"code": INTEGER, "type": TEXT, "message": TEXT, "error": TEXT, "request_id": TEXT})
_OF_EACH = fields(
    {"method": TEXT, "target": ANYTHING, "attributions": ANYTHING},
    {
        "label": nullable("string"), "output_name": nullable("string"), "output": TEXT,
        "probability": nullable("number"), "baseline": TEXT, "explained_with": TEXT,
        **{name: NUMBER for name in ("f_input", "f_baseline", "f_served", "sum_attributions")},
        **{name: nullable("number") for name in
           ("convergence_delta", "relative_delta", "net_share", "error")},
        "n_steps": INTEGER, "tolerance_met": nullable("boolean"), "warnings": listed(TEXT),
        "shape": ANYTHING,
    },
)  # fmt: skip
_OF_ALL = {"model": TEXT, "version": TEXT}
EXPLANATIONS: Mapping[str, Schema] = {
    "Explanation": {
        **_OF_EACH,
        "required": [*_OF_ALL, *_OF_EACH["required"]],
        "properties": {**_OF_ALL, **_OF_EACH["properties"]},
    },
    "ExplanationOfTarget": _OF_EACH,
    "ExplanationsOfTargets": fields(
        {**_OF_ALL, "explanations": listed({"$ref": "#/components/schemas/ExplanationOfTarget"})}
    ),
}
"""Of one target; of several, as `target=top-3` asks for."""
EXPLAINED: Schema = {
    "anyOf": [
        {"$ref": f"#/components/schemas/{each}"}
        for each in ("Explanation", "ExplanationsOfTargets")
    ]
}


TENSOR = fields(
    {
        "name": TEXT, "shape": listed(INTEGER),
        "datatype": {"type": "string", "enum": [*sorted(OIP_DATATYPES.values()), "BYTES"]},
    },
    {"data": listed(ANYTHING), "parameters": by_name(ANYTHING)},
)  # fmt: skip
SCHEMAS: Mapping[str, Schema] = {
    "Error": ERROR,
    **EXPLANATIONS,
    "Tensor": TENSOR,
    "InferRequest": fields(
        {"inputs": listed({"$ref": "#/components/schemas/Tensor"})},
        {"id": TEXT, "parameters": by_name(ANYTHING), "outputs": listed(by_name(ANYTHING))},
    ),
    "InferResponse": fields(
        {
            "model_name": TEXT, "model_version": TEXT,
            "outputs": listed({"$ref": "#/components/schemas/Tensor"}),
        },
        {"id": TEXT, "parameters": by_name(ANYTHING)},
    ),
}  # fmt: skip
"""Of routes that take any model; a model's own are in its own document."""


def body_and_answer(
    handler: str, signature: Signature | None
) -> tuple[Mapping[str, Schema], Schema]:
    """Return what a prediction takes, by media type, and what it answers.

    Args:
        handler: as the manifest names it.
        signature: of the artifact, where it is known.
    """
    if handler == "base_handler" and signature is not None and signature.inputs:
        return {"application/json": _rows(signature.inputs)}, _rows(signature.outputs)
    return HANDLERS.get(handler, OF_ANY_HANDLER)


def _rows(specs: Iterable[TensorSpec]) -> Schema:
    """Return the schema of one row: of one tensor its numbers, of several an object by name."""
    rows = {spec.name: _nested(spec.shape[1:], _value(spec.dtype)) for spec in specs}
    if not rows:
        return ANYTHING
    return fields(rows) if len(rows) > 1 else next(iter(rows.values()))


def _nested(shape: tuple[Size, ...], value: Schema) -> Schema:
    schema = value
    for size in reversed(shape):
        schema = {**listed(schema), **_limits(size)}
    return schema


def _limits(size: Size) -> Schema:
    if isinstance(size, Dim):
        return {} if str(size) == size.name else {"minItems": size.min, "maxItems": size.max}
    return {"minItems": size, "maxItems": size}


def _value(dtype: str) -> Schema:
    if dtype == "bool":
        return {"type": "boolean"}
    return INTEGER if "int" in dtype else NUMBER


def tensor_schemas(signature: Signature) -> dict[str, Schema]:
    """Return components for requests and answers of the Open Inference Protocol."""
    components: dict[str, Schema] = {}
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


def _tensor(spec: TensorSpec, side: str) -> Schema:
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


def _one_of(names: list[str]) -> Schema:
    """Return the schema of a list of these tensors, each of them once."""
    each: list[Schema] = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    if not each:
        return listed(by_name(ANYTHING))
    return listed(each[0] if len(each) == 1 else {"anyOf": each})


def _title(name: str) -> str:
    """Return a name as names of classes are written: `input_ids` is `InputIds`."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
