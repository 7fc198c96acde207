"""A project whose own files are called as our packages are: both keep their names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.cli import COMMANDS

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a project with modules and a package of our packages' names, which fail on import."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "exporter").mkdir()
    for name in ("serve.py", "handlers.py", "archiver.py", "exporter/__init__.py"):
        (folder / name).write_text(f"raise SystemExit('{name} of the project was imported')\n")
    return folder


def modelyard(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in the project, whose folder leads the path."""
    path = os.pathsep.join((".", str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "modelyard", *arguments],
        cwd=project, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_there(project: Path, command: str) -> None:
    ran = modelyard(project, command, "--help")
    assert ran.returncode == 0, ran.stderr
    assert "was imported" not in ran.stdout + ran.stderr


def test_the_whole_trip_runs_there(project: Path) -> None:
    model = f"{DIGITS / 'net.py'}:DigitsNet"
    state = project / "state"
    scan = str(DIGITS / "scans" / "7.png")

    def run(*arguments: str) -> str:
        ran = modelyard(project, *arguments)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run("export", str(DIGITS / "digits.pt"), "--model", model, "--input",
        "image:float32[batch,1,8,8]", "--output", "logits", "--format", "pt2",
        "-o", "artifacts")  # fmt: skip
    run("archive", "digits", "--version", "1.0", "--artifact", "artifacts/digits.pt2",
        "--handler", "image_classifier", "--extra-files", str(DIGITS / "index_to_name.json"),
        "--config-file", str(DIGITS / "model-config.yaml"), "--example", f"{scan}=7",
        "-o", "store")  # fmt: skip
    run("verify", "store/digits.mar")
    run("serve", "start", "--model-store", "store", "--models", "digits", "--workers", "1",
        "--state-dir", str(state), "--port=0", "--management-port=0",
        "--metrics-port=0")  # fmt: skip
    try:
        answer = json.loads(run("predict", "digits", scan, "--state-dir", str(state), "--json"))
        assert max(answer, key=answer.get) == "7"
    finally:
        modelyard(project, "serve", "stop", "--state-dir", str(state))
