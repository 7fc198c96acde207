"""A container of a cloud, as its platform starts one: the command, and the variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.serve.live import environment, poll

START_S = 120


@dataclass
class Container:
    """One that runs."""

    client: httpx.Client
    log: Path
    process: subprocess.Popen[bytes]

    def ping(self, route: str = "/ping") -> tuple[int, str]:
        """Return status and reason of its health."""
        answer = self.client.get(route)
        return answer.status_code, answer.json().get("reason", "")

    def wait_for(self, status: int, route: str = "/ping", says: str = "") -> str:
        """Return the reason as soon as its health has this status and says this."""

        def look() -> tuple[str] | None:
            found, reason = self.ping(route)
            return (reason,) if found == status and says in reason else None

        what = f"health {status} {says}; it says {self.ping(route)}, its log {self.log.read_text()}"
        found: tuple[str] = poll(look, what, START_S)
        return found[0]


@contextmanager
def container(
    cloud: str, folder: Path, state: Path, variables: Mapping[str, str], *options: str,
    python: str = sys.executable,
) -> Iterator[Container]:  # fmt: skip
    """Start one, and end it with the block; it listens when this returns, and may still load."""
    state.mkdir(exist_ok=True)
    own = {
        "MODELYARD_HOST": "127.0.0.1",
        "MODELYARD_MANAGEMENT_PORT": "0",
        "MODELYARD_METRICS_PORT": "0",
        "MODELYARD_PORT": "0",
        "MODELYARD_STATE_DIR": str(state),
        "MODELYARD_WORKERS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-P", "-m", "modelyard", cloud, "serve", f"--model-dir={folder}", *options]
    kept = {k: v for k, v in environment().items() if k != "MODELYARD_WRITE_PATHS"}
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**kept, **own, **variables}
        )
    file = state / "server.json"
    try:
        poll(lambda: file.exists() or process.poll() is not None, "it listens", START_S)
        assert process.poll() is None, (state / "log").read_text()
        url = json.loads(file.read_text())["inference"]
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Container(client, state / "log", process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def write_folder(folder: Path, files: Mapping[str, str]) -> Path:
    """Write a model folder's files, and return it."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def has_peers(name: str) -> str | None:
    """Return the Python of an environment that `scripts/peers` has made, None without."""
    python = Path(__file__).parents[3] / ".peers" / name / "bin" / "python"
    return os.environ.get(f"{name.upper()}_PYTHON") or (str(python) if python.exists() else None)
