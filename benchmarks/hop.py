"""What a request costs in HAProxy: as it was, as it is, and without it, in turns.

    python -m benchmarks.hop [--rounds 3] [--seconds 3]

One cell of one worker, whose handler answers at once, is asked at its own address (`server`),
through Ray's HAProxy with `haproxy.sh` (`direct`), through the replica's Python, as cells of other
machines are (`hop`), and as both were before record 0121 (`large-direct`, `large-hop`: buffers of
1.1 MB). Bodies of 200 B and 100 KB; then 4,000 connections, each with a request. Needs Ray and wrk;
in namespaces of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.chaos import ALONE, CELL, PORT, PROXY, SERVER, Cells, poll, processes, surroundings
from benchmarks.procfs import cpu_s
from benchmarks.wrk import run_wrk

PATH = "/predictions/at-once"
SIZES, CONNECTIONS, MANY = (200, 100_000), (8, 64), 4000
HANDLER = '''\
"""Answer with the length of each body."""


class Handler:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [str(len(row.get("body") or b"")) for row in data]
'''


def build(store: Path) -> None:
    """Archive the handler."""
    from modelyard.archiver import write_archive

    with tempfile.TemporaryDirectory() as name:
        sources = Path(name)
        (sources / "nothing.bin").write_bytes(b"nothing")
        (sources / "handler.py").write_text(HANDLER)
        write_archive("at-once", version="1.0", artifact=sources / "nothing.bin",
                      handler=str(sources / "handler.py"), output_dir=store)  # fmt: skip


def variant(config: str, port: int, is_hop: bool, is_large: bool) -> str:
    """Return Ray's file for another port: past the cell's own address, or with large buffers."""
    config = re.sub(r"(?m)^    (stats |server-state-|load-server-state|log ).*\n", "", config)
    config = re.sub(
        r"(?s)\nfrontend prometheus.*?(?=\nfrontend http)|\nlisten stats.*?(?=\nback)", "", config
    )
    config = config.replace(f"bind *:{PORT}", f"bind 127.0.0.1:{port}")
    if is_hop:
        config = re.sub(r"127\.0\.0\.1:\d+ check port (\d+)", r"127.0.0.1:\1 check", config)
    if is_large:
        config = config.replace("tune.bufsize 24576", "tune.bufsize 1114112")
        config = re.sub(r"(?m)^    use_backend large.*\n", "", config)
    return config


def spent(words: bytes) -> tuple[float, int]:
    """Return CPU time and minor faults so far of the processes that run this."""
    pids = processes(words)
    faults = [
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids
    ]
    return sum(map(cpu_s, pids)), sum(faults)


async def hold(body: bytes) -> Counter[str]:
    """Open many connections, then send a request on each; return what came."""
    pairs = [await asyncio.open_connection("127.0.0.1", PORT) for _ in range(MANY)]
    for _, writer in pairs:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
    return Counter([(await reader.readline()).decode()[9:12] for reader, _ in pairs])


def inside(folder: Path, rounds: int, seconds: float) -> None:
    """Measure, and print the table."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    cells = Cells(folder)
    cells.cells = 1
    table = Table(box=box.SIMPLE)
    for column in ("body", "connections", "way", "rate", "p50", "HAProxy, us", "faults",
                   "replica, us", "server, us"):  # fmt: skip
        table.add_column(column, justify="right")
    with cells.running():
        cells.whole()
        words = Path(f"/proc/{processes(PROXY)[-1]}/cmdline").read_text().split("\0")
        ours = Path(next(word for word in words if word.endswith("/haproxy.cfg")))
        poll(lambda: "check port" in ours.read_text(), "HAProxy has the cell's own address")
        text = ours.read_text()
        ways = {"server": (re.findall(r"(127\S+) check port", text)[0], b"none"),
                "direct": (f"127.0.0.1:{PORT}", str(ours.with_suffix("")).encode())}  # fmt: skip
        for port, (way, *options) in enumerate(
            [("hop", True, False), ("large-direct", False, True), ("large-hop", True, True)],
            PORT + 1,
        ):
            file = folder / f"{way}.cfg"
            file.write_text(variant(text, port, *options))
            subprocess.Popen([os.environ["CELLS_HAPROXY"], "-db", "-f", file])
            ways[way] = f"127.0.0.1:{port}", str(file).encode()
        time.sleep(3)  # all have asked the cell
        for size in SIZES:
            (body := folder / "body").write_bytes(b"x" * size)
            for connections in CONNECTIONS:
                # What is above 16 KB of another machine passes the second HAProxy of `direct`.
                chosen = [way for way in ways if size == SIZES[0] or way != "hop"]
                rows: dict[str, list[list[float]]] = {way: [] for way in chosen}
                for at in range(rounds):
                    for way in sorted(chosen, reverse=bool(at % 2)):
                        address, mark = ways[way]
                        watched = (mark, CELL, SERVER)
                        before = [spent(each) for each in watched]
                        url = f"http://{address}{PATH}"
                        load = run_wrk(url, connections, seconds, "text/plain", [body])
                        costs = [(b[0] - a[0], b[1] - a[1]) for a, b in
                                 zip(before, map(spent, watched), strict=True)]  # fmt: skip
                        if load.failures:
                            sys.stderr.write(f"{way}: {load.errors}\n")
                        done = load.requests
                        cpu_us = [cpu / done * 1e6 for cpu, _ in costs]
                        each = [load.requests / load.seconds, load.p50_ms, cpu_us[0]]
                        rows[way].append([*each, costs[0][1] / done, *cpu_us[1:]])
                for way, measured in rows.items():
                    rate, p50, proxy, faults, replica, server = map(
                        statistics.median, zip(*measured, strict=True)
                    )
                    costs_us = [f"{proxy:.0f}", f"{faults:.2f}", f"{replica:.0f}", f"{server:.0f}"]
                    row = str(size), str(connections), way, f"{rate:,.0f}", f"{p50:.1f} ms"
                    table.add_row(*row, *costs_us)
        came = asyncio.run(hold(b"x" * 200))
        pids = processes(str(ours.with_suffix("")).encode())
        peaks = [int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])
                 for pid in pids]  # fmt: skip
    at_most = f"{MANY} connections at once: {sum(peaks) / 1e3:.0f} MB at most, {dict(came)}"
    Console(width=120).print(table, f"medians of {rounds} rounds in turns; {at_most}")


def main() -> int:
    """Read the arguments and run in namespaces of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside, given.rounds, given.seconds)
        return 0
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # Ray's sockets have long names
        build(Path(name, "one"))
        command = [*ALONE, sys.executable, "-m", "benchmarks.hop", "--inside", name,
                   "--rounds", str(given.rounds), "--seconds", str(given.seconds)]  # fmt: skip
        return subprocess.run(command, cwd=name, env=surroundings(name)).returncode


if __name__ == "__main__":
    sys.exit(main())
