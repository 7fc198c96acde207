"""The wheels: every package below `modelyard`, with the files that are not modules; the client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("archiver", "base", "examples", "exporter", "handlers", "plugins", "serve")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy: setuptools leaves files beside what it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "modelyard", source / "modelyard", symlinks=True)
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "model_archiver.py"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
               "--no-index", str(source), "-w", str(folder), "-q"]  # fmt: skip
    subprocess.run(command, check=True, timeout=150, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_file_of_the_packages_once(wheel: Path) -> None:
    files = {
        file.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for file in (ROOT / package).rglob("*")
        if file.is_file()
        and not {"__pycache__", "tests"} & {*file.parts}
        and (package != "plugins" or file.suffix != ".md")
    }
    own = {
        f"modelyard/{name}"
        for name in (
            *("__init__.py", "__main__.py", "cli.py", "client.py", "commands.toml"),
            *("example_cli.py", "py.typed"),
        )
    }
    own.add("model_archiver.py")
    with zipfile.ZipFile(wheel) as zipped:
        held = [name for name in zipped.namelist() if ".dist-info/" not in name]
    assert len(held) == len(set(held))
    assert set(held) - own == {f"modelyard/{file}" for file in files}
    assert own <= set(held)


def run_installed(wheel: Path, folder: Path, *arguments: str) -> str:
    """Unpack a wheel into a folder, and return what Python prints that finds it there."""
    with zipfile.ZipFile(wheel) as zipped:
        zipped.extractall(folder)
    ran = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    )
    return ran.stdout


def test_what_is_installed_from_a_wheel_runs_anywhere(wheel: Path, tmp_path: Path) -> None:
    printed = run_installed(wheel, tmp_path / "installed", "-m", "modelyard", "export", "--help")
    assert "checkpoint" in printed
