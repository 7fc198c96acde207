"""Core in a checkout from which `plugins/` was removed: its tests pass there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRIP = (
    "tests/trips/test_predict.py",
    "tests/archiver/test_write.py",
    "tests/handlers/test_base.py",
)
"""What is run by day: an export, an archive, a served answer, a handler of one's own."""

pytestmark = pytest.mark.skipif(not (ROOT / "plugins").exists(), reason="there are none here")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this checkout without plug-ins, as they are registered here."""
    folder = tmp_path_factory.mktemp("core")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        file = ROOT / name
        if not name.startswith("plugins/") and (file.is_symlink() or file.exists()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, folder / name, follow_symlinks=False)
    assert not (folder / "plugins").exists()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "# Of an editable install, which would find the plug-ins of the other checkout.\n"
        "sys.meta_path = [f for f in sys.meta_path if not hasattr(f, '__module__') or\n"
        "                 not f.__module__.startswith('__editable__')]\n"
    )
    return folder


def run(folder: Path, *arguments: str) -> None:
    path = os.pathsep.join([str(folder), str(folder / "client")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MODELYARD_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env={**kept, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_no_plug_in_is_there(alone: Path) -> None:
    code = "from modelyard.base.plugins import registered as r; print(*r('tasks'), *r('commands'))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=alone, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(alone)},
    )  # fmt: skip
    assert ran.stdout.split() == []


@pytest.mark.timeout(600)
def test_cores_trip_passes_without_plug_ins(alone: Path) -> None:
    run(alone, *TRIP)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_all_of_cores_tests_pass_without_plug_ins(alone: Path) -> None:
    run(alone, "--numprocesses", "2", "--dist", "loadfile", "tests")
