"""Answers as JSON of Triton's generate routes, and as server-sent events.

https://html.spec.whatwg.org/multipage/server-sent-events.html
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md
"""

import contextlib
import re
from base64 import b64encode
from collections.abc import Callable
from typing import NamedTuple

import orjson

from modelyard.serve.dataplane.wire import Payload
from modelyard.serve.front.begin import Fields, Headers

EVENTS = b"text/event-stream"
HEAD: Headers = [
    (b"content-type", EVENTS + b"; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PAUSE = b":\n\n"
"""A comment, which keeps what stands between from giving up."""
_LINE_END = re.compile(rb"\r\n|\r|\n")
LENGTH_HEADER = b"inference-header-content-length"
OF_BODY = frozenset((*(name for name, _ in HEAD), LENGTH_HEADER))
"""Headers that are the form's own."""


class Form(NamedTuple):
    """How a route answers."""

    name: str
    is_stream: bool


GENERATE = Form("generate", False)
GENERATE_STREAM = Form("generate", True)
INFER_STREAM = Form("infer", True)
CHUNKS = Form("", True)
"""Form of /predictions, where the client asks for events."""


def event(data: Payload) -> bytes:
    """Return an event, whose reader joins its lines again."""
    return b"".join(b"data: %b\n" % line for line in _LINE_END.split(data)) + b"\n"


def error_event(text: str) -> bytes:
    """Return the event that ends a stream early."""
    return event(orjson.dumps({"error": broken_text(text)}))


def broken_text(text: str) -> str:
    """Return what is said of a stream that ends early: the message, where it is a worker's JSON."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(orjson.loads(text)["message"])
    return text


def writer(form: Form, model: str, version: str, headers: Fields) -> Callable[[Payload], bytes]:
    """Return what makes an answer's chunk, of these headers, what the form has it as.

    It raises a ValueError for what the form has no way to say.
    """
    write: Callable[[Payload], bytes] = bytes
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    if form.name == "generate":
        about = orjson.dumps({"model_name": model, "model_version": version})[1:-1]

        def generated(chunk: Payload) -> bytes:
            return b"{%b,%b}" % (about, _fields(chunk, content_type))

        write = generated
    elif form.name == "infer":
        write = _tensors
    return (lambda chunk: event(write(chunk))) if form.is_stream else write


def _fields(chunk: Payload, content_type: bytes) -> bytes:
    """Return a handler's value as fields of an object: text, an object's own, or anything else."""
    if content_type.startswith(b"application/json"):
        text = bytes(chunk).strip()
        if text[:1] == b"{" and (own := text[1:-1].strip()):
            return own
        return b'"output":' + text
    with contextlib.suppress(UnicodeDecodeError):
        if not content_type.startswith(b"application/octet-stream"):
            return b'"text_output":' + orjson.dumps(bytes(chunk).decode())
    return b'"output":' + orjson.dumps({"b64": b64encode(chunk).decode()})


def _tensors(chunk: Payload) -> bytes:
    head, tail = split_tensors(chunk)
    if tail:
        raise ValueError("events hold no binary tensors; ask for JSON")
    return bytes(head)


def split_tensors(chunk: Payload) -> tuple[memoryview, memoryview]:
    """Return the JSON of a streamed answer's tensors, and the bytes behind it."""
    length = int.from_bytes(chunk[:4], "little")
    view = memoryview(chunk)
    return view[4 : 4 + length], view[4 + length :]


def as_chunk(body: Payload, headers: Fields) -> bytes:
    """Return an answer of tensors as a chunk of a stream."""
    length = int(dict(headers).get(LENGTH_HEADER, len(body)))
    return length.to_bytes(4, "little") + body


def wants_events(headers: Fields) -> bool:
    """Return whether a request's Accept names events."""
    return any(name == b"accept" and EVENTS in value.lower() for name, value in headers)


def are_events(headers: Fields) -> bool:
    """Return whether an answer is events already, its handler's own."""
    return any(name == b"content-type" and value.startswith(EVENTS) for name, value in headers)


def is_text(headers: Fields) -> bool:
    """Return whether an answer's chunks can stand in events."""
    kinds = [value for name, value in headers if name == b"content-type"]
    return all(kind.startswith((b"text/", b"application/json")) for kind in kinds)
