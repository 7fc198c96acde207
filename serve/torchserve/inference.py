"""The inference API in TorchServe's dialect: its routes, in whatever method.

| path | what |
| --- | --- |
| /predictions/{m}[/{v}[/rest]], /explanations/… | the hot path |
| /v1/models/{m}:predict, :explain · /v2/models/{m}[/versions/{v}]/infer, explain | KServe's |
| /invocations, /models/{m}/invoke, /{m}[/{v}]/predict | the query is the handler's too |
| /v2, /v2/health/…, /v2/models/{m}[/versions/{v}][/ready] | Open Inference Protocol, if on |
| /ping, /health/live, /health/ready | for probes, without a token |
"""

from __future__ import annotations

from modelyard.serve.api.asgi import Check, Phase, Receive, Scope, Send
from modelyard.serve.api.health import why_not_ready
from modelyard.serve.api.inference import KINDS, Answering, Target, refuse_body
from modelyard.serve.api.oip import describe_signature, readiness
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import BadRequest, BodyTooLarge, NoSuchRoute, ServeError, Unavailable
from modelyard.serve.http.answers import Answer
from modelyard.serve.http.body import ClientLeft, read_body
from modelyard.serve.settings import Settings
from modelyard.serve.torchserve import TORCHSERVE_VERSION, openapi
from modelyard.serve.torchserve.dialect import (
    REASON,
    Dialect,
    error_answer,
    json_answer,
    parameters,
    segments,
)
from modelyard.serve.torchserve.forms import form_field
from modelyard.serve.torchserve.settings import TorchServeSettings

