"""The bare loop: the same handler in the same kind of process, with no server around it.

`Bare` is the parent's side. `python -m benchmarks.bare FOLDER` is one process of it: it loads an
unpacked archive exactly as a worker does, then runs what each line on its standard input asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.archives import ROOT, Subject
from modelyard.archiver import open_archive
from modelyard.archiver.untrusted.names import MANIFEST_NAME

LOAD = "load.json"
WARM_UP_CALLS = 20
WARM_UP_S = 1.0
"""Time for slow models, which need fewer calls."""
STOP_TIMEOUT_S = 10

# As the server sets it for its workers.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
}


@dataclass(frozen=True)
class Loop:
    """What one run of the bare loop gave, all its processes together."""

    requests: int
    seconds: float
    cpu_s: float
    p50_ms: float
    """Median of one call of the handler, whatever its batch."""
    p99_ms: float


class Bare:
    """One-thread processes, each with the handler of an archive; a context manager.

    Args:
        folder: where to unpack the archive.
        count: processes.
    """

    def __init__(self, subject: Subject, folder: Path, count: int) -> None:
        self._folder = folder
        if not folder.exists():
            unpack(subject, folder)
        files = [str(file) for file in subject.requests]
        command = [sys.executable, "-m", "benchmarks.bare", str(folder), *files]
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD},
                # As a worker; where Linux shares out cores by session, each has its own share.
                start_new_session=True,
            )
            for _ in range(count)
        ]

    def __enter__(self) -> Self:
        """Wait until every process has loaded."""
        for process in self._processes:
            _read_line(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the processes: at the end of their input, or by force."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def run(self, batch: int, seconds: float, processes: int) -> Loop:
        """Call the handler with `batch` requests at a time, in the first `processes` processes."""
        chosen = self._processes[:processes]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(f"{json.dumps({'batch': batch, 'seconds': seconds})}\n")
            process.stdin.flush()
        return merge_loops([Loop(**_read_line(process)) for process in chosen])


def merge_loops(loops: Sequence[Loop]) -> Loop:
    """Add up processes that ran at the same time; percentiles are the worst process's.

    Rates are added, each over its own time: a process ends with a whole call, not with the others.
    """
    requests = sum(loop.requests for loop in loops)
    return Loop(
        requests=requests,
        seconds=requests / sum(loop.requests / loop.seconds for loop in loops),
        cpu_s=sum(loop.cpu_s for loop in loops),
        p50_ms=max(loop.p50_ms for loop in loops),
        p99_ms=max(loop.p99_ms for loop in loops),
    )


def _read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the bare loop ended with code {process.wait()}")
    return dict(json.loads(line))


def unpack(subject: Subject, folder: Path, device: str = "cpu", batch_size: int = 8) -> None:
    """Unpack an archive, and write down the message that a worker would be sent."""
    with open_archive(subject.archive) as archive:
        archive.unpack(folder)
        manifest = archive.manifest
        message = {
            "name": subject.name,
            "folder": str(folder),
            "manifest": json.loads(archive.read(MANIFEST_NAME)),
            "handler": manifest.handler,
            "config_file": manifest.config_file,
            "device": device,
            "batch_size": batch_size,
            "worker": 1,
        }
    (folder / LOAD).write_text(json.dumps(message))


# -- one process -------------------------------------------------------------------------------


def main(folder: Path, files: Sequence[str]) -> None:
    """Load, say so, then run until the end of standard input."""
    from modelyard.serve.worker.load import load_service

    bodies = [Path(file).read_bytes() for file in files]
    service = load_service(json.loads((folder / LOAD).read_text()))
    print("{}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(asdict(_loop(service, bodies, **order))), flush=True)


def _loop(service: Any, bodies: Sequence[bytes], batch: int, seconds: float) -> Loop:
    """Call the handler for `seconds`, request bytes in and JSON bytes out."""
    warm_by = time.perf_counter() + WARM_UP_S
    for _ in range(WARM_UP_CALLS):
        _answer(service, bodies[:batch])
        if time.perf_counter() > warm_by:
            break
    spans: list[float] = []
    cpu_began, began = time.process_time(), time.perf_counter()
    now, at = began, 0
    while now - began < seconds:
        chosen = [bodies[(at + i) % len(bodies)] for i in range(batch)]
        at += batch
        _answer(service, chosen)
        before, now = now, time.perf_counter()
        spans.append(now - before)
    cpu_s = time.process_time() - cpu_began
    spans.sort()
    p50, p99 = (1000 * spans[int(share * (len(spans) - 1))] for share in (0.5, 0.99))
    return Loop(len(spans) * batch, now - began, cpu_s, p50, p99)


def _answer(service: Any, bodies: Sequence[bytes]) -> list[bytes]:
    service.context.reset([""] * len(bodies))
    rows = [{"body": bytearray(body)} for body in bodies]
    return [json.dumps(answer).encode() for answer in service.predict(rows, service.context)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
