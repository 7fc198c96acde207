"""The Open Inference Protocol by gRPC: `inference.GRPCInferenceService`.

A request for inference is turned into the form that the protocol has by HTTP, with binary tensors
(`handlers.tensors`), and takes the way of every other request from there on. What comes raw is
answered raw, what comes as typed contents is answered so.
"""

from __future__ import annotations

import array
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from time import monotonic
from typing import Any, NamedTuple

import orjson
from google.protobuf.message import DecodeError

from modelyard.plugins.grpc.fields import begin_bytes, cut_out
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Message, Method, Rpc, RpcError, Status, status_of
from modelyard.serve.api.events import LENGTH_HEADER, broken_text, split_tensors
from modelyard.serve.api.health import find_model, is_model_ready, why_not_ready
from modelyard.serve.api.inference import (
    PRIORITY_HEADER,
    CallReply,
    Calls,
    class_of,
    pack_fields,
    parse_priority,
    unpack_headers,
)
from modelyard.serve.api.oip import EXTENSIONS, describe_signature
from modelyard.serve.api.traces import describe_call
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.control.repository import Repository
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import HIGH, NORMAL, PREDICT, Call, Reply, Stream, Target
from modelyard.serve.dataplane.tracing import PARENT, STATE, Attributes, Trace, Tracing
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.errors import (
    BadRequest,
    DeadlinePassed,
    Forbidden,
    StreamBroken,
    Unavailable,
    error_body,
    http_status,
)
from modelyard.serve.http.application import ServerState

SERVICE = "inference.GRPCInferenceService"
ENDS_S = 0.1
"""Before its deadline a call that is given up counts as late."""
HELD = 16
"""Requests of one stream that wait for the one before them; the client waits with further ones."""


REQUEST, RESPONSE = "inference.ModelInferRequest", "inference.ModelInferResponse"
ID, RAW_INPUT, RAW_OUTPUT, INFER_RESPONSE = 3, 7, 6, 2
"""Numbers of fields: of a request and its answer, of a request, of an answer, of a stream's."""
CACHED_BYTES = 1 << 11
"""Of what a request or an answer says beside its tensors: what is longer is read each time."""


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
MOST_DIMS, MOST_PARAMETERS, MOST_TEXTS = 32, 256, 200_000
"""Of one tensor, of one map, of one tensor of BYTES as typed contents: while a request is read here
nobody else is answered."""
_FIELDS = frozenset(each.field for each in CONTENTS.values())


def parse(name: str, data: Message | bytes) -> Any:
    """Return a message of bytes.

    Raises:
        RpcError: they are not one.
    """
    try:
        return message(name).FromString(bytes(data))
    except DecodeError as error:
        raise _not_a(name, error) from error


def _not_a(name: str, error: Exception) -> RpcError:
    return RpcError(Status.INVALID_ARGUMENT, f"the message is not a {name}: {error}")


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

    def cancel(self) -> bool:
        """Note that nobody waits for it any more; who leaves as its time ends has waited it out.

        A client counts the time of a call by itself, and is there first.
        """
        call = self.call
        if call is None or call.deadline - monotonic() > ENDS_S:
            return super().cancel()
        self.set_exception(DeadlinePassed("the client has left as its time ended"))
        return True

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
    priority: int = NORMAL, form: Callable[[Exception], RpcError] = error_of,
) -> None:  # fmt: skip
    """Queue a call that came by gRPC, as `Calls.begin` does one that came by HTTP.

    Args:
        form: makes a status of the error where there is no such model.

    Raises:
        RpcError: there is no such model.
    """
    rpc.is_counted = True
    try:
        model = calls.find(target, rpc.id, rpc.metadata)
    except Exception as error:
        failure = form(error)
        calls.count_unrouted(http_status(error)[0])
        raise failure from error
    rpc.served = model.name, model.version
    sink = reply(model)
    sink.carrier = rpc
    trace = None
    if calls.tracing is not None:
        trace = sink.trace = _begin_trace(calls.tracing, rpc, model, target)
        rpc.trace_id = trace.id if trace is not None else ""
    asked_s = min(timeout_s, rpc.timeout_s)
    must_fit = model.config.refuses_late or asked_s < math.inf
    asked_s = min(asked_s, model.request_timeout_s)
    try:
        for name, value in rpc.metadata:
            if name == PRIORITY_HEADER and priority == NORMAL:
                priority = parse_priority(value)
        if priority == HIGH:
            calls.check_high(rpc.metadata)
        if model.kept is None:
            model.batchers[target.kind].check(asked_s, must_fit, monotonic(), priority=priority)
    except (BadRequest, Forbidden, Unavailable) as error:
        sink.fail(error, 0.0)
        return
    head = pack_fields(b"", b"", rpc.id, [*headers, *_trace_headers(rpc, trace)])
    call = Call(
        model, target.kind, head, sink, asked_s, rpc.is_left, target.flags, must_fit, trace,
        priority,
    )  # fmt: skip
    sink.call = call
    call.rows = rows
    if model.kept is not None:
        call.lookup = model.kept.lookup(rpc.metadata)
    call.submit(parts)


