"""The Open Inference Protocol by gRPC: `inference.GRPCInferenceService`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Any

import orjson
from google.protobuf.json_format import ParseDict
from grpc import StatusCode

from modelyard.plugins.grpc.fields import begin_bytes
from modelyard.plugins.grpc.messages import (
    INFER_RESPONSE,
    Asked,
    parse,
    read_request,
    write_answer,
)
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Failure, Method, Rpc, code_of, failure_of
from modelyard.serve.api.events import LENGTH_HEADER, broken_text, split_tensors
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import NORMAL, Reply, Stream, Target
from modelyard.serve.dataplane.tracing import PARENT, STATE, Attributes
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import DeadlinePassed, StreamBroken, http_status
from modelyard.serve.front.begin import AwaitedReply, Front, find_model, pack_fields
from modelyard.serve.front.models import (
    EXTENSIONS,
    describe_signature,
    is_model_ready,
    why_not_ready,
)

SERVICE = "inference.GRPCInferenceService"
INFERS = (f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer")
"""Methods that ask for an answer."""
CHANGES = (f"/{SERVICE}/RepositoryModelLoad", f"/{SERVICE}/RepositoryModelUnload")
"""Methods that change what is served."""
OPEN = (f"/{SERVICE}/ServerLive", f"/{SERVICE}/ServerReady")
"""Probes, which carry no token."""
_MEMORY = tuple(
    f"{kind}SharedMemory{act}"
    for kind in ("System", "Cuda")
    for act in ("Status", "Register", "Unregister")
)
EXTENDED = ("ModelConfig", "ModelStatistics", "TraceSetting", "LogSettings", *_MEMORY)
"""Triton's methods, which a plug-in answers."""
PREDICTS = frozenset((*INFERS, *(f"/{SERVICE}/{name}" for name in _MEMORY)))
"""Methods that need the right `predict`."""
ENDS_S = 0.1
"""Time before its deadline within which a call that is given up counts as late."""


class RpcReply(AwaitedReply):
    """Hands the reply to a call on to the task of its gRPC call.

    Args:
        headers: headers that the handler finds beside those of a trace, name after value.
    """

    __slots__ = ("_headers",)
    asked: Rpc

    def __init__(
        self, front: Front, rpc: Rpc, target: Target, headers: Sequence[bytes] = ()
    ) -> None:
        super().__init__(front, rpc, target)
        self._headers = headers

    def head(self) -> bytes:
        """Return what a worker needs beside the message."""
        trace = self.trace
        names = (STATE,) if trace is not None else (PARENT, STATE)
        found = [each for pair in self.asked.headers if pair[0] in names for each in pair]
        parent = (PARENT, trace.parent) if trace is not None else ()
        return pack_fields(b"", b"", self.asked.id, [*self._headers, *found, *parent])

    def describe(self) -> tuple[str, Attributes]:
        """Return the span's name and attributes, by OpenTelemetry's conventions for gRPC."""
        name = self.asked.method.removeprefix("/")
        service, _, method = name.partition("/")
        about = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        return name, {**about, **self.describe_call()}

    def describe_status(self, status: int) -> Attributes:
        """Return what the span says of an answer."""
        return {"rpc.grpc.status_code": code_of(status).value[0] if status >= 400 else 0}

    def cancel(self) -> bool:
        """Note that nobody waits for it any more; who leaves as its time ends has waited it out.

        A client counts the time of a call by itself, and is there first.
        """
        call = self.call
        if call is None or call.deadline - monotonic() > ENDS_S:
            return super().cancel()
        self.set_exception(DeadlinePassed("the client has left as its time ended"))
        return True


async def ask(
    front: Front,
    rpc: Rpc,
    target: Target,
    parts: Sequence[Buffer],
    headers: Sequence[bytes] = (),
    asked: Asked | None = None,
) -> Reply:
    """Return the reply to a call, from the front and by the way of every request.

    Args:
        parts: the body.
        headers: headers of `RpcReply`.
        asked: what a request of tensors says of its rows, time and class.

    Raises:
        ServeError: there is no such model, the call is refused, or there is no answer.
    """
    reply = RpcReply(front, rpc, target, headers)
    rpc.is_counted = True
    rpc.let_go()  # of the request before it
    timeout_s = rpc.timeout_s if asked is None else min(rpc.timeout_s, asked.timeout_s)
    priority = NORMAL if asked is None else asked.priority
    try:
        call = front.begin(reply, timeout_s=timeout_s, priority=priority, began_at=rpc.began)
    except Exception as error:
        front.count_unrouted(http_status(error)[0])
        raise
    if call is not None:
        if asked is None:
            call.submit(parts)
        else:
            call.rows = asked.rows
            front.extensions.submit(call, parts, call.submit)
    try:
        answer = await reply.wait()
    except asyncio.CancelledError:
        rpc.has_left = True
        raise
    except Exception:
        rpc.let_go()
        raise
    if not isinstance(answer.body, Stream):
        rpc.let_go()
    if answer.note is not None:
        rpc.outcome = answer.note.outcome
    return answer


