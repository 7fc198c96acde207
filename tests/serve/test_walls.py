"""Walls around workers: what a hostile archive gets with them, and without."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from modelyard.archiver.untrusted.names import SHARED_FOLDER
from modelyard.serve.control.sandbox import Sandbox, check_machine, examine_machine
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings
from modelyard.serve.walls import calls, kernel, landlock, mounts, places
from modelyard.serve.walls.environment import PASSED, choose_variables
from modelyard.serve.walls.measures import LACKING, OFF, UP
from tests.serve import live
from tests.serve.live import LiveServer, build_archive, is_alive, poll, running
from tests.serve.walls.identities import IS_ROOT


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("walls") / "store"
    build_archive(store, "red_team", config="minWorkers: 1\n")
    return store


@pytest.fixture(scope="module", params=["walls", "no walls"])
def server(store: Path, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """Serve the hostile archive, with the walls and without."""
    config = store.parent / "modelyard.yaml"
    config.write_text(f"sandbox: {str(request.param == 'walls').lower()}\n", encoding="utf-8")
    state = store.parent / request.param.replace(" ", "-")
    with running(state, store, "--models=red_team", f"--config={config}") as server:
        yield server


def has_walls(server: LiveServer) -> bool:
    return server.state_dir.name == "walls"


def test_a_daemon_ends_with_its_model(server: LiveServer) -> None:
    build_archive(server.store, "red_team", name="daemon", config="minWorkers: 1\n")
    server.register_all("daemon")
    pid = server.predict("daemon", "daemon 600").json()["got"]
    assert is_alive(pid) and os.getsid(pid) not in (pid, *server.worker_pids("daemon"))
    assert server.management.delete("/models/daemon").status_code == 200
    poll(lambda: not Path(f"/proc/{pid}").exists(), "the daemon is ended and reaped", 5)


# -- what they leave ---------------------------------------------------------------------------


def test_a_handler_does_its_own_work(server: LiveServer) -> None:
    got = server.predict("red_team", "work").json()["got"]
    uid = got.pop("uid")
    scratch = got.pop("scratch")
    assert got == {
        "ran": "ran",
        "squares": [1, 2],
        "shared": True,
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
    if mounts.why_not() is None:
        assert all(each.status != LACKING for each in check_machine(settings))
    monkeypatch.syspath_prepend(tmp_path)  # what workers import from, they read
    with pytest.raises(StartError, match=r"files: the state folder .* lies in .*give another"):
        check_machine(settings)


LACKS = """
import ctypes, errno, struct, sys
from pathlib import Path
from modelyard.serve.walls import calls, kernel, measures
refusal = errno.EPERM if sys.argv[3] == "mounts" else errno.ENOSYS
absent = calls._if(0x15, int(sys.argv[1]), [calls._refuse(refusal)])
program = [calls._load(0), *absent, calls._allow()]
code = b"".join(program)
buffer = ctypes.create_string_buffer(code, len(code))
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
kernel.syscall(int(sys.argv[2]), 1, 0, header)
for each in measures.examine(Path("/absent"), range(60706, 60707)):
    print(each.name, each.status, each.found, sep="|")
