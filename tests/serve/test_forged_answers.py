"""A handler's status without a body: nothing of its body reaches a client, whoever reads."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.serve.live import LiveServer, build_archive, running

BODILESS = (204, 205, 304)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("forging")
    for name in ("forging", "echo"):
        build_archive(folder / "store", name, config="minWorkers: 1\n")
    with running(folder / "state", folder / "store", "--models=forging,echo") as live:
        yield live


@pytest.mark.parametrize("status", BODILESS)
@pytest.mark.parametrize("kind", ["", "text/plain", "application/json"])
def test_the_next_model_answers_for_itself(server: LiveServer, status: int, kind: str) -> None:
    body = f"{status} {kind}".encode()
    with httpx.Client(base_url=str(server.client.base_url)) as client:
        for _ in range(20):
            assert client.post("/predictions/forging", content=body).status_code == status
            assert client.post("/predictions/echo", content=b"mine").json()["body"] == "mine"
    with closing(http.client.HTTPConnection(*server.address)) as connection:
        for path, sent, said in (("forging", body, b""), ("echo", b"mine", b'"mine"')):
            connection.request("POST", f"/predictions/{path}", sent)
            assert said in connection.getresponse().read()


@pytest.mark.parametrize("status", BODILESS)
@pytest.mark.parametrize("method", ["POST", "HEAD"])
def test_not_a_byte_comes_after_the_head(server: LiveServer, status: int, method: str) -> None:
    body = b"%d" % status
    with socket.create_connection(server.address, timeout=10) as client:
        client.sendall(
            b"%s /predictions/forging HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (method.encode(), len(body), body)
        )
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    head, end, rest = answer.partition(b"\r\n\r\n")
    assert (end, rest) == (b"\r\n\r\n", b"")
    if method == "POST":
        assert head.startswith(b"HTTP/1.1 %d " % status)
        lengths = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
        assert lengths == ([b"content-length: 0"] if status == 205 else [])
