"""ResNet-50 on a CUDA device: the bare loop and the server, with graphs and without.

    python -m benchmarks.gpu [--device cuda:0] [--batch 1 --batch 8 --batch 32] [--seconds 5]

Exports the model (weights are random, from a fixed seed), archives it for each size of batch, and
measures requests per second, PNG bytes to JSON bytes:

    in turn    the handler in a bare loop, one batch after the other
    pinned     the same in two halves, two batches in flight, as a worker runs it
    pageable   that with ordinary memory of the host instead of pinned memory
    served     `modelyard serve start` with one worker; wrk with connections for three batches

"in turn" knows no graphs: it is what a worker does that cannot run in halves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import procfs
from benchmarks.archives import DIGITS, ROOT, Subject, modelyard
from benchmarks.bare import LOAD, WARM_UP_CALLS, unpack
from benchmarks.memory import LOCAL_RESULTS, NETWORKS, save_checkpoint
from benchmarks.server import Server
from benchmarks.wrk import run_wrk

IN_TURN, PINNED, PAGEABLE, SERVED = "in turn", "pinned", "pageable", "served"
WAYS = (IN_TURN, PINNED, PAGEABLE, SERVED)
CONFIG = """\
batchSize: {batch}
handler:
  cuda_graphs: {graphs}
  image: {{mode: RGB, size: [224, 224], mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}
"""
IN_FLIGHT = 2
CONNECTIONS_PER_ROW = 3

Answer = Callable[[], Any]


@dataclass(frozen=True)
class Rate:
    """One run of one way."""

    way: str
    batch: int
    graphs: bool
    per_s: float
    failures: int = 0


def main() -> int:
    """Measure, print a table and keep it; 1 where there is no such device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("-o", "--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-gpu"))
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare is not None:
        print(json.dumps(measure_bare(given.bare, given.seconds)))
        return 0
    name = find_device(given.device)
    if name is None:
        print(f"benchmarks.gpu: torch finds no CUDA device {given.device} on this machine; run it "
              "on one where nvidia-smi lists a GPU, with a torch build for CUDA",
              file=sys.stderr)  # fmt: skip
        return 1
    rates: list[Rate] = []
    with tempfile.TemporaryDirectory(prefix="modelyard-gpu-") as folder:
        for batch in given.batch or (1, 8, 32):
            for graphs in (True, False):
                rates += _measure(Path(folder), batch, graphs, given.device, given.seconds)
                print(f"measured batch {batch}, graphs {graphs}", file=sys.stderr)
    machine = {**procfs.describe_machine(), "gpu": name}
    text = table(machine, rates)
    print(text)
    given.output.mkdir(parents=True, exist_ok=True)
    about = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": machine}
    content = {**about, "rates": [asdict(rate) for rate in rates]}
    (given.output / f"{given.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (given.output / f"{given.name}.txt").write_text(text + "\n")
    return 0


def find_device(device: str) -> str | None:
    """Return what torch calls a CUDA device, None where it sees none of that name."""
    import torch

    kind, _, index = device.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind != "cuda" or int(index or 0) >= count:
        return None
    return str(torch.cuda.get_device_name(int(index or 0)))


def table(machine: dict[str, Any], rates: Sequence[Rate]) -> str:
    """Return requests per second: a row for each batch with graphs and without."""
    found = {(rate.batch, rate.graphs, rate.way): rate for rate in rates}
    lines = [
        f"{machine['gpu']}, {machine['cpu']}, {machine['cores']} cores; requests per second",
        f"{'batch':>5} {'graphs':>7}" + "".join(f"{way:>12}" for way in WAYS),
    ]
    for batch, graphs in dict.fromkeys((rate.batch, rate.graphs) for rate in rates):
        row = (found.get((batch, graphs, way)) for way in WAYS)
        cells = (
            "-" if rate is None
            else f"{rate.failures} failed" if rate.failures
            else f"{rate.per_s:,.0f}"
            for rate in row
        )  # fmt: skip
        shown = f"{batch:>5} {'on' if graphs else 'off':>7}"
        lines.append(shown + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _measure(folder: Path, batch: int, graphs: bool, device: str, seconds: float) -> list[Rate]:
    subject = _archive(folder, batch, graphs)
    unpacked = folder / f"unpacked-{subject.name}"
    unpack(subject, unpacked, device, batch)
    command = [sys.executable, "-m", "benchmarks.gpu", "--bare", str(unpacked)]
    command += ["--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the bare loop ended with code {done.returncode}: {done.stderr}")
    bare = json.loads(done.stdout.splitlines()[-1])
    rates = [Rate(way, batch, graphs, per_s) for way, per_s in bare.items()]
    with Server(subject, 1, folder / f"state-{subject.name}", device) as server:
        connections = CONNECTIONS_PER_ROW * batch
        for length in (1, seconds):  # the first warms up
            load = run_wrk(server.url, connections, length, subject.content_type, subject.requests)
    served = (load.requests - load.failures) / load.seconds
    return [*rates, Rate(SERVED, batch, graphs, served, load.failures)]


def _archive(folder: Path, batch: int, graphs: bool) -> Subject:
    artifact = folder / "artifacts" / "resnet50.pt2"
    if not artifact.exists():
        checkpoint = folder / "weights" / "resnet50.pt"
        save_checkpoint(checkpoint)
        modelyard("export", checkpoint, "--model", f"{NETWORKS}:ResNet50",
                  "--input", "image:float32[batch,3,224,224]", "--output", "logits",
                  "--format", "pt2", "-o", artifact.parent)  # fmt: skip
    name = f"resnet50-{batch}-{'graphs' if graphs else 'eager'}"
    config = folder / f"{name}.yaml"
    config.write_text(CONFIG.format(batch=batch, graphs=str(graphs).lower()))
    modelyard("archive", name, "--artifact", artifact, "--handler", "image_classifier",
              "--config-file", config, "--version", "1.0", "--no-dry-run",
              "-o", folder / "store")  # fmt: skip
    scans = tuple(sorted((DIGITS / "scans").glob("*.png")))
    return Subject(name, folder / "store" / f"{name}.mar", "image/png", scans)


# -- the bare loop, in a process of its own ------------------------------------------------------


def measure_bare(folder: Path, seconds: float) -> dict[str, float]:
    """Load an unpacked archive as a worker does; return requests per second of each way."""
    import torch

    from modelyard.handlers.cuda import Cuda, open_overlap
    from modelyard.serve.worker.load import load_service

    message = json.loads((folder / LOAD).read_text())
    service = load_service(message)
    launch = service.launch
    if launch is None:
        raise RuntimeError(f"the handler does not run in halves on {service.device}")
    handler: Any = service.predict.__self__  # type: ignore[attr-defined]
    batch = message["batch_size"]
    scans = [path.read_bytes() for path in sorted((DIGITS / "scans").glob("*.png"))]
    service.context.reset([""] * batch)

    def rows() -> list[dict[str, Any]]:
        return [{"body": bytearray(scans[at % len(scans)])} for at in range(batch)]

    pageable = open_overlap(
        handler, service.context, Cuda(torch.device(service.device), pinned=False)
    )
    ways: dict[str, tuple[Callable[[], Answer], int]] = {
        IN_TURN: (lambda: _answered(service.predict(rows(), service.context)), 1),
        PINNED: (lambda: launch(rows(), service.context).result, IN_FLIGHT),
        PAGEABLE: (lambda: pageable.launch(rows(), service.context).result, IN_FLIGHT),
    }
    return {
        way: batch * batches_per_s(start, in_flight, seconds)
        for way, (start, in_flight) in ways.items()
    }


def _answered(answers: Any) -> Answer:
    return lambda: answers


def batches_per_s(start: Callable[[], Answer], in_flight: int, seconds: float) -> float:
    """Start batches for `seconds`, at most `in_flight` at once, and write each one's answers.

    Args:
        start: begins a batch, and gives what waits for its answers.
    """
    flights: deque[Answer] = deque()

    def finish() -> None:
        for answer in flights.popleft()():
            json.dumps(answer).encode()

    def run(more: Callable[[int], bool]) -> int:
        count = 0
        while more(count):
            flights.append(start())
            count += 1
            if len(flights) == in_flight:
                finish()
        while flights:
            finish()
        return count

    run(lambda count: count < WARM_UP_CALLS)
    began = time.perf_counter()
    count = run(lambda _: time.perf_counter() - began < seconds)
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
