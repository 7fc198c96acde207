"""What can go wrong with a call.

ClientError
├── RequestFailed     the server answered with an error
├── NoAnswer          nobody answered, or not in time
│   └── NotTrusted    whoever answered has a certificate that nobody vouches for
└── BadAnswer         what came is not what the protocol says
"""

from __future__ import annotations

import json
from typing import Any


class ClientError(Exception):
    """Base of every error that this package raises on purpose, but for wrong arguments."""


class NoAnswer(ClientError):
    """Nobody answered."""


class NotTrusted(NoAnswer):
    """The server's certificate is not trusted."""


class BadAnswer(ClientError):
    """The answer is not of the form that was asked for."""


class RequestFailed(ClientError):
    """The server answered with an error.

    Attributes:
        status: status of HTTP.
        type: the server's name for it, as `ModelNotFoundException`; empty where it names none.
        message: the server's.
        request_id: id by which the server's log knows it.
        retry_after_s: when the server says to come back; None where it does not.
    """

    def __init__(
        self, status: int, content: bytes, request_id: str = "", retry_after_s: float | None = None
    ) -> None:
        self.status = status
        self.retry_after_s = retry_after_s
        try:
            error = json.loads(content)
            self.type, self.message = str(error["type"]), str(error["message"])
            self.request_id = str(error.get("request_id") or request_id)
        except (ValueError, KeyError, TypeError, AttributeError):
            self.type, self.request_id = "", request_id
            self.message = content[:500].decode(errors="replace")
        # The arguments are those of a copy in another process.
        super().__init__(status, content, request_id, retry_after_s)

    def __str__(self) -> str:
        named = f" {self.type}" if self.type else ""
        asked = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status}{named}: {self.message}{asked}"


def numpy() -> Any:
    """Return numpy, which only calls with arrays need.

    Raises:
        ImportError: it is not installed; the message says what to install.
    """
    try:
        import numpy
    except ImportError as error:
        advice = "explain and infer give arrays; pip install 'modelyard-client[arrays]'"
        raise ImportError(f"numpy is not installed: {advice}", name="numpy") from error
    return numpy
