"""Receive batch → handler → send replies, until the server closes the socket.

The loop takes every frame that has arrived before it starts the next batch ("late merge"), so a
batch is as large as what waits, up to the batch size, and the worker never idles while there is
work.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import math
import os
import re
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import orjson
import torch

from modelyard.handlers import Context
from modelyard.handlers.entry_point import Entry
from modelyard.handlers.errors import BadInput, LoadError, NoGradients, PredictionException
from modelyard.handlers.strict_json import parse_strictly
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.lengths import CALL_BYTES, choose_alike
from modelyard.serve.worker.load import Service
from modelyard.serve.worker.request import ReadJson, Request

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
MAX_BODY = 0xFFFFFFFF

JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"
AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_PACKED = {name: wire.pack_meta([b"content-type", name.encode()]) for name in (JSON, TEXT, BYTES)}
KIND = wire.EXPLAIN | wire.ALONE | wire.DESCRIBE
"""Flags that jobs of one batch share."""

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})
"""Headers that belong to the connection; a handler's opinion of them is left out."""
_STREAMED = {"ts_stream_next": "true"}
"""On the first chunk of a streamed answer, as TorchServe's clients know it."""


@dataclass(frozen=True)
class Rules:
    """How requests are read and answers are written; the LOAD message says it."""

    is_torchserve: bool = False
    """The server speaks TorchServe's dialect: its errors, and numbers that JSON does not have."""
    is_plain: bool = False
    """Answers as TorchServe writes them: indented JSON, and of the content types none but its."""
    read_json: ReadJson | None = parse_strictly
    """None leaves bodies as they come."""
    max_answer_bytes: int | None = None
    """Of one answer or chunk; a longer one is an error of its own request."""
    times_predictions: bool = False
    """Whether each call of the handler is reported as the metric PredictionTime."""

    @classmethod
    def of(cls, message: dict[str, Any]) -> Rules:
        """Read the LOAD message."""
        is_torchserve = message.get("dialect") == "torchserve"
        is_plain = is_torchserve or "modelyard" not in (message["manifest"] or {})
        decodes = message.get("decode_input", True)
        return cls(
            is_torchserve=is_torchserve,
            is_plain=is_plain,
            read_json=(json.loads if is_plain else parse_strictly) if decodes else None,
            max_answer_bytes=message.get("max_response_bytes"),
            times_predictions=message.get("metrics") is not None,
        )


OURS = Rules()
"""Of an archive that we sealed, in a server of ours."""


class Answer(NamedTuple):
    """A reply before it is framed."""

    status: int
    headers: dict[str, str]
    body: bytes
    flags: int = 0


UNREAD = Answer(503, {}, b"", wire.UNREAD)
"""To a job that nobody waits for any more; the server counts it, and drops it."""


class WrongAnswer(Exception):
    """What a handler answered cannot be sent.

    Args:
        message: what came and what was expected.
        torchserve: what TorchServe says to that.
        code: the status of that.
    """

    def __init__(
        self, message: str, torchserve: str = "Prediction failed", code: int = 503
    ) -> None:
        super().__init__(message)
        self.torchserve = torchserve
        self.code = code


class ClientsLeft(BaseException):
    """Nobody waits for any answer of the batch any more; no `except Exception` holds it up."""


