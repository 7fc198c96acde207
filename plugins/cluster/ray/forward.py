"""The hop of a request from Ray to the cell's server: ASGI in, HTTP/1.1 out, bytes as they come.

Nothing is collected and no body is looked at; what changes is the head, by the headers that are of
one connection only (RFC 9110, 7.6.1).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

OF_ONE_CONNECTION = frozenset({
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
})  # fmt: skip
EXPECT = b"expect"
"""Ray has let the client go on with its body before we see the request."""
OF_RAYS_SERVER = frozenset({b"date", b"server", b"x-request-id"})
"""Headers of an answer that Ray's server writes as well; the last is the request's in both."""
WITHOUT_BODY = (204, 304)
CHUNK_BYTES = 1 << 16
MAX_HEAD_BYTES = 1 << 18
DYING_S = 2.0
"""How long the replica may take to end after its server; then the server is there but refuses."""


class ServerGone(Exception):
    """The cell's server took no connection, or closed one without an answer."""


class Connection:
    """A connection to the server; it carries one exchange at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.idle_since = 0.0

    async def read_head(self) -> tuple[int, list[Header]]:
        """Return status and headers of the answer; interim ones are passed over.

        Raises:
            ServerGone: the server closed the connection before that.
        """
        while True:
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise ServerGone("the cell's server closed the connection unanswered") from error
            first, *lines = head[:-4].split(b"\r\n")
            status = int(first[9:12])
            if status >= 200:
                pairs = (line.partition(b":") for line in lines)
                return status, [(name.lower(), value.strip()) for name, _, value in pairs]

    async def read_body(self, fields: dict[bytes, bytes]) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            ConnectionError, asyncio.IncompleteReadError: the server closed in the middle.
        """
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                async for piece in self._read(size):
                    yield piece
                await self.reader.readexactly(2)
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers, which ASGI has no place for
        elif b"content-length" in fields:
            async for piece in self._read(int(fields[b"content-length"])):
                yield piece
        else:
            while piece := await self.reader.read(CHUNK_BYTES):
                yield piece

    async def _read(self, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await self.reader.read(min(size, CHUNK_BYTES))
            if not piece:
                raise ConnectionResetError("the connection was closed in the middle of the answer")
            size -= len(piece)
            yield piece

    def close(self) -> None:
        """Close it, whatever is on its way."""
        self.writer.close()


class Upstream:
    """Connections to the server, which are kept.

    Args:
        host, port: of the server.
        keep_s: an idle connection is not used after this, so that it is never the server that
            closes it first.
    """

    def __init__(self, host: str, port: int, keep_s: float) -> None:
        self.host = host
        self.port = port
        self._keep_s = keep_s
        self._idle: list[Connection] = []

    @property
    def address(self) -> str:
        """Where the server listens; its own name."""
        return f"{self.host}:{self.port}"

    async def connect(self) -> Connection:
        """Return a new connection.

        Raises:
            ServerGone: nobody listens.
        """
        try:
            pair = await asyncio.open_connection(self.host, self.port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            raise ServerGone(f"no connection to the cell's server: {error.strerror}") from error
        return Connection(*pair)

    def take(self) -> Connection | None:
        """Return an idle connection, the one that was used last."""
        oldest = time.monotonic() - self._keep_s
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and not connection.reader.at_eof():
                return connection
            connection.close()
        return None

    def keep(self, connection: Connection) -> None:
        """Take back a connection whose exchange is over."""
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    async def get(self, path: str, token: str | None = None) -> tuple[int, bytes]:
        """Return status and body of a small answer of the server.

        Raises:
            ServerGone, OSError, asyncio.IncompleteReadError: it does not answer.
        """
        authorization = f"authorization: Bearer {token}\r\n" if token else ""
        request = f"GET {path} HTTP/1.1\r\nhost: {self.address}\r\n{authorization}\r\n"
        connection = self.take() or await self.connect()
        try:
            connection.writer.write(request.encode("latin-1"))
            status, headers = await connection.read_head()
            body = b"".join([piece async for piece in connection.read_body(dict(headers))])
        except BaseException:
            connection.close()
            raise
        self.keep(connection)
        return status, body

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()


class Forwarder:
    """The ASGI application of a replica.

    Args:
        upstream: the server's inference API.
        keeps_host: whether the server looks at the name that a client calls it by; else it is
            called by its own.
    """

    def __init__(self, upstream: Upstream, keeps_host: bool) -> None:
        self._upstream = upstream
        self._keeps_host = keeps_host

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or take part in the start and end of Ray's server."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            while (kind := (await receive())["type"]) != "lifespan.shutdown":
                await send({"type": f"{kind}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "websocket.close"})

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        try:
            await self._exchange(scope, message, receive, send)
        except ServerGone as error:
            # The replica ends with its server, and a request without a byte of an answer can be
            # sent to another cell (`retry-on empty-response`). An answer, even 502, would be final.
            await asyncio.sleep(DYING_S)
            await _refuse(send, str(error))

    async def _exchange(
        self, scope: Message, message: Message, receive: Receive, send: Send
    ) -> None:
        """Send the request, and what the server answers, back.

        Raises:
            ServerGone: there is no answer, and nothing was sent to the client.
        """
        body, more = message.get("body", b""), message.get("more_body", False)
        head, is_chunked = self._head(scope)
        connection, sending = None, None
        if not more:
            connection = self._upstream.take()
        try:
            if connection is not None:
                try:
                    connection.writer.write(head + _framed(body, is_chunked, True))
                    status, headers = await connection.read_head()
                except ServerGone:
                    # The server closed an idle connection before it read the request
                    # (RFC 9112, 9.3.1.1); it is sent again, once, on a connection of its own.
                    connection.close()
                    connection = None
            if connection is None:
                connection = await self._upstream.connect()
                connection.writer.write(head + _framed(body, is_chunked, not more))
                if more:
                    rest = _send_rest(connection.writer, receive, is_chunked)
                    sending = asyncio.create_task(rest)
                status, headers = await connection.read_head()
            fields = dict(headers)
            await send({"type": "http.response.start", "status": status,
                        "headers": _kept(headers, OF_ONE_CONNECTION | OF_RAYS_SERVER)})  # fmt: skip
            if scope["method"] != "HEAD" and status not in WITHOUT_BODY:
                async for piece in connection.read_body(fields):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            is_whole = sending is None or (sending.done() and sending.exception() is None)
            if is_whole and fields.get(b"connection", b"").lower() != b"close":
                self._upstream.keep(connection)
                connection = None
        finally:
            if sending is not None:
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await sending
            if connection is not None:
                connection.close()

    def _head(self, scope: Message) -> tuple[bytes, bool]:
        """Return the request's line and headers, and whether its body goes in chunks."""
        target = scope.get("raw_path") or scope["path"].encode()
        target = target.removeprefix(scope.get("root_path", "").encode()) or b"/"
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = scope["headers"]
        is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
        kept = _kept(headers, OF_ONE_CONNECTION | {EXPECT})
        lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1"]
        if not self._keeps_host:
            lines.append(f"host: {self._upstream.address}".encode())
            kept = [pair for pair in kept if pair[0] != b"host"]
        if is_chunked:
            lines.append(b"transfer-encoding: chunked")
        lines += [name + b": " + value for name, value in kept]
        return b"\r\n".join(lines) + b"\r\n\r\n", is_chunked


def _kept(headers: Iterable[Header], dropped: frozenset[bytes]) -> list[Header]:
    """Return headers without those that are dropped, or that `Connection` names."""
    headers = list(headers)
    named = {
        word.strip().lower()
        for name, value in headers
        if name == b"connection"
        for word in value.split(b",")
    }
    return [pair for pair in headers if pair[0] not in dropped and pair[0] not in named]


def _framed(piece: bytes, is_chunked: bool, is_last: bool) -> bytes:
    if not is_chunked:
        return piece
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
    return chunk + (b"0\r\n\r\n" if is_last else b"")


async def _send_rest(writer: asyncio.StreamWriter, receive: Receive, is_chunked: bool) -> None:
    """Send the rest of a body as it comes; end the connection where the client has gone."""
    more = True
    while more:
        await writer.drain()
        message = await receive()
        if message["type"] == "http.disconnect":
            writer.transport.abort()
            return
        more = message.get("more_body", False)
        writer.write(_framed(message.get("body", b""), is_chunked, not more))
    await writer.drain()


async def _refuse(send: Send, reason: str) -> None:
    text = json.dumps({"code": 502, "type": "BadGatewayException", "message": reason}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(text)).encode()),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": text})
