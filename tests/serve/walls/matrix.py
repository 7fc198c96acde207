"""Every attempt of the red team's table, by a real worker, as each identity.

`python -m tests.serve.walls.matrix` runs them all and writes `matrix.json`, which names the
attempts that got something, and the table in docs/security.md. As root, for it becomes the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from modelyard.serve.control.sandbox import scratch_of
from tests.archives.red_team.attempts import ATTEMPTS
from tests.serve import live
from tests.serve.live import LiveServer, build_archive, environment, running
from tests.serve.walls.identities import IS_ROOT, UID, command_as
from tests.shared import ROOT

IDENTITIES = {
    "root": "root",
    "user": "user without capabilities",
    "rootless": "rootless",
    "root in a container": "root as in Docker",
    "container": "user as in Docker",
}
RECORD = Path(__file__).with_name("matrix.json")
PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- python -m tests.serve.walls.matrix -->", "<!-- end -->"
SECRETS = {
    "MODELYARD_SIGNING_KEY": "a signing key",
    "AWS_SECRET_ACCESS_KEY": "a cloud's key",
    "HF_TOKEN": "a hub's token",
    "UNHEARD_OF": "anything",
}
PRIVILEGED = "RED_TEAM_PRIVILEGED"
"""Variable: a program that runs as who owns it, and prints its user."""


def try_everything(has_walls: bool) -> dict[str, Any]:
    """Serve the hostile archive as this process's user; return what each attempt answered."""
    with tempfile.TemporaryDirectory() as name, _surroundings(has_walls, Path(name)):
        folder = Path(name)
        folder.chmod(0o755)
        store = folder / "store"
        for archive in ("red_team", "neighbour", "echo"):
            behaviour = "echo" if archive == "echo" else "red_team"
            build_archive(store, behaviour, name=archive, config="minWorkers: 1\n")
        with (
            running(folder / "state", store, "--models=red_team,neighbour,echo") as server,
            _world(server, folder, has_walls) as world,
        ):
            answers = {}
            for each in ATTEMPTS:
                body = json.dumps({"name": each, "world": world})
                answer = server.predict("red_team", body)
                assert answer.status_code == 200, (each, answer.text)
                answers[each] = answer.json()
            return answers


@contextlib.contextmanager
def _surroundings(has_walls: bool, folder: Path) -> Iterator[None]:
    """Give servers the secrets, and workers a folder that they may read."""
    readable = folder / "readable"
    readable.mkdir()
    variables = {
        **environment(),
        **SECRETS,
        "MODELYARD_SANDBOX": str(int(has_walls)),
        "MODELYARD_READ_PATHS": str(readable),
    }
    before = live.environment
    live.environment = lambda: variables
    try:
        yield
    finally:
        live.environment = before