def _begin_trace(tracing: Tracing, rpc: Rpc, model: ModelVersion, target: Target) -> Trace | None:
    """Begin the trace of a call; None where it is not sampled.

    Names and attributes are those of OpenTelemetry's conventions for gRPC.
    """
    service, _, method = rpc.method.removeprefix("/").partition("/")

    def about() -> tuple[str, Attributes]:
        return f"{service}/{method}", {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            **describe_call(model, target, rpc.id),
        }

    return tracing.begin(rpc.metadata, rpc.began, about, _describe_status)


def _describe_status(status: int) -> Attributes:
    return {"rpc.grpc.status_code": int(status_of(status)) if status >= 400 else 0}


def _trace_headers(rpc: Rpc, trace: Trace | None) -> list[bytes]:
    """Return what the handler finds of a trace among its headers, name after value."""
    names = (STATE,) if trace is not None else (PARENT, STATE)
    found = [each for pair in rpc.metadata if pair[0] in names for each in pair]
    return [*found, PARENT, trace.parent] if trace is not None else found


class Several(NamedTuple):
    """What takes several answers to one request."""

    send: Callable[[list[Buffer]], None]
    end: Callable[[], None]


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
        model = self._find(request)
        return message("inference.ModelReadyResponse")(ready=is_model_ready(model, self._state))

    def _server(self, request: Any) -> Any:
        return message("inference.ServerMetadataResponse")(
            name="modelyard", version=version("modelyard"), extensions=EXTENSIONS
        )

    def _model(self, request: Any) -> Any:
        model = self._find(request)
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

    def _find(self, request: Any) -> ModelVersion:
        return find_model(self._registry, self._state, request.name, request.version or None)

    def _index(self, request: Any) -> Any:
        answer = message("inference.RepositoryIndexResponse")()
        for entry in self._repository.index(request.ready):
            answer.models.add(**entry)
        return answer

    # -- what infers -----------------------------------------------------------------------------

    def _infer(self, rpc: Rpc, data: Message) -> None:
        self.begin(
            rpc, data, lambda parts: rpc.reply(*parts),
            lambda error: rpc.fail(error.status, str(error)),
        )  # fmt: skip

    def begin(
        self,
        rpc: Rpc,
        data: Message,
        send: Callable[[list[Buffer]], None],
        failed: Callable[[RpcError], None],
        several: Several | None = None,
    ) -> None:
        """Begin to answer one request.

        Args:
            send: called with the answer, a message in parts.
            failed: called with the error that there is instead.
            several: what takes the answers, where there may be more than one.

        Raises:
            RpcError: it cannot be begun.
        """
        asked, id, tail = read_request(data)
        target = asked.target
        if several is not None:
            target = target._replace(flags=target.flags | wire.STREAM)

        def reply(answer: Reply) -> None:
            if answer.note is not None and several is None:
                rpc.outcome = answer.note.outcome
            if isinstance(answer.body, Stream) and several is not None:
                write = partial(_write_chunk, is_raw=asked.is_raw, id=id)
                rpc.run(_pass_on(rpc, answer.body, write, several, failed))
            else:
                send(write_answer(answer, asked.is_raw, id))

        begin_call(
            self._calls, rpc, target, asked.headers, [asked.head, *tail],
            lambda model: InferReply(self._calls, model, target, reply, failed),
            asked.timeout_s, asked.rows, asked.priority,
        )  # fmt: skip


def _answer(name: str, answer: Callable[[Any], Any], rpc: Rpc) -> None:
    """Answer a call whose answer is there at once."""

    def reply(data: Message) -> None:
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
            raise error_of(error) from error
        done = {"model_name": model, f"is{name}ed": True}
        rpc.reply(message(f"inference.RepositoryModel{name}Response")(**done).SerializeToString())

    def begin(data: Message) -> None:
        request = parse(f"inference.RepositoryModel{name}Request", data)
        # KServe's messages have the model's name where Triton's have that of a repository.
        rpc.run(run(request.model_name or request.repository_name))

    rpc.unary(begin)


async def _pass_on(
    rpc: Rpc, stream: Stream, write: Callable[[Payload], list[Buffer]],
    several: Several, failed: Callable[[RpcError], None],
) -> None:  # fmt: skip
    """Send each chunk of an answer as it comes."""
    try:
        async for chunk in stream.read():
            several.send(write(chunk))
            await rpc.drain()
    except Exception as error:
        failed(_of_stream(error))
    else:
        several.end()
    finally:
        stream.close()