PROBES = ("/ping", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")
"""Paths that need no token."""
OIP_NAMES = ("oip", "true")
"""What switches the Open Inference Protocol on: by environment, and by file."""


class TorchServeInference(Dialect, Answering):
    """Routes for clients."""

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        check: Check,
        phase: Phase,
        settings: Settings,
        dialect: TorchServeSettings,
    ) -> None:
        limit = settings.max_request_bytes
        self._has_oip = (dialect.ts_open_inference_protocol or "").lower() in OIP_NAMES
        document = openapi.server(inference=True, oip=self._has_oip)
        Answering.__init__(self, registry, metrics, check, phase, limit)
        Dialect.__init__(self, check, phase, dialect, limit, document)
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer predictions and explanations here, everything else by `Dialect`."""
        if (target := self.target(scope)) is not None:
            await self.run_job(scope, receive, send, self.request_id(scope), target)
        elif scope["method"] != "OPTIONS" and segments(scope["path"]) == ["invocations"]:
            await self._invoke(scope, receive, send, self.request_id(scope))
        else:
            await Dialect.__call__(self, scope, receive, send)

    def target(self, scope: Scope) -> Target | None:
        """Return what a request asks a model for; None for all other requests."""
        return None if scope["method"] == "OPTIONS" else self._aim(segments(scope["path"]))

    def _aim(self, path: list[str]) -> Target | None:
        """Return what a path asks a model for; None for all other paths."""
        match path:
            case ["predictions" | "explanations" as first, name, *rest] if name:
                return Target(KINDS[first], [name, *rest])
            case ["v1", "models", last]:
                name, _, verb = last.rpartition(":")
                if verb in ("predict", "explain"):
                    return Target(_KSERVE[verb], [name], wire.KSERVE)
            case ["v2", "models", name, "infer" | "explain" as verb]:
                return Target(_KSERVE[verb], [name], wire.KSERVE)
            case ["v2", "models", name, "versions", version, "infer" | "explain" as verb]:
                if self._has_oip:
                    return Target(_KSERVE[verb], [name, version], wire.KSERVE)
            case ["models", name, "invoke"]:
                return Target(PREDICT, [name], wire.LEGACY)
            case [_, "predict"] | [_, _, "predict"]:
                return Target(PREDICT, path[:-1], wire.LEGACY)
        return None

    async def _invoke(self, scope: Scope, receive: Receive, send: Send, id: str) -> None:
        """Run the model that the query or the form names, else the one that there is."""
        try:
            self.check(scope["path"], scope["headers"])
            parts = await read_body(scope, receive, self.max_request_bytes)
            name = parameters(scope).get("model_name")
            name = name or form_field(scope["headers"], b"".join(parts), "model_name")
            if not (name := name or self._only_model()):
                raise BadRequest("Parameter model_name is required.")
            target = Target(PREDICT, [name], wire.LEGACY)
            answer = await self.answer(scope, receive, target, id, parts)
        except ClientLeft:
            return
        except BodyTooLarge as error:
            await refuse_body(self, receive, send, id, error)
            return
        except ServeError as error:
            answer = self.form_error(error, id)
        await self.send_answer(scope, send, id, *answer)

    def _only_model(self) -> str | None:
        """Return the model that was loaded at the start, when it is one."""
        names = {model.name for model in self._registry if model.at_start}
        return names.pop() if len(names) == 1 else None

    def word(self, error: Exception, path: list[str]) -> Exception:
        """Return of a request that no worker takes what TorchServe says; the reason is kept."""
        if not isinstance(error, Unavailable):
            return error
        version = f" Version {path[1]}" if len(path) > 1 and path[1] else ""
        return Refused(f'Model "{path[0]}"{version} {NO_WORKER}', error)

    def form_error(self, error: Exception, id: str) -> Answer:
        """Return status, headers and body for an error."""
        answer = super().form_error(error, id)
        if isinstance(error, Refused):
            answer[1].append((REASON, error.reason.encode("ascii", "replace")))
        return answer

    async def route(self, scope: Scope, path: list[str], body: bytes, id: str) -> Answer:
        """Answer what is not a prediction."""
        if scope["method"] == "OPTIONS" and (target := self._aim(path)) is not None:
            name, version = (*target.path, "")[:2]
            return json_answer(openapi.model(self._registry.get(name, version or None).name))
        match path:
            case ["ping"]:
                return self._ping()
            case ["health", "live"]:
                return json_answer({"live": True})
            case ["health", "ready"]:
                return self._ready()
            case ["wfpredict", name, *_]:
                return error_answer(404, "WorkflowNotFoundException", f"Workflow not found: {name}")
            case ["v2", *rest] if self._has_oip:
                return self._inference_protocol(rest)
        raise NoSuchRoute

    def _ping(self) -> Answer:
        """Healthy unless a default version has lost workers for good."""
        sick = any(
            model.pool.healthy_count < model.pool.least
            for model in self._registry
            if self._registry.is_default(model)
        )
        return json_answer({"status": "Unhealthy" if sick else "Healthy"}, 500 if sick else 200)

    def _ready(self) -> Answer:
        if (reason := why_not_ready(self._registry, self.phase)) is not None:
            return json_answer({"ready": False, "reason": reason}, 503)
        return json_answer({"ready": True})

    def _inference_protocol(self, path: list[str]) -> Answer:
        """Answer what the Open Inference Protocol asks of server and models."""
        match path:
            case []:
                names = ["kserve", "kubeflow"]
                # The key without its slip is the protocol's; TorchServe's clients know the other.
                about = {"extensions": names, "extenstion": names}
                return json_answer({"name": "Torchserve", "version": TORCHSERVE_VERSION, **about})
            case ["health", "live"]:
                return json_answer({"live": True})
            case ["health", "ready"]:
                return self._ready()
            case ["models", name]:
                return self._describe(self._registry.get(name))
            case ["models", name, "versions", version]:
                return self._describe(self._registry.get(name, version))
            case ["models", name, "ready"]:
                return json_answer(*readiness(self._registry.get(name)))
            case ["models", name, "versions", version, "ready"]:
                return json_answer(*readiness(self._registry.get(name, version)))
        raise NoSuchRoute

    def _describe(self, model: ModelVersion) -> Answer:
        return json_answer(describe_signature(self._registry, model))


class Refused(Unavailable):
    """No worker takes a request; TorchServe's words, and ours as the reason."""

    def __init__(self, message: str, cause: Unavailable) -> None:
        super().__init__(message, cause.retry_after_s)
        self.reason = str(cause)


NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If "
    "this is a sequence inference, please check if it is closed, or expired; or exceeds "
    "maxSequenceJobQueueSize"
)
_KSERVE = {"predict": PREDICT, "infer": PREDICT, "explain": EXPLAIN}