class Reader:
    """Whole frames from the server's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = wire.Decoder(MAX_BODY)
        self._frames: deque[list[wire.Item]] = deque()
        self.poll_s = 0.0
        """How long `read_arrived` looks for a frame before it sleeps, after a wait as short."""
        self._was_short = False
        self.cancelled: set[int] = set()
        """Jobs that nobody waits for any more."""

    def read(self) -> list[wire.Item]:
        """Wait for the next frame.

        Raises:
            EOFError: the server closed its end.
        """
        while not self._frames:
            self._receive(0)
        return self._frames.popleft()

    def forget_cancelled(self) -> None:
        """Forget jobs that were answered before the word came; call it when none is held."""
        if not self._frames:
            self.cancelled.clear()

    def read_arrived(self, must_wait: bool = False) -> list[wire.Item]:
        """Return the items of all frames that have arrived; wait for a first one where asked to.

        Raises:
            EOFError: the server closed its end.
        """
        if must_wait:
            while not self._frames:
                self._wait()  # gives all that has arrived, up to the size of a receive
        else:
            self.poll()
        items = [item for frame in self._frames for item in frame]
        self._frames.clear()
        return items

    def poll(self) -> None:
        """Take what has arrived, without waiting, and keep it for the next read."""
        try:
            while self._receive(socket.MSG_DONTWAIT) == RECEIVE_BYTES:
                pass
        except BlockingIOError:
            return

    def _wait(self) -> None:
        """Receive once, without sleeping where the last wait was over soon.

        To wake a process on an idle core takes longer than a small model. Under load a worker is
        not idle, and others that want its core get it.
        """
        began = perf_counter()
        if self._was_short:
            while perf_counter() - began < self.poll_s:
                try:
                    self._receive(socket.MSG_DONTWAIT)
                    return
                except BlockingIOError:
                    os.sched_yield()
        self._receive(0)
        self._was_short = perf_counter() - began < self.poll_s

    def _receive(self, flags: int) -> int:
        data = self.connection.recv(RECEIVE_BYTES, flags)
        if not data:
            raise EOFError
        for frame in self._decoder.feed(data):
            if frame[0].id == 0 and frame[0].code == wire.CANCEL:
                self.cancelled.update(wire.decode_control(frame[0])["ids"])
            else:
                self._frames.append(frame)
        return len(data)


class Chunks:
    """Sends what a handler answers before it is done: the context's `stream`."""

    def __init__(self, reader: Reader, context: Context, rules: Rules) -> None:
        self._reader = reader
        self._context = context
        self._rules = rules
        self._requests: Sequence[Request] = ()
        self.has_sent = False
        """Whether the running call has sent a chunk."""

    def begin(self, requests: Sequence[Request]) -> None:
        """Take note of whom the next chunks are for."""
        self._requests = requests
        self.has_sent = False

    def check_cancelled(self) -> None:
        """Raise ClientsLeft when all clients of the running call have hung up."""
        self._reader.poll()
        if all(map(self.has_left, self._requests)):
            raise ClientsLeft

    def has_left(self, request: Request) -> bool:
        """Return whether nobody waits for the answer to this request any more."""
        return request.id in self._reader.cancelled

    def __call__(self, values: Sequence[Any]) -> None:
        """Send one chunk to each client.

        Raises:
            ClientsLeft: all of them have hung up.
            WrongAnswer: a value cannot be sent.
        """
        frame = wire.Frame()
        self._reader.poll()
        waiting = [(at, request) for at, request in enumerate(self._requests)
                   if not self.has_left(request)]  # fmt: skip
        if not waiting:
            raise ClientsLeft
        for at, request in waiting:
            answer = _format(self._context, at, values[at], self._rules)
            headers = {} if self.has_sent else {**answer.headers, **_STREAMED}
            frame.add(request.id, answer.status, wire.MORE, _pack(headers), [answer.body])
        self._reader.connection.sendall(b"".join(frame.buffers()))
        self.has_sent = True


def run(reader: Reader, service: Service, rules: Rules = OURS) -> None:
    """Serve until the server closes its end (EOFError)."""
    gc.collect()
    gc.freeze()
    chunks = connect(service.context, reader, rules)
    waiting: deque[wire.Item] = deque()
    call_bytes = CALL_BYTES[service.device.partition(":")[0]] if service.by_length else None
    while True:
        if not waiting:
            reader.forget_cancelled()
        waiting.extend(reader.read_arrived(must_wait=not waiting))
        batch = take_batch(waiting, service.batch_size, call_bytes)
        send(reader, batch, answer_batch(service, batch, rules, chunks), service.context.metrics)