def _of_stream(error: Exception) -> RpcError:
    """Return the error that ends a stream, whose text may be the JSON of a worker's."""
    failure = error_of(error)
    if not isinstance(error, StreamBroken):
        return failure
    return RpcError(failure.status, broken_text(str(error)))


def _write_chunk(chunk: Payload, is_raw: bool, id: bytes) -> list[Buffer]:
    head, _ = split_tensors(chunk)
    length = wire.pack_meta([LENGTH_HEADER, b"%d" % len(head)])
    return write_answer(Reply(200, length, bytes(chunk[4:])), is_raw, id)


class _InferStream:
    """Requests of one stream, answered in their order."""

    def __init__(self, service: Inference, rpc: Rpc) -> None:
        self._service = service
        self._rpc = rpc
        self._waiting: deque[Message] = deque()
        """The first of them is being answered."""
        self._is_begun = self._is_whole = self._is_running = False

    def start(self) -> None:
        """Take the requests as they come."""
        self._rpc.keeps_messages = self._rpc.may_rest = True
        self._rpc.on_message, self._rpc.on_whole = self._take, self._end

    def _take(self, data: Message) -> None:
        self._waiting.append(data)
        if len(self._waiting) > HELD:
            self._rpc.pause()
        self._run()

    def _end(self) -> None:
        self._is_whole = True
        self._run()

    def _run(self) -> None:
        """Begin with one request after the other, as long as they are answered at once."""
        if self._is_running:
            return
        self._is_running = True
        while self._waiting and not self._is_begun:
            self._is_begun = True
            try:
                self._service.begin(
                    self._rpc,
                    self._waiting[0],
                    self._send,
                    self._fail,
                    Several(self._send_one, self._done),
                )
            except RpcError as error:
                self._fail(error)
        self._is_running = False
        if self._is_whole and not self._waiting:
            self._rpc.finish()

    def _send(self, answer: list[Buffer]) -> None:
        self._put(begin_bytes(INFER_RESPONSE, sum(map(len, answer))), *answer)

    def _send_one(self, answer: list[Buffer]) -> None:
        """Send one of several answers to the same request."""
        self._rpc.send(begin_bytes(INFER_RESPONSE, sum(map(len, answer))), *answer)

    def _fail(self, error: RpcError) -> None:
        answer = message("inference.ModelStreamInferResponse")(error_message=str(error))
        self._put(answer.SerializeToString())

    def _put(self, *answer: Buffer) -> None:
        self._rpc.send(*answer)
        self._done()

    def _done(self) -> None:
        """Go on with the next request."""
        self._rpc.release(self._waiting.popleft())
        self._is_begun = False
        if len(self._waiting) == HELD:
            self._rpc.resume()
        self._run()


# -- messages ↔ the form that HTTP has -----------------------------------------------------------


class Asked(NamedTuple):
    """What a request says beside its id and its raw tensors."""

    target: Target
    head: bytes
    """The JSON, as it has it by HTTP."""
    headers: Sequence[bytes]
    tail: Sequence[bytes]
    """Typed contents as bytes."""
    rows: int
    timeout_s: float
    priority: int
    is_raw: bool
    """Whether the answer is to be raw."""


def read_request(data: Message) -> tuple[Asked, bytes, Sequence[Buffer]]:
    """Return what a ModelInferRequest says, its id, and the bytes behind its JSON, uncopied.

    Raises:
        RpcError: it is none; raw and typed contents are mixed, or typed ones stand in another
            type's field.
    """
    try:
        rest, cut = cut_out(data.pieces, (ID, RAW_INPUT))
        id, sizes, raw = "", [], []
        for number, value in cut:
            if number == ID:
                id = b"".join(value).decode()
            else:
                raw += value
                sizes.append(sum(map(len, value)))
    except ValueError as error:
        raise _not_a(REQUEST, error) from error
    read = _read if len(rest) > CACHED_BYTES else _read_again
    asked = read(rest, tuple(sizes))
    return asked, id.encode(), raw or asked.tail


