"""What every answer of the three APIs has in common: token check, error form, headers."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from modelyard.archiver import ArchiveError
from modelyard.serve.dataplane.call import Stream
from modelyard.serve.errors import (
    BadRequest,
    MethodNotAllowed,
    NoSuchRoute,
    ServeError,
    Unauthorized,
)
from modelyard.serve.http.answers import COMMON_HEADERS, Answer, Headers, error_answer, request_id
from modelyard.serve.http.auth import TokenCheck
from modelyard.serve.http.connection import ANSWER, WholeRequest

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
AtOnce = Callable[[int, Headers, bytes], bool]
"""`Exchange.send_at_once` of a connection."""
Check = Callable[[str, Headers], None]
"""Called with path and headers; raises Unauthorized unless the request may pass."""


def open_to_all(path: str, headers: Headers) -> None:
    """Check nothing."""


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Phase:
    """Where the server is in its life; shared by all that must know."""

    is_starting = True
    """Models are being loaded; one that is not there yet may come."""
    is_draining = False
    """The server is being stopped; connections close with their answer."""


class Front:
    """What the applications of every dialect have in common.

    Args:
        check: the token check; it comes before routing, so that no route can forget it.
        phase: shared with the server.
    """

    def __init__(self, check: Check, phase: Phase) -> None:
        self.on_status: Callable[[int], None] | None = None
        """Told the status of every answer; TorchServe counts them."""
        self.closes_after_errors = False
        self.more_headers: Headers = []
        """On every answer."""
        self.check = check
        self.phase = phase

    def form_error(self, error: Exception, id: str) -> Answer:
        """Return status, headers and body for an error."""
        return error_answer(error, id)

    def take(self, exchange: WholeRequest) -> bool:
        """Answer a request without a task; False, as here, leaves it to ASGI's call."""
        return False

    def refuse(self, error: Exception) -> Answer:
        """Return the last answer on a connection, to what could not be read as a request."""
        id = request_id(())
        status, headers, body = self.form_error(error, id)
        if self.on_status is not None:
            self.on_status(status)
        common = [pair for pair in self.headers(id, status) if pair[0] != b"connection"]
        return status, [*headers, *common], body

    def closes(self, status: int) -> bool:
        """Return whether an answer is the last on its connection."""
        return self.phase.is_draining or (self.closes_after_errors and status >= 400)

    def headers(self, id: str, status: int) -> Headers:
        """Return the headers that every answer of this status has."""
        headers = [(b"x-request-id", id.encode()), *COMMON_HEADERS, *self.more_headers]
        if self.closes(status):
            headers.append((b"connection", b"close"))
        return headers

    async def send_answer(
        self, scope: Scope, send: Send, id: str, status: int, headers: Headers, body: bytes | Stream
    ) -> None:
        """Send a whole answer, in one piece where the connection can, or a streamed one."""
        extensions = scope.get("extensions")
        at_once = extensions.get(ANSWER) if extensions else None
        if at_once is not None and self.send_at_once(at_once, id, status, headers, body):
            return
        if self.on_status is not None:
            self.on_status(status)
        if not isinstance(body, bytes):
            await send_stream(send, status, self._complete(id, status, headers), body, id)
            return
        headers = self._complete(id, status, headers, len(body))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def send_at_once(
        self, at_once: AtOnce, id: str, status: int, headers: Headers, body: bytes | Stream
    ) -> bool:
        """Send a whole answer in one piece; return False where that cannot be done.

        Args:
            at_once: the connection's own way.
        """
        if not isinstance(body, bytes) or self.closes(status):
            return False
        if not at_once(status, self._complete(id, status, headers, len(body)), body):
            return False
        if self.on_status is not None:
            self.on_status(status)
        return True

    def _complete(
        self, id: str, status: int, headers: Headers, length: int | None = None
    ) -> Headers:
        """Return an answer's headers with those that every answer has."""
        common = self.headers(id, status)
        if len(headers) > 1 or (headers and headers[0][0] != b"content-type"):
            # What a handler says, of caching for instance, counts.
            own = {name for name, _ in headers}
            common = [pair for pair in common if pair[0] not in own]
        if length is None:
            return [*headers, *common]
        return [*headers, (b"content-length", b"%d" % length), *common]


async def send_stream(
    send: Send, status: int, headers: Headers, stream: Stream, request_id: str
) -> None:
    """Send each chunk as it comes.

    A stream that breaks is left without its end, which closes the connection: a client must not
    take a part for the whole.
    """
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        async for chunk in stream.read():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except ServeError as error:
        logger.error("request %s: the stream is broken: %s", request_id, error)
    finally:
        stream.close()


class Api(Front, FastAPI):
    """A FastAPI application behind a token check, whose errors are our JSON.

    Args:
        description: for the documentation.
    """

    def __init__(self, title: str, description: str, check: TokenCheck, phase: Phase) -> None:
        FastAPI.__init__(
            self,
            title=title,
            description=description,
            version=version("modelyard"),
            openapi_url=None,  # `docs.py` describes all three APIs in one document
        )
        Front.__init__(self, check, phase)
        for kind in (ServeError, ArchiveError, Exception):
            self.add_exception_handler(kind, _answer_error)
        self.add_exception_handler(RequestValidationError, _answer_validation)  # type: ignore[arg-type]
        self.add_exception_handler(HTTPException, _answer_http)  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the token, then route; add the common headers to the answer."""
        if scope["type"] != "http":
            await FastAPI.__call__(self, scope, receive, send)
            return
        id = scope.setdefault("state", {})["request_id"] = request_id(scope["headers"])
        try:
            self.check(scope["path"], scope["headers"])
        except Unauthorized as error:
            await self.send_answer(scope, send, id, *error_answer(error, id))
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                if self.on_status is not None:
                    self.on_status(message["status"])
                message["headers"] = [*message["headers"], *self.headers(id, message["status"])]
            await send(message)

        await FastAPI.__call__(self, scope, receive, send_with_headers)


def _respond(request: Request, error: Exception) -> Response:
    status, headers, body = error_answer(error, request.state.request_id)
    return Response(body, status, {k.decode(): v.decode() for k, v in headers})


async def _answer_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, (ServeError, ArchiveError)):
        logger.exception("request %s", request.state.request_id, exc_info=error)
    return _respond(request, error)


async def _answer_validation(request: Request, error: RequestValidationError) -> Response:
    problems = "; ".join(
        f"{'.'.join(str(part) for part in e['loc'][1:])}: {e['msg']}, got {e.get('input')!r}"
        for e in error.errors()
    )
    return _respond(request, BadRequest(problems))


async def _answer_http(request: Request, error: HTTPException) -> Response:
    known = {404: NoSuchRoute, 405: MethodNotAllowed}.get(error.status_code)
    if known is not None:
        answer = _respond(request, known())
        answer.headers.update(error.headers or {})  # 405 says what is allowed
        return answer
    kind, message = "InternalServerException", str(error.detail)
    content = {
        "code": error.status_code,
        "type": kind,
        "message": message,
        "request_id": request.state.request_id,
    }
    return Response(
        json.dumps(content), error.status_code, error.headers, media_type="application/json"
    )
