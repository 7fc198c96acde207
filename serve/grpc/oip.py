"""The Open Inference Protocol by gRPC: `inference.GRPCInferenceService`.

A request for inference is turned into the form that the protocol has by HTTP, with binary tensors
(`handlers.tensors`), and takes the way of every other request from there on. What comes raw is
answered raw, what comes as typed contents is answered so.
"""

from __future__ import annotations

import array
import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Any, NamedTuple

import orjson
from google.protobuf.message import DecodeError

from modelyard.serve.api.health import why_not_ready
from modelyard.serve.api.inference import CallReply, Calls, pack_fields, unpack_headers
from modelyard.serve.api.oip import EXTENSIONS, describe_signature
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply, Stream, Target
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.errors import BadRequest, Unavailable, error_body, http_status
from modelyard.serve.grpc.protos import message
from modelyard.serve.grpc.rpc import Method, Rpc, RpcError, Status, status_of
from modelyard.serve.http.application import ServerState

SERVICE = "inference.GRPCInferenceService"
LENGTH_HEADER = b"inference-header-content-length"
HELD = 16
"""Requests of one stream that wait for the one before them; the client waits with further ones."""


class _Contents(NamedTuple):
    """Where a datatype's values stand in a message, and what they are in memory."""

    field: str
    code: str
    """Of `array`; none for BYTES."""


CONTENTS: Mapping[str, _Contents] = {
    "BOOL": _Contents("bool_contents", "b"),
    "INT8": _Contents("int_contents", "b"),
    "INT16": _Contents("int_contents", "h"),
    "INT32": _Contents("int_contents", "i"),
    "INT64": _Contents("int64_contents", "q"),
    "UINT8": _Contents("uint_contents", "B"),
    "UINT16": _Contents("uint_contents", "H"),
    "UINT32": _Contents("uint_contents", "I"),
    "UINT64": _Contents("uint64_contents", "Q"),
    "FP32": _Contents("fp32_contents", "f"),
    "FP64": _Contents("fp64_contents", "d"),
    "BYTES": _Contents("bytes_contents", ""),
}
"""FP16 and BF16 come raw only."""
_FIELDS = frozenset(each.field for each in CONTENTS.values())


def parse(name: str, data: Buffer) -> Any:
    """Return a message of bytes.

    Raises:
        RpcError: they are not one.
    """
    try:
        return message(name).FromString(bytes(data) if isinstance(data, memoryview) else data)
    except DecodeError as error:
        raise RpcError(Status.INVALID_ARGUMENT, f"the message is not a {name}") from error


def error_of(error: Exception) -> RpcError:
    """Return an error of ours as gRPC has it."""
    if isinstance(error, RpcError):
        return error
    return RpcError(status_of(http_status(error)[0]), str(error_body(error, "")["message"]))


class InferReply(CallReply):
    """Sends the reply to a call on: a worker's, or an error."""

    __slots__ = ("_failed", "_send")

    def __init__(
        self,
        calls: Calls,
        model: ModelVersion,
        target: Target,
        send: Callable[[Reply], None],
        failed: Callable[[RpcError], None],
    ) -> None:
        super().__init__(calls, model, target)
        self._send = send
        self._failed = failed

    def answer(self, reply: Reply) -> None:
        """Send a worker's reply."""
        try:
            if reply.status >= 400:
                raise _worker_error(reply)
            self._send(reply)
        except RpcError as error:
            self._failed(error)

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        self._failed(error_of(error))


