"""What walls are made of: a filter of system calls, and Landlock."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelyard.serve.walls import calls, landlock, mounts
from tests.serve.walls.identities import IS_ROOT

ALLOWED, REFUSED, DONE, ABSENT = 0x7FFF0000, 0x00050001, 0x00050000, 0x00050000 | 38


def judge(machine: str, has_network: bool, number: int, *arguments: int) -> int:
    """Run the filter as the kernel does, and return its verdict."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    words = [*arguments, *(0,) * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *words)
    built = calls._program(machine, has_network, False, 77)
    program = [struct.unpack("HBBI", each) for each in built]
    at = value = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x06:
            return int(operand)
        else:
            is_true = {
                0x15: value == operand,
                0x35: value >= operand,
                0x45: bool(value & operand),
            }[code]
            at += if_true if is_true else if_false


OF_ITSELF: dict[str, tuple[tuple[int, ...], int | None]] = {
    "prlimit64": ((), None),
    "sched_setparam": ((), None),
    "sched_setscheduler": ((), None),
    "sched_setattr": ((), None),
    "sched_setaffinity": ((), None),
    "setpriority": ((os.PRIO_PROCESS,), os.PRIO_USER),
    "ioprio_set": ((1,), 3),
}
"""Call → its arguments before the process, and the first one with which it means a user's all."""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_judges_alike_on_both_architectures(machine: str) -> None:
    column = ["x86_64", "aarch64"].index(machine)
    unix, internet, packet, route = 1, 2, 17, 16
    stream, raw, cloexec = 1, 3, 0o2000000
    for numbers, verdict in (
        *((numbers, REFUSED) for numbers in (calls._DENIED | calls._WATCHING).values()),
        *((numbers, DONE) for numbers in calls._METADATA.values()),
    ):
        if numbers[column] >= 0:
            assert judge(machine, True, numbers[column]) == verdict
    ioctl, fcntl = calls._IOCTL[column], calls._WITH["fcntl_setlease"][column]
    for group in "fXv\x94":
        assert judge(machine, True, ioctl, 3, 0x40080000 | ord(group) << 8 | 2) == 0x00050000 | 25
    assert judge(machine, True, ioctl, 3, 0xC020462A) == ALLOWED  # a GPU's
    assert [judge(machine, True, fcntl, 3, command) for command in (1, 1024, 1026)] == [
        ALLOWED, REFUSED, REFUSED]  # fmt: skip
    prctl, sets = (calls._WITH[f"{name}_{what}"][column] for name, what in (
        ("prctl", "set_seccomp"), ("setsockopt", "attach_filter")))  # fmt: skip
    assert [judge(machine, True, prctl, option) for option in (15, 22)] == [ALLOWED, REFUSED]
    of_sockets, of_ip6 = 1, 41
    assert [judge(machine, True, sets, 3, *each) for each in (
        (of_sockets, 26), (of_sockets, 51), (of_sockets, 2), (of_ip6, 26))] == [
        REFUSED, REFUSED, ALLOWED, ALLOWED]  # fmt: skip
    clone, socket_ = calls._CLONE[column], calls._SOCKET[column]
    assert judge(machine, True, clone, 0x3D0F00) == ALLOWED  # a thread
    assert judge(machine, True, clone, 0x10000000 | 17) == REFUSED  # with a user namespace
    assert judge(machine, True, 435) == 0x00050000 | 38  # clone3: ENOSYS
    for family, kind, verdict in (
        (internet, stream | cloexec, ALLOWED),
        (unix, stream, ALLOWED),
        (internet, raw | cloexec, REFUSED),
        (packet, raw, REFUSED),
        (route, raw | cloexec, ALLOWED),
        (40, stream, REFUSED),
    ):
        assert judge(machine, True, socket_, family, kind) == verdict
        assert judge(machine, False, socket_, family, kind) == REFUSED
    assert judge(machine, True, socket_, route, raw, 9) == REFUSED  # another part of the kernel
    packets, datagram = 5, 2
    for family, kind, verdict in (
        (unix, packets | cloexec, ALLOWED),
        (unix, stream, REFUSED),
        (unix, datagram, REFUSED),
        (internet, packets, REFUSED),
        (packet, packets, REFUSED),
    ):
        assert judge(machine, False, socket_, family, kind) == verdict
    for kind, verdict in ((stream | cloexec, ALLOWED), (packets, ALLOWED), (datagram, REFUSED),
                          (raw, REFUSED)):  # fmt: skip
        assert judge(machine, False, calls._SOCKETPAIR[column], unix, kind) == verdict
        assert judge(machine, True, calls._SOCKETPAIR[column], unix, kind) == ALLOWED
    assert judge(machine, False, calls._CONNECT[column], 3) == 0x00050000 | 111  # ECONNREFUSED
    assert judge(machine, True, calls._CONNECT[column], 3) == ALLOWED
    assert OF_ITSELF.keys() == calls._OF_ITSELF.keys()
    for name, (before, user) in OF_ITSELF.items():
        number = calls._OF_ITSELF[name][column]
        verdicts = [judge(machine, False, number, *before, pid) for pid in (0, 77, 1)]
        other = DONE if name == "sched_setaffinity" else REFUSED  # libraries pin threads
        assert verdicts == [ALLOWED, ALLOWED, other], name
        if user is not None:
            assert judge(machine, False, number, user, 0) == REFUSED, name
    later, of_x32 = calls._NEWEST + 1, 0x40000000
    assert {judge(machine, False, each) for each in (later, of_x32, 0xFFFFFFFF)} == {ABSENT}
    assert judge(machine, False, calls._NEWEST) == DONE  # it is among the tables'
    assert judge(machine, False, {"x86_64": 0, "aarch64": 63}[machine]) == ALLOWED  # read


