"""A job's bytes → what a handler sees of a request; its output or error → a reply's bytes.

The server never looks into a body; whatever can go wrong with one goes wrong here, in a worker,
and is the client's fault. A media type counts without its parameters and as it is spelled, and what
cannot be decoded stays a bytearray. Only of JSON is more expected from clients of archives of ours:
nothing in it is guessed at.
"""

import binascii
import gzip
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson

from modelyard.handlers.body import as_prediction, parse_strictly, read_instances, weights_of
from modelyard.handlers.context import Context
from modelyard.handlers.errors import BadInput, NoGradients, PredictionException
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.form import MAX_PARTS, read_parts

logger = logging.getLogger(__name__)

Row = dict[str, Any]
ReadJson = Callable[[bytes | bytearray], Any]
"""Raises ValueError or RecursionError for what is not valid JSON, BadInput to refuse it."""

MULTIPART, FORM = "multipart/form-data", "application/x-www-form-urlencoded"
_BROKEN_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")

JSON, TEXT, BYTES = "application/json", "text/plain; charset=utf-8", "application/octet-stream"
COMPRESSIBLE = (JSON, "text/html")
COMPRESSED_FROM = 32_768
"""Bytes of an answer that is worth it."""
INTERNAL = "InternalServerException"
MOST_SAID = 100_000
"""Characters of an error's message that a client gets: an author's error may quote its input."""
AS_JSON = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class Request:
    """One request as a handler sees it.

    Attributes:
        row: parameter name → value; `body` unless the request is a form.
        rows: `row`, or those of all instances of the request.
        has_instances: whether the answers to all of them are one.
        headers: name as the client spelled it → value, and entries that handlers of old look for.
        query: query parameter → value; the last one wins.
    """

    __slots__ = (
        "_added", "_fields", "_flags", "_headers", "_item", "has_instances", "id", "query",
        "request_id", "row", "rows",
    )  # fmt: skip

    def __init__(self, item: wire.Item) -> None:
        self.id = item.id
        self._item = item
        self._flags = item.flags
        self._fields = fields = wire.unpack_meta(item.meta)
        query = fields[1].decode("latin-1")
        self.request_id = fields[2].decode("latin-1")
        self.row: Row = {}
        self.rows: Sequence[Row] = (self.row,)
        self.has_instances = bool(item.flags & wire.INSTANCES)
        self.query = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
        self._headers: dict[str, Any] | None = None
        self._added: dict[str, str] = {}
        """Name of each value → its media type, which handlers find among the headers."""
        if self._flags & wire.LEGACY:
            for name, value in parse_qsl(query, keep_blank_values=True, encoding="latin-1"):
                self._add(name, bytearray(value, "latin-1"), "")

    @property
    def is_explained(self) -> bool:
        """Whether it asks for an explanation."""
        return bool(self._flags & wire.EXPLAIN)

    @property
    def headers(self) -> dict[str, Any]:
        """The headers; few handlers ask for them, so they are decoded when one does."""
        if self._headers is None:
            texts = [field.decode("latin-1") for field in self._fields[3:]]
            headers: dict[str, Any] = dict(zip(texts[::2], texts[1::2], strict=True))
            if self._flags & wire.DESCRIBE:
                headers["describe"] = "True"
            if not self._flags & wire.LEGACY:
                headers["explain"] = "True" if self._flags & wire.EXPLAIN else "False"
                if not self._flags & wire.KSERVE:
                    headers["url_path"] = self._fields[0].decode()
            for name, media_type in self._added.items():
                headers.setdefault(name, {"content-type": media_type})
            self._headers = headers
        return self._headers

    @property
    def _content_type(self) -> str:
        """The last header of that name, empty without one."""
        value = b""
        fields = self._fields
        for at in range(3, len(fields), 2):
            if len(fields[at]) == 12 and fields[at].lower() == b"content-type":
                value = fields[at + 1]
        return value.decode("latin-1")

    def decode(
        self,
        body: wire.Payload,
        read_json: ReadJson | None = parse_strictly,
    ) -> None:
        """Fill `row`.

        Args:
            body: body as it was sent; the handler gets a bytearray as it is, bytes as a copy.
            read_json: None leaves every value a bytearray, text too.

        Raises:
            BadInput: a form that cannot be read, or what `read_json` refuses.
        """
        if self._flags & wire.DESCRIBE:
            return
        if self.has_instances:
            instances = read_instances(body, read_json or parse_strictly)
            self.rows = [{"body": each} for each in instances]
            self._added["body"] = JSON
            return
        if self._flags & (wire.TENSORS | wire.TEXTS):  # the handler reads it
            self.row["body"] = body
            return
        if self._flags & wire.PARTS:
            for name, value in wire.unpack_parts(body):
                self._add(name, value, "")
            return
        content_type = self._content_type
        media_type = content_type.partition(";")[0].strip() if content_type else ""
        form = media_type.lower()
        if form == FORM and self._flags & wire.KSERVE:
            media_type = form = JSON  # as `curl -d` sends it; KServe looks at no content type
        if form == MULTIPART:
            self._decode_multipart(body, read_json)
        elif form == FORM:
            self._decode_form(body)
        else:
            value = _decode_value(media_type, body, read_json)
            self._add("body", value, media_type)

    def decoded_again(self, read_json: ReadJson | None) -> "Request":
        """Return this request as it came, whatever a handler did to its row and headers."""
        request = Request(self._item)
        request.decode(self._item.body, read_json)
        return request

    def _add(self, name: str, value: Any, media_type: str) -> None:
        self.row[name] = value
        self._added.setdefault(name, media_type)

    def _decode_form(self, body: wire.Payload) -> None:
        """Read `name=value&…`; what follows the last `&` counts only with a `=`.

        `curl -d '{"a": 1}'` sends JSON under this content type: the handler gets an empty row.
        """
        if _BROKEN_ESCAPE.search(body):
            raise BadInput("the form cannot be read: a % is not followed by two hexadecimal digits")
        if body[:1] in (b"{", b"[") and is_json(body):
            logger.warning(
                "request %s: a JSON body came with the content type %s, so the handler finds no "
                "`body`; send it with -H 'Content-Type: application/json'", self.request_id, FORM
            )  # fmt: skip
        if body.count(b"&") >= MAX_PARTS:
            raise BadInput(f"the form has more than {MAX_PARTS} fields")
        fields = body.split(b"&")
        if b"=" not in fields[-1]:
            fields.pop()
        for field in fields:
            name, _, value = field.partition(b"=")
            self._add(
                _unescape(name).decode("utf-8", "replace"),
                bytearray(_unescape(value)),
                "",
            )

    def _decode_multipart(self, body: wire.Payload, read_json: ReadJson | None) -> None:
        try:
            parts = read_parts(self._content_type, body)
        except ValueError as error:
            raise BadInput(str(error)) from error
        for head, content in parts:
            name = head.get_param("name", header="content-disposition")
            if not isinstance(name, str):
                raise BadInput("a part of the multipart body has no name")
            if head.get_filename() is None:
                self._add(name, content, "")
                continue
            media_type = str(head.get("content-type", BYTES)).partition(";")[0].strip()
            self._add(name, _decode_value(media_type, content, read_json), media_type)