def _worker_error(reply: Reply) -> RpcError:
    """Return what a worker refused, in whichever form its dialect writes that."""
    body = b"" if isinstance(reply.body, Stream) else bytes(reply.body)
    try:
        text = str(orjson.loads(body)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return RpcError(status_of(reply.status), text)


def begin_call(
    calls: Calls, rpc: Rpc, target: Target, headers: Sequence[bytes], parts: Sequence[Buffer],
    reply: Callable[[ModelVersion], CallReply], timeout_s: float = math.inf, rows: int = 1,
) -> None:  # fmt: skip
    """Queue a call that came by gRPC, as `Calls.begin` does one that came by HTTP.

    Raises:
        RpcError: there is no such model.
    """
    try:
        model = calls.find(target)
    except Exception as error:
        failure = error_of(error)
        calls.count_unrouted(http_status(error)[0])
        raise failure from error
    sink = reply(model)
    asked_s = min(timeout_s, rpc.timeout_s)
    must_fit = model.config.refuses_late or asked_s < math.inf
    asked_s = min(asked_s, model.request_timeout_s)
    try:
        model.batchers[target.kind].check(asked_s, must_fit, monotonic())
    except (BadRequest, Unavailable) as error:
        sink.fail(error, 0.0)
        return
    head = pack_fields(b"", b"", rpc.id, headers)
    call = Call(
        model, target.kind, head, sink, asked_s, rpc.is_left, target.flags, must_fit
    )  # fmt: skip
    sink.call = call
    call.rows = rows
    call.submit(parts)


class Inference:
    """The service.

    Args:
        calls: makes calls of requests.
    """

    def __init__(
        self, calls: Calls, registry: Registry, state: ServerState, repository: Repository
    ) -> None:
        self._repository = repository
        self._calls = calls
        self._registry = registry
        self._state = state

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        unary = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server,
            "ModelMetadata": self._model,
            "RepositoryIndex": self._index,
        }
        methods: dict[str, Method] = {
            name: partial(_answer, name, answer) for name, answer in unary.items()
        }
        methods["ModelInfer"] = lambda rpc: rpc.unary(partial(self._infer, rpc))
        methods["RepositoryModelLoad"] = partial(_change, "Load", self._repository.load)
        methods["RepositoryModelUnload"] = partial(_change, "Unload", self._repository.unload)
        methods["ModelStreamInfer"] = lambda rpc: _InferStream(self, rpc).start()
        return {f"/{SERVICE}/{name}": method for name, method in methods.items()}

    # -- what describes --------------------------------------------------------------------------

    def _live(self, request: Any) -> Any:
        return message("inference.ServerLiveResponse")(live=True)

    def _ready(self, request: Any) -> Any:
        ready = why_not_ready(self._registry, self._state) is None
        return message("inference.ServerReadyResponse")(ready=ready)

    def _model_ready(self, request: Any) -> Any:
        model = self._registry.get(request.name, request.version or None)
        return message("inference.ModelReadyResponse")(ready=model.pool.ready_count > 0)

    def _server(self, request: Any) -> Any:
        return message("inference.ServerMetadataResponse")(
            name="modelyard", version=version("modelyard"), extensions=EXTENSIONS
        )

    def _model(self, request: Any) -> Any:
        model = self._registry.get(request.name, request.version or None)
        about = describe_signature(self._registry, model)
        answer = message("inference.ModelMetadataResponse")(
            name=about["name"], versions=about["versions"], platform=about["platform"]
        )
        for side in ("inputs", "outputs"):
            for tensor in about[side]:
                getattr(answer, side).add(
                    name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"]
                )
        return answer

    def _index(self, request: Any) -> Any:
        answer = message("inference.RepositoryIndexResponse")()
        for entry in self._repository.index(request.ready):
            answer.models.add(**entry)
        return answer

    # -- what infers -----------------------------------------------------------------------------

    def _infer(self, rpc: Rpc, data: Buffer) -> None:
        self.begin(
            rpc, data, lambda answer: rpc.reply(answer.SerializeToString()),
            lambda error: rpc.fail(error.status, str(error)),
        )  # fmt: skip

    def begin(
        self,
        rpc: Rpc,
        data: Buffer,
        send: Callable[[Any], None],
        failed: Callable[[RpcError], None],
    ) -> None:
        """Begin to answer one request.

        Args:
            send: called with the answer, a message.
            failed: called with the error that there is instead.

        Raises:
            RpcError: it cannot be begun.
        """
        request = parse("inference.ModelInferRequest", data)
        is_raw = bool(request.raw_input_contents) or not any(
            each.HasField("contents") for each in request.inputs
        )
        head, tail = to_body(request)
        path = [request.model_name, request.model_version]
        target = Target(PREDICT, path, wire.KSERVE | wire.TENSORS)
        rows = request.inputs[0].shape[0] if request.inputs and request.inputs[0].shape else 1
        timeout_us = request.parameters["timeout"].int64_param if "timeout" in request.parameters \
            else 0  # fmt: skip
        begin_call(
            self._calls, rpc, target, (LENGTH_HEADER, b"%d" % len(head)), [head, *tail],
            lambda model: InferReply(
                self._calls, model, target, lambda reply: send(to_message(reply, is_raw)), failed
            ),
            timeout_us / 1e6 if timeout_us > 0 else math.inf,
            max(1, min(rows, wire.MOST_ROWS)),
        )  # fmt: skip