def test_the_numbers_are_those_of_this_machine() -> None:
    """A wrong one would refuse another call: the kernel's own list knows, where it is there."""
    headers = [
        *Path("/usr/include").glob(f"{platform.machine()}-linux-gnu/asm/unistd_64.h"),
        Path("/usr/include/asm-generic/unistd.h"),
    ]
    column = {"x86_64": 0, "aarch64": 1}
    for file in headers:
        machine = "aarch64" if "generic" in file.parts[-2] else platform.machine()
        if not file.exists() or machine not in column:
            continue
        there = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            match line.split():
                case ["#define", name, number] if number.isdigit():
                    there[name.removeprefix("__NR_").removeprefix("__NR3264_")] = int(number)
        others = {"clone": calls._CLONE, "clone3": calls._CLONE3, "socket": calls._SOCKET,
                  "ioctl": calls._IOCTL, "connect": calls._CONNECT,
                  "socketpair": calls._SOCKETPAIR,
                  **{name.partition("_")[0]: each
                     for name, each in calls._WITH.items()}}  # fmt: skip
        known = calls._DENIED | calls._OF_ITSELF | calls._WATCHING | calls._METADATA | others
        for name, numbers in known.items():
            assert numbers[column[machine]] >= 0 or name not in there, name
            if numbers[column[machine]] < 0:
                continue
            assert there.get(name, numbers[column[machine]]) == numbers[column[machine]], name


def test_calls_since_linux_5_1_have_one_number_everywhere() -> None:
    """Headers that are older than a call do not know it."""
    for name, (one, other) in (calls._DENIED | calls._METADATA | calls._WATCHING).items():
        assert one == other or max(one, other) < 424, name


CUDA_STARTS = """
import socket, sys, threading
from pathlib import Path
from modelyard.serve.walls import raising
raising.raise_walls(raising.Walls(False, reads=tuple(sys.argv[1:])))
with open(f"/proc/self/task/{threading.get_native_id()}/comm", "wb") as name:
    name.write(b"cuda00001400006")
mark = Path("/proc/self/ns/pid").readlink().name[5:-1]
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
listener.bind(f"\\0cuda-uvmfd-{mark}-{threading.get_native_id()}")
listener.listen(16)
try:
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(listener.getsockname())
except ConnectionRefusedError:
    print("listens")
"""


