"""TorchServe's two APIs by gRPC, each on its own address; equal addresses share a server.

The values of a request go to the handler as they came, under their names, without headers. Its
answer is what it returned; a status that it set does not count, as in TorchServe.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any, NamedTuple

import orjson
from grpc import StatusCode

from modelyard.plugins.grpc import health, oip
from modelyard.plugins.grpc.fields import begin_bytes, cut_out
from modelyard.plugins.grpc.messages import not_a, parse
from modelyard.plugins.grpc.oip import ask
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Failure, GrpcServer, Method, Rpc, Services, code_of
from modelyard.plugins.torchserve.dialect import Refused, text_of, with_class
from modelyard.plugins.torchserve.inference import TorchServeInference
from modelyard.plugins.torchserve.management import TorchServeManagement
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve import errors
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.call import PREDICT, Reply, Stream, Target
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.front.begin import Front, pack_fields
from modelyard.serve.front.face import Face
from modelyard.serve.front.models import why_not_ready
from modelyard.serve.http.application import Answers, Check
from modelyard.serve.http.connection import Access, Answer, Headers
from modelyard.serve.http.listener import Tls
from modelyard.serve.settings import Address, Settings


class Api(NamedTuple):
    """One API by gRPC."""

    name: str
    methods: Mapping[str, Method]
    """Methods by full name."""
    check: Check
    """Token check; it is given the full name of the method as path."""
    address: Address
    age_s: tuple[float, float]
    """Age at which its connections end, and their grace."""


class GrpcFace(Face):
    """The addresses of gRPC, bound.

    Args:
        inference: the inference API by HTTP.
        management: the management API by HTTP.
        check_at: returns the token check of the inference API at an address.
        dialect: settings of the dialect.
        settings: settings whose limits hold.
        budget: counts the messages that the server holds.
        tls: returns certificate and key, for addresses with TLS.
        access: called with each call, for an access log.
    """

    def __init__(
        self,
        inference: TorchServeInference,
        management: TorchServeManagement,
        check_at: Callable[..., Check],
        dialect: TorchServeSettings,
        settings: Settings,
        budget: AnswerBudget,
        tls: Tls | None,
        access: Access | None,
    ) -> None:
        front, most_bytes = inference.front, dialect.max_response_size
        methods = InferenceApi(front, inference.is_healthy, most_bytes, budget).methods()
        if dialect.has_oip:
            described = oip.Inference(front, inference.repository).methods()
            methods |= open_inference(described, oip.SERVICE)
        operated = ManagementApi(management, inference.calls.answers).methods()
        (first, second), (age_s, other_age_s) = dialect.grpc_addresses, dialect.grpc_ages
        checks = check_at(first, oip.CHANGES.__contains__), management.check
        apis = [
            Api("inference", methods, checks[0], first, age_s),
            Api("management", operated, checks[1], second, other_age_s),
        ]
        servers: dict[Address, GrpcServer] = {}
        for address in {first: None, second: None}:
            here = [api for api in apis if api.address == address]
            served = Services(*_methods(here, front), budget, settings.max_request_bytes, access)
            ages_s = min(api.age_s for api in here)
            servers[address] = GrpcServer(served, address, settings, tls, ages_s)
        self._servers = servers.values()
        self._urls = {f"grpc_{api.name}": servers[api.address].url for api in apis}

    @property
    def urls(self) -> Mapping[str, str]:
        """Where it listens."""
        return self._urls

    async def start(self) -> None:
        """Open the addresses."""
        for server in self._servers:
            await server.start()

    async def stop(self, timeout_s: float) -> None:
        """Take nothing new, and answer what was accepted."""
        await asyncio.gather(*(server.stop(timeout_s) for server in self._servers))


def _methods(apis: Sequence[Api], front: Front) -> tuple[dict[str, Method], Check]:
    """Return what answers on an address, and the check of its tokens.

    Each API has its own key; that of the first opens what is nobody's.
    """
    methods = {name: method for api in apis for name, method in api.methods.items()}
    checks = {name: api.check for api in apis for name in api.methods}
    names = sorted({method.split("/")[1] for method in methods})

    def is_ready() -> bool:
        return why_not_ready(front.registry, front.state) is None

    methods |= health.Health(names, is_ready).methods() | health.Reflection(names).methods()

    def check(method: str, headers: Headers) -> None:
        if method in oip.OPEN or method in health.OPEN:
            return
        try:
            checks.get(method, apis[0].check)(method, headers)
        except errors.Unauthorized as error:
            raise Failure(StatusCode.PERMISSION_DENIED, str(error)) from error

    return methods, check


# -- inference: `Ping`, `Predictions`, `StreamPredictions` -----------------------------------------


INFERENCE = "org.pytorch.serve.grpc.inference"
INFERENCE_SERVICE = f"{INFERENCE}.InferenceAPIsService"
REQUEST = f"{INFERENCE}.PredictionsRequest"
INPUT, VALUE, PREDICTION = 3, 2, 1
"""Numbers of fields: of the request, of an entry in its map, of the answer."""
INTERNAL = "InternalServerException"
OPEN_INFERENCE = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata",
                  "ModelInfer")  # fmt: skip
"""What TorchServe has of that protocol. Not what changes models: that needs another key, which is
asked for by the name of the method."""
OUT_OF_RESOURCES = "Out of resources"
REFUSAL = {"code", "type", "message"}
"""What a worker writes of an error."""


@dataclass(frozen=True)
class InferenceApi:
    """The service."""

    front: Front
    is_healthy: Callable[[], bool]
    """What `Ping` says."""
    most_bytes: int
    """Most bytes of the chunks that make one answer."""
    budget: AnswerBudget
    """Counts those meanwhile."""

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {
            f"/{INFERENCE_SERVICE}/Ping": Method(self._ping),
            f"/{INFERENCE_SERVICE}/Predictions": Method(self._predict),
            f"/{INFERENCE_SERVICE}/StreamPredictions": Method(self._stream, is_stream=True),
            f"/{INFERENCE_SERVICE}/StreamPredictions2": Method(_refuse_sequences, is_stream=True),
        }

    async def _ping(self, rpc: Rpc, data: bytes) -> bytes:
        parse("google.protobuf.Empty", data)
        text = json.dumps({"status": "Healthy" if self.is_healthy() else "Unhealthy"}, indent=2)
        answer = message(f"{INFERENCE}.TorchServeHealthResponse")(health=text)
        return bytes(answer.SerializeToString())

    async def _ask(self, rpc: Rpc, data: bytes) -> Reply:
        request, values = _read(data)
        if not request.model_name:
            text = "Parameter model_name is required.\nBadRequestException.()"
            raise Failure(StatusCode.INTERNAL, text)
        # LEGACY: none of the headers that HTTP's requests have is made.
        path = [request.model_name, request.model_version]
        target = Target(PREDICT, path, wire.PARTS | wire.LEGACY)
        reply = await ask(self.front, rpc, target, wire.pack_parts(values))
        if isinstance(reply.body, Stream) or reply.status < 400:
            return reply
        if (refusal := _read_refusal(reply.body)) is not None:
            raise refusal
        return reply

    async def _predict(self, rpc: Rpc, data: bytes) -> bytes:
        try:
            reply = await self._ask(rpc, data)
            body = reply.body
            return _prediction(await self._gather(body) if isinstance(body, Stream) else body)
        except errors.ServeError as error:
            raise _failure_of(error) from error

    async def _stream(self, rpc: Rpc) -> None:
        """Send each chunk as it comes."""
        try:
            reply = await self._ask(rpc, await rpc.read() or b"")
            if not isinstance(reply.body, Stream):
                await rpc.send(_prediction(reply.body))
                return
            try:
                async for chunk in reply.body.read():
                    await rpc.send(_prediction(chunk))
            finally:
                reply.body.close()
        except errors.ServeError as error:
            raise _failure_of(error) from error

    async def _gather(self, stream: Stream) -> bytes:
        """Return all chunks as one answer, once the last has come."""
        chunks, size = list[Payload](), 0
        try:
            async for chunk in stream.read():
                chunks.append(chunk)
                size += len(chunk)
                self.budget.add(len(chunk))
                if size > self.most_bytes:
                    raise Failure(
                        StatusCode.RESOURCE_EXHAUSTED,
                        f"the answer is a stream of more than {self.most_bytes} bytes "
                        "(max_response_size); StreamPredictions takes it in parts",
                    )
            return b"".join(chunks)
        finally:
            stream.close()
            self.budget.give_back(size)


async def _refuse_sequences(rpc: Rpc) -> None:
    """Answer as TorchServe does for a model that does not batch sequences."""
    raise Failure(
        StatusCode.UNKNOWN,
        "sequence batching is not supported here; StreamPredictions streams answers",
    )


def _read(data: bytes) -> tuple[Any, dict[str, list[Buffer]]]:
    """Return a request without its values, and those by name, not copied.

    Raises:
        Failure: it is not one.
    """
    values: dict[str, list[Buffer]] = {}
    try:
        rest, entries = cut_out(data, (INPUT,))
        for _, entry in entries:
            key, cut = cut_out(entry, (VALUE,), most=4)  # a key and a value, and what may come
            name = parse(f"{REQUEST}.InputEntry", key).key
            values[name] = [cut[-1][1]] if cut else []
    except ValueError as error:
        raise not_a(REQUEST, error) from error
    return parse(REQUEST, rest), values


def _prediction(body: Payload) -> bytes:
    """Return a PredictionResponse of one answer."""
    return b"".join((begin_bytes(PREDICTION, len(body)), body))


def _read_refusal(body: Payload | str) -> Failure | None:
    """Return the status of an error that a worker writes; None for what a handler answers."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(said, dict) or said.keys() != REFUSAL:
        return None
    code, text = said["code"], str(said["message"])
    # By HTTP an answer of 413 is one of 507, as is memory that ran out.
    is_too_large = code == 507 and text != OUT_OF_RESOURCES
    return Failure(code_of(413 if is_too_large else code), with_class(text, INTERNAL))


