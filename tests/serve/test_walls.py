"""Walls around workers: what a hostile archive gets with them, and without."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.serve.control.sandbox import check_machine, examine_machine
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings
from modelyard.serve.walls import calls, kernel, landlock
from modelyard.serve.walls.environment import PASSED, choose_variables
from modelyard.serve.walls.measures import LACKING, OFF, UP
from tests.serve import live
from tests.serve.live import LiveServer, build_archive, environment, is_alive, poll, running

IS_ROOT = os.geteuid() == 0
SECRETS = {
    "MODELYARD_SIGNING_KEY": "a signing key",
    "AWS_SECRET_ACCESS_KEY": "a cloud's key",
    "HF_TOKEN": "a hub's token",
    "UNHEARD_OF": "anything",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("walls") / "store"
    build_archive(store, "red_team", config="minWorkers: 1\n")
    build_archive(store, "echo", config="minWorkers: 1\n")
    return store


@pytest.fixture(scope="module", params=["walls", "no walls"])
def server(store: Path, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Serve the hostile archive beside another one, with the walls and without."""
    variables = {**environment(), **SECRETS}
    if request.param == "no walls":
        variables["MODELYARD_SANDBOX"] = "0"
    state = store.parent / request.param.replace(" ", "-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "environment", lambda: variables)
        with running(state, store, "--models=red_team,echo") as server:
            yield server


def has_walls(server: LiveServer) -> bool:
    return server.state_dir.name == "walls"


def attempt(server: LiveServer, *words: object) -> Any:
    """Return what the archive got, {"got": …}, or how it was refused."""
    answer = server.predict("red_team", " ".join(map(str, words)))
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(server: LiveServer, *words: object, root_only: bool = False) -> None:
    """Check that the archive gets it without walls, and nothing with them."""
    answer = attempt(server, *words)
    if has_walls(server):
        assert "refused" in answer, (words, answer)
    elif IS_ROOT or not root_only:
        assert "got" in answer, (words, answer)


def unpacked(server: LiveServer, name: str) -> Path:
    (folder,) = (server.state_dir / "unpacked").glob(f"{name}-*")
    return folder


# -- the server's secrets, and files of others -------------------------------------------------


def test_a_handler_reads_no_token_and_no_state(server: LiveServer) -> None:
    for name in ("keys.json", "models.json", "server.json", "logs/server.log"):
        check(server, "read", server.state_dir / name)
    check(server, "listing", server.state_dir)
    check(server, "read", server.store / "echo.mar")
    check(server, "escape", server.state_dir / "keys.json")
    check(server, "read", "/etc/hostname")


def test_a_handler_gets_none_of_the_servers_secrets(server: LiveServer) -> None:
    for name in SECRETS:
        check(server, "variable", name)


def test_a_handler_changes_no_state(server: LiveServer) -> None:
    victim = server.state_dir / "victim"
    victim.write_text("here")
    (server.state_dir / "models.json.copy").write_text("{}")
    check(server, "append", server.state_dir / "models.json.copy", "#")
    check(server, "cut", victim)
    check(server, "move", victim, f"{victim}-moved")
    if has_walls(server):
        assert victim.read_text() == "here"
    for file in server.state_dir.glob("victim*"):
        file.unlink()


def test_a_handler_changes_no_other_model(server: LiveServer) -> None:
    other = unpacked(server, "echo") / "handler.py"
    check(server, "read", other)
    check(server, "append", other, "#")
    check(server, "append", unpacked(server, "red_team") / "handler.py", "#")
    name = server.state_dir / "linked"
    check(server, "link", other, name)
    name.unlink(missing_ok=True)


# -- the server's process, and those of others -------------------------------------------------


def test_a_handler_reads_no_memory_of_others(server: LiveServer) -> None:
    (other,) = server.worker_pids("echo")
    for pid in (server.pid, other):
        check(server, "memory", pid)
        check(server, "vm_read", pid)
        check(server, "read", f"/proc/{pid}/environ")
        check(server, "read", f"/proc/{pid}/cmdline")
    check(server, "trace", other)


def test_a_handler_signals_neither_the_server_nor_other_workers(server: LiveServer) -> None:
    (other,) = server.worker_pids("echo")
    for pid in (server.pid, other):
        check(server, "send", pid, 0)
        check(server, "send", pid, int(signal.SIGCONT))
        check(server, "send_by_descriptor", pid)
        check(server, "renice", pid)
        check(server, "limit", pid)


def test_a_handler_gets_no_part_of_the_kernel(server: LiveServer, tmp_path: Path) -> None:
    check(server, "mount", tmp_path, root_only=True)
    check(server, "raw_socket", root_only=True)
    check(server, "packet_socket", root_only=True)
    check(server, "become_root", root_only=True)
    check(server, "namespace", root_only=True)
    for name in ("keyctl", "bpf", "perf_event_open", "io_uring_setup"):
        check(server, "call", name, root_only=True)


def test_a_handler_of_ours_has_no_network(server: LiveServer, tmp_path: Path) -> None:
    check(server, "connect", server.address[1])
    path = f"/tmp/modelyard-test-{os.getpid()}"  # a short one
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        Path(path).chmod(0o777)
        check(server, "unix_socket", path)
    Path(path).unlink()


def test_a_daemon_ends_with_its_model(server: LiveServer) -> None:
    build_archive(server.store, "red_team", name="daemon", config="minWorkers: 1\n")
    server.register_all("daemon")
    pid = server.predict("daemon", "daemon 600").json()["got"]
    assert is_alive(pid) and os.getsid(pid) not in (pid, *server.worker_pids("daemon"))
    assert server.management.delete("/models/daemon").status_code == 200
    poll(lambda: not Path(f"/proc/{pid}").exists(), "the daemon is ended and reaped", 5)


# -- what they leave ---------------------------------------------------------------------------


def test_a_handler_does_its_own_work(server: LiveServer) -> None:
    got = attempt(server, "work")["got"]
    uid = got.pop("uid")
    scratch = got.pop("scratch")
    assert got == {
        "ran": "ran",
        "squares": [1, 2],
        "child": -signal.SIGKILL,
        "cpus": True,
        "self": True,
        "random": 4,
        "descriptors": True,
    }
    if has_walls(server):
        assert scratch
        assert uid in Settings().uids if IS_ROOT else uid == os.geteuid()


def test_status_shows_every_wall(server: LiveServer) -> None:
    ran = live.modelyard("serve", "status", f"--state-dir={server.state_dir}", "--json")
    walls = json.loads(ran.stdout)["sandbox"]
    names = {each.name for each in examine_machine(Settings(state_dir=server.state_dir))}
    assert walls.keys() == names >= {"files", "signals", "system calls", "environment", "users"}
    if has_walls(server):
        assert walls["files"]["status"] == walls["signals"]["status"] == UP
    else:
        assert walls["files"] == {"status": OFF, "found": "by the setting sandbox"}


def test_a_start_that_requires_a_wall_that_is_lacking_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state_dir=tmp_path / "state", require_sandbox=True)
    assert all(each.status != LACKING for each in check_machine(settings))
    monkeypatch.syspath_prepend(tmp_path)  # what workers import from, they read
    with pytest.raises(StartError, match=r"files: the state folder .* lies in .*give another"):
        check_machine(settings)


