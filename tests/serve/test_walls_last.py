"""Walls that last: what a worker may read, it may read for as long as it lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.serve.walls import landlock
from tests.serve.walls.lasting import ALL_WAYS, WAYS

ALONE = ("unshare", "--fork", "--pid", "--mount", "--mount-proc", "--kill-child")
"""Processes and a /proc of their own: a remount there is nobody else's."""
MAY_DROP = os.access("/proc/sys/vm/drop_caches", os.W_OK)
each_way = pytest.mark.parametrize(
    "way", [way for way in WAYS if way != "drop" or MAY_DROP], ids=str
)

RULES = """
import os, sys
from modelyard.serve.walls import kernel, landlock, places
forget, folder = sys.argv[1:]
files = ("/proc/cpuinfo", "/proc/sys/kernel/osrelease", "/proc/driver", "/proc/self/maps",
         "/sys/devices/system/cpu/possible", f"{folder}/one")
there, here = os.pipe(), os.pipe()
if os.fork():
    os.read(there[0], 1)
    status = os.system(forget)
    os.write(here[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) or status)
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
landlock.restrict((place, landlock.READ) for place in [*places.readable(), "/proc/self", files[-1]])
look = "for file in filter(os.path.exists, files): os.close(os.open(file, os.O_RDONLY))"
exec(look)
os.write(there[1], b"x")
os.read(here[0], 1)
exec(look)
os.execv(sys.executable, [sys.executable, "-c", f"import os\\nfiles = {files}\\n{look}"])
"""
OVERLAY = """
cd "$1" && mount -t tmpfs none . && cd "$1" && mkdir lower upper work
touch lower/one && ln lower/one lower/two
mount -t overlay none -olowerdir=lower,upperdir=upper,workdir=work . || mv lower/one .
"""


def alone(*command: str) -> subprocess.CompletedProcess[str]:
    """Run what sees no other processes; as root of a user namespace where we are not root."""
    words = [*ALONE, *(() if os.geteuid() == 0 else ("--map-root-user",))]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("there are no namespaces here")
    return subprocess.run([*words, *command], capture_output=True, text=True, timeout=600)


@pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
@each_way
def test_a_rule_outlives_what_the_kernel_keeps_of_its_name(way: str, tmp_path: Path) -> None:
    """Of procfs, and of a file of several names on an overlay; for another program, too."""
    script = f'{OVERLAY}\nexec "{sys.executable}" -c "$0" "$2" "$1"'
    ran = alone("bash", "-c", script, RULES, str(tmp_path), WAYS[way])
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in ALL_WAYS if way != "drop" or MAY_DROP])
def test_every_endpoint_answers_when_names_were_dropped(way: str, digits_store: Path) -> None:
    """`python -m tests.serve.walls.lasting 3600` asks for an hour."""
    ran = alone(sys.executable, "-m", "tests.serve.walls.lasting", "6", way, str(digits_store))
    assert ran.returncode == 0, ran.stdout + ran.stderr
