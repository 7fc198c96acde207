"""What a handler gave, or its error → the status, headers and bytes of an answer."""

from __future__ import annotations

import io
import json
import re
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
AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})
"""Headers that belong to the connection; a handler's opinion of them is left out."""


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


def undecodable(error: Exception, request_id: str, rules: Rules) -> Answer:
    """Answer a request whose body cannot be read: the client's fault, but 500 in TorchServe."""
    if rules.is_torchserve:
        return _error(500, "InternalServerException", text_of(error), request_id, rules)
    return error_answer(error, request_id, rules)


def error_answer(error: BaseException, request_id: str, rules: Rules = OURS) -> Answer:
    """Return the JSON error of a request, never the traceback."""
    kind = "InternalServerException"
    if isinstance(error, (BadInput, NoGradients)):
        return _error(400, "BadRequestException", text_of(error), request_id, rules)
    if isinstance(error, PredictionException):
        code = error.error_code if _is_status(error.error_code) else 500
        if rules.is_torchserve and code == 413:
            code = 507
        return _error(code, kind, text_of(error.message), request_id, rules)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        rules.is_torchserve and "CUDA" in text_of(error)
    ):
        return _error(507, kind, "Out of resources", request_id, rules)
    if not rules.is_torchserve:
        name = "" if isinstance(error, WrongAnswer) else f"{type(error).__name__}: "
        return _error(500, kind, f"{name}{text_of(error)}", request_id, rules)
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


def text_of(said: object) -> str:
    """Return what an error or a value says; an author's class may fail to say anything."""
    try:
        return str(said)
    except BaseException as failure:
        return f"(its text fails: {type(failure).__name__})"
