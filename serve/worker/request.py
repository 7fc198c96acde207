"""A job's bytes → the dict, headers and query that a handler sees.

The server never looks into a body; whatever can go wrong with one goes wrong here, in a worker,
and is the client's fault. The rules are TorchServe's (its documents: "request body").
"""

from __future__ import annotations

import json
from email.message import Message
from typing import Any
from urllib.parse import parse_qsl

import python_multipart

from handlers.errors import BadInput
from serve import wire

Row = dict[str, Any]


class Request:
    """One request as a handler sees it.

    Attributes:
        row: parameter name → value; `body` unless the request is a form.
        headers: lower-case name → value, and TorchServe's own entries.
        query: query parameter → value; the last one wins.
    """

    __slots__ = ("headers", "id", "query", "request_id", "row")

    def __init__(self, item: wire.Item) -> None:
        self.id = item.id
        fields = wire.unpack_meta(item.meta)
        url_path, query = fields[0].decode(), fields[1].decode("latin-1")
        self.request_id = fields[2].decode("latin-1")
        self.row: Row = {}
        self.query = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
        self.headers: dict[str, Any] = {}
        for at in range(3, len(fields), 2):
            self.headers[fields[at].decode("latin-1")] = fields[at + 1].decode("latin-1")
        if item.flags & wire.LEGACY:
            for name, value in parse_qsl(query, keep_blank_values=True, encoding="latin-1"):
                self._add(name, bytearray(value, "latin-1"), "")
            return
        self.headers["explain"] = "True" if item.flags & wire.EXPLAIN else "False"
        if not item.flags & wire.KSERVE:
            self.headers["url_path"] = url_path

    def decode(self, body: bytes) -> None:
        """Fill `row`.

        Raises:
            BadInput: a form that cannot be read.
        """
        content_type = self.headers.get("content-type", "")
        media_type = content_type.partition(";")[0].strip()
        if media_type == "multipart/form-data":
            self._decode_multipart(content_type, body)
        elif media_type == "application/x-www-form-urlencoded":
            # As latin-1 every byte is one character: a value keeps the client's own encoding.
            form = parse_qsl(body.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
            for name, value in form:
                self._add(name, bytearray(value, "latin-1"), "")
        else:
            self._add("body", decode_value(media_type, body), media_type)

    def _add(self, name: str, value: Any, media_type: str) -> None:
        self.row[name] = value
        self.headers.setdefault(name, {"content-type": media_type})

    def _decode_multipart(self, content_type: str, body: bytes) -> None:
        parts: list[tuple[Message, bytearray]] = []
        field = bytearray()
        ends: list[bool] = []

        def begin() -> None:
            parts.append((Message(), bytearray()))

        def header_name(data: bytes, start: int, end: int) -> None:
            field.extend(data[start:end])

        def header_value(data: bytes, start: int, end: int) -> None:
            name = field.decode("latin-1")
            del parts[-1][0][name]
            parts[-1][0][name] = data[start:end].decode("latin-1")

        def header_end() -> None:
            field.clear()

        def part_data(data: bytes, start: int, end: int) -> None:
            parts[-1][1].extend(data[start:end])

        message = Message()
        message["content-type"] = content_type
        boundary = message.get_boundary()
        if not boundary:
            raise BadInput("multipart/form-data without a boundary in the Content-Type header")
        try:
            parser = python_multipart.MultipartParser(
                boundary.encode("latin-1"),
                {
                    "on_part_begin": begin,
                    "on_header_field": header_name,
                    "on_header_value": header_value,
                    "on_header_end": header_end,
                    "on_part_data": part_data,
                    "on_end": lambda: ends.append(True),
                },
            )
            parser.write(body)
            parser.finalize()
        except (python_multipart.exceptions.FormParserError, UnicodeEncodeError) as error:
            raise BadInput(f"the multipart body cannot be read: {error}") from error
        if not ends:
            raise BadInput("the multipart body ends before its last boundary")
        for head, content in parts:
            name = head.get_param("name", header="content-disposition")
            media_type = head.get_content_type() if "content-type" in head else ""
            if not isinstance(name, str):
                raise BadInput("a part of the multipart body has no name")
            is_file = head.get_filename() is not None
            self._add(name, decode_value(media_type, content) if is_file else content, media_type)


def decode_value(media_type: str, body: bytes | bytearray) -> Any:
    """Return a parsed JSON value, a str or a bytearray, by media type.

    What cannot be decoded stays a bytearray, as in TorchServe.
    """
    try:
        if media_type == "application/json":
            return json.loads(body)
        if media_type.startswith("text"):
            return body.decode("utf-8")
    except (ValueError, RecursionError):
        pass
    return bytearray(body)
