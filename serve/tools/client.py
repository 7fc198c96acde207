"""Calls to a running server, for the command line."""

from __future__ import annotations

import http.client
import json
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from modelyard.serve.errors import ServeError, StartError

TIMEOUT_S = 600.0


class Answer(NamedTuple):
    """An HTTP answer with status 200 to 299."""

    content_type: str
    body: bytes

    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.body)


class RequestFailed(ServeError):
    """The server answered with an error; the message is the server's."""


def call(
    url: str,
    method: str,
    path: str,
    *,
    query: dict[str, Any] | None = None,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    token: str | None = None,
) -> Answer:
    """Send one request.

    Args:
        url: base URL of an API.
        query: parameters; those that are None are left out.

    Raises:
        StartError: nobody answers at `url`.
        RequestFailed: the answer is an error.
    """
    parts = urlsplit(url)
    if parameters := {name: value for name, value in (query or {}).items() if value is not None}:
        path = f"{path}?{urlencode(parameters)}"
    sent = dict(headers or {})
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, sent)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise StartError(
            f"no answer from {url} ({error}); is the server running? see `modelyard serve status`"
        ) from error
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        raise RequestFailed(_message(response.status, content))
    return Answer(response.headers.get("content-type", ""), content)


def _message(status: int, content: bytes) -> str:
    try:
        error = json.loads(content)
        return f"{status} {error['type']}: {error['message']} (request {error['request_id']})"
    except (ValueError, KeyError, TypeError):
        return f"{status}: {content[:500].decode(errors='replace')}"
