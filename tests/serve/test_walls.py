"""Walls around workers: what a hostile archive gets with them, and without."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.serve.control.sandbox import check_machine, examine_machine
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings
from modelyard.serve.walls import calls, kernel
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
