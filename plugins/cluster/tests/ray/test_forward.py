"""The hop to a cell's server: bytes in, bytes out, against a server whose every byte is written."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from modelyard.plugins.cluster.ray import forward
from modelyard.plugins.cluster.ray.forward import Forwarder, Message, Upstream

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Client:
    """What Ray's server is to the application: it hands over a request, and takes the answer."""

    def __init__(self, *body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.headers = list(headers)
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        for at, piece in enumerate(body or (b"",)):
            self.send_piece(piece, at + 1 < len(body or (b"",)))
        self.status = 0
        self.answered: dict[bytes, bytes] = {}
        self.body = b""
        self.got = asyncio.Condition()

    def send_piece(self, piece: bytes, more: bool) -> None:
        self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def take(self, message: Message) -> None:
        async with self.got:
            if message["type"] == "http.response.start":
                self.status, self.answered = message["status"], dict(message["headers"])
            else:
                self.body += message["body"]
            self.got.notify_all()

    async def ask(self, app: Forwarder, target: str = "/p?q=1", method: str = "POST") -> None:
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": self.headers,
        }
        await app(scope, self.messages.get, self.take)


def run(
    serve: Serve, scenario: Callable[[Forwarder], Coroutine[Any, Any, None]], **options: bool
) -> None:
    """Run a scenario against a server that answers each connection by `serve`."""

    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)

    async def main() -> None:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            upstream = Upstream("127.0.0.1", port, 30)
            await asyncio.wait_for(scenario(Forwarder(upstream, options.get("host", False))), 20)
            upstream.close()
            for writer in writers:
                writer.transport.abort()
        await asyncio.sleep(0.01)

    asyncio.run(main())


async def read_request(reader: asyncio.StreamReader) -> tuple[list[bytes], bytes]:
    """Return the lines of the next request's head, and its body as it was framed."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head[:-4].split(b"\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in lines[1:])
    if b"transfer-encoding" in fields:
        return lines, await reader.readuntil(b"0\r\n\r\n")
    return lines, await reader.readexactly(int(fields.get(b"content-length", b"0")))


def test_a_request_arrives_without_the_headers_of_one_connection() -> None:
    seen: list[tuple[list[bytes], bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(
            b"HTTP/1.1 100 Continue\r\n\r\n"
            b"HTTP/1.1 201 Made\r\nContent-Length: 2\r\nX-Own: 1\r\n"
            b"Connection: keep-alive, x-hop\r\nX-Hop: 1\r\nDate: today\r\nSet-Cookie: a\r\n\r\nok"
        )

    async def scenario(app: Forwarder) -> None:
        client = Client(
            b"body",
            headers=(
                (b"host", b"models.example"),
                (b"content-length", b"4"),
                (b"authorization", b"Bearer t"),
                (b"connection", b"close, x-mine"),
                (b"x-mine", b"1"),
                (b"te", b"trailers"),
                (b"expect", b"100-continue"),
            ),
        )
        await client.ask(app)
        assert (client.status, client.body) == (201, b"ok")
        assert client.answered == {b"content-length": b"2", b"x-own": b"1", b"set-cookie": b"a"}
        ((lines, body),) = seen
        assert body == b"body"
        assert lines[0] == b"POST /p?q=1 HTTP/1.1"
        assert lines[1].startswith(b"host: 127.0.0.1:")
        assert sorted(lines[2:]) == [b"authorization: Bearer t", b"content-length: 4"]

    run(serve, scenario)


def test_the_name_that_a_client_calls_is_kept_where_the_server_looks_at_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines, _ = await read_request(reader)
        writer.write(OK.replace(b"ok", b"mo") if b"host: models.example" in lines else OK)

    async def scenario(app: Forwarder) -> None:
        client = Client(headers=((b"host", b"models.example"),))
        await client.ask(app, method="GET")
        assert client.body == b"mo"

    run(serve, scenario, host=True)


@pytest.mark.parametrize("pieces", [(b"whole",), (b"in ", b"", b"pieces")])
def test_a_body_without_a_length_goes_in_chunks(pieces: tuple[bytes, ...]) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await read_request(reader))[1])
        writer.write(OK)

    async def scenario(app: Forwarder) -> None:
        client = Client(*pieces, headers=((b"transfer-encoding", b"chunked"),))
        await client.ask(app)
        assert client.body == b"ok"

    run(serve, scenario)
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece]
    assert seen == [b"".join([*chunks, b"0\r\n\r\n"])]


def test_an_answer_is_passed_on_as_it_comes() -> None:
    """The second chunk is sent when the client has the first."""
    client: Client

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nfirst\r\n")
        async with client.got:
            await client.got.wait_for(lambda: client.body == b"first")
        writer.write(b"6\r\nsecond\r\n0\r\nTrailer: 1\r\n\r\n")

    async def scenario(app: Forwarder) -> None:
        nonlocal client
        client = Client(b"")
        await client.ask(app)
        assert client.body == b"firstsecond"
        assert b"transfer-encoding" not in client.answered

    run(serve, scenario)


def test_a_connection_is_used_again_and_again_by_one_after_the_other() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while not reader.at_eof():
            lines, _ = await read_request(reader)
            head = b"HTTP/1.1 204 No\r\n\r\n" if b"DELETE" in lines[0] else OK[:-2]
            writer.write(head if b"POST" not in lines[0] else OK)

    async def scenario(app: Forwarder) -> None:
        for method in ("POST", "HEAD", "DELETE", "POST"):
            client = Client()
            await client.ask(app, method=method)
            assert client.status in (200, 204)
            assert client.body == (b"ok" if method == "POST" else b"")
        await asyncio.gather(*(Client().ask(app) for _ in range(3)))

    run(serve, scenario)
    assert connections == 3


def test_a_request_that_met_a_closed_connection_is_sent_once_more() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await read_request(reader))[1])
        writer.write(OK)
        await reader.readexactly(1)  # the next request has come, and is not answered
        writer.transport.abort()

    async def scenario(app: Forwarder) -> None:
        for body in (b"1", b"2"):
            client = Client(body, headers=((b"content-length", b"1"),))
            await client.ask(app)
            assert (client.status, client.body) == (200, b"ok")

    run(serve, scenario)
    assert seen == [b"1", b"2"]


def test_without_a_server_the_client_gets_nothing_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica ends in that time, and what was not answered is sent to another one."""
    monkeypatch.setattr(forward, "DYING_S", 0.01)
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1
        writer.write(b"HTTP/1.1 200")
        writer.close()

    async def scenario(app: Forwarder) -> None:
        client = Client(b"1", headers=((b"content-length", b"1"),))
        await client.ask(app)
        assert client.status == 502
        assert b"closed the connection unanswered" in client.body

    run(serve, scenario)
    assert requests == 1


def test_an_answer_before_the_end_of_the_body_ends_the_request() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK.replace(b"200", b"413"))

    async def scenario(app: Forwarder) -> None:
        for _ in range(2):
            client = Client(headers=((b"content-length", b"99"),))
            client.messages.get_nowait()
            client.send_piece(b"the beginning", more=True)
            await client.ask(app)
            assert client.status == 413

    run(serve, scenario)
    assert connections == 2


def test_a_client_that_leaves_in_the_middle_of_its_body_takes_the_request_along() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_request(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            ended.set()

    async def scenario(app: Forwarder) -> None:
        client = Client(headers=((b"content-length", b"99"),))
        client.messages.get_nowait()
        client.send_piece(b"the beginning", more=True)
        client.leave()
        asking = asyncio.create_task(client.ask(app))
        await ended.wait()
        asking.cancel()

    run(serve, scenario)
