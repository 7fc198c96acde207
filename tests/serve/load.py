"""An accounted load: what is sent is the sum of its outcomes, and no answer is a failure."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from tests.serve.live import LiveServer, descendants, is_alive, poll

NO_ANSWER, WRONG_ANSWER = "no answer", "another's answer"
ANSWER_WITHIN_S = 30.0
"""What reliability promises of a server whose models misbehave."""


class Answer(NamedTuple):
    """Status and body of one answer."""

    status: int
    body: bytes


def ask(
    server: LiveServer, model: str, body: str, timeout_s: float = 240, host: str = "127.0.0.1"
) -> Answer:
    """Send one request over a connection of its own, which leaves no descriptor behind.

    Args:
        host: address of this machine that it comes from.

    Raises:
        OSError, http.client.HTTPException: the connection ended without an answer.
    """
    connection = http.client.HTTPConnection(
        *server.address, timeout=timeout_s, source_address=(host, 0)
    )
    try:
        connection.request("POST", f"/predictions/{model}", body, {"Connection": "close"})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()


class Load:
    """Clients that send requests one after the other, each over a connection that it keeps.

    The model must answer `{"body": …}` with what it was sent; every body is sent once.

    Args:
        prefix: begins each body, as in `sleep 0.01 `.
        pause_s: of a client between an answer and its next request.
    """

    def __init__(
        self,
        server: LiveServer,
        model: str,
        *,
        clients: int = 4,
        prefix: str = "",
        pause_s: float = 0.0,
    ) -> None:
        self._server = server
        self._path = f"/predictions/{model}"
        self._prefix = prefix
        self._pause_s = pause_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        self.sent = 0
        self.outcomes: Counter[int | str] = Counter()
        """HTTP status, NO_ANSWER or WRONG_ANSWER → how many."""
        self.errors: list[str] = []
        """What came instead of an answer of status 200."""
        self.slowest_s = 0.0

    def __enter__(self) -> Self:
        """Start, and return when answers come."""
        for thread in self._threads:
            thread.start()
        poll(lambda: sum(self.outcomes.values()) >= len(self._threads), "the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        """End after the answers to what is on its way, and check the account."""
        self._done.set()
        for thread in self._threads:
            thread.join()
        assert self.sent == sum(self.outcomes.values())
        assert self.outcomes[NO_ANSWER] == self.outcomes[WRONG_ANSWER] == 0, self

    def __repr__(self) -> str:
        """Return what became of the requests."""
        return (
            f"{self.sent} sent: {dict(self.outcomes)}, slowest {self.slowest_s:.2f} s"
            f"{''.join(f'; {error}' for error in self.errors[:5])}"
        )

    def _run(self, client: int) -> None:
        connection = http.client.HTTPConnection(*self._server.address, timeout=ANSWER_WITHIN_S)
        number = 0
        while not self._done.is_set():
            number += 1
            body = f"{self._prefix}{client}.{number}"
            with self._lock:
                self.sent += 1
            began = time.monotonic()
            outcome: int | str
            try:
                connection.request("POST", self._path, body)
                answer = connection.getresponse()
                outcome, text = answer.status, answer.read()
                if outcome == 200 and json.loads(text).get("body") != body:
                    outcome = WRONG_ANSWER
            except (OSError, http.client.HTTPException) as error:
                outcome, text = NO_ANSWER, repr(error).encode()
                connection.close()
            with self._lock:
                self.outcomes[outcome] += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if outcome != 200:
                    self.errors.append(f"{outcome}: {text.decode(errors='replace')}")
            if self._pause_s:
                self._done.wait(self._pause_s)
        connection.close()


def descriptors(pid: int) -> int:
    """Return how many files, sockets and pipes a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


@contextmanager
def unharmed(server: LiveServer, healthy: str) -> Iterator[Load]:
    """Run a block beside a load on a healthy model, and check that nobody else noticed.

    The server lives and answers /ping, no request of the healthy model failed, and
    descriptors and processes are as many as before.
    """
    # A block before may have ended a worker, whose place is empty until the next one is ready.
    poll(lambda: server.client.get("/ping").json() == {"status": "Healthy"}, "all are well", 15)
    server.describe(healthy)
    server.metric("modelyard_ready_workers")
    files, processes = descriptors(server.pid), len(descendants(server.pid))
    with Load(server, healthy, clients=2, pause_s=0.02) as load:
        yield load
        assert server.client.get("/ping").json()["status"] in ("Healthy", "Unhealthy")
        poll(lambda: server.client.get("/ping").json() == {"status": "Healthy"}, "all are well", 15)
    assert set(load.outcomes) == {200}, load
    assert is_alive(server.pid)
    poll(lambda: len(descendants(server.pid)) == processes, "as many processes as before", 5)
    poll(lambda: descriptors(server.pid) <= files, "no more descriptors than before", 5)