def connect(context: Context, reader: Reader, rules: Rules) -> Chunks:
    """Let handlers stream through a context, and learn from it that clients have left."""
    chunks = context.stream = Chunks(reader, context, rules)
    context.cancellation = chunks.check_cancelled
    return chunks


def send(
    reader: Reader, batch: Sequence[wire.Item], answers: Sequence[Answer], metrics: Any
) -> None:
    """Send the answers of a batch, one per item, and what its handler measured."""
    frame = wire.Frame()
    for item, answer in zip(batch, answers, strict=True):
        frame.add(item.id, answer.status, answer.flags, _pack(answer.headers), [answer.body])
    if metrics is not None and (records := metrics.drain()):
        # Authors report numbers of any library; the server reads what str() makes of them.
        reported = json.dumps({"records": records}, default=_text).encode()
        frame.add(0, wire.METRICS, 0, b"", [reported])
    reader.connection.sendall(b"".join(frame.buffers()))


def _pack(headers: dict[str, str]) -> bytes:
    if len(headers) == 1 and (packed := _PACKED.get(headers.get("content-type", ""))):
        return packed
    return wire.pack_meta(
        text.encode("latin-1", "replace") for pair in headers.items() for text in pair
    )


def take_batch(
    waiting: deque[wire.Item], size: int, call_bytes: int | None = None
) -> list[wire.Item]:
    """Take the first item and up to `size - 1` more of its kind; the others keep their order.

    Args:
        waiting: what has arrived, at least one.
        size: the largest batch.
        call_bytes: of `lengths.CALL_BYTES`, for items of like length; None takes them in order.
    """
    first = waiting.popleft()
    batch = [first]
    kind = first.flags & KIND
    if kind & (wire.ALONE | wire.DESCRIBE):
        return batch
    if call_bytes is not None:
        waiting.appendleft(first)
        return _take_alike(waiting, size, call_bytes)
    others: list[wire.Item] = []
    while waiting and len(batch) < size:
        item = waiting.popleft()
        (batch if item.flags & KIND == kind else others).append(item)
    waiting.extendleft(reversed(others))
    return batch


def _take_alike(waiting: deque[wire.Item], size: int, call_bytes: int) -> list[wire.Item]:
    kind = waiting[0].flags & KIND
    places = [at for at, item in enumerate(waiting) if item.flags & KIND == kind]
    chosen = choose_alike([len(waiting[at].body) for at in places], size, call_bytes)
    batch = [waiting[places[at]] for at in chosen]
    for at in reversed(chosen):
        del waiting[places[at]]
    return batch


def answer_batch(
    service: Service,
    batch: Sequence[wire.Item],
    rules: Rules = OURS,
    chunks: Chunks | None = None,
) -> list[Answer]:
    """Return one answer per item, whatever happens.

    A request whose body cannot be decoded is answered by itself. When the handler fails on several
    requests together, each is run again alone: the bad one gets its own error, the others their
    answers.

    Args:
        service: what answers.
        batch: of one kind.
        rules: how to read and write.
        chunks: what the handler streams through, None where nobody reads that.
    """
    answers, requests = read_requests(batch, rules, chunks)
    if requests:
        entry = service.explain if batch[0].flags & wire.EXPLAIN else service.predict
        answered = _call(service, entry, requests, rules, chunks)
        for request, answer in zip(requests, answered, strict=True):
            answers[request.id] = answer
    return [answers[item.id] for item in batch]


def read_requests(
    batch: Sequence[wire.Item], rules: Rules, chunks: Chunks | None
) -> tuple[dict[int, Answer], list[Request]]:
    """Return the answers of those that no handler needs to see, by id, and the other requests."""
    answers: dict[int, Answer] = {}
    requests = []
    for item in batch:
        request = Request(item)
        if chunks is not None and chunks.has_left(request):
            answers[item.id] = UNREAD
            continue
        try:
            request.decode(item.body, rules.read_json)
        except Exception as error:
            answers[item.id] = _undecodable(error, request.request_id, rules)
        else:
            requests.append(request)
    return answers, requests


