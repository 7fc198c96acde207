"""How a body becomes what a handler sees: TorchServe's table, row by row."""

import json
import math
import random
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from modelyard.handlers.body import parse_strictly
from modelyard.handlers.errors import BadInput
from modelyard.serve.dataplane import wire
from modelyard.serve.worker.codec import ReadJson, Request, encode

PNG = b"\x89PNG\r\n\x1a\n\0\xff"


def decode(
    body: bytes,
    *headers: tuple[bytes, bytes],
    path: bytes = b"",
    query: bytes = b"",
    flags: int = 0,
    read_json: ReadJson | None = parse_strictly,
) -> Request:
    fields = [path, query, b"id-1"]
    for pair in headers:
        fields += pair
    request = Request(wire.Item(1, 0, flags, wire.pack_meta(fields), body))
    request.decode(body, read_json)
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
        (b"APPLICATION/JSON", b'{"a": 1}', bytearray(b'{"a": 1}')),
        (b"Text/plain", b"a", bytearray(b"a")),
        (b"application/vnd.api+json", b"[1]", bytearray(b"[1]")),
        (b"text/plain; charset=latin-1", "gr\u00fcn".encode(), "gr\u00fcn"),
        (b"application/json", b"{broken", bytearray(b"{broken")),
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


AS_JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b'{"a": [1e400]}', "the number 1e400 is too large"),
        (b'{"a": {"b": 1e400}}', "the number 1e400 is too large"),
        (b"[" + b"9" * 400 + b"]", "is too large"),
        (b"9" * 5000, "is too large"),
        (b"[" * 100_000, "nested deeper"),
        (b'"\\ud800"', "surrogate"),
        (b'{"a": 1, "b": 2, "a": 3}', 'the key "a" is given twice'),
        (b'[{"b": {"a": 1, "a": 1}}]', 'the key "a" is given twice'),
    ],
)
def test_json_to_be_guessed_at_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        decode(body, AS_JSON)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": {"a": ":"}, "b:": [{"a": 1}, {"a": 2}]}',
         {"a": {"a": ":"}, "b:": [{"a": 1}, {"a": 2}]}),
        (b'{"a": ["\\ud83d\\ude00", 1e-400, -0.0, 1E5]}', {"a": ["\U0001f600", 0.0, 0.0, 1e5]}),
        (b"[18446744073709551615, -9223372036854775808]", [2**64 - 1, -(2**63)]),
        (b"\xef\xbb\xbf[1]", [1]),
        ("[1]".encode("utf-16"), [1]),
        (b"[" * 400 + b"]" * 400, None),
    ],
)  # fmt: skip
def test_other_json_is_read_as_python_reads_it(body: bytes, expected: Any) -> None:
    read = decode(body, AS_JSON).row["body"]
    assert read == (json.loads(body) if expected is None else expected)


def test_an_archive_of_torchserve_gets_json_as_torchserve_gives_it() -> None:
    row = decode(b'{"a": [NaN, 1e400], "a": [Infinity, 7]}', AS_JSON, read_json=json.loads).row
    assert row == {"body": {"a": [math.inf, 7]}}
    deep = b"[" * 100_000
    assert decode(deep, AS_JSON, read_json=json.loads).row == {"body": bytearray(deep)}


def test_a_body_without_a_content_type_is_bytes() -> None:
    assert decode(PNG).row == {"body": bytearray(PNG)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"a=1&b=two+words&c=", {"a": b"1", "b": b"two words", "c": b""}),
        (b"a=%E2%82%AC", {"a": "\u20ac".encode()}),
        (b"a=%FF", {"a": b"\xff"}),
        (b"a=\xc3\xa9", {"a": "\u00e9".encode()}),
        (b"%C3%A9=1", {"\u00e9": b"1"}),
        (b"a=1&a=2", {"a": b"2"}),
        (b"a&b=1", {"a": b"", "b": b"1"}),
        (b"a=1&hello", {"a": b"1"}),
        (b"a=1&", {"a": b"1"}),
        (b"a=b=c", {"a": b"b=c"}),
        (b"hello", {}),
        (b'{"a":1}', {}),
        (b"", {}),
    ],
)
def test_a_form_gives_each_field_as_the_bytes_that_were_sent(
    body: bytes, expected: dict[str, bytes]
) -> None:
    row = decode(body, (b"content-type", b"application/x-www-form-urlencoded")).row
    assert row == expected
    assert all(type(value) is bytearray for value in row.values())


FORM = (b"content-type", b"application/x-www-form-urlencoded")


def test_escapes_are_read_as_urllib_reads_them() -> None:
    draw = random.Random(7)
    pieces = [
        b"%41",
        b"%3d",
        b"%0A",
        b"%fF",
        b"=",
        b"=3D",
        b"=\r\n",
        b"\n",
        b" \n",
        b"_",
        b"a",
        b"\xff",
    ]
    for _ in range(2000):
        value = b"".join(draw.choices(pieces, k=draw.randrange(12)))
        assert decode(b"a=" + value, FORM).row == {"a": bytearray(unquote_to_bytes(value))}


