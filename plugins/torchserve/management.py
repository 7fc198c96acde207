"""The management API in TorchServe's dialect: its routes, parameters, answers and texts."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.archiver.manifest import RUNTIMES
from modelyard.plugins.torchserve import NO_WORKFLOWS, openapi
from modelyard.plugins.torchserve.dialect import (
    JSON,
    Dialect,
    boolean,
    error_answer,
    integer,
    json_answer,
    parameters,
    segments,
    status_answer,
)
from modelyard.plugins.torchserve.tokens import Tokens
from modelyard.serve import errors
from modelyard.serve.api.inference import pack_head
from modelyard.serve.api.management import describe_settings, memory_bytes
from modelyard.serve.api.routes import Routes
from modelyard.serve.control.model_config import ModelConfig, Options
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply
from modelyard.serve.dataplane.pool import ReplicaSlot
from modelyard.serve.front.begin import let_everybody
from modelyard.serve.http.application import Answers
from modelyard.serve.http.connection import Answer, RequestResponseCycle
from modelyard.serve.observers import Observer

PAGE = 100
MOST_WORKERS = 1024
OF_SEQUENCES = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence",
                "maxSequenceJobQueueSize")  # fmt: skip
NO_WORKER = (
    'Model "{}" has no worker to serve describe request. Please use scale workers API to add '
    "workers."
)


class TorchServeManagement(Dialect):
    """Routes for operators.

    Args:
        tokens: None lets everybody in.
        has_model_api: whether models may be registered and unregistered.
        observers: add routes to these, and answer the paths that they own.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        observers: Sequence[Observer],
        tokens: Tokens | None,
        answers: Answers,
        has_model_api: bool,
    ) -> None:
        self._lifecycle, self._registry = lifecycle, lifecycle.registry
        self._tokens = tokens
        self.has_model_api = has_model_api
        self.check = tokens.check("management", ["/token"]) if tokens else let_everybody
        self._observers = observers
        self._routes = Routes("", "", answers, *(each for one in observers for each in one.routers))
        document = openapi.server("models", "one_model", "management")
        super().__init__(self.check, answers, document, observers=observers)

    def owns(self, path: str) -> bool:
        """Return whether a path is this API's, or an observer's."""
        match segments(path):
            case ["models", _, "invoke"]:
                return False
            case ["models" | "workflows", *_] | ["token"]:
                return True
            case ["v1", "models", name]:
                return ":" not in name or name.rpartition(":")[2] not in ("predict", "explain")
        return any(each.owns(path) for each in self._observers)

    def answer_first(self, cycle: RequestResponseCycle, id: str) -> bool:
        """Answer a request for an observer's route."""
        if not self._routes.has(cycle.path):
            return False
        if cycle.method not in ("GET", "HEAD") and not self.has_model_api:
            raise errors.MethodNotAllowed
        self._routes(cycle, id)
        return True

    async def respond(
        self, cycle: RequestResponseCycle, path: list[str], body: bytes, id: str
    ) -> Answer:
        """Answer a request by method and path."""
        query = parameters(cycle.query)
        version = path[2] if len(path) > 2 else None
        match "GET" if cycle.method == "HEAD" else cycle.method, path:
            case "GET", ["models"]:
                return self.list_models(query)
            case "POST", ["models"] if self.has_model_api:
                return await self.register(_body_or_query(cycle, body, query))
            case "GET", ["models", name] | ["models", name, _]:
                if boolean(query, "customized", False) and version != "all":
                    return await self.describe_customized(name, version, pack_head(cycle, ""))
                return self.describe(name, version)
            case "PUT", ["models", name] | ["models", name, _]:
                return await self.scale(name, version or query.get("model_version"), query)
            case "DELETE", ["models", name] | ["models", name, _] if self.has_model_api:
                return await self.unregister(name, version)
            case "OPTIONS", ["models", name] | ["models", name, _]:
                return json_answer(openapi.model_management(self._registry.get(name, version).name))
            case "PUT", ["models", name, named, "set-default"]:
                return self.set_default(name, named)
            case "GET", ["v1", "models", name]:
                model = self._registry.get(name)
                return json_answer({"name": model.name, "ready": bool(model.pool.slots)})
            case _, ["token"] if self._tokens is not None:
                self._tokens.replace(query.get("type", ""), cycle.headers)
                return 200, list(JSON), b"\n"
            case "GET", ["workflows"]:
                return json_answer({"workflows": []})
            case "POST", ["workflows"]:
                raise errors.BadRequest(NO_WORKFLOWS)
            case _, ["workflows", name]:
                return error_answer(404, "WorkflowNotFoundException", f"Workflow not found: {name}")
            case _, ["models"] | ["models", _] | ["models", _, _] | ["models", _, _, "set-default"]:
                raise errors.MethodNotAllowed
            case _, ["v1", "models", _] | ["workflows"]:
                raise errors.MethodNotAllowed
        raise errors.NoSuchRoute

    def list_models(self, query: Mapping[str, Any]) -> Answer:
        """Answer with a page of the models' names and locations."""
        limit, start = integer(query, "limit", PAGE), integer(query, "next_page_token", 0)
        limit = limit if 0 <= limit <= PAGE else PAGE
        start = max(0, start)
        models = [model for model in self._registry if self._registry.is_default(model)]
        answer: dict[str, Any] = {}
        if start + limit <= len(models):
            answer["nextPageToken"] = str(start + limit)
        page = models[start : start + limit]
        answer["models"] = [{"modelName": model.name, "modelUrl": model.url} for model in page]
        return json_answer(answer)

    async def register(self, values: Mapping[str, Any]) -> Answer:
        """Register a model version as the parameters say."""
        if (url := values.get("url")) is None:
            raise errors.BadRequest("Parameter url is required.")
        if boolean(values, "s3_sse_kms", False):
            raise errors.BadRequest("s3_sse_kms: signed requests to S3 are not supported")
        workers = integer(values, "initial_workers", -1)
        is_synchronous = boolean(values, "synchronous", True)
        try:
            model = await self._lifecycle.register(
                str(url),
                _text(values, "model_name"),
                _limited("initial_workers", workers) if workers >= 0 else None,
                _options(values),
                synchronous=is_synchronous,
            )
        except errors.LoadFailed as error:
            name, version = error.model or ("", "")
            return _failed_to_start(error, name, version)
        count = model.pool.least
        if count and not is_synchronous:
            return status_answer("Processing worker updates...", 202)
        more = "" if count else ". Use scale workers API to add workers for the model."
        return status_answer(
            f'Model "{model.name}" Version: {model.version} registered with {count} initial '
            f"workers{more}"
        )

    async def unregister(self, name: str, version: str | None) -> Answer:
        """Remove a model version."""
        await self._lifecycle.unregister(self._registry.get(name, version))
        return status_answer(f'Model "{name}" unregistered')

    async def scale(self, name: str, version: str | None, query: Mapping[str, Any]) -> Answer:
        """Change how many workers a model version has."""
        least = integer(query, "min_worker", 1)
        most = integer(query, "max_worker", least)
        if most < least:
            raise errors.BadRequest("max_worker cannot be less than min_worker.")
        _limited("min_worker", least)
        model = self._registry.get(name, version)
        is_synchronous = boolean(query, "synchronous", False)
        try:
            await self._lifecycle.scale(model, least, most, is_synchronous)
        except errors.LoadFailed as error:
            return _failed_to_start(error, name, version or "null")
        if not is_synchronous:
            return status_answer("Processing worker updates...", 202)
        suffix = f", version: {version}" if version else ""
        return status_answer(f"Workers scaled to {least} for model: {name}{suffix}")

    def set_default(self, name: str, version: str) -> Answer:
        """Have a version answer where clients name none."""
        try:
            self._lifecycle.set_default(name, version)
        except errors.VersionNotFound as error:
            status, kind = errors.http_status(error)
            text = f"Model version {version} does not exist for model {name}"
            return error_answer(status, kind, text)
        return status_answer(
            f'Default version successfully updated for model "{name}" to "{version}"'
        )

    def describe(self, name: str, version: str | None) -> Answer:
        """Answer with what a version, or `all`, is run with."""
        if version == "all":
            return json_answer([describe(model) for model in self._registry.versions(name)])
        return json_answer([describe(self._registry.get(name, version))])

    async def describe_customized(self, name: str, version: str | None, head: bytes) -> Answer:
        """Ask the handler too; an answer that is not an object counts as none.

        Args:
            head: head of the request, as `pack_head` makes it.
        """
        model = self._registry.get(name, version)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        Call(model, PREDICT, head, future, flags=wire.DESCRIBE, must_fit=False).submit([b""])
        try:
            reply = await future
        except errors.Unavailable as error:
            raise errors.Unavailable(NO_WORKER.format(model.name), error.retry_after_s) from error
        body = bytes(reply.body) if isinstance(reply.body, bytes | bytearray) else b""
        if reply.status != 200:
            fields = wire.unpack_meta(reply.headers)
            return reply.status, list(zip(fields[::2], fields[1::2], strict=True)), body
        try:
            metadata = json.loads(body)
        except ValueError:
            metadata = None
        customized = metadata if isinstance(metadata, dict) else {}
        return json_answer([{**describe(model), "customizedMetadata": customized}])


