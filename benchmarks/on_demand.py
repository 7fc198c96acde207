"""A thousand digits models in one server, a hundred of them loaded at once.

    python -m benchmarks.on_demand [--models 1000] [--loaded 100] [--requests 20000] [--minutes 60]

Each model answers labels of its own, so that an answer of another is seen; every answer is compared
with the one that is expected, byte by byte. Prints what the start took, how long a cold model's
first answer takes, a pinned model's with and without others being loaded beside it, in turns,
what became of requests to models drawn by their rank (its power -1.5), and how long the stop took.
With `--output` the lines and the counts are in a file as well, which is written again as they grow.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks import procfs
from benchmarks.archives import DIGITS, build_digits, modelyard, modelyard_json, scan_files
from modelyard.archiver import write_archive

SKEW = 1.5
CLIENTS = 8
COLD = 50
"""Cold models whose first answer is timed."""
LOOK_S, MEMORY_EVERY = 2.0, 15
"""Time between two looks at the clients, and looks between two of the memory: it takes a second."""
TURNS, TURN_S, HOT_PER_S = 3, 6.0, 50
PINNED = "m0"
READY_S, MEMORY_GB, COLD_S = 120, 3, 1.0
"""Goals: processor time of a start, memory then, and time of a cold model's answer."""


class Client:
    """One connection, which compares each answer with what is expected."""

    def __init__(self, url: str, expected: Sequence[bytes], scans: Sequence[bytes]) -> None:
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
        self._expected, self._scans = expected, scans
        self.found: Counter[str] = Counter()

    def ask(self, model: str, scan: int) -> float:
        """Ask for one prediction, count what came of it, and return how long it took."""
        began = time.perf_counter()
        try:
            headers = {"Content-Type": "image/png"}
            self._connection.request("POST", f"/predictions/{model}", self._scans[scan], headers)
            answer = self._connection.getresponse()
            body = answer.read()
        except OSError as error:
            self._connection.close()
            self.found[f"lost: {error}"] += 1
        else:
            right = self._expected[scan].replace(f'"{PINNED}-'.encode(), f'"{model}-'.encode())
            outcome = "right" if body == right else "wrong"
            self.found[outcome if answer.status == 200 else f"status {answer.status}"] += 1
            if body != right:
                print(f"{model}, scan {scan}: status {answer.status}, {body[:200]!r}", flush=True)
        return time.perf_counter() - began


def build(folder: Path, count: int) -> Path:
    """Archive so many digits models, which differ in their labels."""
    build_digits(folder, ("onnx",))
    labels = json.loads((DIGITS / "index_to_name.json").read_text())
    file, scan = folder / "index_to_name.json", scan_files()[7]
    for number in range(count):
        file.write_text(json.dumps({at: f"m{number}-{label}" for at, label in labels.items()}))
        write_archive(
            f"m{number}", version="1.0", artifact=folder / "artifacts" / "digits.onnx",
            handler="image_classifier", output_dir=folder / "many", extra_files=[file],
            config_file=DIGITS / "model-config.yaml", examples=[f"{scan}=m{number}-7"],
        )  # fmt: skip
    return folder / "many"


@contextmanager
def serving(folder: Path, store: Path, loaded: int) -> Iterator[dict[str, Any]]:
    """Serve all models of the store on demand for a block; print what start and stop took."""
    config, state = folder / "serve.yaml", folder / "state"
    config.write_text(json.dumps({"max_loaded_models": loaded, "workers": 1,
                                  "model_settings": {PINNED: {"pinned": True}}}))  # fmt: skip
    began = time.perf_counter()
    about: dict[str, Any] = modelyard_json(
        "serve", "start", "--model-store", store, "--models", "ALL", "--config", config,
        "--state-dir", state, "--device", "cpu", "--port", "0", "--management-port", "0",
        "--metrics-port", "0",
    )  # fmt: skip
    began, ready_s = time.perf_counter(), time.perf_counter() - began
    try:
        cpu_s, gb = taken(about["pid"])
        print(f"start: ready in {ready_s:.1f} s, {cpu_s:.1f} s of CPU (goal {READY_S}), "
              f"{gb:.2f} GB (goal {MEMORY_GB})", flush=True)  # fmt: skip
        before = procfs.cpu_s(about["pid"])
        time.sleep(5)
        idle = (procfs.cpu_s(about["pid"]) - before) / 5
        print(f"idle: {100 * idle:.1f} % of a core", flush=True)
        yield about
    finally:
        began = time.perf_counter()
        modelyard("serve", "stop", "--state-dir", state)
        print(f"stop: {time.perf_counter() - began:.1f} s")


def taken(pid: int) -> tuple[float, float]:
    """Return CPU seconds and memory in GB of a server and all below it."""
    pids = [pid, *procfs.descendants(pid)]
    cpu_s, memory = 0.0, 0.0
    for each in pids:
        try:
            cpu_s += procfs.cpu_s(each)
            memory += psutil.Process(each).memory_full_info().pss / 1e9
        except (psutil.Error, OSError):
            continue
    return cpu_s, memory