LACKS = """
import ctypes, errno, struct, sys
from pathlib import Path
from modelyard.serve.walls import calls, kernel, measures
absent = calls._if(0x15, int(sys.argv[1]), [calls._refuse(errno.ENOSYS)])
program = [calls._load(0), *absent, calls._allow()]
code = b"".join(program)
buffer = ctypes.create_string_buffer(code, len(code))
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
kernel.syscall(int(sys.argv[2]), 1, 0, header)
for each in measures.examine(Path("/absent"), range(60706, 60707)):
    print(each.name, each.status, each.found, sep="|")
"""


@pytest.mark.parametrize(
    ("without", "lacking"),
    [
        ("landlock", {"files": "no Landlock: it takes 5.13", "signals": "it takes 6.12"}),
        ("seccomp", {"system calls": "takes no seccomp filter", "network": "no seccomp filter"}),
    ],
)
def test_what_a_kernel_lacks_is_said(without: str, lacking: dict[str, str]) -> None:
    seccomp = calls._SECCOMP[calls._ARCHITECTURES[platform.machine()][0]]
    number = {"landlock": 444, "seccomp": seccomp}[without]
    command = [sys.executable, "-P", "-c", LACKS, str(number), str(seccomp)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = {
        name: text
        for name, status, text in (line.split("|") for line in ran.stdout.splitlines())
        if status == LACKING
    }
    if IS_ROOT:
        assert found.pop("users") == "it takes Landlock and seccomp"
    assert found.keys() == lacking.keys()
    assert all(text in found[name] for name, text in lacking.items())


PLANS = """
import sys
from pathlib import Path
from modelyard.serve.control.sandbox import Sandbox, check_machine
from modelyard.serve.settings import Settings
settings = Settings(state_dir=Path(sys.argv[1]))
check_machine(settings)
(folder := Path(sys.argv[1], "echo-1")).mkdir()
print(Sandbox(settings).plan(folder, "none", "own", may_write=False).uid)
"""


def test_a_root_with_no_other_user_runs_workers_as_itself_and_says_so(tmp_path: Path) -> None:
    """As in a rootless container, which may have a single user."""
    command = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("there are no user namespaces here")
    command += [sys.executable, "-P", "-c", PLANS, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("None\n", 0), ran.stderr
    assert ran.stderr.count("no wall for users: users 60706-61183 are not all in this") == 1


@pytest.mark.parametrize(
    ("users", "groups", "has_them"),
    [
        ("0 1000 1\n1 100000 65536\n", "0 1000 1\n1 100000 65536\n", True),
        ("0 0 4294967295\n", "0 0 60800\n60800 200000 1000\n", True),
        ("0 0 4294967295\n", "0 0 60800\n", False),
        ("0 1000 1\n", "0 0 4294967295\n", False),
        ("60800 0 9999\n", "0 0 4294967295\n", False),
    ],
    ids=["rootless container", "two pieces", "some groups", "one user", "some users"],
)
def test_users_are_there_when_each_is_mapped(
    tmp_path: Path, users: str, groups: str, has_them: bool
) -> None:
    maps = tmp_path / "uid_map", tmp_path / "gid_map"
    for file, text in zip(maps, (users, groups), strict=True):
        file.write_text(text)
    assert kernel.has_users(Settings().uids, maps) is has_them


# -- their parts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "passed", "is_passed"),
    [
        ("PATH", (), True),
        ("CUDA_VISIBLE_DEVICES", (), True),
        ("HF_HOME", (), True),
        ("HF_TOKEN", (), False),
        ("HF_TOKEN", ("HF_*",), False),
        ("HF_TOKEN", ("HF_TOKEN",), True),
        ("MODELYARD_STATE_DIR", ("*",), False),
        ("aws_secret_access_key", ("*",), False),
        ("BUCKET", (), False),
        ("BUCKET", ("BUCK*",), True),
        ("BUCKET", ("*",), True),
    ],
)
def test_workers_get_the_variables_that_are_named(
    name: str, passed: tuple[str, ...], is_passed: bool
) -> None:
    chosen = choose_variables({name: "value"}, (*PASSED, *passed))
    assert chosen == ({name: "value"} if is_passed else {})
    assert not choose_variables({name: "value"}, (*PASSED, *passed), hidden=name)


ALLOWED, REFUSED = 0x7FFF0000, 0x00050001


def judge(machine: str, has_network: bool, number: int, *arguments: int) -> int:
    """Run the filter as the kernel does, and return its verdict."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    words = [*arguments, *(0,) * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *words)
    program = [struct.unpack("HBBI", each) for each in calls._program(machine, has_network, 77)]
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
    "setpriority": ((os.PRIO_PROCESS,), os.PRIO_USER),
    "ioprio_set": ((1,), 3),
}
"""Call → its arguments before the process, and the first one with which it means a user's all."""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_judges_alike_on_both_architectures(machine: str) -> None:
    column = ["x86_64", "aarch64"].index(machine)
    unix, internet, packet, route = 1, 2, 17, 16
    stream, raw, cloexec = 1, 3, 0o2000000
    for numbers in calls._DENIED.values():
        assert judge(machine, True, numbers[column]) == REFUSED
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
    assert OF_ITSELF.keys() == calls._OF_ITSELF.keys()
    for name, (before, user) in OF_ITSELF.items():
        number = calls._OF_ITSELF[name][column]
        verdicts = [judge(machine, False, number, *before, pid) for pid in (0, 77, 1)]
        assert verdicts == [ALLOWED, ALLOWED, REFUSED], name
        if user is not None:
            assert judge(machine, False, number, user, 0) == REFUSED, name
    assert judge(machine, False, 0x40000000) == REFUSED
    assert judge(machine, False, 0) == ALLOWED


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
        others = {"clone": calls._CLONE, "clone3": calls._CLONE3, "socket": calls._SOCKET}
        for name, numbers in {**calls._DENIED, **calls._OF_ITSELF, **others}.items():
            assert there.get(name, numbers[column[machine]]) == numbers[column[machine]], name


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