def _call(
    service: Service,
    entry: Entry,
    requests: list[Request],
    rules: Rules,
    chunks: Chunks | None,
) -> list[Answer]:
    """Run the handler on these requests, and on each alone when that fails."""
    context = service.context
    began = begin(context, requests, chunks)
    try:
        outputs = entry([request.row for request in requests], context)
        outputs = check_outputs(outputs, len(requests))
    except BaseException as error:
        return answer_failure(service, entry, error, requests, rules, chunks)
    return answer_outputs(context, outputs, began, requests, rules, chunks)


def begin(context: Context, requests: list[Request], chunks: Chunks | None) -> float:
    """Make a context that of these requests, and return the time."""
    context.reset(
        request_ids=[request.request_id for request in requests],
        headers=lambda: [request.headers for request in requests],
        queries=[request.query for request in requests],
    )
    if chunks is not None:
        chunks.begin(requests)
    return perf_counter()


def answer_failure(
    service: Service,
    entry: Entry,
    error: BaseException,
    requests: list[Request],
    rules: Rules,
    chunks: Chunks | None,
) -> list[Answer]:
    """Answer requests on which the handler failed together, by running each alone.

    Raises:
        RuntimeError: the device cannot be used any more. That ends this process: the server starts
            another one, which gets the requests one by one, and only the bad one will be lost.
    """
    if service.device != "cpu":
        torch.cuda.synchronize()
    if chunks is not None and chunks.has_sent:
        return _broken(error, requests, rules)
    if isinstance(error, ClientsLeft):
        return [UNREAD] * len(requests)
    if rules.is_torchserve and not isinstance(error, Exception):
        raise error  # `sys.exit()` in a handler ends the worker there
    if len(requests) > 1 and not (rules.is_torchserve and isinstance(error, WrongAnswer)):
        # As they came: the handler may have changed what it was given.
        fresh = [request.decoded_again(rules.read_json) for request in requests]
        return [_call(service, entry, [one], rules, chunks)[0] for one in fresh]
    _log_failure(error, requests[0].request_id, rules)
    return [error_answer(error, request.request_id, rules) for request in requests]


def answer_outputs(
    context: Context,
    outputs: list[Any],
    began: float,
    requests: list[Request],
    rules: Rules,
    chunks: Chunks | None,
) -> list[Answer]:
    """Turn what the handler gave into answers, each that cannot be sent into an error."""
    if rules.times_predictions and context.metrics is not None:
        context.metrics.add_time("PredictionTime", round((perf_counter() - began) * 1000, 2))
    answers = []
    for index, output in enumerate(outputs):
        try:
            answers.append(_format(context, index, output, rules))
        except Exception as error:  # an answer is an author's object: each of its methods may fail
            if chunks is not None and chunks.has_sent:
                answers += _broken(error, [requests[index]], rules)
            else:
                _log_failure(error, requests[index].request_id, rules)
                answers.append(error_answer(error, requests[index].request_id, rules))
    return answers


def _broken(error: BaseException, requests: Sequence[Request], rules: Rules) -> list[Answer]:
    """Return the ends of answers of which the clients have the first chunks already."""
    if not isinstance(error, ClientsLeft):
        _log_error("request %s failed after its first chunk", requests[0].request_id, error)
    return [
        error_answer(error, request.request_id, rules)._replace(flags=wire.BROKEN)
        for request in requests
    ]


def _log_failure(error: BaseException, request_id: str, rules: Rules) -> None:
    """Log what is not the client's fault, with the traceback that no client sees."""
    if error_answer(error, request_id, rules).status >= 500:
        _log_error("request %s failed", request_id, error)


