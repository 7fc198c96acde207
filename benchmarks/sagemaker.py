"""Amazon's toolkit on TorchServe 0.12 beside `modelyard sagemaker serve`: one folder, in pairs.

`scripts/peers sagemaker-toolkit`, then `python -m benchmarks.sagemaker`; needs wrk and Java 17.
Both have one worker of one thread and batches of one. Rounds alternate: their ratio counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.wrk import Load, run_wrk

ROOT = Path(__file__).parents[1]
TOOLKIT = ROOT / ".peers" / "sagemaker-toolkit"
CODE = """
import torch

def model_fn(model_dir):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
"""
# The toolkit writes its configuration to /etc, where this machine's own may be.
START = """
import sys
from sagemaker_pytorch_serving_container import serving, torchserve
torchserve.TS_CONFIG_FILE, torchserve.MODEL_STORE = sys.argv[1:]
serving.main()
"""


@contextlib.contextmanager
def serving(
    command: list[str], folder: Path, port: int, variables: dict[str, str]
) -> Iterator[str]:
    """Start a container's command, wait until it is healthy, and end it."""
    own = {"SAGEMAKER_BASE_DIR": str(folder), "SAGEMAKER_BIND_TO_PORT": str(port),
           "SAGEMAKER_MODEL_SERVER_WORKERS": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    with (folder / f"{port}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own, **variables}, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/ping", timeout=2).close()
                break
            assert process.poll() is None and time.monotonic() < deadline, log.name
            time.sleep(0.2)
        yield f"{url}/invocations"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def ask(url: str, body: Path) -> list[list[float]]:
    """Return one answer."""
    kind = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body.read_bytes(), kind)) as answer:
        found: list[list[float]] = json.load(answer)
        return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model" / "code").mkdir(parents=True)
        (folder / "model" / "code" / "inference.py").write_text(CODE)
        (body := folder / "body.json").write_text(json.dumps([[0.5] * 64]))
        ours = {
            **{f"MODELYARD_{api}_PORT": "0" for api in ("MANAGEMENT", "METRICS")},
            "MODELYARD_HOST": "127.0.0.1", "MODELYARD_STATE_DIR": str(folder / "state"),
        }  # fmt: skip
        python = str(TOOLKIT / "bin" / "python")
        store = folder / "store"
        theirs = [python, "-c", START, str(folder / "ts.properties"), str(store)]
        path = {"PATH": f"{TOOLKIT / 'bin'}:{os.environ['PATH']}"}
        command = [sys.executable, "-P", "-m", "modelyard", "sagemaker", "serve"]
        with (
            serving(theirs, folder, 18081, path) as amazon,
            serving(command, folder, 18082, ours) as modelyard,
        ):
            pairs_of_values = zip(ask(amazon, body)[0], ask(modelyard, body)[0], strict=True)
            assert all(abs(a - b) < 1e-5 for a, b in pairs_of_values), "they answer otherwise"
            loads: dict[str, list[Load]] = {amazon: [], modelyard: []}
            for _ in range(given.rounds):
                for url, found in loads.items():
                    found.append(
                        run_wrk(url, given.connections, given.seconds, "application/json", [body])
                    )
    for name, found in zip(("toolkit", "modelyard"), loads.values(), strict=True):
        rate = statistics.median(load.requests / load.seconds for load in found)
        p50_ms = statistics.median(load.p50_ms for load in found)
        failures = sum(load.failures for load in found)
        print(f"{name}: {rate:.0f}/s, p50 {p50_ms:.2f} ms, {failures} failed")
    pairs = [
        (b.requests / b.seconds) / (a.requests / a.seconds)
        for a, b in zip(*loads.values(), strict=True)
    ]
    print(f"rate of modelyard / toolkit in pairs: {', '.join(f'{pair:.2f}' for pair in pairs)}")


if __name__ == "__main__":
    main()
