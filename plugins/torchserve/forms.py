"""One field of a form, where a route has to know it before a worker reads the body."""

from __future__ import annotations

from collections.abc import Iterable
from email.message import Message
from urllib.parse import parse_qsl

from modelyard.serve.dataplane.form import MAX_CONTENT_TYPE, read_parts
from modelyard.serve.errors import BadRequest


def form_field(headers: Iterable[tuple[bytes, bytes]], body: bytes, name: str) -> str | None:
    """Return a field's text, the last one of this name; None without such a form or field.

    Raises:
        BadRequest: the form cannot be read.
    """
    values = (value.decode("latin-1") for header, value in headers if header == b"content-type")
    content_type = next(values, "")
    if len(content_type) > MAX_CONTENT_TYPE:
        raise BadRequest(f"the Content-Type is longer than {MAX_CONTENT_TYPE} characters")
    message = Message()
    message["content-type"] = content_type
    kind = message.get_content_type() if content_type else ""
    if kind == "application/x-www-form-urlencoded":
        return dict(parse_qsl(body.decode("latin-1"), keep_blank_values=True)).get(name)
    if kind != "multipart/form-data" or not message.get_boundary():
        return None
    try:
        parts = read_parts(content_type, body)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    for head, content in reversed(parts):
        if head.get_param("name", header="content-disposition") == name:
            return content.decode("utf-8", "replace")
    return None
