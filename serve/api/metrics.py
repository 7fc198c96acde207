"""The metrics API: Prometheus text."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from modelyard.serve.dataplane.metrics import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_routes(metrics: Metrics) -> APIRouter:
    """Return the route that a Prometheus server scrapes."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", summary="Metrics", response_class=PlainTextResponse)
    async def read_metrics(
        names: Annotated[list[str], Query(alias="name[]", description="Only these metrics.")] = [],  # noqa: B006 - FastAPI never changes it
    ) -> PlainTextResponse:
        """Requests, errors, latency, queue time, batch size, workers, and what handlers measure."""
        return PlainTextResponse(metrics.text(names), media_type=CONTENT_TYPE)

    return router
