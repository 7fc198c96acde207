"""A server of our own, started and stopped by the product's command, and what its processes use."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import procfs
from benchmarks.archives import CommandFailed, Subject, modelyard, modelyard_json
from benchmarks.results import OURS, Footprint

IDLE_CORES = 0.05
IDLE_WATCH_S = 0.4
IDLE_TIMEOUT_S = 120
ANSWER_TIMEOUT_S = 30


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far."""

    server_s: float
    workers_s: float

    @property
    def total_s(self) -> float:
        """Both together."""
        return self.server_s + self.workers_s


def ask(url: str, subject: Subject) -> bytes:
    """Post a subject's first request and return what status 200 came with.

    Raises:
        OSError: there was no answer, or one of another status.
    """
    body, headers = subject.requests[0].read_bytes(), {"Content-Type": subject.content_type}
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        return bytes(answer.read())


def wait_idle(usage: Callable[[], Usage]) -> None:
    """Wait until a server works no more on requests that the last run left behind.

    The load generator ends with a request in flight on every connection. What of them has reached
    a worker is answered to nobody, and would be a neighbour of the next run.

    Raises:
        RuntimeError: it works on without any request.
    """
    limit = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < limit:
        before = usage().total_s
        time.sleep(IDLE_WATCH_S)
        if usage().total_s - before <= IDLE_CORES * IDLE_WATCH_S:
            return
    raise RuntimeError(f"the server is still busy {IDLE_TIMEOUT_S} s after the last request")


class Server:
    """One running server with one model, on free ports and with its own state folder.

    A context manager; the server is stopped when the block ends, however it ends.
    """

    def __init__(
        self,
        subject: Subject,
        workers: int,
        state_dir: Path,
        device: str = "cpu",
        options: Sequence[str | Path] = (),
    ) -> None:
        self._device, self._options = device, options
        self._state_dir = state_dir
        self._model = subject.name
        self._store = subject.archive.parent
        self._workers = workers
        self.start_s = 0.0
        """From the command's start to the first answer, to its return where there is no request."""
        self.answer = b""
        """The first, to the subject's first request."""
        self.subject = subject
        self.pid = -1
        self.worker_pids: list[int] = []
        self.url = ""

    def __enter__(self) -> Self:
        """Start, and find the processes."""
        began = time.perf_counter()
        try:
            about = modelyard_json(
                "serve", "start", "--model-store", self._store, "--models", self._model,
                "--workers", str(self._workers), "--state-dir", self._state_dir,
                "--device", self._device, "--port", "0",
                "--management-port", "0", "--metrics-port", "0", *self._options,
            )  # fmt: skip
            self.pid = int(about["pid"])
            self.url = f"{about['inference']}/predictions/{self._model}"
            if self.subject.requests:
                self.answer = ask(self.url, self.subject)
            self.start_s = time.perf_counter() - began
            self.worker_pids = [int(worker["pid"]) for worker in self._describe()["workers"]]
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop by command, by force when that fails."""
        self._stop()

    def usage(self) -> Usage:
        """Return what the processes have used so far."""
        return Usage(procfs.cpu_s(self.pid), sum(map(procfs.cpu_s, self.worker_pids)))

    def server_memory(self) -> procfs.Memory:
        """Return the memory of the server process."""
        return procfs.memory(self.pid)

    def worker_memory(self) -> procfs.Memory:
        """Return the mean memory of a worker."""
        found = [procfs.memory(pid) for pid in self.worker_pids]
        return procfs.Memory(
            sum(memory.rss_mb for memory in found) / len(found),
            sum(memory.pss_mb for memory in found) / len(found),
            sum(memory.own_mb for memory in found) / len(found),
        )

    def footprint(self, subject: str, round: int) -> Footprint:
        """Describe what the processes take now, and how long the start took."""
        server, each = self.server_memory(), self.worker_memory()
        return Footprint(
            subject, OURS, len(self.worker_pids), round, self.start_s,
            server.pss_mb + len(self.worker_pids) * each.pss_mb, server.rss_mb, server.pss_mb,
            each.rss_mb, each.pss_mb, procfs.maps(self.pid, "libtorch"),
        )  # fmt: skip

    def _describe(self) -> dict[str, Any]:
        about = modelyard_json("serve", "status", "--state-dir", self._state_dir)
        return dict(about["models"][0])

    def _stop(self) -> None:
        try:
            modelyard("serve", "stop", "--state-dir", self._state_dir)
        except CommandFailed:
            if self.pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            raise