def _answer(name: str, answer: Callable[[Any], Any], rpc: Rpc) -> None:
    """Answer a call whose answer is there at once."""

    def reply(data: Buffer) -> None:
        request = parse(f"inference.{name}Request", data)
        try:
            rpc.reply(answer(request).SerializeToString())
        except Exception as error:
            raise error_of(error) from error

    rpc.unary(reply)


def _change(name: str, change: Callable[[str], Awaitable[None]], rpc: Rpc) -> None:
    """Answer a call that loads or unloads a model, when that is done."""

    async def run(model: str) -> None:
        try:
            await change(model)
        except Exception as error:
            failure = error_of(error)
            rpc.fail(failure.status, str(failure))
        else:
            done = {"model_name": model, f"is{name}ed": True}
            rpc.reply(
                message(f"inference.RepositoryModel{name}Response")(**done).SerializeToString()
            )

    def begin(data: Buffer) -> None:
        request = parse(f"inference.RepositoryModel{name}Request", data)
        # KServe's messages have the model's name where Triton's have that of a repository.
        task = asyncio.get_running_loop().create_task(
            run(request.model_name or request.repository_name)
        )
        _changing.add(task)
        task.add_done_callback(_changing.discard)

    rpc.unary(begin)


_changing: set[asyncio.Task[None]] = set()
"""The loop holds its tasks weakly."""


class _InferStream:
    """Requests of one stream, answered in their order."""

    def __init__(self, service: Inference, rpc: Rpc) -> None:
        self._service = service
        self._rpc = rpc
        self._waiting: deque[Buffer] = deque()
        self._is_busy = self._is_whole = False

    def start(self) -> None:
        """Take the requests as they come."""
        self._rpc.on_message, self._rpc.on_whole = self._take, self._end

    def _take(self, data: Buffer) -> None:
        self._waiting.append(data)
        if len(self._waiting) > HELD:
            self._rpc.stream.hold()
        if not self._is_busy:
            self._next()

    def _end(self) -> None:
        self._is_whole = True
        if not self._is_busy:
            self._rpc.finish()

    def _next(self) -> None:
        """Begin with the next request."""
        self._is_busy = True
        try:
            self._service.begin(self._rpc, self._waiting.popleft(), self._send, self._fail)
        except RpcError as error:
            self._fail(error)

    def _send(self, answer: Any) -> None:
        self._put(message("inference.ModelStreamInferResponse")(infer_response=answer))

    def _fail(self, error: RpcError) -> None:
        self._put(message("inference.ModelStreamInferResponse")(error_message=str(error)))

    def _put(self, answer: Any) -> None:
        self._rpc.send(answer.SerializeToString())
        self._is_busy = False
        if self._waiting:
            self._rpc.stream.release()
            self._next()
        elif self._is_whole:
            self._rpc.finish()


# -- messages ↔ the form that HTTP has -----------------------------------------------------------


