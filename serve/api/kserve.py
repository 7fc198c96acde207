"""KServe's first protocol: models, and whether they are ready. What infers is the inference API's.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v1-protocol
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelyard.serve.api.description import ModelName, error_responses
from modelyard.serve.control.registry import Registry
from modelyard.serve.errors import MethodNotAllowed
from modelyard.serve.front.begin import ServerState, find_model
from modelyard.serve.front.models import readiness


def kserve_routes(registry: Registry, state: ServerState) -> APIRouter:
    """Return the routes that describe."""
    router = APIRouter(tags=["KServe v1"])
    of_model = {**error_responses(404), 503: {"description": "Not ready."}}

    @router.get("/", summary="Alive")
    async def alive() -> dict[str, str]:
        """The process responds."""
        return {"status": "alive"}

    @router.get("/v1/models", summary="Models")
    async def models() -> dict[str, list[str]]:
        """The names of all models."""
        return {"models": list(dict.fromkeys(model.name for model in registry))}

    @router.get("/v1/models/{model}", summary="A model is ready", responses=of_model)
    async def model_ready(model: ModelName) -> JSONResponse:
        """Return whether a worker of the default version is ready."""
        if ":" in model:
            # No model has such a name.
            raise MethodNotAllowed(f"GET is not taken by /v1/models/{model}; expected POST")
        found, status, headers = readiness(find_model(registry, state, model), state)
        about: dict[str, Any] = {"error": f"Model {model} is not ready"} if status != 200 else {}
        return JSONResponse({**found, **about}, status, headers)

    return router
