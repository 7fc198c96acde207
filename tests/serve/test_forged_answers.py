"""What a handler says of its answer reaches no other answer, and no other page of the host."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle, islice
from pathlib import Path

import aiohttp
import httpx
import pytest

from tests.serve.live import LiveServer, build_archive, poll, running

BODILESS = (204, 205, 304)
FORGERIES = [
    f"{stream}{status} {kind}".encode()
    for stream in ("", "stream ")
    for status in (*BODILESS, 200, 404)
    for kind in ("", "text/plain", "empty")
]
"""Bodies that ask for an answer: with its status alone, or with a body that is one more answer."""
DAY, NIGHT = 200, 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("forging")
    for name in ("forging", "echo"):
        build_archive(folder / "store", name, config="minWorkers: 1\n")
    with running(folder / "state", folder / "store", "--models=forging,echo") as live:
        yield live


# -- no byte after the head ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [b"", b"stream "], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", [b"", b"empty"], ids=["body", "empty"])
@pytest.mark.parametrize("status", [*BODILESS, 200])
@pytest.mark.parametrize("method", ["POST", "HEAD"])
def test_not_a_byte_comes_after_the_head(
    server: LiveServer, status: int, kind: bytes, stream: bytes, method: str
) -> None:
    if method == "POST" and status == 200:
        return
    body = b"%s%d %s" % (stream, status, kind)
    answer = exchange(
        server,
        b"%s /predictions/forging HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (method.encode(), len(body), body),
    )
    head, end, rest = answer.partition(b"\r\n\r\n")
    assert (end, rest) == (b"\r\n\r\n", b"")
    if method == "POST":
        assert head.startswith(b"HTTP/1.1 %d " % status)
        lengths = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
        assert lengths == ([b"content-length: 0"] if status == 205 else [])
        assert b"transfer-encoding" not in head.lower()


@pytest.mark.parametrize(
    "request_",
    [
        b"HEAD /predictions/cats HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"HEAD /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"HEAD /ping HTTP/1.1\r\nhost: elsewhere.example\r\n\r\n",
        b"HEAD /predictions/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999999999\r\n\r\n",
        b"HEAD /predictions/echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
        b"\r\nno chunk\r\n",
        b"HEAD /ping HTTP/1.1\r\n\r\n",
        b"HEAD /ping HTTP/1.1\r\nhost: a\r\nno header\r\n\r\n",
        b"HEAD /ping HTTP/1.1\r\nhost: a\r\nlong: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids=[
        "no model",
        "no route",
        "another host",
        "too long",
        "not HTTP",
        "no host",
        "no colon",
        "a long head",
    ],
)
def test_nor_after_a_refusal_of_a_head(server: LiveServer, request_: bytes) -> None:
    head, end, rest = exchange(server, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4") and (end, rest) == (b"\r\n\r\n", b"")


def test_an_older_client_gets_no_answer_before_its_answer(server: LiveServer) -> None:
    """HTTP/1.0 knows no 100, so the client would take it for the answer (RFC 9110, 10.1.1)."""
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(b"POST /predictions/echo HTTP/1.0\r\nexpect: 100-continue\r\n"
                       b"content-length: 4\r\n\r\n")  # fmt: skip
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(100)
        client.settimeout(20)
        client.sendall(b"mine")
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and b'"mine"' in answer


def exchange(server: LiveServer, request: bytes) -> bytes:
    """Send a request, and return all that comes until the server closes."""
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(65536), b""))


# -- the next answer on a connection is the next model's -------------------------------------------


def by_httpx(url: str, bodies: Sequence[bytes]) -> None:
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:
        for body in bodies:
            client.post("/predictions/forging", content=body)
            assert client.post("/predictions/echo", content=b"mine").json()["body"] == "mine"


def by_http_client(url: str, bodies: Sequence[bytes]) -> None:
    place = httpx.URL(url)
    with closing(http.client.HTTPConnection(place.host, place.port, timeout=60)) as client:
        for body in bodies:
            for path, sent, said in (("forging", body, b""), ("echo", b"mine", b'"mine"')):
                client.request("POST", f"/predictions/{path}", sent)
                assert said in client.getresponse().read()


def by_aiohttp(url: str, bodies: Sequence[bytes]) -> None:
    async def ask() -> None:
        limit = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(url, connector=limit) as client:
            for body in bodies:
                for path, sent, said in (("forging", body, b""), ("echo", b"mine", b'"mine"')):
                    async with client.post(f"/predictions/{path}", data=sent) as answer:
                        assert said in await answer.read()

    asyncio.run(ask())


def by_curl(url: str, bodies: Sequence[bytes]) -> None:
    """One process, one connection: what is sent to echo must come back in its place."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    lines = []
    for at, body in enumerate(bodies):
        for path, sent in (("forging", body.decode()), ("echo", f"mine-{at}")):
            out = "/dev/null" if path == "forging" else "-"
            lines += [f'url = "{url}/predictions/{path}"', f'data-raw = "{sent}"',
                      'header = "content-type: text/plain"',
                f'output = "{out}"', "silent", "next"]  # fmt: skip
    ran = subprocess.run(["curl", "-K", "-"], input="\n".join(lines[:-1]), capture_output=True,
                         text=True, timeout=600)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "FORGED" not in ran.stdout
    assert [at for at in range(len(bodies)) if f'"mine-{at}"' not in ran.stdout] == []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def behind(program: str, server: LiveServer, folder: Path) -> Iterator[str]:
    """Run a proxy in front that keeps its connections to the server; yield its URL."""
    binary = shutil.which(program)
    if binary is None:
        pytest.skip(f"{program} is not installed")
    port, (host, to) = free_port(), server.address
    file = folder / f"{program}.conf"
    if program == "haproxy":
        file.write_text(
            "defaults\n mode http\n timeout client 60s\n timeout server 60s\n timeout connect 5s\n"
            f"frontend f\n bind 127.0.0.1:{port}\n default_backend b\n"
            f"backend b\n http-reuse always\n server s {host}:{to} maxconn 1\n"
        )
        command = [binary, "-f", str(file)]
    else:
        file.write_text(
            f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
            f"http {{ access_log off; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;"
            f" fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;"
            f" upstream localhost {{ server {host}:{to}; keepalive 1; }} keepalive_requests 100000;"
            f" server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://localhost;"
            ' proxy_http_version 1.1; proxy_set_header Connection ""; } } }'
        )
        command = [binary, "-c", str(file), "-e", str(folder / "error.log")]
    proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def answers() -> bool:
            assert proxy.poll() is None, "the proxy has ended"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        poll(answers, "the proxy answers")
        yield f"http://127.0.0.1:{port}"
    finally:
        proxy.terminate()
        proxy.wait(20)


