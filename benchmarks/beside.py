"""What slows predictions down from the side: one table, of pairs of loads with and without.

    python -m benchmarks.beside [scrape judge …] [--rounds 5] [--seconds 4] [--rate 400]

Serves a handler that takes 0.3 ms of a core, sends it an open loop of so many requests a second,
and does something else meanwhile; in the other half of each pair it does not. Pairs of all effects
take turns, in rounds, and which half comes first does, too. Prints medians:

    p50, p99   of predictions without and with it, counted from when a request was due
    change     of p99, of one pair; `nothing` shows what this is where there is nothing at all
    CPU        of the server's process beyond that of the other half, for each time that it was done

Goal: p99 rises by no more than 2 %, for machines with a core each for the server, for the load, for
workers and for what runs beside (a worker that loads, explains or answers copies is a process).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

from benchmarks import open_loop, procfs
from benchmarks.archives import (
    CommandFailed,
    build_digits,
    modelyard,
    modelyard_json,
    scan_files,
)
from benchmarks.rollouts import Operator
from modelyard.archiver import write_archive

HANDLER = '''\
"""Spins: each row takes 0.3 ms of a core, an explanation 7 ms."""
import time


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def handle(data, context):
    """Name the likeliest digit of a number."""
    if data is None:
        return None
    spin({seconds} * len(data))
    off = {off}
    return [
        {{str(d): (0.9 if d == int(row["body"]) % 10 else 0.011) + off for d in range(10)}}
        for row in data
    ]
'''
MODEL, BODY = "beside", b"7"
HANDLER_S, NEAR = 0.0003, 1e-6
DIGITS = "digits-onnx"
CONSOLES, CLIENTS, EVERY_S, GOAL = 5, 4, 1.0, 0.02
WARM_UP_S, SETTLE_S = 1.0, 0.5
CHUNK = 1 << 20


class Half(NamedTuple):
    """What half of a pair found."""

    p50_ms: float
    p99_ms: float
    cpu_s: float
    times: int
    """How often the other thing was done."""
    failed: int


class Place:
    """A server that runs, and what can be done beside its predictions."""

    def __init__(self, about: dict, state: Path, log: BlockedLog) -> None:  # type: ignore[type-arg]
        self.about, self.pid, self._log = about, int(about["pid"]), log
        self.token = json.loads((state / "keys.json").read_text())["management"]
        self.operator = Operator(about, self.token)
        self.times = 0

    def effects(self) -> dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]]:
        """Return what is measured: name → words, and what does it for a block."""
        return {
            "nothing": ("nothing", lambda: self._repeated(lambda number: None, 1)),
            "scrape": ("a scrape of /metrics", lambda: self._repeated(self._scrape, 1)),
            "judge": ("the judge: a roll-out of which 1 % is copied", lambda: self._shadow(1)),
            "shadow10": ("a copy: 10 % copied, the same answers", lambda: self._shadow(10)),
            "shadow": ("a copy: all copied, the same answers", lambda: self._shadow(100)),
            "near": ("a copy: all copied, numbers compared", lambda: self._shadow(100, "near")),
            "console": (f"an update of {CONSOLES} open consoles", lambda: self._repeated(
                self._console, CONSOLES)),
            "explain": (f"explanations of digits, {CLIENTS} clients without pause", lambda:
                self._repeated(self._explain, CLIENTS, 0)),
            "register": ("a large archive registered, and removed", lambda: self._repeated(
                self._register, 1)),
            "log": ("an access log that nobody takes", self._log.blocked),
        }  # fmt: skip

    @contextmanager
    def _repeated(
        self, do: Callable[[int], object], threads: int, every_s: float = EVERY_S
    ) -> Iterator[None]:
        """Do something each second in so many threads, once before."""
        over, failed = threading.Event(), list[Exception]()
        for number in range(threads):
            do(number)

        def run(number: int) -> None:
            over.wait(number * every_s / threads)
            try:
                while not over.wait(every_s):
                    do(number)
                    self.times += 1
            except Exception as error:
                failed.append(error)

        running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in running:
                thread.join()
        if failed:
            raise failed[0]

    def _scrape(self, number: int) -> None:
        with urllib.request.urlopen(f"{self.about['metrics']}/metrics", timeout=60) as answer:
            answer.read()

    def _console(self, number: int) -> None:
        """Ask for what the page of a version, or the list of them all, asks for each second."""
        place = urlsplit(self.about["management"]).netloc
        if not hasattr(self, "_cookie"):
            self._cookie = sign_in(place, self.token)
        connection = HTTPConnection(place, timeout=10)
        path = ("/console/live", f"/console/models/{MODEL}/1.0/live")[number % 2]
        connection.request("GET", path, headers={"Cookie": self._cookie, "HX-Request": "true"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}")

    def _explain(self, number: int) -> None:
        url = f"{self.about['inference']}/explanations/{DIGITS}"
        request = urllib.request.Request(url, scan_files()[7].read_bytes())
        request.add_header("Content-Type", "image/png")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    @contextmanager
    def _shadow(self, percent: int, candidate: str = "same") -> Iterator[None]:
        path = f"/models/{MODEL}/rollout"
        self.operator.ask("POST", path, url=f"{candidate}.mar", shadow=f"{percent}%", canary="50")
        time.sleep(SETTLE_S)
        before, began = self._compared(path), time.monotonic()
        try:
            yield
        finally:
            looks = int((time.monotonic() - began) / 0.25)
            self.times = looks if percent == 1 else self._compared(path) - before
            self.operator.ask("POST", f"{path}/abort")

    def _compared(self, path: str) -> int:
        return int(self.operator.ask("GET", path)["compared"])

    def _register(self, number: int) -> None:
        self.operator.ask("POST", "/models", url="large.mar", initial_workers="1",
                          synchronous="true")  # fmt: skip
        self.operator.ask("DELETE", "/models/large/1.0")


class BlockedLog:
    """A log that is a pipe, whose reader can stop."""

    def __init__(self, file: Path) -> None:
        os.mkfifo(file)
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._pipe = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._pipe, True)
        self.lines = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._goes_on.wait():
            data = os.read(self._pipe, CHUNK)
            self.lines += data.count(b"\n")
            if not data:
                time.sleep(0.01)  # nobody has opened it yet

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Read nothing for a block."""
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()


