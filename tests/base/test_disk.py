"""What is removed that others wrote."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from modelyard.base.disk import remove

LEAVES = """
import os, sys
from pathlib import Path
from modelyard.base.disk import remove
if os.geteuid() == 0:  # whom no mode keeps out
    os.setgroups([])
    os.setresgid(*[1500] * 3)
    os.setresuid(*[1500] * 3)
folder = Path(sys.argv[1], "left")
folder.mkdir()
here = os.open(folder, os.O_RDONLY)
for _ in range(1500):
    os.mkdir("deeper", dir_fd=here)
    os.symlink(sys.argv[1], "link", dir_fd=here)
    above, here = here, os.open("deeper", os.O_RDONLY, dir_fd=here)
    os.close(above)
for name in ("closed", "closed/inside"):
    (folder / name).mkdir()
(folder / "closed" / "inside" / "file").touch()
for name in ("closed/inside", "closed", "."):
    (folder / name).chmod(0)
remove(folder)
remove(folder)
print(folder.exists())
"""


def test_a_folder_goes_however_deep_and_closed_it_is() -> None:
    """Python's own function calls itself for each folder, and cannot enter one that is closed."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o777)  # it is another user's work
        (place / "kept").touch()
        command = [sys.executable, "-P", "-c", LEAVES, name]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (ran.stdout.strip(), ran.stderr) == ("False", "")
        assert [each.name for each in place.iterdir()] == ["kept"]


SWAPS = """
import contextlib, os, sys
os.chdir(sys.argv[1])
print(flush=True)
while True:
    for at in range(20):
        with contextlib.suppress(OSError):
            os.makedirs(f"{at}/inner", exist_ok=True)
            os.rename(f"{at}", f"was {at}")
            os.symlink(sys.argv[2], f"{at}")
            os.unlink(f"{at}")
            os.rename(f"was {at}", f"{at}")
"""


@pytest.mark.nightly
def test_no_link_that_is_put_in_a_folders_place_meanwhile_is_followed(tmp_path: Path) -> None:
    """One that looks first and opens then removed what lies outside in 12 of 125 rounds."""
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True, mode=0o755)
    for at in range(30):
        folder = tmp_path / str(at)
        folder.mkdir()
        command = [sys.executable, "-c", SWAPS, str(folder), str(outside)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as swaps:
            assert swaps.stdout is not None
            swaps.stdout.readline()
            time.sleep(0.05)  # until it has made all of them, and swaps
            remove(folder)
            swaps.kill()
        assert (outside / "kept").is_dir()
    assert outside.stat().st_mode & 0o777 == 0o755
