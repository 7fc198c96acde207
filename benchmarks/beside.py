"""What explanations cost the predictions beside them.

    python -m benchmarks.beside [--rounds 3] [--seconds 8] [--workers 1] [--clients 4]

Serves the digits model (ONNX), measures predictions over 4 connections, then the same while
`--clients` ask for explanations without pause, in turns. The goal, p99 up by less than 25 %, is for
machines with a core each for the server with wrk, for each worker and for the explainer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.archives import build_digits
from benchmarks.server import Server
from benchmarks.wrk import run_wrk

CONNECTIONS = 4
WARM_UP_S = 2
EXPLAIN_TIMEOUT_S = 60


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    rows: dict[str, list[tuple[float, float, float]]] = {"alone": [], "beside": []}
    explained = 0
    with tempfile.TemporaryDirectory(prefix="modelyard-beside-") as name:
        folder = Path(name)
        (subject,) = build_digits(folder, ("onnx",))
        send = subject.content_type, subject.requests
        with Server(subject, given.workers, folder / "state") as server:
            run_wrk(server.url, CONNECTIONS, WARM_UP_S, *send)
            for _ in range(given.rounds):
                alone = run_wrk(server.url, CONNECTIONS, given.seconds, *send)
                with _explaining(server.url, subject.requests[7], given.clients) as count:
                    beside = run_wrk(server.url, CONNECTIONS, given.seconds, *send)
                explained += len(count)
                for key, load in (("alone", alone), ("beside", beside)):
                    rate = (load.requests - load.failures) / load.seconds
                    rows[key].append((rate, load.p50_ms, load.p99_ms))
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {given.workers} worker(s), wrk -t1 -c{CONNECTIONS}, {given.clients} "
          f"clients explaining, medians of {given.rounds} rounds of {given.seconds} s")  # fmt: skip
    print(f"{'PREDICTIONS':<12} {'req/s':>8} {'p50 ms':>8} {'p99 ms':>8}")
    medians = {}
    for key, found in rows.items():
        rate, p50, p99 = (statistics.median(column) for column in zip(*found, strict=True))
        medians[key] = p99
        print(f"{key:<12} {rate:>8,.0f} {p50:>8.2f} {p99:>8.2f}")
    rise = 100 * (medians["beside"] / medians["alone"] - 1)
    per_s = explained / given.rounds / given.seconds
    print(f"p99 rises by {rise:.0f} %; {per_s:.0f} explanations/s meanwhile")


@contextmanager
def _explaining(url: str, scan: Path, clients: int) -> Iterator[list[float]]:
    """Ask for explanations without pause; give the list of how long each took, in seconds."""
    done = threading.Event()
    took_s: list[float] = []
    body = scan.read_bytes()
    explain = url.replace("/predictions/", "/explanations/")

    def ask() -> None:
        while not done.is_set():
            began = time.perf_counter()
            request = urllib.request.Request(explain, body, {"Content-Type": "image/png"})
            with urllib.request.urlopen(request, timeout=EXPLAIN_TIMEOUT_S) as answer:
                answer.read()
            took_s.append(time.perf_counter() - began)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_S)
    took_s.clear()
    try:
        yield took_s
    finally:
        done.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