def compare_hot(client: Client, colds: Sequence[Client], names: Sequence[str]) -> str:
    """Ask the pinned model at a steady rate, with and without others being loaded, in turns."""
    found: dict[bool, list[float]] = {False: [], True: []}
    chance, ends = random.Random(1), [0.0]

    def churn(other: Client) -> None:
        while time.perf_counter() < ends[0]:
            other.ask(chance.choice(names[1:]), 0)

    with ThreadPoolExecutor(len(colds)) as threads:
        for turn in range(2 * TURNS):
            is_beside, began = turn % 2 == 1, time.perf_counter()
            ends[0] = began + TURN_S
            others = [threads.submit(churn, each) for each in colds] if is_beside else []
            for number in range(int(TURN_S * HOT_PER_S)):
                time.sleep(max(0.0, began + number / HOT_PER_S - time.perf_counter()))
                found[is_beside].append(client.ask(PINNED, number % 10))
            for each in others:
                each.result()
    return ", ".join(
        f"{('alone', 'with loads beside it')[is_beside]} p50 {1e3 * statistics.median(taken):.2f} "
        f"p99 {1e3 * statistics.quantiles(taken, n=100)[98]:.1f} ms"
        for is_beside, taken in found.items()
    )  # fmt: skip


def main() -> None:
    """Build, serve, ask, and print the lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--loaded", type=int, default=100)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=60, help="most time for the requests")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    lines: list[str] = []
    counts: dict[str, Any] = {"wanted": given.requests}

    def keep() -> None:
        if given.output is not None:
            given.output.write_text(json.dumps({"lines": lines, **counts}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="modelyard-demand-") as name:
        folder = Path(name)
        store = build(folder, given.models)
        with serving(folder, store, given.loaded) as about:
            for line in measure(about, given, counts, keep):
                lines.append(line)
                print(line, flush=True)
                keep()


def measure(
    about: dict[str, Any],
    given: argparse.Namespace,
    counts: dict[str, Any],
    keep: Callable[[], None],
) -> Iterator[str]:
    """Yield a line for each thing that is measured.

    Args:
        counts: gets how many models were drawn and asked so far, and what became of all.
        keep: called whenever it has changed.
    """
    models: int = given.models
    scans, names = [file.read_bytes() for file in scan_files()], [f"m{n}" for n in range(models)]
    expected = [_first_answer(about["inference"], scan) for scan in scans]
    clients = [Client(about["inference"], expected, scans) for _ in range(CLIENTS)]
    pid = about["pid"]
    cpu_s = _all_s(pid)
    cold = [clients[0].ask(each, 7) for each in names[-min(COLD, models - 1) :]]
    yield (f"cold, first answer: median {statistics.median(cold):.2f} s, slowest {max(cold):.2f} "
           f"(goal {COLD_S:g}); {(_all_s(pid) - cpu_s) / len(cold):.2f} s of CPU each")  # fmt: skip
    yield f"pinned: {compare_hot(clients[0], clients[1:3], names)}"
    weights = [(1 + at) ** -SKEW for at in range(models)]
    ranked = random.Random(2).sample(names, models)

    def run(at: int) -> None:
        chance, client = random.Random(at), clients[at]
        drawn = iter(chance.choices(ranked, weights, k=given.requests // CLIENTS))
        while time.perf_counter() < ends and (each := next(drawn, None)):
            took.append(client.ask(each, chance.randrange(len(scans))))

    before, began, most_gb = _counted(about), time.perf_counter(), 0.0
    took, ends = list[float](), began + 60 * given.minutes
    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(run, at) for at in range(CLIENTS)]
        for look in itertools.count():
            if all(each.done() for each in running):
                break
            if look % MEMORY_EVERY == 0:
                most_gb = max(most_gb, taken(pid)[1])
            counts |= {"drawn": len(took), "of_all": sum((c.found for c in clients), Counter())}
            keep()
            time.sleep(LOOK_S)
    for each in running:
        each.result()
    took.sort()
    loads = {key: value - before[key] for key, value in _counted(about).items()}
    found = sum((client.found for client in clients), Counter())
    yield (f"{len(took)} requests in {time.perf_counter() - began:.0f} s: "
           f"{loads['model_loads_total']:.0f} loads, {loads['model_unloads_total']:.0f} unloads, "
           f"median {1e3 * took[len(took) // 2]:.1f} ms, p99 {took[int(0.99 * len(took))]:.2f} s, "
           f"slowest {took[-1]:.2f} s; at most {most_gb:.2f} GB")  # fmt: skip
    counts |= {"drawn": len(took), "of_all": found}
    yield f"of all {sum(found.values())} answers: {dict(found)}"


def _first_answer(url: str, scan: bytes) -> bytes:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.request("POST", f"/predictions/{PINNED}", scan, {"Content-Type": "image/png"})
    body = connection.getresponse().read()
    assert f'"{PINNED}-'.encode() in body, body
    return body


def _all_s(pid: int) -> float:
    """Return CPU time of a server, of its workers, and of those that have ended."""
    ended = psutil.Process(pid).cpu_times()
    return taken(pid)[0] + float(ended.children_user + ended.children_system)


def _counted(about: dict[str, Any]) -> dict[str, float]:
    place = urlsplit(about["metrics"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.request("GET", "/metrics")
    found: defaultdict[str, float] = defaultdict(float)
    for line in connection.getresponse().read().decode().splitlines():
        if line.startswith(("modelyard_model_loads", "modelyard_model_unloads")):
            name, _, value = line.removeprefix("modelyard_").rpartition(" ")
            found[name.partition("{")[0]] += float(value)
    return found


if __name__ == "__main__":
    main()
