"""No onnxruntime that is allowed reads or writes beyond what a file holds."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.handlers.hostile_onnx import TRY_ALL, write_all

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def outcomes(folder: Path, libraries: Path | None = None) -> dict[str, str]:
    """Return file → what came of it with the onnxruntime of `libraries`, or the installed one."""
    names = list(write_all(folder))
    ran = subprocess.run(
        [sys.executable, "-c", TRY_ALL, *names],
        cwd=folder,
        env={**os.environ, **({"PYTHONPATH": str(libraries)} if libraries else {})},
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = dict(map(json.loads, ran.stdout.splitlines()))
    assert list(found) == names, ran.stderr
    return found


def are_safe(found: dict[str, str]) -> bool:
    assert found.pop("honest").startswith("answered [[1.0, 0.0")
    return {name: said for name, said in found.items() if said != "refused"} == {}


def install(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
    subprocess.run([*command, f"--target={folder}", f"onnxruntime=={version}"], check=True)
    return folder


def test_the_onnxruntime_that_is_here_refuses_every_hostile_file(tmp_path: Path) -> None:
    found = outcomes(tmp_path)

    assert are_safe(found), found


@pytest.mark.network
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_lowest_onnxruntime_that_is_allowed_refuses_every_hostile_file(tmp_path: Path) -> None:
    lines = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    (lowest,) = re.findall(r"^onnxruntime>=([\d.]+)", "\n".join(lines), re.M)
    found = outcomes(tmp_path, install(f"{lowest}.*", tmp_path / "lowest"))

    assert are_safe(found), found


@pytest.mark.network
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_files_show_what_an_onnxruntime_before_the_bound_did(tmp_path: Path) -> None:
    found = outcomes(tmp_path, install("1.20.1", tmp_path / "old"))

    assert found["absolute"].startswith("answered [[")
    assert found["region"] == "ended by signal 11"
    assert not are_safe(found)
