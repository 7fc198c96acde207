"""The metrics API: Prometheus text."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from modelyard.serve.api.asgi import Api, Phase
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.http.auth import TokenCheck

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_metrics(metrics: Metrics, check: TokenCheck, phase: Phase) -> Api:
    """Return the application that a Prometheus server scrapes."""
    api = Api("Modelyard metrics", "Prometheus metrics.", check, phase)
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", summary="Metrics", response_class=PlainTextResponse)
    async def read_metrics(
        names: Annotated[list[str], Query(alias="name[]", description="Only these metrics.")] = [],  # noqa: B006 - FastAPI never changes it
    ) -> PlainTextResponse:
        """Requests, errors, latency, queue time, batch size, workers, and what handlers measure."""
        return PlainTextResponse(metrics.text(names), media_type=CONTENT_TYPE)

    api.include_router(router)
    return api
