"""How a server is reached: address, token, certificates. What both clients have in common."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from modelyard_client.errors import BadAnswer
from modelyard_client.retries import Answer, Attempt, Flow

T = TypeVar("T")

MOST_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Connection:
    """Where a server is, and how it is called.

    Args:
        url: URL of the API.
        token: or the file that it is in, which is read for each request.
        ca: certificates to trust in place of the system's, or how TLS is spoken.
        most_bytes: longest answer.
        trusts_environment: whether proxies are taken from the environment.

    Raises:
        ValueError: the URL is not one, or the certificates cannot be read.
    """

    url: str
    token: str | Path | None = None
    ca: Path | str | ssl.SSLContext | None = None
    most_bytes: int = 1 << 28
    trusts_environment: bool = True

    def __post_init__(self) -> None:
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise ValueError(
                f"{self.url} is not a URL; expected http://HOST:PORT or https://HOST:PORT"
            )
        try:
            httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{self.url} is not a URL: {error}") from error

    def options(self) -> dict[str, Any]:
        """Return what httpx's clients are made with."""
        tls = self.ca
        if not self.url.startswith("https:"):  # reading the system's certificates takes 10 ms
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        elif not isinstance(tls, ssl.SSLContext):
            try:
                tls = ssl.create_default_context(cafile=tls)
            except OSError as error:  # ssl.SSLError is one
                raise ValueError(f"cannot use the certificates in {self.ca}: {error}") from error
        return {
            "base_url": self.url.rstrip("/"),
            "verify": tls,
            "trust_env": self.trusts_environment,
            "follow_redirects": False,  # a token is for one server
        }

    def build(self, client: httpx.Client | httpx.AsyncClient, attempt: Attempt) -> httpx.Request:
        """Return a request of httpx.

        Raises:
            ValueError, OSError: the token cannot be read.
        """
        request = attempt.request
        return client.build_request(
            request.method,
            request.path,
            params=dict(request.query) or None,
            headers={**self._authorization(), **request.headers},
            content=request.body if request.method != "GET" else None,
            timeout=attempt.timeout_s,
        )

    def _authorization(self) -> Mapping[str, str]:
        token = self.token
        if isinstance(token, Path):
            with token.open("rb") as file:
                token = file.read(MOST_TOKEN_BYTES + 1).decode().strip()
            if not token or len(token) > MOST_TOKEN_BYTES:
                raise ValueError(f"the file {self.token} holds no token, or too long a one")
        return {"Authorization": f"Bearer {token}"} if token is not None else {}

    def collect(self, body: bytearray, chunk: bytes) -> None:
        """Add a piece of a body.

        Raises:
            BadAnswer: it has become too long.
        """
        body += chunk
        if len(body) > self.most_bytes:
            raise BadAnswer(
                f"the answer has more than {self.most_bytes} bytes; raise max_answer_bytes"
            )


def is_left_open(attempt: Attempt, response: httpx.Response) -> bool:
    """Return whether an answer is read by whoever asked."""
    return attempt.request.is_stream and response.status_code < 300


def answer_of(response: httpx.Response, body: bytes | None) -> Answer:
    """Return an answer; without a body it is left open."""
    stream = response if body is None else None
    return Answer(response.status_code, response.headers, body or b"", stream)


def run_apart(connection: Connection, flow: Flow[T]) -> T:
    """Take the steps of a call by a client of its own: the one that asked may be closed by now."""
    from modelyard_client.synchronous import Client

    with Client(
        connection.url,
        token=connection.token,
        ca=connection.ca,
        max_answer_bytes=connection.most_bytes,
        trust_env=connection.trusts_environment,
    ) as client:
        return client.run(flow)