@pytest.mark.parametrize("count", [DAY, pytest.param(NIGHT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("proxy", ["", "nginx", "haproxy"])
@pytest.mark.parametrize("ask", [by_httpx, by_aiohttp, by_http_client, by_curl])
def test_the_next_model_answers_for_itself(
    server: LiveServer,
    tmp_path: Path,
    ask: Callable[[str, Sequence[bytes]], None],
    proxy: str,
    count: int,
) -> None:
    """`count` forgeries in all, over four clients, directly and behind two proxies."""
    if count == DAY and proxy and ask is not by_http_client:
        pytest.skip("by day each proxy has one client")
    bodies = list(islice(cycle(FORGERIES), -(-count // 12)))
    with ExitStack() as stack:
        url = str(server.client.base_url)
        if proxy:
            url = stack.enter_context(behind(proxy, server, tmp_path))
        ask(url, bodies)


# -- headers that are the server's -----------------------------------------------------------------


def test_a_handler_says_nothing_for_the_whole_host(server: LiveServer) -> None:
    said = {
        "Set-Cookie": "modelyard-console-8081=; Path=/", "Clear-Site-Data": '"*"',
        "Strict-Transport-Security": "max-age=31536000", "Service-Worker-Allowed": "/",
        "X-Request-Id": "forged", "X-Model-Version": "9.9", "X-Content-Type-Options": "off",
        "Alt-Svc": 'h3="evil.example:443"', "NEL": "{}", "Report-To": "{}",
    }  # fmt: skip
    lines = "\n".join(f"{name}: {value}" for name, value in said.items())
    answer = server.predict("forging", f"200 text/plain\n{lines}", headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-model-version"] == "1.0"
    assert answer.headers["x-content-type-options"] == "nosniff"
    kept = {"x-request-id", "x-model-version", "x-content-type-options"}
    assert [name for name in said if name.lower() in answer.headers.keys() - kept] == []
    own = server.predict("forging", "200 text/plain\nSet-Cookie: mine=1\nX-Mine: 2")
    assert (own.headers["set-cookie"], own.headers["x-mine"]) == ("mine=1", "2")


@pytest.mark.parametrize(
    ("kind", "is_page"),
    [
        ("text/html", True), ("Text/HTML; charset=utf-8", True), ("image/svg+xml", True),
        ("application/xhtml+xml", True), ("text/xml", True), ("multipart/x-mixed-replace", True),
        ("application/json", False), ("image/png", False), ("text/plain", False), ("", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", ["", "\ncontent-security-policy: default-src *"])
def test_a_handlers_page_has_an_origin_of_its_own(
    server: LiveServer, kind: str, is_page: bool, more: str
) -> None:
    answer = server.predict("forging", f"200 {kind}{more}")
    policies = [value for name, value in answer.headers.multi_items()
                if name == "content-security-policy"]  # fmt: skip
    assert ("sandbox allow-scripts" in policies) is is_page
    assert len(policies) == is_page + bool(more)
    assert answer.headers["x-content-type-options"] == "nosniff"
