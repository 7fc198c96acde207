"""What is removed that others wrote."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

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
