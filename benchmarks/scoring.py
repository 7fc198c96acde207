"""`POST /invocations` of one model: `modelyard serve` beside `mlflow models serve`, in turns.

scripts/peers mlflow && python -m benchmarks.scoring

A perceptron of 64, 128, 128 and 10 numbers, saved by mlflow.pytorch; one worker each, one thread
for torch. Every body has one row; both have to give the same predictions.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.wrk import run_wrk

ROOT = Path(__file__).parents[1]
PEER = ROOT / ".peers" / "mlflow" / "bin"
OURS = [sys.executable, "-m", "modelyard"]
TOLERANCE = 1e-4
SAVE = """
import sys, mlflow.pytorch, torch
from mlflow.models import infer_signature
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
).eval()
rows = torch.rand(2, 64)
signature = infer_signature(rows.numpy(), net(rows).detach().numpy())
mlflow.pytorch.save_model(
    net, sys.argv[1], signature=signature, input_example=rows.numpy(), pip_requirements=["torch"]
)
"""


def free_port() -> int:
    """Return a port that nobody had a moment ago."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def wait_ready(url: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a server answers its probe."""
    for _ in range(600):
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ping").status_code == 200:
                return
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"error: {url} did not become ready")


@contextlib.contextmanager
def theirs(model: Path, folder: Path) -> Iterator[str]:
    """Serve a model by MLflow."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    env = {**os.environ, "PATH": f"{PEER}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command: list[str | Path] = [PEER / "mlflow", "models", "serve", "-m", model]
    command += ["--env-manager", "local"]
    with (folder / "mlflow.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "-p", str(port), "-w", "1"], env=env, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_ready(url, process)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(30)


@contextlib.contextmanager
def ours(model: Path, folder: Path) -> Iterator[str]:
    """Serve the same by Modelyard: exported, proven, archived."""
    env = {**os.environ, "MODELYARD_STATE_DIR": str(folder / "state"), "OMP_NUM_THREADS": "1"}

    def run(*words: str | Path) -> None:
        subprocess.run([*OURS, *words], env=env, check=True, cwd=folder, stdout=subprocess.DEVNULL)

    url = f"http://127.0.0.1:{(port := free_port())}"
    run("export", model, "-o", "build", "--format", "onnx", "--name", "net")
    run("archive", "net", "--artifact", "build/net.onnx", "--handler", "mlflow_scoring",
        "--example", "build/net.example.json", "-o", "store")  # fmt: skip
    (folder / "settings.yaml").write_text("invocations: net\n")
    run("serve", "start", "--config", "settings.yaml", "--model-store", "store", "--models", "net",
        "--workers", "1", "--port", str(port), "--management-port", "0", "--metrics-port", "0"
        )  # fmt: skip
    try:
        wait_ready(url)
        yield url
    finally:
        run("serve", "stop")


def compare(urls: dict[str, str], bodies: list[Path]) -> None:
    """Refuse to measure servers that answer differently."""
    for body in bodies:
        found = [
            httpx.post(
                f"{url}/invocations",
                content=body.read_bytes(),
                headers={"content-type": "application/json"},
            ).json()["predictions"][0]
            for url in urls.values()
        ]
        apart = max(abs(one - other) for one, other in zip(*found, strict=True))
        if apart > TOLERANCE:
            raise SystemExit(f"error: {body.name}: the predictions are {apart:.1e} apart")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4)
    options = parser.parse_args()
    if not (PEER / "mlflow").exists():
        raise SystemExit("error: there is no MLflow; `scripts/peers mlflow` installs it")
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        model = folder / "model"
        subprocess.run([PEER / "python", "-W", "ignore", "-c", SAVE, model], check=True)
        bodies = []
        for at in range(8):
            rows = [[round((at + each) % 9 / 9, 3) for each in range(64)]]
            bodies.append(folder / f"{at}.json")
            bodies[-1].write_text(json.dumps({"inputs": rows}))
        urls = {"mlflow": stack.enter_context(theirs(model, folder))}
        urls["modelyard"] = stack.enter_context(ours(model, folder))
        compare(urls, bodies)
        print("connections   mlflow/s  modelyard/s   ratio   p50 ms mlflow  modelyard")
        for connections in (1, 8, 64):
            rates: dict[str, list[float]] = {name: [] for name in urls}
            p50s: dict[str, list[float]] = {name: [] for name in urls}
            for _ in range(options.rounds):
                for name, url in urls.items():
                    load = run_wrk(
                        f"{url}/invocations", connections, options.seconds, "application/json",
                        bodies,
                    )  # fmt: skip
                    if load.failures:
                        raise SystemExit(f"error: {name}: {load.errors}")
                    rates[name].append(load.requests / load.seconds)
                    p50s[name].append(load.p50_ms)
            ratio = statistics.median(
                one / other for one, other in zip(rates["modelyard"], rates["mlflow"], strict=True)
            )
            rate, p50 = (
                {name: statistics.median(each) for name, each in found.items()}
                for found in (rates, p50s)
            )
            print(
                f"{connections:>11} {rate['mlflow']:>10.0f} {rate['modelyard']:>12.0f} "
                f"{ratio:>6.1f}x {p50['mlflow']:>14.2f} {p50['modelyard']:>10.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
