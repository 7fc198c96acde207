"""What N servers behind one port give and cost, and how evenly the kernel spreads connections.

python -m benchmarks.servers            # two against one, and one of two killed under load
python -m benchmarks.servers --paper    # the table of connections over servers, by arithmetic
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.archives import modelyard, modelyard_json
from benchmarks.wrk import Load, run_wrk

HANDLER = '''\
"""Takes a time for each batch, and no core."""

import time


def handle(data, context):
    if data is None:
        return None
    time.sleep({seconds})
    return ["ok"] * len(data)
'''
MODELS = {"at-once": 0.0, "2-ms": 0.002, "20-ms": 0.02}
CONNECTIONS = 64
WORKERS = 4
TRIALS = 2000
LOAD_S, BACK_S = 4, 6
REQUEST = b"POST /predictions/2-ms HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\nx"
PORTS = ["--port=0", "--management-port=0", "--metrics-port=0"]


def spread(connections: int, servers: int, trials: int = TRIALS) -> tuple[float, float]:
    """Return the busiest server's connections over the mean: the median, and in 1 of 100 cases.

    The kernel chooses by a hash of both addresses, which is a choice by chance for each connection.
    """
    rng, worst = random.Random(0), []
    for _ in range(trials):
        counts = Counter(rng.randrange(servers) for _ in range(connections))
        worst.append(max(counts.values()) * servers / connections)
    worst.sort()
    return worst[trials // 2], worst[trials * 99 // 100]


def print_spread() -> None:
    """Print the table for the page."""
    servers = (2, 4, 8, 16)
    print("| connections |", " | ".join(f"{n} servers" for n in servers), "|")
    print("| --- |" + " --- |" * len(servers))
    for connections in (16, 64, 256, 1024, 4096):
        cells = [spread(connections, n) for n in servers]
        print(f"| {connections} |", " | ".join(f"{m:.2f} ({w:.2f})" for m, w in cells), "|")


@contextlib.contextmanager
def running(store: Path, state: Path, servers: int) -> Iterator[dict[str, object]]:
    """Start the models on so many servers."""
    folders = [f"--model-store={store}", f"--state-dir={state}"]
    command = ["serve", "start", *PORTS, *folders, f"--servers={servers}", "--device=cpu"]
    try:
        yield modelyard_json(*command, f"--workers={WORKERS}", *(f"--models={m}" for m in MODELS))
    finally:
        modelyard("serve", "stop", f"--state-dir={state}")


def make_store(folder: Path) -> Path:
    """Archive the models."""
    config = folder / "model-config.yaml"
    config.write_text("batchSize: 1\njobQueueSize: 1000\n")
    for name, seconds in MODELS.items():
        handler = folder / f"{name.replace('-', '_')}.py"
        handler.write_text(HANDLER.replace("{seconds}", str(seconds)))
        modelyard("archive", name, "--handler", handler, "--config-file", config, "-o", folder)
    return folder


async def load_and_kill(url: str, pid: int) -> Counter[str]:
    """Return what clients of one connection each saw, while a server was killed."""
    host, _, port = url.removeprefix("http://").partition(":")
    seen: Counter[str] = Counter()
    until = time.monotonic() + LOAD_S

    async def ask() -> None:
        opened = None
        while time.monotonic() < until:
            try:
                opened = opened or await asyncio.open_connection(host, int(port))
                opened[1].write(REQUEST)
                head = await opened[0].readuntil(b"\r\n\r\n")
                await opened[0].readexactly(len("ok"))
                seen["answered" if b" 200 " in head.splitlines()[0] else "refused"] += 1
            except (OSError, asyncio.IncompleteReadError):
                seen["failed"] += 1
                if opened is not None:
                    opened[1].close()
                opened = None

    clients = [asyncio.create_task(ask()) for _ in range(CONNECTIONS)]
    await asyncio.sleep(1)
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*clients)
    return seen


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", action="store_true", help="the table only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    if options.paper:
        print_spread()
        return
    with tempfile.TemporaryDirectory(prefix="servers-") as folder:
        root = Path(folder)
        store, body = make_store(root), root / "body"
        body.write_bytes(b"x" * 100)
        with running(store, root / "one", 1) as one, running(store, root / "two", 2) as two:
            for model in MODELS:
                found: dict[int, list[Load]] = {1: [], 2: []}
                for turn in range(options.rounds):
                    for count in ((1, 2), (2, 1))[turn % 2]:
                        url = f"{(one, two)[count - 1]['inference']}/predictions/{model}"
                        load = run_wrk(url, CONNECTIONS, options.seconds, "text/plain", [body])
                        found[count].append(load)
                rates = {
                    n: statistics.median(each.requests / each.seconds for each in loads)
                    for n, loads in found.items()
                }
                tails = {
                    n: statistics.median(load.p99_ms for load in loads)
                    for n, loads in found.items()
                }
                lost = sum(load.failures for load in (*found[1], *found[2]))
                ratio = rates[2] / rates[1]
                print(
                    f"{model}: one {rates[1]:.0f}/s, p99 {tails[1]:.0f} ms; two {rates[2]:.0f}/s,"
                    f" p99 {tails[2]:.0f} ms; ratio {ratio:.2f}, {lost} failed"
                )
            pids = two["servers"]
            assert isinstance(pids, list)
            for pid in pids:
                seen = asyncio.run(load_and_kill(str(two["inference"]), pid))
                print(f"one of two killed under {CONNECTIONS} connections: {dict(seen)}")
                time.sleep(BACK_S)


if __name__ == "__main__":
    main()
