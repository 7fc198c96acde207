"""What the APIs have in common in TorchServe's dialect: paths, parameters, answers, errors."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from modelyard.archiver import ArchiveError
from modelyard.serve.api.asgi import Check, Front, Phase, Receive, Scope, Send
from modelyard.serve.api.inference import refuse_body
from modelyard.serve.errors import (
    BadMessage,
    BodyTooLarge,
    FetchFailed,
    MethodNotAllowed,
    ServeError,
    Unauthorized,
    Unavailable,
    UrlRefused,
    http_status,
)
from modelyard.serve.http.answers import Answer, Headers, request_id
from modelyard.serve.http.body import ClientLeft, read_body
from modelyard.serve.torchserve.openapi import Document
from modelyard.serve.torchserve.settings import TorchServeSettings

logger = logging.getLogger(__name__)

JSON: Headers = [(b"content-type", b"application/json")]
REASON = b"x-modelyard-reason"
"""Header of an error whose message is TorchServe's and says less than we know."""
MAX_REASON = 500
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class Dialect(Front):
    """An API whose answers and errors are TorchServe's.

    Args:
        settings: for the CORS headers.
        max_request_bytes: a larger body is answered 413.
        document: the OpenAPI document of its port.
    """

    def __init__(
        self,
        check: Check,
        phase: Phase,
        settings: TorchServeSettings,
        max_request_bytes: int,
        document: Document,
    ) -> None:
        Front.__init__(self, check, phase)
        self.document = document
        self.closes_after_errors = True
        self.max_request_bytes = max_request_bytes
        self.more_headers = [
            (name, value.encode("latin-1"))
            for name, value in (
                (b"access-control-allow-origin", settings.cors_allowed_origin),
                (b"access-control-allow-methods", settings.cors_allowed_methods),
                (b"access-control-allow-headers", settings.cors_allowed_headers),
            )
            if value
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: what is open to all, then the token check, then the rest."""
        id = self.request_id(scope)
        try:
            path = segments(scope["path"])
            answer = self.describe_api(scope["method"], path)
            if answer is None:
                self.check(scope["path"], scope["headers"])
                body = await read_body(scope, receive, self.max_request_bytes)
                answer = await self.route(scope, path, b"".join(body), id)
        except ClientLeft:
            return
        except BodyTooLarge as error:
            await refuse_body(self, receive, send, id, error)
            return
        except Exception as error:
            answer = self.form_error(error, id)
        await self.send_answer(scope, send, id, *answer)

    def describe_api(self, method: str, path: list[str]) -> Answer | None:
        """Return the API's description where it is asked for; it needs no token."""
        if not path:
            if method != "OPTIONS":
                raise MethodNotAllowed
            return json_answer(self.document)
        return json_answer(self.document) if path == ["api-description"] else None

    async def route(self, scope: Scope, path: list[str], body: bytes, id: str) -> Answer:
        """Answer a request that has passed the token check.

        Raises:
            ServeError, ArchiveError: what is answered instead.
        """
        raise NotImplementedError

    def request_id(self, scope: Scope) -> str:
        """Return a UUID, the client's where it sent one."""
        return request_id(scope["headers"], UUID)

    def form_error(self, error: Exception, id: str) -> Answer:
        """Return status, headers and body for an error."""
        if isinstance(error, BodyTooLarge):
            return 413, [], b""
        status, kind = http_status(error)
        reason = None
        if isinstance(error, Unauthorized):
            status = 400
        elif not isinstance(error, (ServeError, ArchiveError)):
            logger.error("request %s", id, exc_info=error)
        elif isinstance(error, BadMessage):
            return error_answer(400, "BadRequestException", "Invalid HTTP message.", str(error))
        elif isinstance(error, FetchFailed | UrlRefused):
            reason = error.reason
        declared = isinstance(error, (ServeError, ArchiveError))
        message = str(error) if declared else f"internal error ({type(error).__name__})"
        answer = error_answer(status, kind, message, reason)
        if isinstance(error, Unavailable):
            answer[1].append((b"retry-after", str(error.retry_after_s).encode()))
        return answer


def segments(path: str) -> list[str]:
    """Split a decoded path as TorchServe does: empty parts at its end do not count."""
    parts = path.split("/")[1:]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def parameters(scope: Scope) -> dict[str, str]:
    """Return the query's parameters; the first of a name counts."""
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return dict(reversed(pairs))


def integer(values: Mapping[str, Any], name: str, default: int) -> int:
    """Return a whole number; whatever is none is the default, as in TorchServe."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return default
    try:
        return int(value)
    except ValueError:
        return default


def boolean(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return whether a value is `true`, in any case."""
    value = values.get(name)
    return default if value is None else str(value).lower() == "true"


def json_answer(value: Any, status: int = 200) -> Answer:
    """Return an answer of the server's own: JSON over several lines, with a line end."""
    return status, list(JSON), (json.dumps(value, indent=2) + "\n").encode()


def status_answer(text: str, status: int = 200) -> Answer:
    """Return what TorchServe's management API says of a change."""
    return json_answer({"status": text}, status)


def error_answer(status: int, kind: str, message: str, reason: str | None = None) -> Answer:
    """Return an error; what it says beyond TorchServe's words is in a header.

    Args:
        kind: the name of TorchServe's class.
    """
    answer = json_answer({"code": status, "type": kind, "message": message}, status)
    if reason:
        logger.warning("%d %s: %s", status, message, reason)
        line = " ".join(reason.split())[:MAX_REASON]
        answer[1].append((REASON, line.encode("ascii", "replace")))
    return answer