def _read(rest: bytes, sizes: tuple[int, ...]) -> Asked:
    """Return what a request says whose raw tensors have these sizes."""
    request = parse(REQUEST, rest)
    if sizes and len(sizes) != len(request.inputs):
        raise RpcError(
            Status.INVALID_ARGUMENT,
            f"{len(sizes)} raw_input_contents for {len(request.inputs)} inputs; expected as many",
        )
    inputs, tail = [], []
    for at, each in enumerate(request.inputs):
        if len(each.shape) > MOST_DIMS:
            raise RpcError(
                Status.INVALID_ARGUMENT,
                f'input "{each.name}" has {len(each.shape)} dimensions; at most {MOST_DIMS} are '
                "taken",
            )
        if sizes and each.HasField("contents"):
            raise RpcError(
                Status.INVALID_ARGUMENT,
                f'input "{each.name}" has contents beside raw_input_contents; expected one of them',
            )
        if not sizes:
            tail.append(_to_raw(each))
        inputs.append({
            "name": each.name, "datatype": each.datatype, "shape": list(each.shape),
            "parameters": _parameters(each.parameters)
            | {"binary_data_size": sizes[at] if sizes else len(tail[-1])},
        })  # fmt: skip
    parameters = _parameters(request.parameters)
    head: dict[str, Any] = {
        "inputs": inputs, "parameters": parameters | {"binary_data_output": True}
    }  # fmt: skip
    if request.outputs:
        head["outputs"] = [
            {"name": each.name, "parameters": _parameters(each.parameters) | {"binary_data": True}}
            for each in request.outputs
        ]
    body = orjson.dumps(head)
    first = request.inputs[0].shape[:1] if request.inputs else ()
    timeout_us, priority = parameters.get("timeout", 0), parameters.get("priority", 0)
    return Asked(
        Target(PREDICT, [request.model_name, request.model_version], wire.KSERVE | wire.TENSORS),
        body,
        (LENGTH_HEADER, b"%d" % len(body)),
        tail,
        max(1, min(*first, wire.MOST_ROWS)) if first else 1,
        timeout_us / 1e6 if type(timeout_us) is int and timeout_us > 0 else math.inf,
        class_of(priority) if type(priority) is int else NORMAL,
        bool(sizes) or not any(each.HasField("contents") for each in request.inputs),
    )


_read_again = lru_cache(256)(_read)
"""Of one client's requests all but the tensors and the id is the same, most of the time."""


def _parameters(given: Any) -> dict[str, Any]:
    """Return parameters as JSON has them; what the tensors' form says itself is left out."""
    if len(given) > MOST_PARAMETERS:
        raise RpcError(
            Status.INVALID_ARGUMENT,
            f"{len(given)} parameters of one kind; at most {MOST_PARAMETERS} are taken",
        )
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
        if len(values) > MOST_TEXTS:
            raise RpcError(
                Status.INVALID_ARGUMENT,
                f"{where} has {len(values)} bytes_contents; at most {MOST_TEXTS} are taken, send "
                "it in raw_input_contents",
            )
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    try:
        return array.array(kind.code, values).tobytes()
    except OverflowError as error:
        raise RpcError(
            Status.INVALID_ARGUMENT, f"{where} has numbers beyond {tensor.datatype}"
        ) from error


def write_answer(reply: Reply, is_raw: bool, id: bytes) -> list[Buffer]:
    """Return a worker's answer as a ModelInferResponse, in parts, its tensors uncopied.

    Raises:
        RpcError: it holds no tensors, as of a handler behind an envelope.
    """
    length = _head_length(reply.headers)
    if isinstance(reply.body, Stream) or length is None:
        raise RpcError(
            Status.UNIMPLEMENTED,
            "this model does not answer with tensors: its handler reads bodies through an envelope",
        )
    view = memoryview(reply.body)
    describe = _describe if length > CACHED_BYTES else _describe_again
    described, sizes, has_fields = describe(bytes(view[:length]))
    own = begin_bytes(ID, len(id)) + id if id else b""
    if not is_raw and has_fields:
        return [_with_contents(described, view[length:], sizes), own]
    parts: list[Buffer] = [described + own]
    at = length
    for size in sizes:
        parts += (begin_bytes(RAW_OUTPUT, size), view[at : at + size])
        at += size
    return parts


@lru_cache(64)
def _head_length(headers: bytes) -> int | None:
    found = dict(unpack_headers(headers)).get(LENGTH_HEADER)
    return None if found is None else int(found)


def _describe(head: bytes) -> tuple[bytes, tuple[int, ...], bool]:
    """Return an answer without its tensors, their sizes, and whether each has typed contents."""
    found = orjson.loads(head)
    answer = message(RESPONSE)(
        model_name=found["model_name"], model_version=found["model_version"]
    )  # fmt: skip
    for each in found["outputs"]:
        answer.outputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
    sizes = tuple(each["parameters"]["binary_data_size"] for each in found["outputs"])
    has_fields = all(each["datatype"] in CONTENTS for each in found["outputs"])
    return answer.SerializeToString(), sizes, has_fields


_describe_again = lru_cache(256)(_describe)


def _with_contents(described: bytes, tail: memoryview, sizes: Sequence[int]) -> bytes:
    """Return an answer with its tensors as typed contents."""
    answer = message(RESPONSE).FromString(described)
    at = 0
    for tensor, size in zip(answer.outputs, sizes, strict=True):
        _put_contents(tensor, bytes(tail[at : at + size]))
        at += size
    return bytes(answer.SerializeToString())


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