def _unescape(value: wire.Payload) -> bytes:
    """Return what a form's field says, whose escapes are all whole.

    They are read as those of quoted-printable text: 6 MB of them take urllib 1 s, and this 20 ms.
    """
    return binascii.a2b_qp(value.replace(b"+", b" ").replace(b"=", b"%3D").replace(b"%", b"="))


def _decode_value(media_type: str, body: wire.Payload, read_json: ReadJson | None) -> Any:
    """Return a parsed JSON value, a str or a bytearray, by media type.

    What cannot be decoded stays a bytearray.
    """
    try:
        if read_json is not None and media_type == "application/json":
            return read_json(body)
        if read_json is not None and media_type.startswith("text"):
            return body.decode("utf-8")
    except (ValueError, RecursionError) as error:
        logger.warning("a body of type %s cannot be decoded: %s", media_type, error)
    return body if isinstance(body, bytearray) else bytearray(body)


def is_json(body: wire.Payload) -> bool:
    """Return whether bytes are a JSON text."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


class Answer(NamedTuple):
    """A reply before it is framed."""

    status: int
    headers: dict[str, str]
    body: wire.Payload
    flags: int = 0


UNREAD = Answer(503, {}, b"", wire.UNREAD)
"""Answer to a job that nobody waits for any more; the server counts it, and drops it."""


class WrongAnswer(Exception):
    """What a handler answered cannot be sent.

    Args:
        message: what came and what was expected.
        brief: what a dialect says to that which keeps details to the log.
        code: the status of that.
    """

    def __init__(self, message: str, brief: str = "Prediction failed", code: int = 503) -> None:
        super().__init__(message)
        self.brief = brief
        self.code = code


class NotFinite(WrongAnswer):
    """An answer holds infinity or NaN, which JSON does not have."""


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


def answer_output(context: Context, index: int, output: object, rules: "Rules") -> Answer:
    """Turn one answer of the handler into status, headers and bytes.

    Raises:
        WrongAnswer: it cannot be sent.
    """
    body, headers = encode_value(output, rules)
    if context.is_answer_plain:
        return Answer(200, headers, body)
    status, _ = context.get_response_status(index)
    if not is_status(status):
        raise WrongAnswer(f"the handler set the status {status!r}")
    for name, value in context.get_response_headers(index).items():
        lower, text = str(name).lower(), str(value)
        if not _HEADER_NAME.fullmatch(lower) or not _HEADER_VALUE.fullmatch(text):
            raise WrongAnswer(f"the handler set the header {name!r} to {value!r}")
        if lower.encode("latin-1") not in wire.FRAMING:
            headers[lower] = text
    return Answer(status, headers, body)


def answer_instances(
    outputs: Sequence[object], statuses: Sequence[int], is_explained: bool, rules: "Rules"
) -> Answer:
    """Turn the answers to all instances of one request into one.

    Raises:
        WrongAnswer: it cannot be sent.
    """
    if any(not is_status(status) for status in statuses):
        raise WrongAnswer(f"the handler set the status {list(statuses)!r}")
    for output, status in zip(outputs, statuses, strict=True):
        if status >= 400:
            raise PredictionException(text_of(output), status)
    key = "explanations" if is_explained else "predictions"
    body, headers = encode_value({key: [as_prediction(output) for output in outputs]}, rules)
    return Answer(200, headers, body)


def compressed(answer: Answer, request: Request) -> Answer:
    """Return a long answer of text as gzip where the client takes that.

    Of explanations only: their lists of numbers become a third, for some 25 ms per megabyte, in a
    worker that predictions do not wait for. The server never compresses.
    """
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind not in COMPRESSIBLE or len(answer.body) < COMPRESSED_FROM:
        return answer
    headers = {name.lower(): str(value) for name, value in request.headers.items()}
    weights = weights_of(headers.get("accept-encoding", ""))
    if "content-encoding" in answer.headers or not weights.get("gzip", weights.get("*", 0.0)):
        return answer._replace(headers={**answer.headers, "vary": "accept-encoding"})
    body = gzip.compress(answer.body, compresslevel=1, mtime=0)
    sent = {"content-encoding": "gzip", "vary": "accept-encoding"}
    return answer._replace(headers={**answer.headers, **sent}, body=body)


def encode_value(output: object, rules: "Rules") -> tuple[wire.Payload, dict[str, str]]:
    """Turn a value of the handler into bytes, and the header that says their type.

    Raises:
        WrongAnswer: it cannot be sent.
    """
    try:
        body, content_type = rules.encode(output)
    except (TypeError, ValueError, RecursionError) as error:
        kind = NotFinite if "Out of range float" in str(error) else WrongAnswer
        raise kind(
            f"the handler's answer cannot be sent as JSON: {error}",
            "Unsupported model output data type.",
        ) from error
    limit = rules.max_answer_bytes
    if limit is not None and len(body) > limit:
        text = f"the answer has {len(body)} bytes; {rules.answer_setting} allows {limit}"
        raise WrongAnswer(text, text, 500)
    return body, {"content-type": content_type} if content_type else {}


def encode(output: object) -> tuple[wire.Payload, str]:
    """Return the bytes and the content type of one value.

    Plain bytes, whatever an author's class says of itself: the frame's lengths must be true.

    Raises:
        TypeError, ValueError, RecursionError: JSON has no such value.
    """
    if isinstance(output, str):
        return str.encode(output), TEXT
    if isinstance(output, (bytes, bytearray)):
        # An author's class goes; what has none is not copied.
        plain = type(output) in (bytes, bytearray)
        return output if plain else b"".join((output,)), BYTES
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


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, the process's or a device's."""
    torch = sys.modules.get("torch")  # a worker whose handler does without it does not import it
    return isinstance(error, MemoryError) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    )


