"""No onnxruntime that is allowed reads or writes beyond what a file holds."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.handlers.hostile_onnx import TRY_ALL, write_all, write_more

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def outcomes(folder: Path, libraries: Path | None = None) -> dict[str, str]:
    """Return file → what came of it with the onnxruntime of `libraries`, or the installed one.

    Files of `write_more` that were run, twice and with other bytes in fresh memory, gave the same.
    """
    firm, others = list(write_all(folder)), list(write_more(folder))
    found = [_outcomes(folder, [*firm, *others], byte, libraries) for byte in (17, 200)]
    assert list(found[0]) == [*firm, *others]
    for name in others:
        if found[0][name] == found[1][name] and found[0][name].startswith("answered"):
            found[0][name] = "refused"
    return found[0]


def _outcomes(folder: Path, names: list[str], byte: int, libraries: Path | None) -> dict[str, str]:
    path = {"PYTHONPATH": str(libraries)} if libraries else {}
    ran = subprocess.run(
        [sys.executable, "-c", TRY_ALL, *names],
        cwd=folder,
        env={**os.environ, "MALLOC_PERTURB_": str(byte), **path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return dict(map(json.loads, ran.stdout.splitlines()))


def are_safe(found: dict[str, str]) -> bool:
    assert len(found) > 66
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