@contextlib.contextmanager
def _world(server: LiveServer, folder: Path, has_walls: bool) -> Iterator[dict[str, Any]]:
    """Make what there is to reach, and yield where it is."""
    neighbours = server.predict("neighbour", "share secret").json()["got"]
    libc = ctypes.CDLL(None, use_errno=True)
    unpacked = {
        name: next((server.state_dir / "unpacked").glob(f"{name}-*"))
        for name in ("red_team", "neighbour")
    }
    places = {
        "state": server.state_dir,
        "store": server.store,
        "own": unpacked["red_team"],
        "other": unpacked["neighbour"],
        "scratch": scratch_of(unpacked["neighbour"]),
        "readable": folder / "readable",
        "home": folder / "home",
        "public": folder / "public",
        "mine": folder / "mine",
    }
    for place in places.values():
        place.mkdir(exist_ok=True, mode=0o700)
        _make(place / "victim")
    _make(places["readable"] / "cut")
    for each in (places["readable"], places["state"]):
        _make(each / "labelled")
    _make(places["state"] / "removed")
    (places["state"] / "link").symlink_to("/secret")
    places["readable"].chmod(0o755)
    places["public"].chmod(0o777)
    (places["public"] / "victim").chmod(0o666)
    scratch = places["scratch"].stat()
    if os.geteuid() == 0:
        os.chown(places["scratch"] / "victim", scratch.st_uid, scratch.st_gid)
    memory = SharedMemory(create=True, size=16)
    removed = Path("/dev/shm", f"{memory.name}-removed")
    removed.touch()
    key = int.from_bytes(os.urandom(3), "big")
    mine, create = 0o600, 0o1600
    segment, semaphore = libc.shmget(key, 64, create), libc.semget(key, 1, create)
    queue = libc.msgget(key, create)
    posix = f"red-team-{os.getpid()}"
    libc.mq_open(f"/{posix}".encode(), os.O_CREAT | os.O_RDWR, mine, None)
    unix = {
        "unix_path": f"/tmp/red-team-{os.getpid()}",
        "abstract": f"\0{posix}",
        "datagram_path": f"/tmp/red-team-{os.getpid()}-datagrams",
        "datagram_name": f"\0{posix}-datagrams",
    }
    with contextlib.ExitStack() as stack:
        for name, address in unix.items():
            kind = socket.SOCK_DGRAM if name.startswith("datagram") else socket.SOCK_STREAM
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            if name.endswith("path"):
                stack.callback(Path(address).unlink)
                Path(address).chmod(0o777)
        try:
            yield {
                **{name: str(place) for name, place in places.items()},
                "mine": str(scratch_of(unpacked["red_team"]) if has_walls else folder / "mine"),
                "server": server.pid,
                "neighbour": server.worker_pids("neighbour")[0],
                "port": server.address[1],
                **unix,
                "server_memory": memory.name,
                "neighbour_memory": neighbours,
                "key": key,
                "segment": segment,
                "semaphore": semaphore,
                "queue": queue,
                "posix_queue": posix,
                "privileged": os.environ.get(PRIVILEGED, "/usr/bin/id"),
            }
        finally:
            libc.mq_unlink(f"/{posix}".encode())
            libc.shmctl(segment, 0, None)
            libc.semctl(semaphore, 0, 0)
            libc.msgctl(queue, 0, None)
            memory.close()
            memory.unlink()
            for each in (removed, Path("/dev/shm", neighbours)):
                each.unlink(missing_ok=True)


def _make(file: Path) -> None:
    file.write_text("something secret")
    with contextlib.suppress(OSError):
        os.setxattr(file, "user.mark", b"secret")


def run_as(identity: str, has_walls: bool = True) -> dict[str, Any]:
    """Return what each attempt answered to a server of that identity."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        program = shutil.copy("/usr/bin/id", folder / "id")
        if IS_ROOT:
            os.chown(program, UID + 1, UID + 1)
        Path(program).chmod(0o755 | stat.S_ISUID)
        command = [sys.executable, "-B", "-m", "tests.serve.walls.matrix", "--here"]
        ran = subprocess.run(
            command_as(identity, [*command, str(int(has_walls))]),
            capture_output=True,
            text=True,
            timeout=600,
            cwd=ROOT,
            env={**os.environ, PRIVILEGED: str(program), "TMPDIR": name, "HOME": name},
        )
    assert ran.returncode == 0, ran.stderr
    answers: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answers


def through(answers: dict[str, Any]) -> list[str]:
    """Return the names of the attempts that got something."""
    return sorted(name for name, answer in answers.items() if "got" in answer)


def table(record: dict[str, list[str]]) -> str:
    """Return the matrix by group: refused of tried; and how many get something without walls."""
    groups = dict.fromkeys(group for group, _ in ATTEMPTS.values())
    rows = [["attempts", *IDENTITIES.values(), "through without walls"]]
    rows.append(["---"] * len(rows[0]))
    real = {each for name, names in record.items() if name.endswith("no walls") for each in names}
    for group in [*groups, ""]:
        names = {name for name, (of, _) in ATTEMPTS.items() if group in ("", of)}
        counts = [len(names - {*record[identity]}) for identity in IDENTITIES]
        cells = [f"{count}/{len(names)}" for count in counts]
        rows.append([group or "**all**", *cells, str(len(names & real))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Run all of it, and write down what got through."""
    record = {identity: through(run_as(identity)) for identity in IDENTITIES}
    record |= {f"{each}, no walls": through(run_as(each, False)) for each in ("root", "user")}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(record)}\n{END}{after}", encoding="utf-8")
    sys.stdout.write(f"{platform.release()}\n{table(record)}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        sys.stdout.write(json.dumps(try_everything(sys.argv[2] == "1")) + "\n")
    else:
        main()
