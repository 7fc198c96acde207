"""An installation without extras: what it can do, and what says which extra is missing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard import cli
from modelyard.base.extras import EXTRAS
from modelyard.exporter import export
from modelyard.exporter.errors import UsageError
from tests.serve.live import launch, start_arguments
from tests.shared import DIGITS, FURTHER


def test_a_command_names_the_extra_that_it_misses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needs_safetensors.py").write_text("import safetensors.torch")
    (tmp_path / "needs_another.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    command = cli.commands()["inspect"]
    monkeypatch.setitem(cli.commands(), "inspect", command._replace(module="needs_safetensors"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", "net.pt"])
    assert ended.value.code == (
        "error: modelyard inspect: safetensors is not installed; pip install 'modelyard[export]'"
    )
    monkeypatch.setitem(cli.commands(), "inspect", command._replace(module="needs_another"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["inspect", "net.pt"])


def test_an_export_to_onnx_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    message = r"--format onnx: onnxscript is not installed; pip install 'modelyard\[export\]', or"
    with pytest.raises(UsageError, match=message):
        export(DIGITS / "digits.pt", None, (), output_dir=tmp_path)


@pytest.mark.nightly
@FURTHER
def test_a_server_without_any_extra_predicts_and_explains(
    digits_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    lines = "\n".join(f"sys.modules[{name!r}] = None" for name in EXTRAS)
    (blocked / "sitecustomize.py").write_text(f"import sys\n{lines}\n")
    paths = filter(None, (str(blocked), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    probe = [sys.executable, "-P", "-c", "import captum"]
    assert subprocess.run(probe, capture_output=True, check=False).returncode == 1
    scan = (DIGITS / "scans" / "7.png").read_bytes()
    state = tmp_path / "state"
    # gRPC is an extra as well, without which its port is refused.
    asked = [each for each in start_arguments(state, digits_store) if "grpc" not in each]
    with contextlib.ExitStack() as ended:
        server = launch(state, digits_store, *asked, "--models", "onnx")
        ended.callback(server.stop)
        assert max(server.predict("onnx", scan).json().items(), key=lambda each: each[1])[0] == "7"
        explained = server.client.post("/explanations/onnx", content=scan)
        assert explained.json()["label"] == "7"
        answer = server.client.post("/explanations/onnx?quality=true", content=scan)
        assert answer.status_code == 400
        assert "captum is not installed; pip install 'modelyard[explain]'" in answer.text