def test_json_that_comes_as_a_form_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert decode(b'{"a": 1}', FORM).row == {}
    assert "a JSON body came with the content type application/x-www" in caplog.text
    caplog.clear()
    decode(b"{no json}=1", FORM)
    assert not caplog.records


@pytest.mark.parametrize("body", [b"a=%", b"a=%2", b"a=%zz", b"%x=1"])
def test_a_broken_escape_is_the_clients_fault(body: bytes) -> None:
    with pytest.raises(BadInput, match="two hexadecimal digits"):
        decode(body, FORM)


def test_what_cannot_be_decoded_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    decode(b"{bad", (b"content-type", b"application/json"))
    assert "a body of type application/json cannot be decoded" in caplog.text


def test_nothing_is_decoded_where_the_server_says_so() -> None:
    body = (
        part("j", b"[1]", "Content-Type: application/json\r\n", "a.json")
        + part("t", b"words", "Content-Type: text/plain\r\n", "n.txt")
        + b"--B--\r\n"
    )
    for header, sent in (
        ((b"content-type", b"application/json"), b"[1]"),
        ((b"content-type", b"text/plain"), b"words"),
        (MULTIPART, body),
    ):
        row = decode(sent, header, read_json=None).row
        assert {type(value) for value in row.values()} == {bytearray}


def test_the_media_type_of_each_value_is_a_header() -> None:
    body = (
        part("typed", b"x", "Content-Type: Image/PNG; q=1\r\n", "a.png")
        + part("file", b"x", "", "a.bin")
        + part("field", b"x", "Content-Type: text/plain\r\n")
        + b"--B--\r\n"
    )
    headers = decode(body, MULTIPART).headers
    assert headers["typed"] == {"content-type": "Image/PNG"}
    assert headers["file"] == {"content-type": "application/octet-stream"}
    assert headers["field"] == {"content-type": ""}


def test_headers_keep_their_spelling_and_the_last_of_one_spelling_counts() -> None:
    request = decode(
        b"[1]",
        (b"Content-Type", b"application/json"),
        (b"X-One", b"1"),
        (b"X-One", b"2"),
        (b"x-one", b"3"),
        (b"Explain", b"mine"),
        (b"explain", b"mine"),
    )
    assert request.row == {"body": [1]}
    assert request.headers == {
        "Content-Type": "application/json",
        "X-One": "2",
        "x-one": "3",
        "Explain": "mine",
        "explain": "False",
        "url_path": "",
        "body": {"content-type": "application/json"},
    }


def test_kserves_routes_have_no_path_and_legacy_ones_give_the_query_to_the_row() -> None:
    kserve = decode(b"", flags=wire.KSERVE).headers
    assert (kserve["explain"], "url_path" in kserve) == ("False", False)
    legacy = decode(b"z=1&b=3", FORM, query=b"a=%E2%82%AC&b=2&c=", flags=wire.LEGACY)
    assert legacy.row == {"a": "\u20ac".encode(), "b": b"3", "c": b"", "z": b"1"}
    assert all(type(value) is bytearray for value in legacy.row.values())
    assert not {"explain", "url_path"} & set(legacy.headers)


def test_a_describe_job_has_an_empty_row() -> None:
    request = decode(b"", flags=wire.DESCRIBE)
    assert request.row == {}
    assert request.headers["describe"] == "True"


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


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (b"multipart/form-data; boundary=B", part("a", b"x") * 100_000),
        (b"multipart/form-data; boundary=" + b"B" * 60_000, part("a", b"x")),
        (b"multipart/form-data" + b";" * 60_000 + b"boundary=B", part("a", b"x")),
        (b"multipart/form-data; boundary=B", part("a" * 1_000_000, b"x")),
        (b"multipart/form-data; boundary=B", part("a", b"x", "b: c\r\n" * 100_000)),
        (b"application/x-www-form-urlencoded", b"a=b&" * 100_000),
    ],
    ids=["100,000 parts", "a boundary of 60 KB", "60,000 parameters", "a name of 1 MB",
         "100,000 headers", "100,000 fields"],
)  # fmt: skip
def test_a_form_cannot_hold_a_worker(content_type: bytes, body: bytes) -> None:
    with pytest.raises(BadInput):
        decode(body, (b"content-type", content_type))


def test_a_field_of_20_mb_is_taken_as_it_is() -> None:
    content = b"x" * 20_000_000
    row = decode(part("data", content) + b"--B--\r\n", MULTIPART).row
    assert row == {"data": content}


def test_an_answer_of_plain_bytes_is_not_copied_and_an_authors_class_is_left_behind() -> None:
    class Mine(bytearray):
        def __len__(self) -> int:
            return 1

    for plain in (b"abc", bytearray(b"abc")):
        assert encode(plain)[0] is plain
    body, kind = encode(Mine(b"abc"))
    assert (type(body), body, kind) == (bytes, b"abc", "application/octet-stream")
