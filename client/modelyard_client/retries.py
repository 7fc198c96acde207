"""When a request is sent once more, and when not.

A request may be sent again where the server has not begun with it: nobody took the connection, or
the answer says to come back. One that was sent and not answered may have run; it is sent again only
where that does no harm, which its caller says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import Any, TypeVar

import httpx

from modelyard_client.errors import BadAnswer, NoAnswer, NotTrusted, RequestFailed

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
COME_BACK = frozenset({429, 503})
"""Statuses whose `Retry-After` says that nothing was done."""
OF_GATEWAYS = frozenset({502, 503, 504})
"""What a proxy answers whose server is gone."""
LONGEST_TIME_S = 86_400.0
"""Longest time that a server takes as X-Request-Timeout."""

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One request, as it is sent each time."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_idempotent: bool = False
    """Whether it may run twice."""
    is_stream: bool = False
    """Whether its answer is read piece by piece."""


@dataclass(frozen=True)
class Attempt:
    """A step: send the request, and give up after this time."""

    request: Request
    timeout_s: float


@dataclass(frozen=True)
class Pause:
    """A step: wait."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    stream: httpx.Response | None = None
    """Open, where the request asked for that and the answer is not an error."""

    @property
    def version(self) -> str:
        """The version of the model that answered; empty where the server does not say."""
        return self.headers.get("x-model-version", "")

    @property
    def request_id(self) -> str:
        """The id by which the server's log knows the request."""
        return self.headers.get("x-request-id", "")

    @property
    def content_type(self) -> str:
        """The media type, without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Outputs(dict[str, Any]):
    """A model's outputs by name; BF16 as float32, BYTES as an array of bytes."""

    version = ""
    """The version of the model that answered; empty where the server does not say."""
    request_id = ""
    """The id by which the server's log knows the request."""


Step = Attempt | Pause
Outcome = Answer | Exception | None
"""What came of a step: an answer or httpx's error of an attempt, nothing of a pause."""
Flow = Generator[Step, Outcome, T]
"""Yields the steps of a call, is sent their outcomes, and returns what the call is for. So that the
same calls run with and without asyncio."""


@dataclass(frozen=True)
class Retries:
    """How often, and how long."""

    attempts: int = 4
    timeout_s: float = 60.0
    """Time of the call, from its begin to its answer, pauses included."""
    draw: Callable[[float, float], float] = random.uniform

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s}; expected seconds above 0")

    def send(self, request: Request) -> Flow[Answer]:
        """Return the answer to a request, sent as often as that is safe and the time allows.

        Raises:
            NoAnswer: nobody answered, or not in time.
            RequestFailed: the last answer is an error.
        """
        ends_at = monotonic() + self.timeout_s
        for number in range(1, self.attempts + 1):
            left_s = max(0.001, ends_at - monotonic())
            outcome = yield Attempt(_with_time(request, left_s), left_s)
            if isinstance(outcome, Answer) and outcome.status < 300:
                return outcome
            error, may_retry, after_s = self._judge(request, outcome)
            pause_s = after_s + self.draw(0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number))
            if not may_retry or number == self.attempts or monotonic() + pause_s >= ends_at:
                raise error
            yield Pause(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _judge(self, request: Request, outcome: Outcome) -> tuple[Exception, bool, float]:
        """Return the error of an attempt, whether another one is safe, and after how long."""
        if isinstance(outcome, Answer):
            after_s = read_retry_after(outcome.headers.get("retry-after"))
            id = outcome.headers.get("x-request-id", "")
            failed = RequestFailed(outcome.status, outcome.body, id, after_s)
            told = outcome.status in COME_BACK and after_s is not None
            gone = outcome.status in OF_GATEWAYS and request.is_idempotent
            return failed, told or gone, after_s or 0.0
        if isinstance(outcome, httpx.HTTPError):
            error = _explain(outcome)
            not_sent = isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout)
            is_late = isinstance(outcome, httpx.TimeoutException)
            again = not_sent or (request.is_idempotent and not is_late)
            return error, again and not isinstance(error, NotTrusted), 0.0
        assert outcome is not None, "a pause is not judged"
        return outcome, False, 0.0


def _with_time(request: Request, left_s: float) -> Request:
    """Return the request with the time that its client still has, for the server to reckon with."""
    if left_s > LONGEST_TIME_S or request.method == "GET":
        return request
    return replace(request, headers={"X-Request-Timeout": f"{left_s:.3f}", **request.headers})


def _explain(error: httpx.HTTPError) -> NoAnswer | BadAnswer:
    """Return what an error of the connection means."""
    try:
        url = str(error.request.url.copy_with(query=None))
    except RuntimeError:  # of no request
        url = "the server"
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return NotTrusted(f"the certificate of {url} is not trusted: {reason or text}")
    if isinstance(error, httpx.DecodingError):
        return BadAnswer(f"the answer of {url} cannot be decoded: {text}")
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return NoAnswer(f"no answer from {url} in time ({type(error).__name__})")
    if "WRONG_VERSION_NUMBER" in text:
        plain = url.replace("https:", "http:", 1)
        return NoAnswer(f"no TLS is spoken at {url}; expected its URL to begin as {plain}")
    return NoAnswer(f"no answer from {url} ({text})")


def read_retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After`: a number, or a date; None where it says neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, TypeError):
        return None