def test_what_cuda_does_when_it_starts_is_not_refused() -> None:
    """As libcuda 580 did it on an H200: else cuInit fails with 304."""
    command = [sys.executable, "-c", CUDA_STARTS, sys.prefix, sys.base_prefix, str(Path.cwd())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "listens\n", ran.stderr


METADATA = """
import contextlib, ctypes, fcntl, os, sys
from modelyard.serve.walls import calls, kernel, mounts
folder, walls = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
if walls == "mounts":
    mounts.separate([f"{folder}/own"])
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
if walls != "none":
    calls.restrict(has_network=True, has_metadata=walls != "seccomp")
file = f"{folder}/file"
reading = os.open(file, os.O_RDONLY)
NODUMP = (0x40).to_bytes(8, "little")
for name, change in {
    "mode": lambda: os.chmod(file, 0o644),
    "closed folder": lambda: os.chmod(f"{folder}/closed", 0),
    "mode by descriptor": lambda: os.fchmod(reading, 0o604),
    "time": lambda: os.utime(file, (1, 1)),
    "time by descriptor": lambda: os.utime(reading, (2, 2)),
    "owner": lambda: os.chown(file, -1, GROUP),
    "label": lambda: os.setxattr(file, "user.mark", b"1"),
    "label by descriptor": lambda: os.setxattr(reading, "user.other", b"1"),
    "flags": lambda: fcntl.ioctl(reading, 0x40086602, NODUMP),
    "lease": lambda: fcntl.fcntl(reading, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "watch": lambda: None if libc.inotify_init1(0) >= 0 else 1 / 0,
    "processors": lambda: os.sched_setaffinity(os.getppid(), {min(os.sched_getaffinity(0))}),
}.items():
    before = about(folder)
    with contextlib.suppress(OSError, ZeroDivisionError):
        change()
        if name in ("lease", "watch") or about(folder) != before:
            print(name)
os.sched_setaffinity(0, os.sched_getaffinity(0))
with open(f"{folder}/own/file", "w") as own:
    os.fchmod(own.fileno(), 0o600)
    os.chmod(f"{folder}/own/file", os.fstat(own.fileno()).st_mode | 0o100)
print(oct(os.stat(f"{folder}/own/file").st_mode)[-3:])
"""
HIDDEN = """
import contextlib, os, pathlib, sys
from modelyard.serve.walls import mounts
base = sys.argv[1]
state = f"{base}/state"
reads = ["/usr", f"{base}/elsewhere", f"{state}/models/own", f"{state}/models/own/inner",
         f"{state}/read", f"{base}/link/models/linked", f"{state}/absent"]
writes = [f"{state}/models/own/inner/shared", f"{state}/models/own/inner/file",
          f"{state}/scratch", f"{state}/written", f"{state}/absent"]
mounts.separate(writes, reads, sys.argv[2].format(base))
for place in sorted(pathlib.Path(base).rglob("*")):
    with contextlib.suppress(OSError):
        if place.is_file():
            place.open("a").close()
            print(place.relative_to(base), place.read_text().strip(), "written")
            continue
    print(place.relative_to(base), place.read_text().strip() if place.is_file() else "")
for place in (state, f"{state}/models", f"{state}/models/own", f"{state}/models/own/inner/shared"):
    with contextlib.suppress(OSError):
        os.close(os.open(f"{place}/new", os.O_CREAT))
        print("new in", os.path.relpath(place, base))
"""
VISIBLE = """
elsewhere
elsewhere/file one
link
state
state/models
state/models/linked
state/models/linked/file one
state/models/own
state/models/own/file one
state/models/own/inner
state/models/own/inner/file one written
state/models/own/inner/shared
state/models/own/inner/shared/file one written
state/read one
state/scratch
state/scratch/file one written
state/written one written
new in state/models/own/inner/shared
"""


@pytest.mark.parametrize("hidden", ["{}/state", "{}/link", "{}/absent", ""])
def test_of_a_hidden_folder_there_is_what_is_named(tmp_path: Path, hidden: str) -> None:
    if reason := mounts.why_not():
        pytest.skip(reason)
    folders = ("elsewhere", "state/models/own/inner/shared", "state/models/other")
    for folder in (*folders, "state/models/linked", "state/scratch"):
        (tmp_path / folder).mkdir(parents=True)
    made = [*(tmp_path / "state").rglob("*"), tmp_path / "elsewhere"]
    files = [folder / "file" for folder in made]
    for file in (*files, *(tmp_path / "state" / name for name in ("keys", "read", "written"))):
        file.write_text("one")
    (tmp_path / "link").symlink_to("state")
    before = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("*")}
    command = [sys.executable, "-P", "-c", HIDDEN, str(tmp_path), hidden]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    seen = [line.strip() for line in ran.stdout.splitlines()]
    if hidden in ("{}/state", "{}/link"):
        assert seen == VISIBLE.split("\n")[1:-1]
    else:
        assert "state/keys one" in seen and "state/models/other/file one" in seen
    new = tmp_path / "state/models/own/inner/shared/new"
    assert {each for each in tmp_path.rglob("*") if each not in before} == {new}
    changed = {each for each, then in before.items() if each.stat().st_mtime_ns != then}
    assert changed == {new.parent}


ABOUT = """
import fcntl, os
GROUP = max(os.getgroups(), default=0) or 12345
def about(folder):
    with open(f"{folder}/file") as file:
        there, here = os.fstat(file.fileno()), os.stat(f"{folder}/closed")
        try:
            flags = fcntl.ioctl(file, 0x80086601, bytes(8))
        except OSError:
            flags = b""
        cpus = os.sched_getaffinity(os.getppid())
        return (there.st_mode, there.st_mtime, there.st_gid, os.listxattr(file.fileno()), flags,
                here.st_mode, cpus)
"""


