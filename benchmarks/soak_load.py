"""The clients of a soak: predictions, explanations, some that leave early, and some that flood."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

ANSWER_WITHIN_S = 60
LEAVE_EVERY_S = 0.2
FLOOD_EVERY_S = 1.0
CLOSE = 1e-4
"""How far a number may be from the first answer's: batches of other sizes round otherwise."""
OF_A_VERSION = {"version", "archive_digest"}
"""Parts of an explanation that differ between versions of one model."""
FLOODS: tuple[tuple[int, bytes], ...] = (
    (200, b"GET / HTTP/9\r\n\r\n"),
    (
        1,
        b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"a" * (1 << 21) + b"\r\n\r\n",
    ),
    (50, b"GET /ping HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\r\n"),
    (20, b"GET /predictions/nobody HTTP/1.1\r\nHost: x\r\n\r\n" * 50),
    (
        5,
        b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n[[[[[[[[["
        * 50,
    ),
    (50, b"POST /predictions/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\nhalf"),
)
"""How many connections at once, and what each of them sends; then it is closed."""


class Account:
    """What became of the requests of one kind: sent = answered + failed + lost.

    Failed is an answer with another status than 200, or of another value; lost is none at all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies_ms: list[float] = []
        self.sent = self.answered = self.failed = self.lost = 0
        self.errors: Counter[str] = Counter()

    def add(self, latency_ms: float, status: int | None, error: str = "") -> None:
        """Count one request; status is None where no answer came, 200 where a right one did."""
        with self._lock:
            self.sent += 1
            self._latencies_ms.append(latency_ms)
            if status == 200:
                self.answered += 1
            else:
                self.failed += status is not None
                self.lost += status is None
                self.errors[error[:200]] += 1

    def take_latencies_ms(self) -> list[float]:
        """Return the latencies since the last call, sorted."""
        with self._lock:
            taken, self._latencies_ms = self._latencies_ms, []
        return sorted(taken)


class Clients:
    """Threads that send requests until the block ends.

    Args:
        address: host and port of the inference API.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []
        self.disconnects = self.floods = 0

    def __enter__(self) -> Clients:
        """Start."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End after the answers to what is on its way."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def ask(self, path: str, bodies: Sequence[Path], account: Account, clients: int) -> None:
        """Have clients post these bodies in rotation, each over one connection that it keeps."""
        contents = [body.read_bytes() for body in bodies]
        expected = [self._first(path, content) for content in contents]
        for _ in range(clients):
            self._add(lambda: self._ask(path, contents, expected, account))

    def leave(self, path: str, body: Path) -> None:
        """Have a client hang up with half of the body sent, or all of it, or at the answer."""
        self._add(lambda: self._leave(path, body.read_bytes()))

    def flood(self) -> None:
        """Have a client send, from many connections at once, what is refused or never ends."""
        self._add(self._flood)

    def _first(self, path: str, content: bytes) -> bytes:
        """Return what is answered before anything happens."""
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_WITHIN_S)
        connection.request("POST", path, content, {"Content-Type": "image/png"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise OSError(f"POST {path} answered {answer.status}: {body[:200]!r}")
        connection.close()
        return body

    def _add(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))

    def _ask(
        self, path: str, bodies: Sequence[bytes], expected: Sequence[bytes], account: Account
    ) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_WITHIN_S)
        for body, right in itertools.cycle(zip(bodies, expected, strict=True)):
            if self._done.is_set():
                break
            began = time.perf_counter()
            status, error = None, ""
            try:
                connection.request("POST", path, body, {"Content-Type": "image/png"})
                answer = connection.getresponse()
                content = answer.read()
                status, error = answer.status, f"{answer.status}: {content[:200]!r}"
                if status == 200 and not is_same(content, right):
                    status, error = 0, f"another answer: {content[:200]!r}"
            except (OSError, http.client.HTTPException) as failure:
                error = repr(failure)
                connection.close()
            account.add(1000 * (time.perf_counter() - began), status, error)
        connection.close()

    def _leave(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for sent in itertools.cycle([head + body[: len(body) // 2], head + body]):
            if self._done.wait(LEAVE_EVERY_S):
                return
            with socket.create_connection(self._address, ANSWER_WITHIN_S) as client:
                client.sendall(sent)
            self.disconnects += 1

    def _flood(self) -> None:
        for count, content in itertools.cycle(FLOODS):
            if self._done.wait(FLOOD_EVERY_S):
                return
            opened = []
            with contextlib.suppress(OSError):  # it is refused, which is right
                for _ in range(count):
                    opened.append(socket.create_connection(self._address, 5))
                    opened[-1].settimeout(5)
                for each in opened:
                    each.sendall(content)
            for each in opened:
                each.close()
            self.floods += 1


def is_same(answer: bytes, expected: bytes) -> bool:
    """Return whether an answer says what the first one did; numbers may be `CLOSE`."""
    return answer == expected or _is_close(*map(_values, (answer, expected)))


def _values(answer: bytes) -> object:
    try:
        return json.loads(answer)
    except ValueError:
        return answer


def _is_close(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        shared = one.keys() - OF_A_VERSION
        return one.keys() == other.keys() and all(_is_close(one[k], other[k]) for k in shared)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if type(one) is type(other) is float:
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    return one == other
