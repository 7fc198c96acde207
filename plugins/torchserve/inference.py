"""The inference API in TorchServe's dialect: its routes, in whatever method.

| path | what |
| --- | --- |
| /predictions/{m}[/{v}[/rest]], /explanations/… | the hot path |
| /v1/models/{m}:predict, :explain · /v2/models/{m}[/versions/{v}]/infer, explain | KServe's |
| /v2/models/{m}[/versions/{v}]/infer | tensors, if that protocol is on and no envelope reads them |
| /invocations, /models/{m}/invoke, /{m}[/{v}]/predict | the query is the handler's too |
| /v2, /v2/health/…, /v2/models/{m}[/versions/{v}][/ready] | Open Inference Protocol, if on |
| /v1/models[/{m}] | KServe's first, if that one is on |
| /v2/models, /v2/repository/… | the same, where infer takes tensors |
| /ping, /health/live, /health/ready | for probes, without a token |
"""

from collections.abc import Iterable, Sequence
from email.message import Message
from urllib.parse import parse_qsl

from modelyard.plugins.torchserve import NO_WORKFLOWS, TORCHSERVE_VERSION, openapi
from modelyard.plugins.torchserve.dialect import Dialect, Refused, json_answer, parameters, segments
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.api.inference import KINDS, METHODS, Calls, split_verb, target_of_v2
from modelyard.serve.api.oip import asks_for_ready, refuse_overrides
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Target
from modelyard.serve.dataplane.form import MAX_CONTENT_TYPE, MAX_PARTS, read_parts
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import BadRequest, MethodNotAllowed, NoSuchRoute, Unavailable
from modelyard.serve.front import models
from modelyard.serve.front.begin import Front, find_model
from modelyard.serve.http.application import Answers, Check
from modelyard.serve.http.connection import Answer, RequestResponseCycle


