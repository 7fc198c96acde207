"""Which URLs are fetched, and what a fetch may do to the model store."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import ArchiveError
from modelyard.serve.control import fetch
from modelyard.serve.control.fetch import fetch_archive
from modelyard.serve.control.transfer import Limits
from modelyard.serve.control.urls import UrlRules, parse_url
from modelyard.serve.errors import FetchFailed, FileExists, UrlRefused

QUICK = Limits(size_bytes=100_000, total_s=3, silence_s=0.3, bytes_per_s=1000, pause_s=0.01)
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


@functools.cache
def archive(code: str = "") -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        manifest = {"runtime": "python", "model": {"modelName": "m", "handler": "h.py"}}
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        zipped.writestr("h.py", code)
    return content.getvalue()


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """Serve on a free port; yield its base URL and the paths that are asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def sends(body: bytes, **headers: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", headers.get("length", str(len(body))))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirects(target: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def drips(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Send a byte now and then, for as long as anybody listens."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x")
        handler.wfile.flush()
        threading.Event().wait(0.05)


def drips_head(handler: http.server.BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b"H")
        handler.wfile.flush()
        threading.Event().wait(0.05)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "there.mar").write_bytes(b"there")
    return folder


def content(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"/" for path in store.iterdir()}


def test_an_allowed_archive_is_fetched_under_its_last_part(store: Path) -> None:
    with serving(sends(archive())) as (url, asked):
        found = fetch_archive(f"{url}/models/m.mar?version=1", store, UrlRules([f"{url}/.*"]))
    assert found == store / "m.mar"
    assert found.read_bytes() == archive()
    assert asked == ["/models/m.mar?version=1"]
    assert sorted(content(store)) == ["m.mar", "there.mar"]


@pytest.mark.parametrize(
    "answer",
    [
        sends(b"this is not an archive"),
        sends(archive()[:-30]),
        sends(archive(), length=str(len(archive()) + 10)),
        sends(b"0" * 200_000),
        sends(b"", length="999999999"),
        lambda handler: handler.send_error(500),
        lambda handler: handler.send_error(404),
        drips,
        drips_head,
        lambda handler: handler.connection.close(),
    ],
    ids=["garbage", "truncated", "short", "long", "lie", "500", "404", "drip", "head", "closed"],
)
def test_a_fetch_that_fails_leaves_the_store_as_it_was(store: Path, answer: Answer) -> None:
    before = content(store)
    with serving(answer) as (url, _), pytest.raises((FetchFailed, ArchiveError)):
        fetch_archive(f"{url}/m.mar", store, UrlRules([f"{url}/.*"]), QUICK)
    assert content(store) == before


def test_a_file_of_the_store_is_never_replaced(store: Path) -> None:
    before = content(store)
    exists = pytest.raises(FileExists, match=r"Model file already exists there\.mar")
    with serving(sends(archive())) as (url, asked), exists:
        fetch_archive(f"{url}/there.mar", store, UrlRules([f"{url}/.*"]))
    assert (content(store), asked) == (before, [])


@pytest.mark.parametrize("kind", ["other host", "file", "many"])
def test_a_redirection_is_vetted_as_the_first_url_was(store: Path, kind: str) -> None:
    before = content(store)
    with serving(sends(archive())) as (canary, canary_asked):
        target = {
            "other host": f"{canary}/m.mar",
            "file": f"file://{store}/there.mar",
            "many": "/again.mar",
        }[kind]
        with serving(redirects(target)) as (url, asked):
            rules = UrlRules([f"{url}/.*", "file://.*", r"http://[^/]*/no"])
            with pytest.raises((UrlRefused, FetchFailed)):
                fetch_archive(f"{url}/m.mar", store, rules)
    assert canary_asked == []
    assert len(asked) == (1 + Limits().hops if kind == "many" else 1)
    assert content(store) == before


def test_a_redirection_within_what_is_allowed_is_followed(store: Path) -> None:
    with (
        serving(sends(archive())) as (target, _),
        serving(redirects(f"{target}/other.mar")) as (url, _),
    ):
        found = fetch_archive(f"{url}/m.mar", store, UrlRules([f"{url}/.*", f"{target}/.*"]))
    assert found.name == "m.mar"


