"""What a handler gave, or its error → the status, headers and bytes of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import torch

from modelyard.handlers import Context
from modelyard.handlers.bodies import parse_strictly
from modelyard.handlers.errors import BadInput, NoGradients, PredictionException
from modelyard.serve.dataplane import wire
from modelyard.serve.worker.request import ReadJson

JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"
INTERNAL = "InternalServerException"
AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})
"""Headers that belong to the connection; a handler's opinion of them is left out."""


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


def answer_output(context: Context, index: int, output: object, rules: Rules) -> Answer:
    """Turn one answer of the handler into status, headers and bytes.

    Raises:
        WrongAnswer: it cannot be sent.
    """
    try:
        body, content_type = rules.encode(output)
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
    if not is_status(status):
        raise WrongAnswer(f"the handler set the status {status!r}")
    for name, value in context.get_response_headers(index).items():
        lower, text = str(name).lower(), str(value)
        if not _HEADER_NAME.fullmatch(lower) or not _HEADER_VALUE.fullmatch(text):
            raise WrongAnswer(f"the handler set the header {name!r} to {value!r}")
        if lower not in _FRAMING:
            headers[lower] = text
    return Answer(status, headers, body)


def encode(output: object) -> tuple[bytes, str]:
    """Return the bytes and the content type of one value.

    Plain bytes, whatever an author's class says of itself: the frame's lengths must be true.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no such value.
    """
    if isinstance(output, str):
        return str.encode(output), TEXT
    if isinstance(output, (bytes, bytearray)):
        return b"".join((output,)), BYTES
    return _to_json(output), JSON


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


def is_status(code: object) -> bool:
    """Return whether an answer may have this HTTP status."""
    return isinstance(code, int) and 200 <= code <= 599


class Refusal(NamedTuple):
    """What an error means to the client."""

    code: int
    kind: str
    message: str


def explain_error(error: BaseException) -> Refusal:
    """Return status, type and message of an error, never the traceback."""
    if isinstance(error, (BadInput, NoGradients)):
        return Refusal(400, "BadRequestException", text_of(error))
    if isinstance(error, PredictionException):
        code = error.error_code if is_status(error.error_code) else 500
        return Refusal(code, INTERNAL, text_of(error.message))
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Refusal(507, INTERNAL, "Out of resources")
    name = "" if isinstance(error, WrongAnswer) else f"{type(error).__name__}: "
    return Refusal(500, INTERNAL, f"{name}{text_of(error)}")


def write_error(refusal: Refusal, request_id: str) -> bytes:
    """Return the JSON of an error."""
    code, kind, message = refusal
    content = {"code": code, "type": kind, "message": message, "request_id": request_id}
    return json.dumps(content).encode()


def text_of(said: object) -> str:
    """Return what an error or a value says; an author's class may fail to say anything."""
    try:
        return str(said)
    except BaseException as failure:
        return f"(its text fails: {type(failure).__name__})"


@dataclass(frozen=True)
class Rules:
    """How requests are read, and answers and errors written: the defaults are ours."""

    read_json: ReadJson | None = parse_strictly
    """None leaves bodies as they come."""
    encode: Callable[[object], tuple[bytes, str | None]] = encode
    """A value → bytes and content type; raises what JSON libraries raise."""
    explain_error: Callable[[BaseException], Refusal] = explain_error
    explain_undecodable: Callable[[BaseException], Refusal] = explain_error
    """For a request whose body cannot be read."""
    write_error: Callable[[Refusal, str], bytes] = write_error
    ends_worker: Callable[[BaseException], bool] = lambda error: False
    """Whether what a handler raised ends the process."""
    fails_together: Callable[[BaseException], bool] = lambda error: False
    """Whether an error is the batch's: no request is run again alone."""
    max_answer_bytes: int | None = None
    """Of one answer or chunk; a longer one is an error of its own request."""
    time_metric: str | None = None
    """The metric that reports how long each call of the handler took."""

    def refuse(self, error: BaseException, request_id: str) -> Answer:
        """Return the answer to a request on which the handler failed."""
        return self._answer(self.explain_error(error), request_id)

    def refuse_undecodable(self, error: BaseException, request_id: str) -> Answer:
        """Return the answer to a request that no handler saw."""
        return self._answer(self.explain_undecodable(error), request_id)

    def _answer(self, refusal: Refusal, request_id: str) -> Answer:
        body = self.write_error(refusal, request_id)
        return Answer(refusal.code, {"content-type": JSON}, body)


OURS = Rules()
"""Of an archive that we sealed, in a server of ours."""