def _log_error(text: str, request_id: str, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the handler may have closed the log
        logger.error(text, request_id, exc_info=error)


def check_outputs(outputs: object, count: int) -> list[Any]:
    """Return the answers as a plain list: an author's class may lie about its length.

    Raises:
        WrongAnswer: they are not a list, or not as many as the requests.
    """
    if not isinstance(outputs, list):
        raise WrongAnswer(
            f"the handler returned {type(outputs).__name__}; a list with one answer per request "
            "is expected",
            "Invalid model predict output",
        )
    held = list.copy(outputs)
    if len(held) != count:
        text = "number of batch response mismatched"
        raise WrongAnswer(f"{text}: {len(held)} answers to {count} requests", text)
    return held


def _format(context: Context, index: int, output: object, rules: Rules) -> Answer:
    """Turn one answer of the handler into status, headers and bytes.

    Raises:
        WrongAnswer: it cannot be sent.
    """
    try:
        body, content_type = _encode(output, rules)
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongAnswer(
            f"the handler's answer cannot be sent as JSON: {error}",
            "Unsupported model output data type.",
        ) from error
    limit = rules.max_answer_bytes
    if limit is not None and len(body) > limit:
        text = f"the answer has {len(body)} bytes; max_response_size allows {limit}"
        raise WrongAnswer(text, text, 500)
    headers = {"content-type": content_type} if content_type else {}
    if context.is_answer_plain:
        return Answer(200, headers, body)
    status, _ = context.get_response_status(index)
    if not _is_status(status):
        raise WrongAnswer(f"the handler set the status {status!r}")
    for name, value in context.get_response_headers(index).items():
        lower, text = str(name).lower(), str(value)
        if not _HEADER_NAME.fullmatch(lower) or not _HEADER_VALUE.fullmatch(text):
            raise WrongAnswer(f"the handler set the header {name!r} to {value!r}")
        if lower not in _FRAMING:
            headers[lower] = text
    return Answer(status, headers, body)


def _encode(output: object, rules: Rules) -> tuple[bytes, str | None]:
    """Return the bytes of one value, and its content type unless the client is to guess.

    Plain bytes, whatever an author's class says of itself: the frame's lengths must be true.
    """
    if isinstance(output, str):
        return str.encode(output), None if rules.is_plain else TEXT
    if isinstance(output, (bytes, bytearray)):
        return b"".join((output,)), None if rules.is_plain else BYTES
    if not rules.is_plain:
        return _to_json(output), JSON
    if isinstance(output, torch.Tensor):
        saved = io.BytesIO()
        torch.save(output, saved)
        return saved.getvalue(), None
    return json.dumps(output, indent=2, allow_nan=rules.is_torchserve).encode(), JSON


def _to_json(value: object) -> bytes:
    """Return compact JSON; ten floats take orjson a tenth of the standard library's time.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no such value; NaN is one.
    """
    try:
        text = orjson.dumps(value, option=AS_JSON)
    except TypeError:  # keys that are not text, long integers, lone surrogates; or no JSON at all
        text = b""
    if not text or b"null" in text:  # which is what orjson makes of NaN, too
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return text


def _is_status(code: object) -> bool:
    """Return whether an answer may have this HTTP status."""
    return isinstance(code, int) and 200 <= code <= 599


def _undecodable(error: Exception, request_id: str, rules: Rules) -> Answer:
    """Answer a request whose body cannot be read: the client's fault, but 500 in TorchServe."""
    if rules.is_torchserve:
        return _error(500, "InternalServerException", _text(error), request_id, rules)
    return error_answer(error, request_id, rules)


def error_answer(error: BaseException, request_id: str, rules: Rules = OURS) -> Answer:
    """Return the JSON error of a request, never the traceback."""
    kind = "InternalServerException"
    if isinstance(error, (BadInput, NoGradients)):
        return _error(400, "BadRequestException", _text(error), request_id, rules)
    if isinstance(error, PredictionException):
        code = error.error_code if _is_status(error.error_code) else 500
        if rules.is_torchserve and code == 413:
            code = 507
        return _error(code, kind, _text(error.message), request_id, rules)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        rules.is_torchserve and "CUDA" in _text(error)
    ):
        return _error(507, kind, "Out of resources", request_id, rules)
    if not rules.is_torchserve:
        name = "" if isinstance(error, WrongAnswer) else f"{type(error).__name__}: "
        return _error(500, kind, f"{name}{_text(error)}", request_id, rules)
    if isinstance(error, WrongAnswer):
        return _error(error.code, kind, error.torchserve, request_id, rules)
    return _error(503, kind, "Prediction failed", request_id, rules)


