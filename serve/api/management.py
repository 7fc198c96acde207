"""The management API: what is served, and changing it. TorchServe's routes and answers."""

from typing import Annotated, Any, Literal

import psutil
from fastapi import APIRouter, Header, Query
from fastapi.responses import PlainTextResponse

from modelyard.serve.api.description import ModelName, Version, error_responses, of_model
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane.call import CLASSES, EXPLAIN, PREDICT
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.pool import ReplicaSlot
from modelyard.serve.errors import BadRequest

PAGE = 100


def management_routes(registry: Registry, lifecycle: Lifecycle) -> APIRouter:
    """Return the routes for operators."""
    router = APIRouter(tags=["management"], responses=error_responses(400, 401, 404))

    @router.get("/models", summary="List models")
    async def list_models(
        limit: Annotated[int, Query(ge=1, description=f"At most {PAGE} are listed.")] = PAGE,
        next_page_token: Annotated[int, Query(ge=0)] = 0,
    ) -> dict[str, Any]:
        """List the default version of each model, by name."""
        defaults = [model for model in registry if registry.is_default(model)]
        end = next_page_token + min(limit, PAGE)
        page = defaults[next_page_token:end]
        answer: dict[str, Any] = {}
        if end <= len(defaults):
            answer["nextPageToken"] = str(end)
        answer["models"] = [{"modelName": m.name, "modelUrl": m.file} for m in page]
        return answer

    one, version_of_it = "/models/{model}", "/models/{model}/{version}"

    @of_model(
        router,
        "GET",
        ("describe_default", one, "Describe a model"),
        ("describe_version", version_of_it, "Describe a version"),
    )
    async def describe(model: ModelName, version: str | None) -> list[dict[str, Any]]:
        """Describe a version, its settings, workers and queue; `all` describes every one."""
        found = registry.versions(model) if version == "all" else [registry.get(model, version)]
        return [describe_model(each, registry.is_default(each)) for each in found]

    @router.post("/models", summary="Register", responses=error_responses(409, 500, 507))
    async def register(
        url: Annotated[
            str,
            Query(min_length=1, description="File of the model store, or URL#sha256=DIGEST."),
        ],
        model_name: Annotated[str | None, Query(description="Default: the archive's.")] = None,
        initial_workers: Annotated[
            int | None,
            Query(
                ge=0, le=1024, description="Default: the server's, the archive's, else by cores."
            ),
        ] = None,
    ) -> dict[str, str]:
        """Check an archive and start serving it; answers when its workers are ready."""
        model = await lifecycle.register(url, model_name, initial_workers)
        count = len(model.pool.slots)
        return _status(
            f'Model "{model.name}" Version: {model.version} registered with {count} initial workers'
        )

    @of_model(
        router, "PUT", ("scale", one, "Scale"), ("scale_one", version_of_it, "Scale a version"),
        responses=error_responses(409, 500, 507),
    )  # fmt: skip
    async def scale(
        model: ModelName,
        version: str | None,
        min_worker: Annotated[int, Query(ge=0, le=1024)] = 1,
        max_worker: Annotated[int | None, Query(ge=0, le=1024)] = None,
    ) -> dict[str, str]:
        """Have `min_worker` workers of a version; answers when they are ready."""
        if max_worker is not None and max_worker < min_worker:
            raise BadRequest("max_worker cannot be less than min_worker.")
        await lifecycle.scale(registry.get(model, version), min_worker)
        suffix = f", version: {version}" if version else ""
        return _status(f"Workers scaled to {min_worker} for model: {model}{suffix}")

    @of_model(
        router, "DELETE", ("unregister", one, "Unregister"),
        ("unregister_version", version_of_it, "Unregister a version"),
        responses=error_responses(403),
    )  # fmt: skip
    async def unregister(model: ModelName, version: str | None) -> dict[str, str]:
        """Remove a version: the default one only where there is no other."""
        await lifecycle.unregister(registry.get(model, version))
        return _status(f'Model "{model}" unregistered')

    @router.put("/models/{model}/{version}/set-default", summary="Set the default version")
    async def set_default(model: ModelName, version: Version) -> dict[str, str]:
        """Send the requests that name no version to this one."""
        lifecycle.set_default(model, version)
        return _status(f'Default version successfully updated for model "{model}" to "{version}"')

    return router