def _failure_of(error: errors.ServeError) -> Failure:
    """Return an error of ours with TorchServe's status and text."""
    if (
        isinstance(error, errors.StreamBroken)
        and (refusal := _read_refusal(str(error))) is not None
    ):
        return refusal
    text, (status, kind) = text_of(error), errors.http_status(error)
    if isinstance(error, errors.ModelNotFound):
        return Failure(StatusCode.INTERNAL, with_class(text, kind))
    if isinstance(error, Refused):
        return Failure(StatusCode.INTERNAL, f"{text}\n{INTERNAL}.()")
    return Failure(code_of(status), with_class(text, INTERNAL))


def open_inference(methods: dict[str, Method], service: str) -> dict[str, Any]:
    """Return the methods of the Open Inference Protocol by TorchServe's name of it, too."""
    also = f"{INFERENCE.rpartition('.')[0]}.openinference.{service.rpartition('.')[2]}"
    return methods | {f"/{also}/{name}": methods[f"/{service}/{name}"] for name in OPEN_INFERENCE}


# -- management: the six methods, answered by those of HTTP ----------------------------------------


MANAGEMENT = "org.pytorch.serve.grpc.management"
MANAGEMENT_SERVICE = f"{MANAGEMENT}.ManagementAPIsService"
STATUSES = {403: StatusCode.FAILED_PRECONDITION, 409: StatusCode.ALREADY_EXISTS}
"""Status of gRPC for an HTTP status, where TorchServe's gRPC says nothing but UNKNOWN."""