def _body_or_query(
    cycle: RequestResponseCycle, body: bytes, query: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return what a request gives: a JSON body, else the query."""
    headers = (value for name, value in cycle.headers if name == b"content-type")
    media_type = next(headers, b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        return query
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise errors.BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise errors.BadRequest(f"the body is not a JSON object but {type(values).__name__}")
    return values


def _options(values: Mapping[str, Any]) -> Options:
    runtime = _text(values, "runtime")
    if runtime is not None and runtime not in RUNTIMES:
        raise errors.BadRequest(f"Invalid RuntimeType value: {runtime}")
    if runtime == "LSP":
        raise errors.BadRequest("runtime LSP: there is no C++ backend; expected python or python3")
    delay = integer(values, "max_batch_delay", -1)
    return Options(
        batch_size=_positive(values, "batch_size"),
        batch_delay_ms=delay if delay >= 0 else None,
        response_timeout_s=_positive(values, "response_timeout"),
        startup_timeout_s=_positive(values, "startup_timeout"),
        handler=_text(values, "handler"),
        runtime=runtime,
    )


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise errors.BadRequest(f"{name}: expected text, got {value!r}")
    return value or None


def _positive(values: Mapping[str, Any], name: str) -> int | None:
    value = integer(values, name, 0)
    return value if value > 0 else None


def _limited(name: str, workers: int) -> int:
    if not 0 <= workers <= MOST_WORKERS:
        raise errors.BadRequest(f"{name}: expected 0 to {MOST_WORKERS}, got {workers}")
    return workers


def _failed_to_start(error: errors.LoadFailed, name: str, version: str) -> Answer:
    status, kind = errors.http_status(error)
    text = f"Failed to start workers for model {name} version: {version}"
    return error_answer(status, kind, text, str(error))


def describe(model: ModelVersion) -> dict[str, Any]:
    """Return a model version as TorchServe describes it, with the values that are in effect."""
    config = model.config
    timeout_s = config.request_timeout_s
    return {
        **describe_settings(model, model.url),
        "maxRetryTimeoutInSec": config.retry_s,
        "clientTimeoutInMills": int(timeout_s * 1000) if timeout_s != float("inf") else 0,
        "parallelType": config.parallel_type,
        "parallelLevel": config.parallel_level,
        "deviceType": "gpu" if config.uses_gpu else "cpu",
        **({"deviceIds": list(config.device_ids)} if config.device_ids else {}),
        "continuousBatching": False,
        "useJobTicket": config.needs_ticket,
        "useVenv": config.has_venv,
        "stateful": False,
        **dict.fromkeys(OF_SEQUENCES, 0),
        "loadedAtStartup": model.at_start,
        "workers": [_describe_worker(slot, config) for slot in model.pool.slots],
        "jobQueueStatus": {
            "remainingCapacity": model.batchers[PREDICT].remaining,
            "pendingRequests": model.batchers[PREDICT].waiting,
        },
    }


def _describe_worker(slot: ReplicaSlot, config: ModelConfig) -> dict[str, Any]:
    worker = slot.worker
    return {
        "id": str(slot.id),
        "startTime": worker.started_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if worker
        else "",
        "status": "READY" if slot.is_ready else "UNLOADING",
        "memoryUsage": memory_bytes(worker.pid) if worker else 0,
        "pid": worker.pid if worker else -1,
        "gpu": config.uses_gpu,
        "gpuUsage": "N/A",
    }
