"""The clients of a soak: predictions, explanations, and some that leave before their answer."""

from __future__ import annotations

import http.client
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

ANSWER_WITHIN_S = 60
LEAVE_EVERY_S = 0.2


class Account:
    """What became of the requests of one kind: sent = answered + failed + lost.

    Failed is an answer with another status than 200, lost is none at all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies_ms: list[float] = []
        self.sent = self.answered = self.failed = self.lost = 0
        self.errors: Counter[str] = Counter()

    def add(self, latency_ms: float, status: int | None, error: str = "") -> None:
        """Count one request; status is None where no answer came."""
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
        self.disconnects = 0

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
        for _ in range(clients):
            self._add(lambda: self._ask(path, contents, account))

    def leave(self, path: str, body: Path) -> None:
        """Have a client hang up with half of the body sent, or all of it, or at the answer."""
        self._add(lambda: self._leave(path, body.read_bytes()))

    def _add(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))

    def _ask(self, path: str, bodies: Sequence[bytes], account: Account) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_WITHIN_S)
        for body in itertools.cycle(bodies):
            if self._done.is_set():
                break
            began = time.perf_counter()
            status, error = None, ""
            try:
                connection.request("POST", path, body, {"Content-Type": "image/png"})
                answer = connection.getresponse()
                content = answer.read()
                status, error = answer.status, f"{answer.status}: {content[:200]!r}"
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