def sign_in(place: str, token: str) -> str:
    """Return the cookie of a new session of the console."""
    connection = HTTPConnection(place, timeout=10)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/console/sign-in", urlencode({"token": token}), form)
    answer = connection.getresponse()
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    connection.close()
    return cookie


def archive(
    folder: Path, name: str, version: str, file: str, megabytes: int, **words: float
) -> None:
    """Archive a version of the model, with so large an artifact."""
    weights = folder / "weights.bin"
    with weights.open("wb") as opened:
        opened.write(b"none")
        for _ in range(megabytes):
            opened.write(os.urandom(10**6))
    (config := folder / "model-config.yaml").write_text("minWorkers: 1\nbatchSize: 8\n")
    (handler := folder / "beside_handler.py").write_text(HANDLER.format(**words))
    made = write_archive(
        name, version=version, artifact=weights, handler=str(handler),
        output_dir=folder / "out", config_file=config, force=True,
    )  # fmt: skip
    (folder / "store").mkdir(exist_ok=True)
    made.rename(folder / "store" / file)


@contextmanager
def serving(folder: Path, *more: str) -> Iterator[Place]:
    """Serve the model, and others; the access log is a pipe."""
    state = folder / "state"
    (state / "logs").mkdir(parents=True)
    log = BlockedLog(state / "logs" / "access.log")
    about = modelyard_json(
        "serve", "start", "--model-store", folder / "store", "--models", f"{MODEL}=1.0.mar",
        *(f"--models={name}" for name in more),
        "--auth", "management", "--workers", "1", "--state-dir", state, "--device", "cpu",
        "--access-log", "--port", "0", "--management-port", "0", "--metrics-port", "0",
    )  # fmt: skip
    try:
        yield Place(about, state, log)
    finally:
        try:
            modelyard("serve", "stop", "--state-dir", state)
        except CommandFailed as error:
            print(error)
            os.kill(int(about["pid"]), 9)