Respond = Callable[[Rpc, Any], Awaitable[Answer] | Answer]


class ManagementApi:
    """The service.

    Args:
        management: answers by HTTP, from where the answers are taken.
        answers: the form of its errors.
    """

    def __init__(self, management: TorchServeManagement, answers: Answers) -> None:
        self._management = management
        self._answers = answers

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        management = self._management
        own: dict[str, Respond] = {
            "DescribeModel": self._describe,
            "ListModels": lambda rpc, request: management.list_models(
                {"limit": request.limit, "next_page_token": request.next_page_token}
            ),
            "RegisterModel": self._register,
            "ScaleWorker": lambda rpc, request: management.scale(
                request.model_name, request.model_version or None, _given(request)
            ),
            "SetDefault": lambda rpc, request: management.set_default(
                request.model_name, request.model_version
            ),
            "UnregisterModel": self._unregister,
        }
        return {
            f"/{MANAGEMENT_SERVICE}/{name}": Method(partial(self._answer, name, respond))
            for name, respond in own.items()
        }

    async def _answer(self, name: str, respond: Respond, rpc: Rpc, data: bytes) -> bytes:
        request = parse(f"{MANAGEMENT}.{name}Request", data)
        try:
            answered = respond(rpc, request)
            status, _, body = await answered if isawaitable(answered) else answered
        except Failure:
            raise
        except Exception as error:
            status, _, body = self._answers.error(error, rpc.id)
        said = json.loads(body)
        if status >= 400:
            code = STATUSES.get(status) or code_of(status)
            if getattr(request, "customized", False):
                code = StatusCode.INTERNAL
            raise Failure(code, with_class(said["message"], said["type"]))
        is_change = isinstance(said, dict) and "status" in said
        text = said["status"] if is_change else body.decode().rstrip("\n")
        answer: bytes = message(f"{MANAGEMENT}.ManagementResponse")(msg=text).SerializeToString()
        return answer

    async def _describe(self, rpc: Rpc, request: Any) -> Answer:
        name, version = request.model_name, request.model_version or None
        if request.customized and version != "all":
            head = pack_fields(b"", b"", rpc.id, ())
            return await self._management.describe_customized(name, version, head)
        return self._management.describe(name, version)

    async def _register(self, rpc: Rpc, request: Any) -> Answer:
        self._require_model_api()
        return await self._management.register(_given(request))

    async def _unregister(self, rpc: Rpc, request: Any) -> Answer:
        self._require_model_api()
        if not request.model_name:
            raise errors.BadRequest("Parameter url is required.")  # as TorchServe calls it
        return await self._management.unregister(request.model_name, request.model_version or None)

    def _require_model_api(self) -> None:
        if not self._management.has_model_api:
            text = with_class("Model API disabled", "ModelException")
            raise Failure(StatusCode.PERMISSION_DENIED, text)


def _given(request: Any) -> dict[str, Any]:
    """Return what a request says: a number counts above 0 only, a text where it is not empty."""
    fields = {field.name: value for field, value in request.ListFields()}
    given = {name: value for name, value in fields.items() if isinstance(value, str) or value > 0}
    return {**given, "synchronous": request.synchronous}