class TorchServeInference(Dialect):
    """Routes for clients."""

    def __init__(
        self,
        front: Front,
        check: Check,
        answers: Answers,
        settings: TorchServeSettings,
        repository: Repository,
    ) -> None:
        self.repository = repository
        self.front, self._registry, self._state = front, front.registry, front.state
        self._has_oip, self._has_tensors = settings.has_oip, settings.has_tensors
        self.calls = Calls(front, answers, self._target, takes_codings=True)
        document = openapi.server("inference", *(["oip"] if self._has_oip else []))
        super().__init__(check, answers, document, self.calls)

    def owns(self, path: str) -> bool:
        """Return whether a path is this API's, which takes what is nobody's."""
        return True

    def _target(self, cycle: RequestResponseCycle) -> Target | None:
        """Return what a request asks a model for; None for all other requests."""
        target = None if cycle.method == "OPTIONS" else self._aim(segments(cycle.path))
        is_ours = self._has_tensors and target_of_v2(segments(cycle.path)[1:]) is not None
        return None if is_ours and cycle.method not in METHODS else target

    def _aim(self, path: list[str]) -> Target | None:
        """Return what a path asks a model for; None for all other paths."""
        match path:
            case ["predictions" | "explanations" as first, name, *rest] if name:
                return Target(KINDS[first], [name, *rest])
            case ["v1", "models", last] if (found := split_verb(last)) is not None:
                return Target(found[1], [found[0]], wire.KSERVE)
            case ["v2", *rest] if self._has_tensors and (target := target_of_v2(rest)) is not None:
                return target
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

    def begin(
        self, cycle: RequestResponseCycle, path: list[str], parts: Sequence[Buffer], id: str
    ) -> bool:
        """Call the model that an invocation names in its query or form, else the one there is."""
        if path != ["invocations"] or cycle.method == "OPTIONS":
            return False
        name = parameters(cycle.query).get("model_name")
        name = name or form_field(cycle.headers, b"".join(parts), "model_name")
        if not (name := name or self._only_model()):
            raise BadRequest("Parameter model_name is required.")
        cycle.parts = list(parts)  # the call reads them again
        self.calls.begin(cycle, Target(PREDICT, [name], wire.LEGACY))
        return True

    def _only_model(self) -> str | None:
        """Return the model that was loaded at the start, when it is one."""
        names = {model.name for model in self._registry if model.at_start}
        return names.pop() if len(names) == 1 else None

    async def respond(
        self, cycle: RequestResponseCycle, path: list[str], body: bytes, id: str
    ) -> Answer:
        """Answer what is not a prediction."""
        if cycle.method == "OPTIONS" and (target := self._aim(path)) is not None:
            name, version = (*target.path, "")[:2]
            return json_answer(openapi.model(self._registry.get(name, version or None).name))
        match path:
            case ["ping"]:
                status, code = ("Healthy", 200) if self.is_healthy() else ("Unhealthy", 500)
                return json_answer({"status": status}, code)
            case ["health", probe]:
                return self._health(probe)
            case ["wfpredict", _, *_]:
                raise BadRequest(NO_WORKFLOWS)
            case ["v1", "models"] if self._has_oip:
                return json_answer(self._names())
            case ["v1", "models", name] if self._has_oip and ":" not in name:
                return self._of_model(name, None, ["ready"])
            case ["v2", *rest] if self._has_oip:
                if self._has_tensors and (answer := await self._of_tensors(rest, body)) is not None:
                    return answer
                return self._inference_protocol(rest)
        raise NoSuchRoute

    def is_healthy(self) -> bool:
        """Return whether no default version has lost workers for good, and one can answer.

        TorchServe is healthy also where no model of the start was found, and while every worker of
        every model fails to load, for as long as they are tried again.
        """
        if self._registry.lacks_all:
            return False
        pools = [model.pool for model in self._registry if self._registry.is_default(model)]
        if any(pool.slots and pool.healthy_count < pool.least for pool in pools):
            return False
        scaled = [pool for pool in pools if pool.slots]
        return not scaled or any(pool.why_none is None for pool in scaled)

    def _health(self, probe: str) -> Answer:
        if probe == "live":
            return json_answer({"live": True})
        if probe != "ready":
            raise NoSuchRoute
        if (reason := models.why_not_ready(self._registry, self._state)) is not None:
            return json_answer({"ready": False, "reason": reason}, 503, models.RETRY)
        return json_answer({"ready": True})

    def _inference_protocol(self, path: list[str]) -> Answer:
        """Answer what the Open Inference Protocol asks of server and models."""
        match path:
            case []:
                names = ["kserve", "kubeflow"]
                # The key without its slip is the protocol's; TorchServe's clients know the other.
                own = list(models.EXTENSIONS) if self._has_tensors else names
                about = {"extensions": own, "extenstion": names}
                return json_answer({"name": "Torchserve", "version": TORCHSERVE_VERSION, **about})
            case ["health", probe]:
                return self._health(probe)
            case ["models", name, "versions", version, *rest]:
                return self._of_model(name, version, rest)
            case ["models", name, *rest]:
                return self._of_model(name, None, rest)
        raise NoSuchRoute

    async def _of_tensors(self, path: list[str], body: bytes) -> Answer | None:
        """Answer what belongs to requests of tensors, and TorchServe does not have."""
        match path:
            case ["models"]:
                return json_answer(self._names())
            case [*rest] if target_of_v2(rest) is not None:
                raise MethodNotAllowed
            case ["repository", "index"]:
                return json_answer(self.repository.index(asks_for_ready(body)))
            case ["repository", "models", name, "load" | "unload" as verb]:
                if verb == "load":
                    refuse_overrides(body)
                await getattr(self.repository, verb)(name)
                return json_answer({"name": name, verb: True})
        return None

    def _names(self) -> dict[str, list[str]]:
        return {"models": list(dict.fromkeys(model.name for model in self._registry))}

    def _of_model(self, name: str, version: str | None, rest: list[str]) -> Answer:
        if rest not in ([], ["ready"]):
            raise NoSuchRoute
        model = find_model(self._registry, self._state, name, version)
        if rest:
            return json_answer(*models.readiness(model, self._state))
        return json_answer(models.describe_signature(self._registry, model))


def rephrase(error: Exception, path: list[str]) -> Exception:
    """Return of a request that no worker takes what TorchServe says; the reason is kept."""
    if not isinstance(error, Unavailable):
        return error
    version = f" Version {path[1]}" if len(path) > 1 and path[1] else ""
    return Refused(f'Model "{path[0]}"{version} {NO_WORKER}', error)


NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If "
    "this is a sequence inference, please check if it is closed, or expired; or exceeds "
    "maxSequenceJobQueueSize"
)
_KSERVE = {"predict": PREDICT, "infer": PREDICT, "explain": EXPLAIN}


def form_field(headers: Iterable[tuple[bytes, bytes]], body: bytes, name: str) -> str | None:
    """Return a field's text, the last one of this name; None without such a form or field.

    Raises:
        BadRequest: the form cannot be read.
    """
    values = (value.decode("latin-1") for header, value in headers if header == b"content-type")
    content_type = next(values, "")
    if len(content_type) > MAX_CONTENT_TYPE:
        raise BadRequest(f"the Content-Type is longer than {MAX_CONTENT_TYPE} characters")
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_type()
    try:
        if kind == "application/x-www-form-urlencoded":
            return dict(parse_qsl(body.decode("latin-1"), True, max_num_fields=MAX_PARTS)).get(name)
        if kind != "multipart/form-data" or not message.get_boundary():
            return None
        parts = read_parts(content_type, body)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    for head, content in reversed(parts):
        if head.get_param("name", header="content-disposition") == name:
            return content.decode("utf-8", "replace")
    return None