def explain_error(error: BaseException) -> Refusal:
    """Return status, type and message of an error, never the traceback."""
    if isinstance(error, (BadInput, NoGradients)):
        return Refusal(400, "BadRequestException", text_of(error))
    if isinstance(error, PredictionException):
        code = error.error_code if is_status(error.error_code) else 500
        return Refusal(code, INTERNAL, text_of(error.message))
    if is_out_of_memory(error):
        return Refusal(507, INTERNAL, "Out of resources")
    name = "" if isinstance(error, WrongAnswer) else f"{type(error).__name__}: "
    return Refusal(500, INTERNAL, f"{name}{text_of(error)}")


def write_error(refusal: Refusal, request_id: str) -> bytes:
    """Return the JSON of an error."""
    code, kind, message = refusal
    content = {
        "code": code, "type": kind, "message": message, "error": message, "request_id": request_id
    }  # fmt: skip
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
    encode: Callable[[object], tuple[wire.Payload, str | None]] = encode
    """A value → bytes and content type; raises what JSON libraries raise."""
    explain_error: Callable[[BaseException], Refusal] = explain_error
    explain_undecodable: Callable[[BaseException], Refusal] = explain_error
    """Refusal of a request whose body cannot be read."""
    write_error: Callable[[Refusal, str], bytes] = write_error
    ends_worker: Callable[[BaseException], bool] = lambda error: False
    """Whether what a handler raised ends the process."""
    fails_together: Callable[[BaseException], bool] = lambda error: False
    """Whether an error is the batch's: no request is run again alone."""
    compresses: bool = True
    """Whether long explanations are sent as gzip to clients that take it."""
    max_answer_bytes: int | None = None
    """Size of one answer or chunk; a longer one is an error of its own request."""
    answer_setting: str = "max_response_bytes"
    """What sets that."""
    time_metric: str | None = None
    """The metric that reports how long each call of the handler took."""

    def refuse(self, error: BaseException, request_id: str, was_read: bool = True) -> Answer:
        """Return the answer to a request on which the handler failed, or that no handler saw."""
        refusal = (self.explain_error if was_read else self.explain_undecodable)(error)
        refusal = refusal._replace(message=refusal.message[:MOST_SAID])
        return Answer(refusal.code, {"content-type": JSON}, self.write_error(refusal, request_id))


OURS = Rules()
"""Rules of an archive that we sealed, in a server of ours."""


def our_rules(message: Mapping[str, Any]) -> Rules:
    """Return the rules of an archive that we sealed, with what a LOAD message sets."""
    read_json = OURS.read_json if message.get("decode_input", True) else None
    return Rules(read_json=read_json, max_answer_bytes=message.get("max_response_bytes"))