def to_body(request: Any) -> tuple[bytes, list[bytes]]:
    """Return the JSON of a ModelInferRequest, and the tensors' bytes that come behind it.

    Raises:
        RpcError: raw and typed contents are mixed, or typed ones stand in another type's field.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RpcError(
            Status.INVALID_ARGUMENT,
            f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs; expected as many",
        )
    inputs, tail = [], []
    for at, each in enumerate(request.inputs):
        if raw and each.HasField("contents"):
            raise RpcError(
                Status.INVALID_ARGUMENT,
                f'input "{each.name}" has contents beside raw_input_contents; expected one of them',
            )
        data = raw[at] if raw else _to_raw(each)
        tail.append(data)
        inputs.append({
            "name": each.name, "datatype": each.datatype, "shape": list(each.shape),
            "parameters": _parameters(each.parameters) | {"binary_data_size": len(data)},
        })  # fmt: skip
    head: dict[str, Any] = {
        "inputs": inputs,
        "parameters": _parameters(request.parameters) | {"binary_data_output": True},
    }
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [
            {"name": each.name, "parameters": _parameters(each.parameters) | {"binary_data": True}}
            for each in request.outputs
        ]
    return orjson.dumps(head), tail


def _parameters(given: Any) -> dict[str, Any]:
    """Return parameters as JSON has them; what the tensors' form says itself is left out."""
    found = {
        name: getattr(value, chosen)
        for name, value in given.items()
        if (chosen := value.WhichOneof("parameter_choice"))
    }
    for name in ("binary_data_size", "binary_data", "binary_data_output"):
        found.pop(name, None)
    return found


def _to_raw(tensor: Any) -> bytes:
    """Return typed contents as bytes."""
    kind = CONTENTS.get(tensor.datatype)
    where = f'input "{tensor.name}"'
    if kind is None:
        raise RpcError(
            Status.INVALID_ARGUMENT,
            f"{where} is {tensor.datatype[:40]!r}, which has no typed contents; send it in "
            f"raw_input_contents, or one of {', '.join(CONTENTS)}",
        )
    for field, _ in tensor.contents.ListFields():
        if field.name != kind.field:
            raise RpcError(
                Status.INVALID_ARGUMENT,
                f"{where} is {tensor.datatype} with {field.name}; expected {kind.field}",
            )
    values = getattr(tensor.contents, kind.field)
    if not kind.code:
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    try:
        return array.array(kind.code, values).tobytes()
    except OverflowError as error:
        raise RpcError(
            Status.INVALID_ARGUMENT, f"{where} has numbers beyond {tensor.datatype}"
        ) from error


def to_message(reply: Reply, is_raw: bool) -> Any:
    """Return a worker's answer as a ModelInferResponse.

    Raises:
        RpcError: it holds no tensors, as of a handler behind an envelope.
    """
    headers = dict(unpack_headers(reply.headers))
    if isinstance(reply.body, Stream) or LENGTH_HEADER not in headers:
        raise RpcError(
            Status.UNIMPLEMENTED,
            "this model does not answer with tensors: its handler reads bodies through an envelope",
        )
    length = int(headers[LENGTH_HEADER])
    view = memoryview(reply.body)
    head = orjson.loads(view[:length])
    answer = message("inference.ModelInferResponse")(
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id") or ""
    )
    at = length
    is_raw = is_raw or any(each["datatype"] not in CONTENTS for each in head["outputs"])
    for each in head["outputs"]:
        size = each["parameters"]["binary_data_size"]
        data, at = bytes(view[at : at + size]), at + size
        tensor = answer.outputs.add(
            name=each["name"], datatype=each["datatype"], shape=each["shape"]
        )
        if is_raw:
            answer.raw_output_contents.append(data)
        else:
            _put_contents(tensor, data)
    return answer


def _put_contents(tensor: Any, data: bytes) -> None:
    kind = CONTENTS[tensor.datatype]
    values = getattr(tensor.contents, kind.field)
    if kind.code:
        numbers = array.array(kind.code, data)
        values.extend(map(bool, numbers) if tensor.datatype == "BOOL" else numbers)
        return
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        values.append(data[at + 4 : end])
        at = end
