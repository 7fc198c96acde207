"""Pages of a version without a browser: what they refuse, bound and escape."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.plugins.ops.console.answers import OF_OURS, Answered, Column, difference
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.rollout import address_of, describe
from modelyard.plugins.ops.rollout.rule import parse_rule
from modelyard.plugins.ops.rollout.trial import describe_findings
from tests.serve.live import LiveServer, build_archive

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    build_archive(shared_server.store, "echo", config="minWorkers: 1\nmaxBatchDelay: 0\n")
    shared_server.register_all("echo.mar")
    return shared_server


@pytest.fixture(scope="module")
def session(server: LiveServer) -> Iterator[httpx.Client]:
    root = f"{str(server.management.base_url).rstrip('/')}/console"
    with httpx.Client(base_url=root, verify=False) as client:
        answer = client.post("/sign-in", data={"token": server.token})
        assert answer.status_code == 303, answer.text
        yield client


def send(
    session: httpx.Client, path: str, file: bytes | None = None, **fields: str
) -> httpx.Response:
    """Send a form of the try-it page, as its script does."""
    page = session.get("/models/echo/1.0/try").text
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found is not None
    files: dict[str, Any] = {
        name: (None, text) for name, text in {"csrf": found[1], **fields}.items()
    }
    if file is not None:
        files["file"] = ("x.txt", file)
    return session.post(path, files=files, headers={"HX-Request": "true"})


def test_what_a_page_asks_goes_the_way_of_every_request(
    server: LiveServer, session: httpx.Client
) -> None:
    before = server.handed_over("echo")
    answer = send(session, "/models/echo/1.0/try/predict", b"some text", way="file")
    assert answer.status_code == 200
    assert "some text" in answer.text and "text/plain" in answer.text
    assert server.handed_over("echo") == before + 1


def test_nothing_of_the_session_reaches_a_handler(
    server: LiveServer, session: httpx.Client
) -> None:
    answer = send(session, "/models/echo/1.0/try/predict", b"x", way="file")
    (cookie,) = session.cookies.jar
    assert cookie.value and cookie.value not in answer.text
    assert "cookie" not in answer.text.lower()


@pytest.mark.parametrize("where", ["predict", "explain"])
def test_a_script_in_an_answer_is_text(session: httpx.Client, where: str) -> None:
    answer = send(session, f"/models/echo/1.0/try/{where}", SCRIPT.encode(), way="file")
    assert SCRIPT not in answer.text and "&lt;script&gt;" in answer.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "is not a way to enter an input"),
        ({"way": "file"}, "no file is chosen"),
        ({"way": "json"}, "nothing is entered"),
        ({"way": "golden-0"}, "is not a way"),
        ({"way": "golden-99999999999"}, "is not a way"),
        ({"way": SCRIPT}, "is not a way"),
        ({"way": "json", "json": "1", "version2": "9.9"}, "version: 9.9 does not exist"),
        ({"way": "json", "json": "1", "version2": SCRIPT}, "&lt;script&gt;"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_said_on_the_page(
    session: httpx.Client, fields: dict[str, str], said: str
) -> None:
    answer = send(session, "/models/echo/1.0/try/predict", None, **fields)
    assert answer.status_code == 200
    assert said in answer.text and SCRIPT not in answer.text


def test_a_body_above_the_limit_of_requests_is_refused_before_it_is_read(
    server: LiveServer, session: httpx.Client
) -> None:
    with socket.create_connection(
        (session.base_url.host, session.base_url.port or 0), 20
    ) as client:
        (cookie,) = session.cookies.jar
        head = (
            f"POST /console/models/echo/1.0/try/predict HTTP/1.1\r\nHost: localhost\r\n"
            f"Cookie: {cookie.name}={cookie.value}\r\nContent-Length: {1 << 40}\r\n\r\n"
        )
        client.sendall(head.encode())
        assert client.recv(99).startswith(b"HTTP/1.1 413")


def test_a_model_that_is_not_there_is_answered_404(session: httpx.Client) -> None:
    for path in ("try", "archive", "rollout"):
        assert session.get(f"/models/nobody/1.0/{path}").status_code == 404


def test_the_archive_is_the_one_that_was_registered_or_it_says_so(
    server: LiveServer, session: httpx.Client
) -> None:
    build_archive(server.store, "echo", name="renewed")
    server.register_all("renewed.mar")
    path = server.store / "renewed.mar"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert "renewed.mar is refused" in session.get("/models/renewed/1.0/archive").text
    build_archive(server.store, "echo", name="renewed", config="batchSize: 2\n")
    assert "has changed in the store" in session.get("/models/renewed/1.0/archive").text
    path.write_bytes(content)
    assert "every file has the digest" in session.get("/models/renewed/1.0/archive").text
    path.unlink()
    server.management.delete("/models/renewed")


# -- what is shown of an answer ------------------------------------------------------------------


def column(
    value: Any, kind: str = "application/json", status: int = 200, explain: bool = False
) -> Column:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    found = Column("one")
    found.show(Answered(status, kind, body, 0.1, 0.0, 0.1), explain)
    return found


def test_labels_are_rows_the_likeliest_first() -> None:
    rows = column({"a": 0.25, "b": 0.75}).rows
    assert [(row.name, row.value, row.share) for row in rows] == [
        ("b", 0.75, 0.75),
        ("a", 0.25, 0.25),
    ]
    assert [row.share for row in column({"a": -4, "b": 2}).rows] == [0.5, 1.0]
    many = column({str(at): at for at in range(50)})
    assert (len(many.rows), many.hidden_rows) == (20, 30)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([1, 2], "application/json"), ({"a": True}, "application/json"), ({}, "application/json"),
        (b"{", "application/json"), (b"\xff" * 9, "text/plain"), (b"x" * 99_999, "text/html"),
        (b"\0\1", "application/x-npy"), (b"<svg/>", "image/svg+xml"), (b"", ""),
    ],
    ids=str,
)  # fmt: skip
def test_anything_else_is_bounded_text(value: Any, kind: str) -> None:
    for explain in (False, True):
        found = column(value, kind, explain=explain)
        assert not found.rows and not found.picture and len(found.text) < 20_100


@pytest.mark.parametrize("value", [
    {"explanations": 3}, {"explanations": [3]}, {"method": "saliency"}, {"tokens": 1}, 4,
    dict.fromkeys(OF_OURS, 3), dict.fromkeys(OF_OURS, "x"), dict.fromkeys(OF_OURS),
])  # fmt: skip
def test_an_explanation_of_an_authors_own_is_shown_as_it_is(value: Any) -> None:
    found = column(value, explain=True)
    assert not found.explained and (found.text or found.rows)


def test_a_picture_that_is_one_is_shown() -> None:
    assert column(b"\x89PNG", "image/png").picture == "data:image/png;base64,iVBORw=="


def test_two_answers_agree_within_the_tolerance_or_the_first_difference_is_named() -> None:
    one, other = column({"a": 0.25}), column({"a": 0.2501})
    assert difference([one, other]).startswith("Both answer the same")
    assert "answer.a: expected 0.25, got 0.3" in difference([one, column({"a": 0.3})])
    assert difference([one]) == difference([one, column("x", status=400)]) == ""


# -- a roll-out ----------------------------------------------------------------------------------

VERSION = {"version": "1.0", "file": "one.mar", "format": "onnx", "digest": "d"}
STATUS: dict[str, Any] = {
    **describe_findings(parse_rule()),
    "model": "m", "state": "canary", "label": "canary 10 %", "since": "2026-11-23T03:56:45.747Z",
    "canaryShare": 0.1, "shadowShare": 0.0,
    "steps": [0.01, 0.1, 0.5], "compared": 4, "live": VERSION,
    "candidate": {**VERSION, "version": "2.0"}, "verdicts": {"equal": 3, "differs": 1},
    "judgement": {"verdict": "fail", "reasons": ["because <b>"]},
    "worst": [{
        "requestId": "r", "at": "t", "difference": None, "input": {"base64": "AA==", "bytes": 9},
        "live": {"status": 200, "text": "x" * 9999}, "candidate": {"status": 500, "text": ""},
    }],
    "events": [],
}  # fmt: skip
STATUS["bounds"] |= {
    "disagreement": {"estimate": 0.25, "low": 0.01, "high": 0.8},
}


class Session:
    csrf = "word"

    def may(self, right: str) -> bool:
        return True


def shown(**changes: Any) -> str:
    """Return the part of the page that shows a roll-out."""
    values = {**describe({**STATUS, **changes}), "root": "..", "place": "/m", "session": Session()}
    return Renderer().text("live_rollout.html", values)


def test_a_roll_out_is_where_its_state_and_share_say() -> None:
    steps = re.findall(r'<li class="(\w*)"[^>]*>([^<]+)</li>', shown())[:6]
    assert [state for state, _ in steps] == ["done", "done", "done", "now", "", ""]
    assert steps[3][1] == "canary 10 %" and "Return to 1.0" in shown()
    returned = shown(state="returned", label="returned")
    assert '<li class="now bad" aria-current="step">returned</li>' in returned
    assert "Return to 1.0" not in returned and "Promote 2.0" not in returned


def test_what_is_not_known_yet_is_left_out() -> None:
    found = describe(STATUS)
    assert [(each["name"], each["estimate"], each["bounds"]) for each in found["intervals"]] == [
        ("Answers that differ", "25 %", "1 % to 80 %")
    ]
    page = shown()
    row = r'<th scope="row">{}</th><td class="n">{}</td>.*?</meter>{}</span>'
    for name, count, share in (("equal", 3, "75 %"), ("differs", 1, "25 %"),
                               ("the live version failed", 0, "0 %")):  # fmt: skip
        assert re.search(row.format(name, count, share), page), name
    assert "because &lt;b&gt;" in page


def test_answers_that_differ_are_cut_and_bytes_are_not_shown() -> None:
    page = shown()
    sides = re.findall(r'<span class="hint">([^<]*)</span><pre tabindex="0">([^<]*)</pre>', page)
    assert [name for name, _ in sides] == [
        "live version, status 200", "candidate, status 500", "request",
    ]  # fmt: skip
    assert len(sides[0][1]) < 2100 and sides[2][1] == "9 bytes" and "they differ" in page


@pytest.mark.parametrize(
    ("body", "media"),
    [
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a\xff", "image/gif"),
        (b"RIFF\xff\x00\x00\x00WEBP", "image/webp"),
        (b"\xff", "application/octet-stream"),
    ],
)
def test_a_request_of_bytes_that_are_kept_whole_is_drawn_and_can_be_loaded_down(
    body: bytes, media: str
) -> None:
    kept = {"base64": base64.b64encode(body).decode(), "bytes": len(body)}
    address = f"data:{media};base64,{kept['base64']}"
    assert address_of(kept) == address
    assert (
        address_of({**kept, "bytes": len(body) + 1}) == address_of({"text": "a", "bytes": 1}) == ""
    )
    page = shown(worst=[{**STATUS["worst"][0], "input": kept}])
    assert f'<a href="{address}" download="request">Download {len(body)} bytes</a>' in page
    assert (f'<img class="drawn" src="{address}" alt="request">' in page) == media.startswith(
        "image"
    )


@pytest.mark.parametrize("verb", ["nothing", "status", "live"])
def test_a_roll_out_has_no_other_verbs(session: httpx.Client, verb: str) -> None:
    answer = send(session, f"/models/echo/1.0/rollout/{verb}")
    assert answer.status_code in (404, 405)