@pytest.mark.parametrize("walls", ["none", "own user", "seccomp", "mounts"])
def test_metadata_of_the_servers_user_are_behind_the_walls(tmp_path: Path, walls: str) -> None:
    """A worker that is the server's user changes none by a path, nor by what it may but read."""
    if walls == "mounts" and (reason := mounts.why_not()):
        pytest.skip(reason)
    (tmp_path / "file").touch(0o600)
    (tmp_path / "closed").mkdir(0o700)
    (tmp_path / "own").mkdir()
    cpus = os.sched_getaffinity(0)
    command = [sys.executable, "-P", "-c", ABOUT + METADATA, str(tmp_path), walls]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        os.sched_setaffinity(0, cpus)
        (tmp_path / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    *changed, own = done.stdout.split("\n")[:-1]
    metadata = {
        "mode",
        "closed folder",
        "mode by descriptor",
        "time",
        "time by descriptor",
        "label",
    }
    assert own == ("644" if walls == "seccomp" else "700")
    if walls in ("none", "own user"):
        assert metadata <= {*changed}
        assert {"lease", "watch"} & {*changed} == ({"lease", "watch"} if walls == "none" else set())
        assert ("processors" in changed) == (walls == "none" and len(cpus) > 1)
    else:
        assert changed == []


def test_a_machine_whose_calls_are_not_known_has_no_filter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not calls.is_supported()


@pytest.mark.parametrize(
    ("version", "rights"),
    [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (6, 16), (7, 16)],
)
def test_each_version_of_landlock_gets_all_that_it_knows_and_no_more(
    version: int, rights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unknown to a kernel it answers with EINVAL, and the wall is lacking."""
    (tmp_path / "file").touch()
    asked, granted = [], []

    def answer(number: int, *words: Any) -> int:
        if number == 444 and words == (None, 0, 1):
            return version
        if number == 444:
            assert words[1:] in ((8, 0), (24, 0))
            data = ctypes.string_at(words[0], words[1])
            asked.append(struct.unpack("=3Q", data.ljust(24, b"\0")))
            assert any(asked[-1])  # else ENOMSG
            return os.open("/dev/null", os.O_RDONLY)
        if number == 445:
            assert (words[1], words[3]) == (1, 0)
            granted.append(struct.unpack("=Qi", ctypes.string_at(words[2], 12))[0])
            return 0
        assert (number, words[1]) == (446, 0)
        return 0

    monkeypatch.setattr(landlock, "syscall", answer)
    everything = (1 << 16) - 1
    landlock.restrict((str(tmp_path / name), everything) for name in ("", "file", "absent"))
    known = (1 << rights) - 1
    assert asked == [(known, 0, 0b11 if version >= 6 else 0)]
    assert granted == [known, known & (0b111 | 1 << 14 | 1 << 15)]

    asked.clear()
    granted.clear()
    landlock.restrict(None)
    to_another_folder = [1 << 13] if version >= 2 else []
    assert [files for files, _, _ in asked] == granted == to_another_folder


SCOPES = """
import os, socket, sys
from modelyard.serve.walls import kernel, landlock
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
folder, walls, address = sys.argv[1:]
rules = [("/absent", landlock.READ), ("/", landlock.READ | landlock.WRITE)]
if walls != "none":
    landlock.restrict(rules if walls == "files too" else None)
os.mkdir(f"{folder}/other")
os.rename(f"{folder}/file", f"{folder}/other/file")
for attempt in (
    lambda: os.kill(os.getppid(), 0),
    lambda: socket.socket(socket.AF_UNIX).connect(f"\\0{address}"),
):
    try:
        attempt()
        print("got")
    except PermissionError:
        print("refused")
"""


@pytest.mark.skipif(landlock.version() < 6, reason="this kernel's Landlock has no scopes")
@pytest.mark.parametrize("walls", ["files too", "signals only", "none"])
def test_what_is_outside_gets_no_signal_of_the_same_user(tmp_path: Path, walls: str) -> None:
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"modelyard-test-{os.getpid()}"
        listener.bind(f"\0{address}")
        listener.listen()
        command = [sys.executable, "-P", "-c", SCOPES, str(tmp_path), walls, address]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["got" if walls == "none" else "refused"] * 2


DEVICES = """
import os, stat, sys
from modelyard.serve.walls import kernel, landlock
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
folder = sys.argv[1]
if sys.argv[2] == "walls":
    landlock.restrict([("/", landlock.READ), (folder, landlock.READ | landlock.WRITE)])
open(f"{folder}/file", "w").close()
os.mkfifo(f"{folder}/pipe")
for name, kind, device in (("null", stat.S_IFCHR, (1, 3)), ("ram", stat.S_IFBLK, (1, 0))):
    try:
        os.mknod(f"{folder}/{name}", kind | 0o600, os.makedev(*device))
        print(name, "made")
    except PermissionError:
        print(name, "refused")
"""


@pytest.mark.skipif(not IS_ROOT, reason="only root may make devices, walls or not")
@pytest.mark.parametrize(("walls", "outcome"), [("walls", "refused"), ("none", "made")])
def test_where_a_worker_may_write_it_makes_no_device(
    tmp_path: Path, walls: str, outcome: str
) -> None:
    command = [sys.executable, "-c", DEVICES, str(tmp_path), walls]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"null {outcome}", f"ram {outcome}"]
