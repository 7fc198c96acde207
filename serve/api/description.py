"""What the inference API's documentation says; requests for these paths never come to FastAPI.

`Calls` takes them before routing. The routes here only describe, and let other methods be 405.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from modelyard.base.explain_options import EXPLAIN_OPTIONS, Option
from modelyard.serve.api.schemas import EXPLAINED
from modelyard.serve.dataplane.call import CLASSES, NORMAL

DESCRIPTION = """\
Predictions and explanations of the models that this server holds.

`curl ADDRESS/predictions/MODEL -T FILE`, where ADDRESS is this page's without `/docs`. The
management and metrics APIs have such a page each, on their own ports.
"""

ModelName = Annotated[str, Path(description="Registered name.", examples=["digits"])]
Version = Annotated[str, Path(description="Registered version.", examples=["1.0"])]
TIMEOUT_PARAMETER = {
    "name": "X-Request-Timeout",
    "in": "header",
    "schema": {"type": "string"},
    "examples": {"seconds": {"value": "0.5"}, "milliseconds": {"value": "150ms"}},
    "description": "How long the client waits, if less than the model allows. A request whose "
    "answer is not to be expected in this time is refused at once.",
}
PRIORITY_PARAMETER = {
    "name": "X-Request-Priority",
    "in": "header",
    "schema": {"type": "string", "enum": list(CLASSES), "default": CLASSES[NORMAL]},
    "description": "Whose turn it is while many wait; `high` needs a token with the right "
    "`priority` where tokens are asked for.",
}
BODY: dict[str, Any] = {
    "parameters": [TIMEOUT_PARAMETER, PRIORITY_PARAMETER],
    "requestBody": {
        "description": "What the model's handler takes: an image, JSON, text, or a form.",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {}},
        },
    },
}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _parameter(name: str, option: Option) -> dict[str, Any]:
    """Describe a query parameter; one that is one of few has them in a list to choose from."""
    schema: dict[str, Any] = {"type": _JSON_TYPES[option.type]}
    if option.choices:
        schema["enum"] = list(option.choices)
    if option.limits is not None:
        schema["minimum"], schema["maximum"] = option.limits
    found = {"name": name, "in": "query", "schema": schema, "description": option.text}
    if option.examples:
        # The first one is filled in, and sent unasked; in JavaScript names of digits come first.
        found["examples"] = {"none": {"value": ""}} | {
            f"index {each}" if each.isdigit() else each: {"value": each} for each in option.examples
        }
    return found


EXPLAIN_BODY: dict[str, Any] = {
    **BODY,
    "parameters": [
        TIMEOUT_PARAMETER,
        PRIORITY_PARAMETER,
        *(_parameter(name, option) for name, option in EXPLAIN_OPTIONS.items()),
    ],
}
INFER_BODY: dict[str, Any] = {
    **BODY,
    "requestBody": {
        "description": "Tensors by name, as JSON, or as JSON with their bytes behind it.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
}
EVERYWHERE = (403, 405, 408, 414, 431)
"""What any request may be answered, for what it is and not for what it asks."""


def _ref(name: str) -> dict[str, str]:
    """Return a reference to one of `schemas.SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def error_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Describe error answers for the documentation."""
    texts = {
        400: "The input or a parameter is wrong; the message names it.",
        401: "The token is missing or wrong.",
        403: "Refused: by a name that is not the server's, from a web page of elsewhere, or a "
        "default version that others stand beside.",
        404: "No such model or version.",
        405: "The path has other methods.",
        408: "The head or the body did not come in time.",
        409: "The version is registered already.",
        413: "The body is over the limit.",
        414: "Path and query are over the limit.",
        415: "The body has a Content-Encoding.",
        431: "The headers are over a limit.",
        500: "The handler failed, or the worker died.",
        503: "The queue is full, the time too short or no worker there; see Retry-After.",
        504: "Not answered in time.",
        507: "Memory, or the disk, ran out.",
    }
    return {
        code: {
            "description": texts[code],
            "content": {"application/json": {"schema": _ref("Error")}},
        }
        for code in codes
    }


CALLS = [
    (
        "predict",
        "/predictions/{model}",
        BODY,
        "Predict",
        "Run the default version of a model on one input.",
    ),
    (
        "predict_version",
        "/predictions/{model}/{version}",
        BODY,
        "Predict, version",
        "Run one version of a model on one input.",
    ),
    (
        "explain",
        "/explanations/{model}",
        EXPLAIN_BODY,
        "Explain",
        "Attribute the default version's answer to each input value, with the error of the sum.\n\n"
        'The handler reads the parameters; a JSON body `{"data": input, "explain": {…}}` and a '
        "part\n`explain` of a form take them too.",
    ),
    (
        "explain_version",
        "/explanations/{model}/{version}",
        EXPLAIN_BODY,
        "Explain, version",
        "Attribute one version's answer to each input value.",
    ),
    (
        "predict_instances",
        "/v1/models/{model}:predict",
        BODY,
        "Predict instances",
        "Run the default version on each of `instances`, as KServe's v1 protocol has them.",
    ),
    (
        "explain_instances",
        "/v1/models/{model}:explain",
        EXPLAIN_BODY,
        "Explain instances",
        "Attribute the default version's answer to each of `instances`.",
    ),
    (
        "infer",
        "/v2/models/{model}/infer",
        INFER_BODY,
        "Infer",
        "Run the default version on tensors by name, as the Open Inference Protocol has them.\n\n"
        "The body is JSON with `inputs`, or JSON with the bytes of tensors behind it, whose own\n"
        "length the header `Inference-Header-Content-Length` says.",
    ),
    (
        "infer_stream",
        "/v2/models/{model}/infer_stream",
        BODY,
        "Infer, stream",
        "The same, answered with an event for each answer that the handler streams.",
    ),
    (
        "generate",
        "/v2/models/{model}/generate",
        BODY,
        "Generate",
        "Answer an object, such as `text_input` and `parameters`, with an object; Triton's.",
    ),
    (
        "generate_stream",
        "/v2/models/{model}/generate_stream",
        BODY,
        "Generate, stream",
        "The same, answered with an event for each piece of the answer.",
    ),
    (
        "infer_version",
        "/v2/models/{model}/versions/{version}/infer",
        INFER_BODY,
        "Infer, version",
        "Run one version on tensors by name, as the Open Inference Protocol has them.",
    ),
]
"""Name, path, what the body may be, summary, text."""


ANSWERS = {"explain": EXPLAINED, "infer": _ref("InferResponse")}
"""Of calls whose answers have one form, whatever the model."""


def _of_model(model: ModelName) -> None:
    """Describe the parameters of a path."""


def _of_version(model: ModelName, version: Version) -> None:
    """Describe the parameters of a path."""


def described_calls() -> APIRouter:
    """Return the routes that document the calls."""
    router = APIRouter(
        tags=["inference"], responses=error_responses(400, 404, 413, 415, 500, 503, 504, 507)
    )
    for name, path, body, summary, text in CALLS:
        answer = ANSWERS.get(name.removesuffix("_version"))
        said: dict[int | str, dict[str, Any]] = (
            {200: {"content": {"application/json": {"schema": answer}}}} if answer else {}
        )
        router.add_api_route(
            path,
            _of_version if "{version}" in path else _of_model,
            methods=["POST"],
            name=name,
            summary=summary,
            description=text,
            openapi_extra=body,
            responses=said,
        )
    return router