"""


BY_SECCOMP = ("system calls", "network", "notification", "affinity", "shared memory")


@pytest.mark.parametrize(
    ("without", "lacking"),
    [
        ("landlock", {"files": "no Landlock: it takes 5.13", "signals": "it takes 6.12"}),
        ("seccomp", {name: "no seccomp filter" for name in BY_SECCOMP}),
        (
            "mounts",
            {
                "shared memory": "versions share /dev/shm, for PermissionError",
                "names": "names are there that it guesses, for PermissionError",
            },
        ),
    ],
)
def test_what_a_kernel_lacks_is_said(without: str, lacking: dict[str, str]) -> None:
    seccomp = calls._SECCOMP[calls._ARCHITECTURES[platform.machine()][0]]
    unshare = calls._DENIED["unshare"][calls._ARCHITECTURES[platform.machine()][0]]
    number = {"landlock": 444, "seccomp": seccomp, "mounts": unshare}[without]
    command = [sys.executable, "-P", "-c", LACKS, str(number), str(seccomp), without]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = {
        name: text
        for name, status, text in (line.split("|") for line in ran.stdout.splitlines())
        if status == LACKING
    }
    if no_mounts := mounts.why_not():
        shared = "seccomp" if without == "seccomp" else no_mounts
        lacking = {**lacking, "shared memory": shared, "names": no_mounts}
    assert found.keys() == lacking.keys()
    assert all(text in found[name] for name, text in lacking.items())


PLANS = """
import sys
from pathlib import Path
from modelyard.serve.control.sandbox import Sandbox, check_machine, examine_machine
from modelyard.serve.settings import Settings
settings = Settings(state_dir=Path(sys.argv[1]))
check_machine(settings)
(folder := Path(sys.argv[1], "echo-1")).mkdir()
print(Sandbox(settings).plan(folder, "none", "own", may_write=False).uid)
users = next(each for each in examine_machine(settings) if each.name == "users")
print(users.status, users.found)
"""


def test_a_root_with_no_other_user_runs_workers_as_itself_and_lacks_no_wall(tmp_path: Path) -> None:
    """As in a rootless container, which may have a single user, and as who is not root."""
    command = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("there are no user namespaces here")
    command += [sys.executable, "-P", "-c", PLANS, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    uid, users = ran.stdout.splitlines()
    assert (uid, ran.stderr) == ("None", "")
    assert users.startswith("off users 60706-61183 are not all in this")


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


# -- what a worker leaves in the next one's way -------------------------------------------------

TAKES_OVER = """
import contextlib, json, os, sys
from modelyard.serve.walls.raising import Walls, raise_walls
raise_walls(Walls.of_message(json.loads(sys.argv[1])))
folder, secret = sys.argv[2:]
for name in os.listdir(folder):
    with contextlib.suppress(OSError):
        os.rename(f"{folder}/{name}", f"{folder}/away")
        os.symlink(os.path.dirname(secret), f"{folder}/{name}")
        print("linked", name)
with contextlib.suppress(OSError):
    print(open(secret).read())
"""


@pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")
@pytest.mark.parametrize("may_write", [True, False], ids=["writes beside the model", "does not"])
def test_no_link_of_a_worker_opens_more_to_the_next_one(tmp_path: Path, may_write: bool) -> None:
    """In a container, where no mount holds the names of folders that are given."""
    state, secret = tmp_path / "state", tmp_path / "elsewhere" / "secret"
    folder = state / "foreign-1"
    folder.mkdir(parents=True)
    secret.parent.mkdir()
    secret.write_text("something secret")
    plan = Sandbox(Settings(state_dir=state)).plan(folder, "none", "own", may_write)
    assert plan is not None
    (folder / SHARED_FOLDER).mkdir(exist_ok=True)
    if may_write:
        folder.chmod(0o777)  # here it is nobody else's
    walls = json.dumps(asdict(replace(plan, has_mounts=False, uid=None, capability=None)))
    command = [sys.executable, "-P", "-c", TAKES_OVER, walls, str(folder), str(secret)]
    said = ""
    for _ in ("one worker", "the next one"):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        said += ran.stdout
    assert ("linked" in said) == may_write
    assert "secret" not in said


def test_keys_of_the_machine_lie_in_no_place_that_workers_read() -> None:
    """The user of a version may read what root may."""
    tls = "/etc/pki/tls/private/localhost.key", "/etc/ssl/private/localhost.key"
    for key in map(Path, (*tls, "/etc/ssh/ssh_host_ed25519_key", "/etc/shadow", "/proc/kcore")):
        assert not any(key.is_relative_to(place) for place in places._SYSTEM), key
