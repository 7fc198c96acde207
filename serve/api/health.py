"""Health: alive, ready, and TorchServe's ping."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.errors import ModelNotFound, Unavailable
from modelyard.serve.http.application import ServerState

OPEN_PATHS = ("/ping", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Probes carry no token."""
RETRY = {"Retry-After": "1"}
"""Seconds after which a client may ask again that was told not ready."""


def health_routes(registry: Registry, state: ServerState) -> APIRouter:
    """Return the routes that probes ask."""
    router = APIRouter(tags=["health"])

    @router.get("/ping", summary="Ping", responses={500: {"description": "Unhealthy."}})
    async def ping() -> JSONResponse:
        """Healthy while every model's default version has a worker; TorchServe's answer."""
        sick = without_worker(registry)
        status = "Unhealthy" if sick else "Healthy"
        return JSONResponse({"status": status}, 500 if sick else 200)

    @router.get("/health/live", summary="Alive")
    async def live() -> dict[str, bool]:
        """The process responds."""
        return {"live": True}

    @router.get(
        "/health/ready", summary="Ready", responses={503: {"description": "Not ready, and why."}}
    )
    async def ready() -> JSONResponse:
        """Predictions can be answered now; else the reason."""
        if (reason := why_not_ready(registry, state)) is not None:
            return JSONResponse({"ready": False, "reason": reason}, 503, RETRY)
        return JSONResponse({"ready": True})

    return router


def find_model(
    registry: Registry, state: ServerState, name: str, version: str | None = None
) -> ModelVersion:
    """Return a model version, the default one where none is named.

    Raises:
        ModelNotFound, VersionNotFound: there is none.
        Unavailable: nor is there one yet, while the server starts: clients ask again.
    """
    try:
        return registry.get(name, version)
    except ModelNotFound as error:
        if not state.is_starting:
            raise
        which = f" in version {version}" if version else ""
        raise Unavailable(f"the server is starting and has no model {name}{which} yet") from error


def is_model_ready(model: ModelVersion, state: ServerState) -> bool:
    """Return whether a version answers predictions now, and will for a while."""
    return model.pool.ready_count > 0 and not state.is_draining


def why_not_ready(registry: Registry, state: ServerState) -> str | None:
    """Return why predictions cannot be answered now, or None when they can."""
    if state.is_starting or state.is_draining:
        return f"the server is {'starting' if state.is_starting else 'being stopped'}"
    if registry.lacks_all:
        return "no model of the start could be loaded; the log says why"
    if sick := without_worker(registry):
        return f"no worker is ready for {', '.join(sick)}"
    return None


def without_worker(registry: Registry) -> list[str]:
    """Return the models whose default version should have workers but has none ready."""
    return [
        model.name
        for model in registry
        if registry.is_default(model) and model.pool.slots and not model.pool.ready_count
    ]