# -- metrics -------------------------------------------------------------------------------------

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_CONTENT_TYPE = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"


def metrics_routes(metrics: Metrics) -> APIRouter:
    """Return the route that a Prometheus server scrapes."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", summary="Metrics", response_class=PlainTextResponse)
    async def read_metrics(
        names: Annotated[list[str], Query(alias="name[]", description="Only these metrics.")] = [],  # noqa: B006 - FastAPI never changes it
        buckets: Annotated[
            Literal["few", "all"], Query(description="`all`: those of every histogram.")
        ] = "few",
        accept: Annotated[str, Header(include_in_schema=False)] = "",
    ) -> PlainTextResponse:
        """Requests, errors, latency, queue time, batch size, workers, and what handlers measure.

        OpenMetrics, with trace ids as exemplars, where the header `Accept` names its media type.
        """
        is_open = OPEN_METRICS in accept.lower()
        content_type = OPEN_CONTENT_TYPE if is_open else CONTENT_TYPE
        text = await metrics.gather(names, is_open, buckets == "all")
        return PlainTextResponse(text, media_type=content_type)

    return router


# -- descriptions --------------------------------------------------------------------------------


def _status(text: str) -> dict[str, str]:
    return {"status": text}


def describe_model(model: ModelVersion, is_default: bool) -> dict[str, Any]:
    """Return a model version as the management API describes it (TorchServe's fields, and ours)."""
    answers, (state, reason) = model.answers, model.state
    return {
        **describe_settings(model, model.file),
        "clientTimeoutInMills": int(model.config.request_timeout_s * 1000),
        "isDefault": is_default,
        "digest": model.digest,
        "state": state,
        "reason": reason,
        "workers": [_describe_slot(model, slot) for slot in model.pool.slots],
        "explainWorkers": [
            _describe_slot(model, slot)
            for slot in (model.explainers.slots if model.explainers is not None else ())
        ],
        "jobQueueStatus": {
            "remainingCapacity": model.batchers[PREDICT].remaining,
            "pendingRequests": model.batchers[PREDICT].waiting,
            "pendingExplanations": model.batchers[EXPLAIN].waiting,
            **{
                f"pending{name.capitalize()}": rows
                for name, rows in zip(CLASSES, model.batchers[PREDICT].queued_by_class, strict=True)
            },
        },
        **({} if answers is None else {"cacheStatus": answers.describe()}),
    }


def describe_settings(model: ModelVersion, url: str) -> dict[str, Any]:
    """Return what a version is and how it is run, as every description of it begins."""
    config, pool = model.config, model.pool
    return {
        "modelName": model.name,
        "modelVersion": model.version,
        "modelUrl": url,
        "runtime": model.runtime,
        "minWorkers": pool.least,
        "maxWorkers": pool.most,
        "batchSize": config.batch_size,
        "maxBatchDelay": config.batch_delay_ms,
        "responseTimeout": int(config.response_timeout_s),
        "startupTimeout": int(config.startup_timeout_s),
    }


def _describe_slot(model: ModelVersion, slot: ReplicaSlot) -> dict[str, Any]:
    return {
        "id": str(slot.number),
        "startTime": model.started_at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        "status": "READY" if slot.is_ready else "UNLOADING",
        "memoryUsage": memory_bytes(slot.worker.pid) if slot.worker else 0,
        "pid": slot.worker.pid if slot.worker else -1,
        "gpu": model.config.device.startswith("cuda"),
        "restarts": slot.restarts,
    }


def memory_bytes(pid: int) -> int:
    """Return a process's proportional set size; 0 when it is gone, or there is none yet (-1).

    Pages that workers share, torch's libraries above all, count once in the sum over all of them.
    """
    if pid < 0:
        return 0
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0
