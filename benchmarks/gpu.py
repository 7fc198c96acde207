"""ResNet-50 on a CUDA device: the bare loop and the server.

    python -m benchmarks.gpu [--device cuda:0] [--batch 1 --batch 8 --batch 32] [--workers 1 --workers 4]

Exports the model (weights are random, from a fixed seed), archives it for each size of batch, and
measures requests per second, PNG bytes to JSON bytes:

    bare       the handler in a bare loop, one batch after the other
    served     `modelyard serve start` with so many workers; wrk with connections for three batches
               of each
"""  # noqa: E501 - the command stands in one line

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
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

BARE, SERVED = "bare", "served, {}"
CONFIG = """\
batchSize: {batch}
handler:
  image: {{mode: RGB, size: [224, 224], mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}}
"""
CONNECTIONS_PER_ROW = 3


@dataclass(frozen=True)
class Rate:
    """One run."""

    kind: str
    batch: int
    per_s: float
    failures: int = 0


def main() -> int:
    """Measure, print a table and keep it; 1 where there is no such device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cpu for a trial of this script")
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--workers", type=int, action="append", help="default: 1 and 4")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("-o", "--output", type=Path, default=LOCAL_RESULTS)
    parser.add_argument("--name", default=time.strftime("%Y-%m-%dT%H%M%S-gpu"))
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare is not None:
        print(measure_bare(given.bare, given.seconds))
        return 0
    name = "no device" if given.device == "cpu" else find_device(given.device)
    if name is None:
        print(f"benchmarks.gpu: torch finds no CUDA device {given.device} on this machine; run it "
              "on one where nvidia-smi lists a GPU, with a torch build for CUDA",
              file=sys.stderr)  # fmt: skip
        return 1
    rates: list[Rate] = []
    machine = {**procfs.describe_machine(), "gpu": name}
    with tempfile.TemporaryDirectory(prefix="modelyard-gpu-") as folder:
        for batch in given.batch or (1, 8, 32):
            workers = given.workers or (1, 4)
            rates += _measure(Path(folder), batch, workers, given.device, given.seconds)
            text = table(machine, rates)
            print(text, flush=True)  # whoever ends it before the end has what was measured
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
    """Return requests per second, a row for each size of batch; columns say how many workers."""
    found = {(rate.batch, rate.kind): rate for rate in rates}
    kinds = list(dict.fromkeys(rate.kind for rate in rates))
    lines = [
        f"{machine['gpu']}, {machine['cpu']}, {machine['cores']} cores; requests per second",
        f"{'batch':>5}" + "".join(f"{kind:>12}" for kind in kinds),
    ]
    for batch in dict.fromkeys(rate.batch for rate in rates):
        row = (found.get((batch, kind)) for kind in kinds)
        cells = (
            "-" if rate is None
            else f"{rate.failures} failed" if rate.failures
            else f"{rate.per_s:,.0f}"
            for rate in row
        )  # fmt: skip
        lines.append(f"{batch:>5}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _measure(
    folder: Path, batch: int, workers: Sequence[int], device: str, seconds: float
) -> list[Rate]:
    subject = _archive(folder, batch)
    unpacked = folder / f"unpacked-{subject.name}"
    unpack(subject, unpacked, device, batch)
    command = [sys.executable, "-m", "benchmarks.gpu", "--bare", str(unpacked)]
    command += ["--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the bare loop ended with code {done.returncode}: {done.stderr}")
    rates = [Rate(BARE, batch, float(done.stdout.splitlines()[-1]))]
    for count in workers:
        with Server(subject, count, folder / f"state-{subject.name}-{count}", device) as server:
            connections = CONNECTIONS_PER_ROW * batch * count
            for length in (1, seconds):  # the first warms up
                load = run_wrk(
                    server.url, connections, length, subject.content_type, subject.requests
                )
        served = (load.requests - load.failures) / load.seconds
        rates.append(Rate(SERVED.format(count), batch, served, load.failures))
    return rates


def _archive(folder: Path, batch: int) -> Subject:
    artifact = folder / "artifacts" / "resnet50.pt2"
    if not artifact.exists():
        checkpoint = folder / "weights" / "resnet50.pt"
        save_checkpoint(checkpoint)
        modelyard("export", checkpoint, "--model", f"{NETWORKS}:ResNet50",
                  "--input", "image:float32[batch,3,224,224]", "--output", "logits",
                  "--format", "pt2", "-o", artifact.parent)  # fmt: skip
    name = f"resnet50-{batch}"
    config = folder / f"{name}.yaml"
    config.write_text(CONFIG.format(batch=batch))
    modelyard("archive", name, "--artifact", artifact, "--handler", "image_classifier",
              "--config-file", config, "--version", "1.0", "--no-dry-run",
              "-o", folder / "store")  # fmt: skip
    scans = tuple(sorted((DIGITS / "scans").glob("*.png")))
    return Subject(name, folder / "store" / f"{name}.mar", "image/png", scans)


# -- the bare loop, in a process of its own ------------------------------------------------------


def measure_bare(folder: Path, seconds: float) -> float:
    """Load an unpacked archive as a worker does; return requests per second."""
    from modelyard.serve.worker.load import load_service

    message = json.loads((folder / LOAD).read_text())
    service = load_service(message)
    batch = message["batch_size"]
    scans = [path.read_bytes() for path in sorted((DIGITS / "scans").glob("*.png"))]
    service.context.reset([""] * batch)

    def answer() -> None:
        rows = [{"body": bytearray(scans[at % len(scans)])} for at in range(batch)]
        for one in service.predict(rows, service.context):
            json.dumps(one).encode()

    return float(batch * batches_per_s(answer, seconds))


def batches_per_s(answer: Callable[[], None], seconds: float) -> float:
    """Return how many batches a second `answer` answers, measured for `seconds`."""
    for _ in range(WARM_UP_CALLS):
        answer()
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds:
        answer()
        count += 1
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
