"""What the inference API's documentation says: `openapi.yaml`, read once.

Requests for the calls in it never come to FastAPI: `Calls` takes them before routing. Their routes
here only describe, and let other methods be 405.
"""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path as File
from typing import Annotated, Any, TypeVar

import yaml
from fastapi import APIRouter, Path, Response

from modelyard.archiver.signature import OIP_DATATYPES
from modelyard.base.explain_options import EXPLAIN_OPTIONS, Option

Schema = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
ModelName = Annotated[str, Path(description="Registered name.", examples=["digits"])]
Version = Annotated[str, Path(description="Registered version.", examples=["1.0"])]

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: every start waits for it
DOCUMENT: dict[str, Any] = _Loader(
    File(__file__).with_name("openapi.yaml").read_bytes()
).get_single_data()
SCHEMAS: dict[str, Schema] = DOCUMENT["schemas"]
SCHEMAS["Tensor"]["properties"]["datatype"]["enum"] += [*sorted(OIP_DATATYPES.values()), "BYTES"]
_ORIGIN = SCHEMAS.pop("ExplanationOrigin")
for _name, _part in (
    ("", SCHEMAS["ExplanationOfTarget"]),
    ("sOfTargets", SCHEMAS["ExplanationsOfTargets"]),
):
    SCHEMAS[f"Explanation{_name}"] = {
        **_ORIGIN, **_part,
        "required": _ORIGIN["required"] + _part["required"],
        "properties": _ORIGIN["properties"] | _part["properties"],
    }  # fmt: skip
TIMEOUT_PARAMETER, _ = DOCUMENT["parameters"]
TOKEN_SCHEME = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
SECURITY: list[Schema] = [{"token": []}, {}]
EVERYWHERE = (403, 405, 408, 414, 431)
"""What any request may be answered, for what it is and not for what it asks."""
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _parameter(name: str, option: Option) -> Schema:
    """Describe a query parameter; one that is one of few has them in a list to choose from."""
    schema: Schema = {"type": _JSON_TYPES[option.type]}
    if option.type is str:
        schema["minLength"] = 1
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


EXPLAIN_PARAMETERS = [_parameter(name, option) for name, option in EXPLAIN_OPTIONS.items()]
PARAMETERS = {"explain": [*DOCUMENT["parameters"], *EXPLAIN_PARAMETERS]}


def error_responses(*codes: int) -> dict[int | str, Schema]:
    """Describe error answers for the documentation."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {code: {"description": DOCUMENT["errors"][code], "content": content} for code in codes}


def of_model(
    router: APIRouter, method: str, *routes: tuple[str, str, str], **options: Any
) -> Callable[[F], F]:
    """Return a decorator that adds a route for a model's default version, and one for any version.

    The function is called with the version, None for the default one.

    Args:
        routes: name, path and summary of each; one whose path names no version is the default
            one's.
        options: options of FastAPI's routes.
    """

    def register(function: F) -> F:
        async def route(**given: Any) -> Any:
            return await function(**{"version": None, **given})

        signature = inspect.signature(function, eval_str=True)
        for name, path, summary in routes:
            own = dict(signature.parameters)
            version = own.pop("version").replace(annotation=Version)
            if "{version}" in path:
                own["version"] = version.replace(kind=version.KEYWORD_ONLY)
            call = partial(route)
            setattr(call, "__signature__", signature.replace(parameters=list(own.values())))  # noqa: B010 - for FastAPI
            router.add_api_route(
                path, call, methods=[method], summary=summary, name=name,
                description=inspect.getdoc(function), **options,
            )  # fmt: skip
        return function

    return register


def _of_model(model: ModelName) -> None:
    """Describe the parameters of a path."""


def _of_version(model: ModelName, version: Version) -> None:
    """Describe the parameters of a path."""


def described_calls() -> APIRouter:
    """Return the routes that document the calls."""
    common = error_responses(400, 404, 413, 415, 500, 503, 504, 507)
    router = APIRouter(tags=["inference"], responses=common)
    for call in DOCUMENT["calls"]:
        answer = DOCUMENT["answers"].get(call["name"].removesuffix("_version"))
        router.add_api_route(
            call["path"],
            _of_version if "{version}" in call["path"] else _of_model,
            methods=["POST"],
            name=call["name"],
            summary=call["summary"],
            description=call["text"],
            openapi_extra={
                "parameters": PARAMETERS.get(
                    call["name"].partition("_")[0], DOCUMENT["parameters"]
                ),
                "requestBody": DOCUMENT["bodies"][call["body"]],
            },
            response_class=Response,  # whose type is what is said here
            responses={
                200: {"content": {call.get("answer", "application/json"): {"schema": answer or {}}}}
            },
        )
    return router
