"""A real server started by the command `torchserve`, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from modelyard.plugins.torchserve import launcher
from tests.serve.live import TIMEOUT_S, environment, poll

COMMAND = [sys.executable, "-P", "-m", "modelyard.plugins.torchserve.cli"]
ANY_PORTS = {
    "inference_address": "http://127.0.0.1:0",
    "management_address": "http://localhost:0",
    "metrics_address": "http://127.0.0.2:0",
    "grpc_inference_port": "0",
    "grpc_management_port": "0",
}
"""Three addresses: APIs with equal ones would share a port, as both APIs by gRPC do the first."""


class Home:
    """A working folder, a model store, a temp folder and the server that runs there."""

    def __init__(self, folder: Path, store: Path | None = None) -> None:
        self.folder = folder
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.store = store or folder / "store"
        self.store.mkdir(exist_ok=True)
        self.output = folder / "output.txt"
        self.logs = folder / "logs"

    def run(self, *arguments: str | Path, **variables: str) -> tuple[int, str]:
        """Run the command to its end; return exit code and output, the server's own included."""
        before = self.output.stat().st_size if self.output.exists() else 0
        with self.output.open("ab") as output:
            ran = subprocess.run(
                [*COMMAND, *map(str, arguments)],
                cwd=self.folder,
                env=self.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=TIMEOUT_S,
            )
        return ran.returncode, self.output.read_text(encoding="utf-8")[before:]

    def environment(self, **variables: str) -> dict[str, str]:
        """Return what the command sees; the project itself is found through the path."""
        kept = {k: v for k, v in environment().items() if not k.startswith("TS_")}
        path = os.pathsep.join(p for p in (os.getcwd(), kept.get("PYTHONPATH")) if p)  # noqa: PTH109
        places = {"TMPDIR": str(self.temp), "TEMP": str(self.temp), "PYTHONPATH": path}
        return {**kept, **places, **variables}

    def start(
        self, *arguments: str | Path, properties: Mapping[str, str] | None = None, **variables: str
    ) -> str:
        """Start a server on free ports without tokens; return the output so far."""
        file = self.folder / "ts.properties"
        values = {
            **ANY_PORTS,
            "disable_token_authorization": "true",
            "disable_system_metrics": "true",
            **(properties or {}),
        }
        file.write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        flags = ("--start", "--model-store", self.store, "--ts-config", file)
        code, output = self.run(*flags, *arguments, **variables)
        assert code == 0, output
        return output

    @property
    def pid(self) -> int:
        """The number in the pid file."""
        return int((self.temp / ".model_server.pid").read_text())

    @property
    def about(self) -> dict[str, Any]:
        """What the server wrote of itself once its ports were open."""
        (file,) = self.temp.glob(".modelyard-torchserve-*/server.json")
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    def client(self, api: str = "inference") -> httpx.Client:
        """Return a client of one API."""
        return httpx.Client(base_url=self.about[api], timeout=TIMEOUT_S, verify=False)

    def get(self, path: str, api: str = "management") -> httpx.Response:
        """Ask once."""
        with self.client(api) as client:
            return client.get(path)

    def wait_for_workers(self, model: str, count: int = 1) -> None:
        """Wait until a model has so many workers that are ready."""

        def is_there() -> bool:
            workers: list[dict[str, Any]] = self.get(f"/models/{model}").json()[0]["workers"]
            return [worker["status"] for worker in workers].count("READY") == count

        poll(is_there, f"{count} workers of {model}")

    def stop(self) -> None:
        """Stop the server, if one runs that named itself."""
        if (self.temp / ".model_server.pid").exists():
            pid = self.pid
            self.run("--stop")
            assert not launcher.is_server(pid)
