"""`ts.launcher`, as TorchServe's users call it from their own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import modelyard.serve.worker
from tests.serve.live import build_archive
from tests.serve.torchserve.live import ANY_PORTS, Home

SCRIPT = """
import json, sys
from pathlib import Path
from ts import launcher

store, home = sys.argv[1:]
lines = launcher.start(
    model_store=store,
    snapshot_file="ts.properties",
    no_config_snapshots=True,
    disable_token=True,
    enable_model_api=True,
)
(about,) = Path(home).glob(".modelyard-torchserve-*/server.json")
launcher.MANAGEMENT = json.loads(about.read_text())["management"]
first = launcher.register_model("mine", "echo.mar")
again = launcher.register_model_with_params((("model_name", "mine"), ("url", "echo.mar")))
launcher.stop()
rest = list(iter(lines.get, None))
print("RESULT", json.dumps([first.status_code, first.json(), again.status_code, again.ok, rest]))
"""


def test_start_register_and_stop_from_python(tmp_path: Path) -> None:
    home = Home(tmp_path)
    build_archive(home.store, "echo")
    ports = "".join(f"{key}={value}\n" for key, value in ANY_PORTS.items())
    (tmp_path / "ts.properties").write_text(ports)
    shim = Path(modelyard.serve.worker.__path__[0]) / "shim"
    environment = home.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(shim), environment["PYTHONPATH"]])
    try:
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(home.store), str(home.temp)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        home.stop()
    assert ran.returncode == 0, ran.stderr
    assert "Model server started." in ran.stdout.splitlines()
    (result,) = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
    registered, said, again, ok, rest = json.loads(result.removeprefix("RESULT"))
    assert registered == 200
    assert said["status"].endswith("registered with 1 initial workers")
    assert (again, ok) == (409, False)
    assert rest[-1].rstrip().endswith("Torchserve stopped.")
