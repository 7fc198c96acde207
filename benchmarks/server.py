"""A server of our own, started and stopped by the product's command, and what its processes use."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import procfs
from benchmarks.archives import CommandFailed, Subject, modelyard, modelyard_json


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far."""

    server_s: float
    workers_s: float


class Server:
    """One running server with one model, on free ports and with its own state folder.

    A context manager; the server is stopped when the block ends, however it ends.
    """

    def __init__(
        self, subject: Subject, workers: int, state_dir: Path, device: str = "cpu"
    ) -> None:
        self._device = device
        self._state_dir = state_dir
        self._model = subject.name
        self._store = subject.archive.parent
        self._workers = workers
        self.start_s = 0.0
        """From the command's start to its return: the models are ready."""
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
                "--management-port", "0", "--metrics-port", "0",
            )  # fmt: skip
            self.start_s = time.perf_counter() - began
            self.pid = int(about["pid"])
            self.url = f"{about['inference']}/predictions/{self._model}"
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