def _error(code: int, kind: str, message: str, request_id: str, rules: Rules) -> Answer:
    content: dict[str, object] = {"code": code, "type": kind, "message": message}
    if rules.is_torchserve:
        body = json.dumps(content, indent=2) + "\n"
    else:
        body = json.dumps({**content, "request_id": request_id})
    return Answer(code, {"content-type": JSON}, body.encode())


def _text(said: object) -> str:
    """Return what an error or a value says; an author's class may fail to say anything."""
    try:
        return str(said)
    except BaseException as failure:
        return f"(its text fails: {type(failure).__name__})"


def check_golden(service: Service, golden: Sequence[dict[str, Any]]) -> None:
    """Replay the archive's golden requests; a worker that answers them wrong is not ready.

    Raises:
        LoadError: which request, what was expected and what came.
    """
    for number, example in enumerate(golden):
        expected = json.loads(Path(example["expected"]).read_bytes())
        answer = answer_golden(service, example, number)
        if difference := compare_golden(answer, expected, example["tolerance"]):
            raise LoadError(
                f"golden request {number} ({example['request']}): {difference}; the weights, the "
                "labels or the preprocessing are not those that the archive was made with"
            )


def answer_golden(service: Service, example: dict[str, Any], number: int) -> Answer:
    """Return the handler's answer to one golden request, alone in its batch.

    It takes the way that predictions will take: in two halves, if they do.
    """
    meta = [b"", b"", b"golden-%d" % number]
    if example["content_type"]:
        meta += [b"content-type", example["content_type"].encode()]
    # The name is relative: the archive is the working folder.
    item = wire.Item(1, 0, 0, wire.pack_meta(meta), Path(example["request"]).read_bytes())
    if (launch := service.launch) is not None:
        service = replace(service, predict=lambda data, context: launch(data, context).result())
    return answer_batch(service, [item])[0]


def compare_golden(answer: Answer, expected: dict[str, Any], tolerance: float) -> str | None:
    """Return how an answer differs from {"label": …} or {"answer": …}, or None when it agrees."""
    if answer.status != 200:
        text = answer.body.decode("utf-8", "replace")
        return f"expected an answer, got status {answer.status}: {text}"
    got = value_of(answer)
    if "label" in expected:
        label = max(got, key=got.__getitem__) if isinstance(got, dict) and got else got
        return (
            None
            if str(label) == expected["label"]
            else (f'expected the label "{expected["label"]}", got "{label}"')
        )
    return _difference(got, expected["answer"], tolerance, "answer")


def value_of(answer: Answer) -> Any:
    """Return what golden answers are compared by: the answer's JSON value, else its text."""
    text = answer.body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _difference(got: Any, expected: Any, tolerance: float, where: str) -> str | None:
    """Return the first difference between two JSON values; numbers may be `tolerance` apart."""
    numbers = (int, float)
    if type(got) in numbers and type(expected) in numbers:  # True is no 1
        close = math.isclose(got, expected, rel_tol=0, abs_tol=tolerance)
        return None if close else f"{where}: expected {expected}, got {got}"
    if isinstance(got, dict) and isinstance(expected, dict) and got.keys() == expected.keys():
        pairs: Any = ((f"{where}.{key}", got[key], expected[key]) for key in expected)
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        pairs = ((f"{where}[{at}]", *pair) for at, pair in enumerate(zip(got, expected)))  # noqa: B905
    else:
        same = type(got) is type(expected) and got == expected
        return None if same else f"{where}: expected {expected!r}, got {got!r}"
    for place, one, other in pairs:
        if difference := _difference(one, other, tolerance, place):
            return difference
    return None
