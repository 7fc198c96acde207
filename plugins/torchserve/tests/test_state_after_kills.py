"""What was acknowledged is there after `kill -9`, as snapshots remember it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.serve.live import environment, poll
from tests.serve.test_state_after_kills import Server, check_survival, write_store


class TorchServes(Server):
    """A server as `torchserve --start` starts it, restored from its snapshots."""

    has_most = True

    def __init__(self, folder: Path, store: Path) -> None:
        super().__init__(folder, store)
        with (
            socket.create_server(("127.0.0.1", 0)) as one,
            socket.create_server(("127.0.0.1", 0)) as two,
        ):
            self.ports = one.getsockname()[1], two.getsockname()[1]
        (folder / "config.properties").write_text(
            f"inference_address=http://127.0.0.1:{self.ports[0]}\n"
            f"management_address=http://127.0.0.1:{self.ports[1]}\n"
            "enable_metrics_api=false\ndisable_system_metrics=true\n"
            "default_workers_per_model=0\nenable_model_api=true\n"
            "disable_token_authorization=true\n",
            encoding="utf-8",
        )

    def start(self) -> None:
        flags = ["-", "--start", "--model-store", str(self.store)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelyard.plugins.torchserve.server", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env={**environment(), "TMPDIR": str(self.folder), "TEMP": str(self.folder)},
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Model server started."):
                break
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.ports[1]}", timeout=20)
        poll(self._answers, "the management API answers")

    def _answers(self) -> bool:
        try:
            return self.client.get("/models").status_code == 200
        except httpx.TransportError:
            return False


@pytest.mark.nightly
def test_what_was_acknowledged_survives_kills_at_any_moment(tmp_path: Path) -> None:
    check_survival(TorchServes(tmp_path, write_store(tmp_path / "store")), 250)
