"""Core in a checkout from which `plugins/` was removed: its tests pass there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from modelyard.archiver import open_archive

ROOT = Path(__file__).parents[1]
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self.layer(row)
"""
TRIP = """
from modelyard import archive, export

(report,) = export(
    "net.pth", "net.py:Net", ("row:float32[batch,4]",), formats=["torchscript"], quick=True,
    output_dir=".",
)
path = archive(
    "value", artifact=report.artifact, handler="base_handler", examples=["row.json"],
    output_dir=".",
)
print(path)
"""
"""What is run by day: an export, an archive, and the answer of a worker that is written into it."""
WHOLE = ("test_docs.py", "test_image.py", "test_notebooks.py", "deploy/test_monitoring.py")
"""What is about the checkout as a whole: pages, notebooks and dashboards name what plug-ins add,
and the image holds them."""

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
    # An environment over this one, whose editable install would find the plug-ins of its checkout:
    # of a folder that a .pth names, no .pth is read.
    venv.create(folder / ".venv", symlinks=True)
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    installed = [path for path in sys.path if path.endswith("-packages")]
    (site / "alone.pth").write_text("\n".join(map(str, (folder, folder / "client", *installed))))
    return folder


def run(
    folder: Path, *arguments: str, where: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the Python of the copy, in it or elsewhere."""
    left_out = ("PYTEST_", "MODELYARD_", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    python = folder / ".venv" / "bin" / "python"
    return subprocess.run(
        [python, *arguments], cwd=where or folder, env=kept, capture_output=True, text=True
    )  # fmt: skip


def check(folder: Path, *arguments: str) -> None:
    ran = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_no_plug_in_is_there(alone: Path) -> None:
    code = "from modelyard.base.plugins import registered as r; print(*r('tasks'), *r('commands'))"
    ran = run(alone, "-c", code)
    assert (ran.returncode, ran.stdout.split()) == (0, []), ran.stderr


def test_cores_trip_passes_without_plug_ins(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    weights = {"layer.weight": torch.ones(2, 4), "layer.bias": torch.tensor([0.0, 1.0])}
    torch.save(weights, tmp_path / "net.pth")
    (tmp_path / "row.json").write_text("[0.5, -1.0, 2.0, 1.0]")
    ran = run(alone, "-c", TRIP, where=tmp_path)
    assert ran.returncode == 0, ran.stderr
    with open_archive(Path(tmp_path, ran.stdout.strip())) as archive:
        answer = json.loads(archive.read("MAR-INF/golden/0.expected.json"))["answer"]
    assert answer == pytest.approx([2.5, 3.5])


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_all_of_cores_tests_pass_without_plug_ins(alone: Path) -> None:
    check(
        alone,
        "--numprocesses",
        "2",
        "--dist",
        "loadfile",
        *(f"--ignore=tests/{file}" for file in WHOLE),
        "tests",
    )