def measure(
    place: Place, beside: AbstractContextManager[None], rate: float, seconds: float
) -> Half:
    """Send predictions for a while, and do something beside."""
    url = f"{place.about['inference']}/predictions/{MODEL}"
    place.times = 0
    with beside:
        before = procfs.cpu_s(place.pid)
        phases = [open_loop.Phase(rate, seconds)]
        report = asyncio.run(open_loop.run(url, BODY, phases, content_type="text/plain",
                                           connections=64))  # fmt: skip
        cpu_s = procfs.cpu_s(place.pid) - before
    (found,) = report.phases
    times, failed = place.times, found.offered - found.good - found.late
    return Half(found.answered_ms.p50, found.answered_ms.p99, cpu_s, times, failed)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("effects", nargs="*", help="all unless some are named")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of each half of a pair")
    parser.add_argument("--rate", type=float, default=400, help="requests a second")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the large archive")
    given = parser.parse_args()
    pairs: dict[str, list[tuple[Half, Half]]] = {}
    with tempfile.TemporaryDirectory(prefix="modelyard-beside-") as name:
        folder = Path(name)
        for version, off in (("1.0", 0.0), ("same", 0.0), ("near", NEAR)):
            archive(folder, MODEL, version, f"{version}.mar", 0, seconds=HANDLER_S, off=off)
        if not given.effects or "register" in given.effects:
            archive(
                folder, "large", "1.0", "large.mar", given.megabytes, seconds=HANDLER_S, off=0.0
            )
        more = [DIGITS] if not given.effects or "explain" in given.effects else []
        if more:
            build_digits(folder, ("onnx",))
        with serving(folder, *more) as place:
            effects = place.effects()
            measure(place, effects["nothing"][1](), given.rate, WARM_UP_S)
            for round in range(given.rounds):
                for name in given.effects or effects:
                    found = {}
                    for is_with in (True, False) if round % 2 else (False, True):
                        beside = effects[name if is_with else "nothing"][1]()
                        found[is_with] = measure(place, beside, given.rate, given.seconds)
                    pairs.setdefault(name, []).append((found[False], found[True]))
                words = {name: effect[0] for name, effect in effects.items()}
                print(f"{len(os.sched_getaffinity(0))} cores, {given.rate:g} requests/s, medians "
                      f"of {round + 1} pair(s) of {given.seconds:g} s\n{tabulate(pairs, words)}",
                      flush=True)  # fmt: skip


def tabulate(pairs: dict[str, list[tuple[Half, Half]]], words: dict[str, str]) -> str:
    """Return one line for each effect."""
    lines = [f"{'BESIDE':<46} {'TIMES':>7} {'p50 ms':>12} {'p99 ms':>14} {'CHANGE':>8} "
             f"{'CPU ms EACH':>11} {'FAILED':>6}  GOAL"]  # fmt: skip
    for name, halves in pairs.items():
        without, beside = (
            Half(*(statistics.median(column) for column in zip(*half, strict=True)))
            for half in zip(*halves, strict=True)
        )
        change = statistics.median(other.p99_ms / one.p99_ms - 1 for one, other in halves)
        each = [1e3 * (other.cpu_s - one.cpu_s) / other.times
                for one, other in halves if other.times]  # fmt: skip
        lines.append(
            f"{words[name]:<46} {beside.times:>7.0f} {without.p50_ms:>5.2f} {beside.p50_ms:>6.2f} "
            f"{without.p99_ms:>7.2f} {beside.p99_ms:>6.2f} {change:>+8.1%} "
            f"{f'{statistics.median(each):.2f}' if each else '–':>11} "
            f"{sum(half.failed for pair in halves for half in pair):>6}  "
            f"{'met' if change <= GOAL else 'not met'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
