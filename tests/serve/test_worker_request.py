"""How a body becomes what a handler sees: TorchServe's table, row by row."""

from typing import Any

import pytest

from handlers.errors import BadInput
from serve import wire
from serve.worker.request import Request

PNG = b"\x89PNG\r\n\x1a\n\0\xff"


def decode(
    body: bytes,
    *headers: tuple[bytes, bytes],
    path: bytes = b"",
    query: bytes = b"",
    flags: int = 0,
) -> Request:
    fields = [path, query, b"id-1"]
    for pair in headers:
        fields += pair
    request = Request(wire.Item(1, 0, flags, wire.pack_meta(fields), body))
    request.decode(body)
    return request


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        (b"application/json", b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        (b"application/json; charset=utf-8", b"[1]", [1]),
        (b"application/json", b"7", 7),
        (b"text/plain", "gr\u00fcn".encode(), "gr\u00fcn"),
        (b"text/csv; charset=utf-8", b"a,b", "a,b"),
        (b"application/octet-stream", PNG, bytearray(PNG)),
        (b"image/png", PNG, bytearray(PNG)),
        (b"", PNG, bytearray(PNG)),
        (b"application/json", b"{broken", bytearray(b"{broken")),
        (b"application/json", b"[" * 100_000, bytearray(b"[" * 100_000)),
        (b"text/plain", b"\xff\xfe", bytearray(b"\xff\xfe")),
        (b"application/json", b"", bytearray()),
        (b"image/png", b"", bytearray()),
    ],
)
def test_a_body_is_decoded_by_its_content_type(
    content_type: bytes, body: bytes, expected: Any
) -> None:
    row = decode(body, (b"content-type", content_type)).row
    assert row == {"body": expected}
    assert type(row["body"]) is type(expected)


def test_a_body_without_a_content_type_is_bytes() -> None:
    assert decode(PNG).row == {"body": bytearray(PNG)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"a=1&b=two+words&c=", {"a": b"1", "b": b"two words", "c": b""}),
        (b"a=%E2%82%AC", {"a": "\u20ac".encode()}),
        (b"a=%FF", {"a": b"\xff"}),
        (b"a=\xc3\xa9", {"a": "\u00e9".encode()}),
        (b"", {}),
    ],
)
def test_a_form_gives_each_field_as_the_bytes_that_were_sent(
    body: bytes, expected: dict[str, bytes]
) -> None:
    row = decode(body, (b"content-type", b"application/x-www-form-urlencoded")).row
    assert row == expected
    assert all(type(value) is bytearray for value in row.values())


def part(name: str, content: bytes, extra: str = "", file: str | None = None) -> bytes:
    shown = f'; filename="{file}"' if file is not None else ""
    head = f'--B\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n{extra}\r\n'
    return head.encode() + content + b"\r\n"


MULTIPART = (b"content-type", b"multipart/form-data; boundary=B")


def test_a_part_with_a_file_name_is_decoded_by_its_own_type() -> None:
    body = (
        part("data", b'{"a": 1}', "Content-Type: application/json\r\n", "a.json")
        + part("note", b"words", "Content-Type: text/plain\r\n", "n.txt")
        + part("image", PNG, "Content-Type: image/png\r\n", "7.png")
        + b"--B--\r\n"
    )
    request = decode(body, MULTIPART)
    assert request.row == {"data": {"a": 1}, "note": "words", "image": bytearray(PNG)}
    assert request.headers["image"] == {"content-type": "image/png"}


def test_a_part_without_a_file_name_is_bytes_whatever_its_type() -> None:
    body = part("data", b'{"a": 1}', "Content-Type: application/json\r\n") + b"--B--\r\n"
    row = decode(body, MULTIPART).row
    assert row == {"data": bytearray(b'{"a": 1}')}
    assert type(row["data"]) is bytearray


def test_a_part_may_hold_anything_but_the_boundary() -> None:
    content = b"\r\n--\r\n--A\r\n" + PNG + b"\r\n"
    assert decode(part("data", content, file="x") + b"--B--\r\n", MULTIPART).row["data"] == content


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"multipart/form-data", b"--B--\r\n"),
        (b"multipart/form-data; boundary=", b"--B--\r\n"),
        (b"multipart/form-data; boundary=B", b"no boundary here"),
        (b"multipart/form-data; boundary=B", part("data", b"x", "broken header\r\n")),
        (b"multipart/form-data; boundary=B", b"--B\r\n\r\nno disposition\r\n--B--\r\n"),
        (
            b"multipart/form-data; boundary=B",
            b"--B\r\nContent-Disposition: form-data\r\n\r\nno name\r\n--B--\r\n",
        ),
        (b"multipart/form-data; boundary=B", b""),
        (b"multipart/form-data; boundary=B", part("data", b"cut off")),
        (b"multipart/form-data; boundary*=utf-8''%E2%82%AC", b"--B--\r\n"),
        (b"multipart/form-data; boundary=" + b"B" * 70_000, b"--B--\r\n"),
    ],
    ids=[
        "no boundary",
        "empty boundary",
        "no part",
        "broken header",
        "no disposition",
        "no name",
        "empty",
        "cut off",
        "boundary beyond latin-1",
        "long boundary",
    ],
)
def test_a_broken_multipart_body_is_the_clients_fault(content_type: bytes, body: bytes) -> None:
    with pytest.raises(BadInput, match="multipart"):
        decode(body, (b"content-type", content_type))


def test_a_handler_sees_headers_query_path_and_what_is_asked_for() -> None:
    request = decode(
        b"",
        (b"accept", b"image/png"),
        (b"x-name", b"gr\xfcn"),
        path="a/\u20ac".encode(),
        query=b"target=3&format=&a=%20b&target=4",
        flags=wire.EXPLAIN,
    )
    assert request.headers == {
        "accept": "image/png",
        "x-name": "gr\u00fcn",
        "explain": "True",
        "url_path": "a/\u20ac",
        "body": {"content-type": ""},
    }
    assert request.query == {"target": "4", "format": "", "a": " b"}
    assert request.request_id == "id-1"


def test_a_prediction_is_told_that_it_is_no_explanation() -> None:
    assert decode(b"").headers["explain"] == "False"


def test_a_form_field_does_not_replace_a_header_of_that_name() -> None:
    request = decode(
        b"accept=x", (b"content-type", b"application/x-www-form-urlencoded"), (b"accept", b"*/*")
    )
    assert request.headers["accept"] == "*/*"
    assert request.row == {"accept": bytearray(b"x")}
