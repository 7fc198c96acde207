"""Receive batch → handler → send replies, until the server closes the socket.

The loop takes every frame that has arrived before it starts the next batch ("late merge"), so a
batch is as large as what waits, up to the batch size, and the worker never idles while there is
work.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import re
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from handlers.errors import BadInput, LoadError, NoGradients, PredictionException
from serve import wire
from serve.worker.load import Entry, Service
from serve.worker.request import Request

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
MAX_BODY = 0xFFFFFFFF

JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})
"""Headers that belong to the connection; a handler's opinion of them is left out."""


class Answer(NamedTuple):
    """A reply before it is framed."""

    status: int
    headers: dict[str, str]
    body: bytes


class Reader:
    """Whole frames from the server's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = wire.Decoder(MAX_BODY)
        self._frames: deque[list[wire.Item]] = deque()

    def read(self) -> list[wire.Item]:
        """Wait for the next frame.

        Raises:
            EOFError: the server closed its end.
        """
        while not self._frames:
            self._receive(0)
        return self._frames.popleft()

    def read_arrived(self) -> list[wire.Item]:
        """Return the items of all frames that have arrived, without waiting."""
        while True:
            try:
                self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        items = [item for frame in self._frames for item in frame]
        self._frames.clear()
        return items

    def _receive(self, flags: int) -> None:
        data = self.connection.recv(RECEIVE_BYTES, flags)
        if not data:
            raise EOFError
        self._frames.extend(self._decoder.feed(data))


def run(reader: Reader, service: Service) -> None:
    """Serve until the server closes its end (EOFError)."""
    gc.collect()
    gc.freeze()
    waiting: deque[wire.Item] = deque()
    while True:
        if not waiting:
            waiting.extend(reader.read())
        waiting.extend(reader.read_arrived())
        batch = take_batch(waiting, service.batch_size)
        frame = wire.Frame()
        for item, answer in zip(batch, answer_batch(service, batch), strict=True):
            meta = wire.pack_meta(
                text.encode("latin-1", "replace")
                for pair in answer.headers.items()
                for text in pair
            )
            frame.add(item.id, answer.status, 0, meta, [answer.body])
        reader.connection.sendall(b"".join(frame.buffers()))


def take_batch(waiting: deque[wire.Item], size: int) -> list[wire.Item]:
    """Take the first item and up to `size - 1` more of its kind; the others keep their order."""
    first = waiting.popleft()
    batch = [first]
    if first.flags & wire.ALONE:
        return batch
    kind = wire.EXPLAIN | wire.ALONE
    others: list[wire.Item] = []
    while waiting and len(batch) < size:
        item = waiting.popleft()
        (batch if item.flags & kind == first.flags & kind else others).append(item)
    waiting.extendleft(reversed(others))
    return batch


def answer_batch(service: Service, batch: Sequence[wire.Item]) -> list[Answer]:
    """Return one answer per item, whatever happens.

    A request whose body cannot be decoded is answered by itself. When the handler fails on several
    requests together, each is run again alone: the bad one gets its own error, the others their
    answers.
    """
    answers: dict[int, Answer] = {}
    requests = []
    for item in batch:
        request = Request(item)
        try:
            request.decode(item.body)
        except Exception as error:
            answers[item.id] = error_answer(error, request.request_id)
        else:
            requests.append(request)
    if requests:
        entry = service.explain if batch[0].flags & wire.EXPLAIN else service.predict
        for request, answer in zip(requests, _call(service, entry, requests), strict=True):
            answers[request.id] = answer
    return [answers[item.id] for item in batch]


def _call(service: Service, entry: Entry, requests: list[Request]) -> list[Answer]:
    """Run the handler on these requests, and on each alone when that fails."""
    context = service.context
    context.reset(
        request_ids=[request.request_id for request in requests],
        headers=[request.headers for request in requests],
        queries=[request.query for request in requests],
    )
    try:
        outputs = entry([request.row for request in requests], context)
        _check_outputs(outputs, len(requests))
    except BaseException as error:
        if len(requests) > 1:
            return [_call(service, entry, [request])[0] for request in requests]
        answer = error_answer(error, requests[0].request_id)
        if answer.status >= 500:
            logger.error("request %s failed", requests[0].request_id, exc_info=error)
        return [answer]
    return [
        _format(context, index, output, requests[index].request_id)
        for index, output in enumerate(outputs)
    ]


def _check_outputs(outputs: object, count: int) -> None:
    if not isinstance(outputs, list):
        raise TypeError(
            f"the handler returned {type(outputs).__name__}; a list with one answer per request "
            "is expected"
        )
    if len(outputs) != count:
        raise ValueError(
            f"number of batch response mismatched: {len(outputs)} answers to {count} requests"
        )


def _format(context: Any, index: int, output: object, request_id: str) -> Answer:
    """Turn one answer of the handler into status, headers and bytes."""
    try:
        if isinstance(output, str):
            body, content_type = output.encode(), TEXT
        elif isinstance(output, (bytes, bytearray)):
            body, content_type = bytes(output), BYTES
        else:
            body, content_type = json.dumps(output, allow_nan=False).encode(), JSON
    except (TypeError, ValueError, RecursionError) as error:
        reason = ValueError(f"the handler's answer cannot be sent as JSON: {error}")
        return error_answer(reason, request_id)
    status, _ = context.get_response_status(index)
    if not _is_status(status):
        return error_answer(ValueError(f"the handler set the status {status!r}"), request_id)
    headers = {"content-type": content_type}
    for name, value in context.get_response_headers(index).items():
        lower, text = str(name).lower(), str(value)
        if not _HEADER_NAME.fullmatch(lower) or not _HEADER_VALUE.fullmatch(text):
            reason = ValueError(f"the handler set the header {name!r} to {value!r}")
            return error_answer(reason, request_id)
        if lower not in _FRAMING:
            headers[lower] = text
    return Answer(status, headers, body)


def _is_status(code: object) -> bool:
    """Tell whether an answer may have this HTTP status."""
    return isinstance(code, int) and 200 <= code <= 599


def error_answer(error: BaseException, request_id: str) -> Answer:
    """Return the JSON error of a request: class and message, never the traceback."""
    code, kind, message = 500, "InternalServerException", f"{type(error).__name__}: {_text(error)}"
    if isinstance(error, (BadInput, NoGradients)):
        code, kind, message = 400, "BadRequestException", _text(error)
    elif isinstance(error, PredictionException):
        code = error.error_code if _is_status(error.error_code) else 500
        message = str(error.message)
    elif isinstance(error, MemoryError):
        code, message = 507, "Out of resources"
    content = {"code": code, "type": kind, "message": message, "request_id": request_id}
    return Answer(code, {"content-type": JSON}, json.dumps(content).encode())


def _text(error: BaseException) -> str:
    """Return what an error says; an author's class may fail to say anything."""
    try:
        return str(error)
    except Exception as failure:
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
    """Return the handler's answer to one golden request, alone in its batch."""
    meta = [b"", b"", b"golden-%d" % number]
    if example["content_type"]:
        meta += [b"content-type", example["content_type"].encode()]
    # The name is relative: the archive is the working folder.
    item = wire.Item(1, 0, 0, wire.pack_meta(meta), Path(example["request"]).read_bytes())
    return answer_batch(service, [item])[0]


def compare_golden(answer: Answer, expected: dict[str, Any], tolerance: float) -> str | None:
    """Say how an answer differs from {"label": …} or {"answer": …}, or None when it agrees."""
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
