"""The parts of a multipart body: workers read all of them, a route of the server may need one."""

from email.message import Message

import python_multipart

from modelyard.serve.dataplane.wire import Payload

MAX_PARTS = 1000
"""Parts of one form; a million would hold a worker for a minute. Netty takes 128."""
MAX_CONTENT_TYPE = 1000
"""Characters of the Content-Type of a form, whose parameters take quadratic time to read."""


def read_parts(content_type: str, body: Payload) -> list[tuple[Message, bytearray]]:
    """Return the headers and the content of each part.

    Raises:
        ValueError: the body cannot be read; the message says why.
    """
    parts: list[tuple[Message, bytearray]] = []
    field = bytearray()
    ends: list[bool] = []

    def begin() -> None:
        if len(parts) == MAX_PARTS:
            raise ValueError(f"the multipart body has more than {MAX_PARTS} parts")
        parts.append((Message(), bytearray()))

    def header_name(data: bytes, start: int, end: int) -> None:
        field.extend(data[start:end])

    def header_value(data: bytes, start: int, end: int) -> None:
        name = field.decode("latin-1")
        del parts[-1][0][name]
        parts[-1][0][name] = data[start:end].decode("latin-1")

    def part_data(data: bytes, start: int, end: int) -> None:
        parts[-1][1].extend(data[start:end])

    if len(content_type) > MAX_CONTENT_TYPE:
        raise ValueError(
            f"the multipart body's Content-Type is longer than {MAX_CONTENT_TYPE} characters"
        )
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if not boundary:
        raise ValueError("multipart/form-data without a boundary in the Content-Type header")
    try:
        parser = python_multipart.MultipartParser(
            boundary.encode("latin-1"),
            {
                "on_part_begin": begin,
                "on_header_field": header_name,
                "on_header_value": header_value,
                "on_header_end": field.clear,
                "on_part_data": part_data,
                "on_end": lambda: ends.append(True),
            },
        )
        parser.write(body)  # type: ignore[arg-type]  # whatever has bytes
        parser.finalize()
    except (python_multipart.exceptions.FormParserError, UnicodeEncodeError) as error:
        raise ValueError(f"the multipart body cannot be read: {error}") from error
    if not ends:
        raise ValueError("the multipart body ends before its last boundary")
    return parts
