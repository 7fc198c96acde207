"""What a start costs with one small model and with many: time, processor, memory; one more worker.

    python -m benchmarks.many [--models 20] [--format onnx] [--rounds 1]
    python -m benchmarks.many --registered 1000

Serves the digits model under many names, one worker each, and under one.
It prints

    ready      from the command to the first answer of every model, in a new state folder
    CPU        seconds that all processes had used by then, the command too
    server     PSS of the server process; PSS counts a page that n processes share as 1/n
    all        PSS of every process
    further    what each model after the first adds to it
    own        what it adds of memory that no two processes share
    added      from a call of the management API to the first answer of one more model: the longest
               of three, of which the first comes at the moment of readiness
    again      from a worker's death to the first answer of the one that takes its place
    import     processor seconds of a fresh interpreter that imports what a server imports

With `--registered` so many models are registered without a worker, and another one is registered
and removed as often. It prints what each takes of the server's process, what a scrape of all of
them does, and the slope of memory while models come and go.

Everything is in the page cache, as it is after the first round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from benchmarks import procfs
from benchmarks.archives import (
    FORMATS,
    ROOT,
    CommandFailed,
    Subject,
    build_bare,
    build_digits,
    modelyard,
    modelyard_json,
)
from benchmarks.rollouts import serving
from benchmarks.server import ask

LOCAL_RESULTS = ROOT / "benchmarks" / "results" / "local"
FIRST_S, CPU_S, FURTHER_MB, ADDED_S, IMPORT_S, AGAIN_S = 1.5, 8.0, 60.0, 0.3, 0.5, 0.3
GOALS_FOR = 20
ADDED = 3
IMPORTS = "import modelyard.serve, modelyard.serve.server, modelyard.serve.app"
POLL_S, AGAIN_TIMEOUT_S = 0.005, 60.0
CLIENTS = 8
SCRAPES = 5
HANDLER = """\"\"\"Answers at once.\"\"\"
def handle(data, context):
    return None if data is None else ["fine"] * len(data)
"""


@dataclass(frozen=True)
class Taken:
    """What one server of so many models took; MB are 10^6 bytes."""

    models: int
    ready_s: float
    cpu_s: float
    server_mb: float
    all_mb: float
    own_mb: float
    added_s: float
    again_s: float
    import_s: float


def main() -> None:
    """Measure, print a table and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--format", choices=FORMATS, default="onnx")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-many"))
    parser.add_argument("--registered", type=int, help="models without a worker, in place of these")
    given = parser.parse_args()
    if given.registered:
        with tempfile.TemporaryDirectory(prefix="modelyard-many-") as name:
            print(register_many(Path(name), given.registered))
        return
    if given.models < 2:
        parser.error("--models is below 2; nothing would be compared")
    with tempfile.TemporaryDirectory(prefix="modelyard-many-") as name:
        folder = Path(name)
        (subject,) = build_digits(folder, (given.format,))
        busy_s, began = procfs.busy_s(), time.perf_counter()
        taken = [measure(subject, count, folder / f"state-{count}-{round}")
                 for round in range(given.rounds) for count in (1, given.models)]  # fmt: skip
        # Busy with these servers or with anything else; nobody can tell them apart afterwards.
        cores = (procfs.busy_s() - busy_s) / (time.perf_counter() - began)
    machine = procfs.describe_machine()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {cores:.1f} of them busy · digits "
        f"({given.format}), one worker each · medians of {given.rounds} round(s) · {date}\n"
        f"{tabulate(taken)}\n"
    )
    print(text, end="")
    given.output.mkdir(parents=True, exist_ok=True)
    content = {"date": date, "machine": machine, "format": given.format,
               "taken": [asdict(each) for each in taken]}  # fmt: skip
    (given.output / f"{given.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (given.output / f"{given.name}.txt").write_text(text)


def measure(subject: Subject, count: int, state_dir: Path) -> Taken:
    """Start a server of so many models, kill a worker, and stop it."""
    names = [f"m{number:02d}" for number in range(count)]
    models = [f"--models={name}={subject.archive.name}" for name in names]
    before, began = _children_s(), time.perf_counter()
    about = modelyard_json(
        "serve", "start", "--model-store", subject.archive.parent, *models, "--workers", "1",
        "--state-dir", state_dir, "--device", "cpu", "--port", "0", "--management-port", "0",
        "--metrics-port", "0",
    )  # fmt: skip
    pid = int(about["pid"])
    try:
        urls = [f"{about['inference']}/predictions/{name}" for name in names]
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(lambda url: ask(url, subject), urls))
        ready_s = time.perf_counter() - began
        pids = [pid, *procfs.descendants(pid)]
        cpu_s = sum(map(procfs.cpu_s, pids)) + _children_s() - before
        memory = [procfs.memory(each) for each in pids]
        own_mb = sum(psutil.Process(each).memory_full_info().uss for each in pids) / 1e6
        added_s = _add_models(about, subject, state_dir)
        again_s = _kill_a_worker(names[-1], urls[-1], subject, state_dir)
    finally:
        _stop(pid, state_dir)
    before = _children_s()
    subprocess.run([sys.executable, "-P", "-c", IMPORTS], check=True)
    return Taken(
        count, ready_s, cpu_s, memory[0].pss_mb, sum(each.pss_mb for each in memory), own_mb,
        added_s, again_s, _children_s() - before,
    )  # fmt: skip


