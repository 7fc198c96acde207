"""What the inference API says of server and models: health, and what KServe's protocols ask.

https://github.com/kserve/open-inference-protocol
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol
"""

from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from modelyard.archiver.untrusted.json import parse_json
from modelyard.serve.api.description import ModelName, error_responses, of_model
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.repository import Repository
from modelyard.serve.errors import BadRequest, MethodNotAllowed
from modelyard.serve.front.begin import Front, ServerState, find_model
from modelyard.serve.front.models import (
    EXTENSIONS,
    RETRY,
    describe_signature,
    readiness,
    why_not_ready,
    without_worker,
)

OPEN_PATHS = ("/ping", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Probes carry no token."""
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready."}}


def oip_routes(front: Front, repository: Repository) -> APIRouter:
    """Return the routes that describe; those that infer are the inference API's."""
    registry, state = front.registry, front.state
    router = APIRouter(prefix="/v2", tags=["open inference protocol"])

    @router.get("", summary="Server")
    async def server() -> dict[str, Any]:
        """Name, version and extensions."""
        return {
            "name": "modelyard",
            "version": version("modelyard"),
            "extensions": [*EXTENSIONS, *front.extensions.names],
        }

    router.get("/health/live", summary="Alive")(live)

    @router.get("/health/ready", summary="Ready", responses=NOT_READY)
    async def ready() -> JSONResponse:
        """Predictions can be answered now."""
        said = {"ready": why_not_ready(registry, state) is None}
        return JSONResponse(said) if said["ready"] else JSONResponse(said, 503, RETRY)

    @router.get("/models", summary="Models")
    async def models() -> dict[str, list[str]]:
        """The names of all models."""
        return {"models": list(dict.fromkeys(model.name for model in registry))}

    @router.post("/repository/index", summary="Model versions and their state")
    async def index(request: Request) -> list[dict[str, str]]:
        """Every version, with its state; only those that are ready where the body asks for them."""
        return repository.index(asks_for_ready(await request.body()))

    of_change = error_responses(400, 401, 403, 404, 500, 507)

    @router.post("/repository/models/{model}/load", summary="Load", responses=of_change)
    async def load(model: ModelName, request: Request) -> dict[str, Any]:
        """Serve the archive of this name of the model store, if the setting `allow_load` is on."""
        refuse_overrides(await request.body())
        await repository.load(model)
        return {"name": model, "load": True}

    @router.post("/repository/models/{model}/unload", summary="Unload", responses=of_change)
    async def unload(model: ModelName) -> dict[str, Any]:
        """Remove all versions of a model, if the setting `allow_load` is on."""
        await repository.unload(model)
        return {"name": model, "unload": True}

    one, version_of_it = "/models/{model}", "/models/{model}/versions/{version}"

    @of_model(
        router, "GET", ("describe", one, "A model's inputs and outputs"),
        ("describe_version", version_of_it, "A version's inputs and outputs"),
        responses=error_responses(404),
    )  # fmt: skip
    async def describe(model: ModelName, version: str | None) -> dict[str, Any]:
        """Describe a version."""
        return describe_signature(registry, find_model(registry, state, model, version))

    @of_model(
        router, "GET", ("model_ready", f"{one}/ready", "A model is ready"),
        ("version_ready", f"{version_of_it}/ready", "A version is ready"),
        responses={**error_responses(404), **NOT_READY},
    )  # fmt: skip
    async def model_ready(model: ModelName, version: str | None) -> JSONResponse:
        """Return whether a worker of a version is ready."""
        return JSONResponse(*readiness(find_model(registry, state, model, version), state))

    return router


def kserve_routes(registry: Registry, state: ServerState) -> APIRouter:
    """Return the routes of KServe's first protocol that describe; those that infer are calls."""
    router = APIRouter(tags=["KServe v1"])

    @router.get("/", summary="Alive")
    async def alive() -> dict[str, str]:
        """The process responds."""
        return {"status": "alive"}

    @router.get("/v1/models", summary="Models")
    async def models() -> dict[str, list[str]]:
        """The names of all models."""
        return {"models": list(dict.fromkeys(model.name for model in registry))}

    @router.get(
        "/v1/models/{model}",
        summary="A model is ready",
        responses={**error_responses(404), **NOT_READY},
    )
    async def model_ready(model: ModelName) -> JSONResponse:
        """Return whether a worker of the default version is ready."""
        if ":" in model:
            # No model has such a name.
            raise MethodNotAllowed(f"GET is not taken by /v1/models/{model}; expected POST")
        found, status, headers = readiness(find_model(registry, state, model), state)
        about: dict[str, Any] = {"error": f"Model {model} is not ready"} if status != 200 else {}
        return JSONResponse({**found, **about}, status, headers)

    return router


def health_routes(registry: Registry, state: ServerState) -> APIRouter:
    """Return the routes that probes ask."""
    router = APIRouter(tags=["health"])

    @router.get("/ping", summary="Ping", responses={500: {"description": "Unhealthy."}})
    async def ping() -> JSONResponse:
        """Healthy while every model's default version has a worker; TorchServe's answer."""
        sick = without_worker(registry)
        return JSONResponse({"status": "Unhealthy" if sick else "Healthy"}, 500 if sick else 200)

    router.get("/health/live", summary="Alive")(live)

    @router.get(
        "/health/ready", summary="Ready", responses={503: {"description": "Not ready, and why."}}
    )
    async def ready() -> JSONResponse:
        """Predictions can be answered now; else the reason."""
        if (reason := why_not_ready(registry, state)) is not None:
            return JSONResponse({"ready": False, "reason": reason}, 503, RETRY)
        return JSONResponse({"ready": True})

    return router


async def live() -> dict[str, bool]:
    """The process responds."""
    return {"live": True}


def asks_for_ready(body: bytes) -> bool:
    """Return whether a request for the repository's index wants only what is ready.

    Raises:
        BadRequest: it is not such a request.
    """
    ready = read_object(body).get("ready")
    if ready is not None and not isinstance(ready, bool):
        raise BadRequest(f"ready is {ready!r}; expected true or false")
    return bool(ready)


def refuse_overrides(body: bytes) -> None:
    """Refuse what a request to load a model would have otherwise than its archive.

    Raises:
        BadRequest: it is not such a request, or has parameters.
    """
    if read_object(body).get("parameters"):
        raise BadRequest(
            "a model is loaded as its archive has it; expected no parameters, such as config or "
            "file:NAME"
        )


def read_object(body: bytes) -> dict[str, Any]:
    """Return a body's object; empty where there is no body.

    Of 16 KB at most: what is wrong with these takes 8 ms to say, in which nobody else is answered.
    """
    try:
        found = parse_json(body, 1 << 14, fast=orjson.loads) if body.strip() else {}
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found
