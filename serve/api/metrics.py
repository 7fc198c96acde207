"""The metrics API: Prometheus text, or OpenMetrics where the client takes that."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import PlainTextResponse

from modelyard.serve.dataplane.metrics import Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_CONTENT_TYPE = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"


def metrics_routes(metrics: Metrics) -> APIRouter:
    """Return the route that a Prometheus server scrapes."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", summary="Metrics", response_class=PlainTextResponse)
    async def read_metrics(
        names: Annotated[list[str], Query(alias="name[]", description="Only these metrics.")] = [],  # noqa: B006 - FastAPI never changes it
        accept: Annotated[str, Header(include_in_schema=False)] = "",
    ) -> PlainTextResponse:
        """Requests, errors, latency, queue time, batch size, workers, and what handlers measure.

        OpenMetrics, with trace ids as exemplars, where the header `Accept` names its media type.
        """
        is_open = OPEN_METRICS in accept.lower()
        content_type = OPEN_CONTENT_TYPE if is_open else CONTENT_TYPE
        return PlainTextResponse(metrics.text(names, is_open), media_type=content_type)

    return router
