"""Health: alive, ready, and TorchServe's ping."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from modelyard.serve.control.registry import Registry
from modelyard.serve.front.begin import ServerState
from modelyard.serve.front.models import RETRY, why_not_ready, without_worker

OPEN_PATHS = ("/ping", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Probes carry no token."""


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