INTERNAL = [
    "169.254.169.254",
    "127.0.0.1",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]",
    "0.0.0.0",
    "0x7f000001",
    "2130706433",
    "127.1",
    "10.0.0.1",
    "192.168.1.1",
    "[fe80::1]",
    "[fd00::1]",
    "localhost",
    "224.0.0.1",
]


@pytest.mark.parametrize("host", INTERNAL)
def test_an_internal_address_is_refused_where_everything_is_allowed(store: Path, host: str) -> None:
    rules = UrlRules(["file://.*", "http(s)?://.*"])
    with pytest.raises((UrlRefused, FetchFailed)):
        fetch_archive(f"http://{host}:1/m.mar", store, rules)
    with pytest.raises((UrlRefused, FetchFailed)):
        rules.check(parse_url(f"http://{host}:1/m.mar"))


def test_a_name_that_resolves_to_an_internal_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    """All addresses are vetted, and the connection goes to what was vetted."""

    def resolve(*_: Any, **__: Any) -> list[Any]:
        public = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", 80))
        return [public, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(UrlRefused) as caught:
        UrlRules(["http://.*"]).check(parse_url("http://rebind.example/m.mar"))
    assert "10.1.2.3, which is not public" in caught.value.reason
    assert UrlRules([r"http://rebind\.example/.*"]).check(
        parse_url("http://rebind.example/m.mar")
    ) == ["93.184.216.34", "10.1.2.3"]


@pytest.mark.parametrize(
    "text",
    [
        "http://allowed.example@evil.example/m.mar",
        "http://allowed.example:80@evil.example/m.mar",
        "http://allowed.example\\@evil.example/m.mar",
        "http://allowed.example#@evil.example/m.mar",
        "http://allowed.example/a/../../m.mar",
        "http://allowed.example/%2e%2e/m.mar",
        "http://allowed.example/%252e%252e/m.mar",
        "http://allowed.example/a%5c..%5cm.mar",
        "http://allowed.example/m.mar%00",
        "http://allowed。example/m.mar",
        "http://allowed.example:99999/m.mar",
        "http:///m.mar",
        "http://allowed.example /m.mar",
        "http://allowed.example\n/m.mar",
        "gopher://allowed.example/m.mar",
        "file://localhost/etc/passwd",
        "file://host/share/m.mar",
        "file:///models/../etc/passwd",
        "file:///models/%2e%2e/etc/passwd",
    ],
)
def test_a_url_that_could_be_read_in_two_ways_is_refused(text: str, store: Path) -> None:
    before = content(store)
    with pytest.raises(UrlRefused, match="does not match any allowed URL"):
        fetch_archive(text, store, UrlRules([".*"]))
    assert content(store) == before


@pytest.mark.parametrize(
    "text",
    [
        "http://evil.example/http://allowed.example/m.mar",
        "http://allowed.example.evil.example/m.mar",
        "https://allowed.example/m.mar",
        "http://allowed.example:8080/m.mar",
        "http://allowed.example/other/m.mar",
    ],
)
def test_a_pattern_matches_the_whole_url(text: str) -> None:
    with pytest.raises(UrlRefused):
        UrlRules([r"http://allowed\.example/models/.*"]).check(parse_url(text))


def test_nothing_is_fetched_where_nothing_is_allowed(store: Path) -> None:
    with serving(sends(archive())) as (url, asked), pytest.raises(UrlRefused):
        fetch_archive(f"{url}/m.mar", store, UrlRules([]))
    assert asked == []


def test_a_file_is_taken_only_from_where_it_really_is(store: Path, tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    for folder in (allowed, secret):
        folder.mkdir()
        (folder / "m.mar").write_bytes(archive())
    (allowed / "link.mar").symlink_to(secret / "m.mar")
    rules = UrlRules([f"file://{allowed}/.*"])
    assert fetch_archive(f"file://{allowed}/m.mar", store, rules).name == "m.mar"
    for refused in (f"{allowed}/link.mar", f"{secret}/m.mar"):
        with pytest.raises(UrlRefused):
            fetch_archive(f"file://{refused}", store, rules)
    assert sorted(content(store)) == ["m.mar", "there.mar"]


def test_what_a_killed_server_had_fetched_half_is_removed(store: Path) -> None:
    (store / ".fetching-0123").mkdir()
    fetch.clear_leftovers(store)
    assert sorted(content(store)) == ["there.mar"]