def _children_s() -> float:
    """Return the processor time of the commands that have ended."""
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.ru_utime + times.ru_stime


def _add_models(about: Mapping[str, Any], subject: Subject, state_dir: Path) -> float:
    """Register some more models, one by one; return the longest time to a first answer."""
    keys = json.loads((state_dir / "keys.json").read_text())
    taken = []
    for number in range(ADDED):
        query = urlencode({"url": subject.archive.name, "model_name": f"added{number}",
                           "initial_workers": 1, "synchronous": "true"})  # fmt: skip
        headers = {"Authorization": f"Bearer {keys['management']}"}
        call = urllib.request.Request(f"{about['management']}/models?{query}", b"", headers)
        began = time.perf_counter()
        urllib.request.urlopen(call, timeout=AGAIN_TIMEOUT_S).close()
        ask(f"{about['inference']}/predictions/added{number}", subject)
        taken.append(time.perf_counter() - began)
    return max(taken)


def register_many(folder: Path, count: int) -> str:
    """Register so many models without a worker, scrape, and let one come and go as often."""
    store, state = folder / "store", folder / "state"
    build_bare(folder, "m", HANDLER, "minWorkers: 1\n")
    lines = []
    with serving(store, state, "m") as (about, operator, _):
        pid = int(about["pid"])

        def register(name: str) -> None:
            (store / f"{name}.mar").hardlink_to(store / "m.mar")
            operator.ask("POST", "/models", url=f"{name}.mar", model_name=name, initial_workers="0")

        def taken() -> tuple[float, float]:
            return procfs.cpu_s(pid), procfs.memory(pid).pss_mb

        def scrape() -> bytes:
            with urllib.request.urlopen(f"{about['metrics']}/metrics", timeout=60) as answer:
                return bytes(answer.read())

        scrape()
        cpu_s, pss_mb = taken()
        tenths = [cpu_s]
        for number in range(count):
            register(f"m{number}")
            if number in (count // 10, count - count // 10 - 1):
                tenths.append(taken()[0])
        tenths.append(taken()[0])
        more_s, more_mb = (now - then for now, then in zip(taken(), (cpu_s, pss_mb), strict=True))
        lines.append(f"{count} registered: {1e3 * more_s / count:.1f} ms of CPU and "
                     f"{1e3 * more_mb / count:.0f} KB each; the first tenth "
                     f"{1e4 * (tenths[1] - tenths[0]) / count:.1f} ms, the last "
                     f"{1e4 * (tenths[3] - tenths[2]) / count:.1f}")  # fmt: skip
        cpu_s, _ = taken()
        text = [scrape() for _ in range(SCRAPES)][-1]
        of_one = text.count(f'model="m{count - 1}",'.encode())
        lines.append(f"a scrape: {1e3 * (taken()[0] - cpu_s) / SCRAPES:.0f} ms of CPU, "
                     f"{len(text) / 1e6:.1f} MB, {of_one} series of an idle model")  # fmt: skip
        points = []
        for number in range(2 * count):
            register("comes")
            operator.ask("DELETE", "/models/comes/1.0")
            (store / "comes.mar").unlink()
            if number % max(1, count // 20) == 0:
                points.append((number, taken()[1]))
        low, slope, high = slope_of(points[len(points) // 2 :])
        first, last = points[0][1], points[-1][1]
        lines.append(f"registered and removed {2 * count} times: {first:.1f} → {last:.1f} MB, "
                     f"{1e3 * slope:+.2f} KB each time in the second half "
                     f"(95 %: {1e3 * low:+.2f} to {1e3 * high:+.2f})")  # fmt: skip
        began = time.perf_counter()
    lines.append(f"stopped in {time.perf_counter() - began:.1f} s")
    return "\n".join(lines)


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return Theil and Sen's slope between the ends of its interval of 95 %.

    The median of the slopes of all pairs: one step, as of a block that the allocator takes, is no
    slope.
    """
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))
    n, count = len(points), len(slopes)
    width = 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    ends = max(0, int((count - width) / 2)), min(count - 1, int((count + width) / 2) + 1)
    return slopes[ends[0]], statistics.median(slopes), slopes[ends[1]]


def _kill_a_worker(name: str, url: str, subject: Subject, state_dir: Path) -> float:
    """Kill the only worker of a model; return how long its answers were away."""
    found: Any = modelyard_json("serve", "status", "--state-dir", state_dir)["models"]
    (worker,) = next(model for model in found if model["modelName"] == name)["workers"]
    os.kill(int(worker["pid"]), signal.SIGKILL)
    began = time.perf_counter()
    while True:
        try:
            ask(url, subject)
            return time.perf_counter() - began
        except OSError:
            if time.perf_counter() - began > AGAIN_TIMEOUT_S:
                raise
        time.sleep(POLL_S)


def _stop(pid: int, state_dir: Path) -> None:
    try:
        modelyard("serve", "stop", "--state-dir", state_dir)
    except CommandFailed:
        os.kill(pid, signal.SIGKILL)
        raise


def tabulate(taken: Sequence[Taken]) -> str:
    """Return one line for each number of models, and what became of the goals."""
    lines = [f"{'MODELS':>6} {'ready s':>8} {'CPU s':>7} {'server MB':>10} {'all MB':>8} "
             f"{'further MB':>11} {'own MB':>7} {'added s':>8} {'again s':>8} "
             f"{'import s':>9}"]  # fmt: skip
    medians = {count: _median([each for each in taken if each.models == count])
               for count in sorted({each.models for each in taken})}  # fmt: skip
    first = min(medians)
    for count, found in medians.items():
        more = max(1, count - first)
        further = (found.all_mb - medians[first].all_mb) / more
        own = (found.own_mb - medians[first].own_mb) / more
        lines.append(
            f"{count:>6} {found.ready_s:>8.2f} {found.cpu_s:>7.1f} {found.server_mb:>10.0f} "
            f"{found.all_mb:>8.0f} {further or '':>11{'.0f' if further else ''}} "
            f"{own or '':>7{'.0f' if own else ''}} {found.added_s:>8.2f} {found.again_s:>8.2f} "
            f"{found.import_s:>9.2f}"
        )
        goals = {}
        if count == 1:
            goals[f"a first answer within {FIRST_S:g} s"] = found.ready_s <= FIRST_S
            goals[f"an import within {IMPORT_S:g} s"] = found.import_s <= IMPORT_S
        if count >= GOALS_FOR:
            goals[f"{count} models for {CPU_S:g} s of a core"] = found.cpu_s <= CPU_S
            goals[f"each further one at most {FURTHER_MB:g} MB"] = further <= FURTHER_MB
            goals[f"a worker again within {AGAIN_S:g} s"] = found.again_s <= AGAIN_S
        goals[f"one more model within {ADDED_S:g} s"] = found.added_s <= ADDED_S
        lines += [f"{goal}: {'met' if is_met else 'not met'}" for goal, is_met in goals.items()]
    return "\n".join(lines)


def _median(found: Sequence[Taken]) -> Taken:
    figures = {name: statistics.median(getattr(each, name) for each in found)
               for name in asdict(found[0]) if name != "models"}  # fmt: skip
    return replace(found[0], **figures)


if __name__ == "__main__":
    main()