def _worker_failure(reply: Reply) -> Failure:
    """Return what a worker refused, in whichever form its dialect writes that."""
    body = b"" if isinstance(reply.body, Stream) else bytes(reply.body)
    try:
        text = str(orjson.loads(body)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return Failure(code_of(reply.status), text)


class Inference:
    """The service.

    Args:
        front: where requests begin.
        repository: what is loaded and unloaded by name.
    """

    def __init__(self, front: Front, repository: Repository) -> None:
        self._front = front
        self._registry = front.registry
        self._state = front.state
        self._repository = repository

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        described = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "RepositoryIndex": self._index,
        }
        methods = {name: Method(partial(_describe, name, it)) for name, it in described.items()}
        methods["ModelInfer"] = Method(self._infer)
        methods["ModelStreamInfer"] = Method(self._infer_stream, is_stream=True)
        methods["RepositoryModelLoad"] = Method(partial(_change, "Load", self._repository.load))
        methods["RepositoryModelUnload"] = Method(
            partial(_change, "Unload", self._repository.unload)
        )
        methods |= {name: Method(partial(self._extend, name)) for name in EXTENDED}
        return {f"/{SERVICE}/{name}": method for name, method in methods.items()}

    async def _extend(self, name: str, rpc: Rpc, data: bytes) -> bytes:
        """Answer a call that a plug-in adds."""
        request = parse(f"inference.{name}Request", data)
        answer = self._front.extensions.calls.get(name)
        if answer is None:
            raise Failure(StatusCode.UNIMPLEMENTED, f"{name} is not answered by this server")
        fields = {each.name: getattr(request, each.name) for each in request.DESCRIPTOR.fields}
        response = message(f"inference.{name}Response")()
        found: bytes = ParseDict(answer(fields, rpc.headers), response).SerializeToString()
        return found

    # -- what describes --------------------------------------------------------------------------

    def _live(self, request: Any) -> Any:
        return message("inference.ServerLiveResponse")(live=True)

    def _ready(self, request: Any) -> Any:
        ready = why_not_ready(self._registry, self._state) is None
        return message("inference.ServerReadyResponse")(ready=ready)

    def _model_ready(self, request: Any) -> Any:
        ready = is_model_ready(self._find(request), self._state)
        return message("inference.ModelReadyResponse")(ready=ready)

    def _server(self, request: Any) -> Any:
        return message("inference.ServerMetadataResponse")(
            name="modelyard",
            version=version("modelyard"),
            extensions=[*EXTENSIONS, *self._front.extensions.names],
        )

    def _model(self, request: Any) -> Any:
        about = describe_signature(self._registry, self._find(request))
        for tensor in (*about["inputs"], *about["outputs"]):
            tensor.pop("parameters", None)
        return message("inference.ModelMetadataResponse")(**about)

    def _find(self, request: Any) -> ModelVersion:
        return find_model(self._registry, self._state, request.name, request.version or None)

    def _index(self, request: Any) -> Any:
        models = self._repository.index(request.ready)
        return message("inference.RepositoryIndexResponse")(models=models)

    # -- what infers -----------------------------------------------------------------------------

    async def _infer(self, rpc: Rpc, data: bytes) -> bytes:
        asked, id, tail = read_request(data)
        reply = await self._ask(rpc, asked, asked.target, tail)
        return write_answer(reply, asked.is_raw, id)

    async def _ask(self, rpc: Rpc, asked: Asked, target: Target, tail: Sequence[Buffer]) -> Reply:
        reply = await ask(
            self._front, rpc, target, [asked.head, *tail], asked.headers, asked
        )  # fmt: skip
        if reply.status >= 400:
            raise _worker_failure(reply)
        return reply

    async def _infer_stream(self, rpc: Rpc) -> None:
        """Answer the requests of a stream in their order; an error ends a request, not the rest."""
        while (data := await rpc.read()) is not None:
            try:
                await self._infer_each(rpc, data)
            except Exception as error:
                text = str(_failure_of_stream(error))
                answer = message("inference.ModelStreamInferResponse")(error_message=text)
                await rpc.send(answer.SerializeToString())
            rpc.outcome = ""  # of one request among several

    async def _infer_each(self, rpc: Rpc, data: bytes) -> None:
        """Send the answer to one request of a stream, or each chunk of it as it comes."""
        asked, id, tail = read_request(data)
        target = asked.target._replace(flags=asked.target.flags | wire.STREAM)
        reply = await self._ask(rpc, asked, target, tail)
        if not isinstance(reply.body, Stream):
            await _send(rpc, write_answer(reply, asked.is_raw, id))
            return
        try:
            async for chunk in reply.body.read():
                head, _ = split_tensors(chunk)
                length = wire.pack_meta([LENGTH_HEADER, b"%d" % len(head)])
                part = Reply(200, length, bytes(chunk[4:]))
                await _send(rpc, write_answer(part, asked.is_raw, id))
        finally:
            reply.body.close()


async def _send(rpc: Rpc, answer: bytes) -> None:
    await rpc.send(begin_bytes(INFER_RESPONSE, len(answer)) + answer)


async def _describe(name: str, answer: Callable[[Any], Any], rpc: Rpc, data: bytes) -> bytes:
    """Answer a call whose answer is there at once."""
    found: bytes = answer(parse(f"inference.{name}Request", data)).SerializeToString()
    return found


async def _change(
    name: str, change: Callable[[str], Awaitable[None]], rpc: Rpc, data: bytes
) -> bytes:
    """Answer a call that loads or unloads a model, when that is done."""
    request = parse(f"inference.RepositoryModel{name}Request", data)
    # KServe's messages have the model's name where Triton's have that of a repository.
    model = request.model_name or request.repository_name
    await change(model)
    done = {"model_name": model, f"is{name}ed": True}
    answer: bytes = message(f"inference.RepositoryModel{name}Response")(**done).SerializeToString()
    return answer


def _failure_of_stream(error: Exception) -> Failure:
    """Return the error that ends an answer in parts, whose text may be the JSON of a worker's."""
    failure = failure_of(error)
    if not isinstance(error, StreamBroken):
        return failure
    return Failure(failure.code, broken_text(str(error)))
