"""One field of a form, where a route has to know it before a worker reads the body."""

from __future__ import annotations

from collections.abc import Iterable
from email.message import Message
from urllib.parse import parse_qsl

import python_multipart

from modelyard.serve.errors import BadRequest

MAX_PARTS = 1000
MAX_CONTENT_TYPE = 1000
"""The limits of `serve/worker/codec.py`: what it would refuse takes no time of the server."""


def form_field(headers: Iterable[tuple[bytes, bytes]], body: bytes, name: str) -> str | None:
    """Return a field's text, the last one of this name; None without such a form or field.

    Raises:
        BadRequest: the form cannot be read.
    """
    given = next((value for header, value in headers if header == b"content-type"), b"")
    if len(given) > MAX_CONTENT_TYPE:
        raise BadRequest(f"the Content-Type is longer than {MAX_CONTENT_TYPE} characters")
    message = Message()
    message["content-type"] = given.decode("latin-1")
    kind = message.get_content_type() if given else ""
    if kind == "application/x-www-form-urlencoded":
        return dict(parse_qsl(body.decode("latin-1"), keep_blank_values=True)).get(name)
    boundary = message.get_boundary()
    if kind != "multipart/form-data" or not boundary:
        return None
    return _multipart_field(boundary.encode("latin-1", "replace"), body, name)


def _multipart_field(boundary: bytes, body: bytes, wanted: str) -> str | None:
    header, value, found = bytearray(), bytearray(), bytearray()
    is_wanted = False
    was_there = False
    count = 0

    def begin() -> None:
        nonlocal is_wanted, count
        count += 1
        if count > MAX_PARTS:
            raise BadRequest(f"the multipart body has more than {MAX_PARTS} parts")
        is_wanted = False
        header.clear()

    def header_field(data: bytes, start: int, end: int) -> None:
        header.extend(data[start:end])

    def header_value(data: bytes, start: int, end: int) -> None:
        value.extend(data[start:end])

    def header_end() -> None:
        nonlocal is_wanted, was_there
        if header.lower() == b"content-disposition":
            part = Message()
            part["content-disposition"] = value.decode("latin-1")
            is_wanted = part.get_param("name", header="content-disposition") == wanted
            if is_wanted:
                was_there = True
                found.clear()
        header.clear()
        value.clear()

    def part_data(data: bytes, start: int, end: int) -> None:
        if is_wanted:
            found.extend(data[start:end])

    try:
        parser = python_multipart.MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_header_field": header_field,
                "on_header_value": header_value,
                "on_header_end": header_end,
                "on_part_data": part_data,
            },
        )
        parser.write(body)
        parser.finalize()
    except python_multipart.exceptions.FormParserError as error:
        raise BadRequest(f"the multipart body cannot be read: {error}") from error
    return found.decode("utf-8", "replace") if was_there else None
