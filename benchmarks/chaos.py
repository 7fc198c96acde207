"""What becomes of requests while cells of Ray Serve are killed, hung, scaled and updated.

    python -m benchmarks.chaos
    python -m benchmarks.chaos --only cell --only update --clients 4
    python -m benchmarks.chaos --nodes --rate 30    # two nodes, 30 requests a second

Two cells of one worker behind Ray's HAProxy serve an archive that takes 5 ms a request and answers
with length and checksum of the body; clients send bodies of 100 bytes to 2 MB, in turns. While they
do, one thing goes wrong, and the table says what became of every request. HAProxy repeats what it
holds: bodies up to 1 MB. What it cannot repeat, larger ones and all on the connections of a proxy
that is killed, the clients send again, and that is counted apart.

Needs Ray (`pip install modelyard[ray]`) and Linux: it runs in namespaces of its own, because Ray
listens on every address, and processes are found by what they run.

The exit code is 1 when a request was never answered or answered wrong, when clients had to repeat
one that HAProxy could have, or when one took more than 5 s because a node went.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.chaos_load import WRONG, Account, Load
from modelyard.plugins.cluster.ray.environment import ray_environment
from modelyard.serve.settings import Settings

ROOT = Path(__file__).absolute().parents[1]
IS_ROOT = os.getuid() == 0
ALONE = ("unshare", *(() if IS_ROOT else ("--map-root-user",)), "--net", "--pid", "--fork",
         "--mount-proc", "--kill-child")  # fmt: skip
"""Namespaces of its own, all of which end with the command."""
HOST, PORT = "127.0.0.1", 8000
MODEL = "chaos"
PATH = f"/predictions/{MODEL}"
SIZES = (100, 10_000, 100_000, 1_000_000, 2_000_000)
SMALL = SIZES[:2]
"""Sizes of which two cores answer so many that three cells are busy."""
HELD = 1_000_000
"""The largest of these that fits HAProxy's buffer, as cells set it."""
CLIENTS = 6
START_S, BEFORE_S, AFTER_S, RECOVER_S = 240.0, 2.0, 2.0, 180.0
FAILED_S = 20.0
"""For which a roll-out that has failed is left as it is."""
CELL, SERVER, PROXY = b"ray::ServeReplica", b"modelyard.plugins.cluster.process", b"/haproxy.cfg"
"""What the command line of a process says."""
RAY, SERVE = (str(Path(sys.executable).with_name(name)) for name in ("ray", "serve"))
APPLICATION = "modelyard"
LOSSES = ("silent", "node", "head", "disk")
NODE_FAULTS = (*LOSSES, "hung-worker", "full-update")
"""Faults of a cluster of two nodes: chaos_nodes.py; of some a node goes."""
SOON_S = 5.0
"""Within which a request is to be answered, whatever becomes of a node."""
HANDLER = '''\
"""Say of each body how long it is, and its checksum, after 5 ms."""

import time
import zlib

VERSION = "{version}"


class Chaos:
    def initialize(self, context):
        {initialize}

    def handle(self, data, context):
        rows = [bytes(row.get("body") or b"") for row in data]
        time.sleep(0.005 * len(rows))
        return [
            {{"version": VERSION, "bytes": len(row), "crc": zlib.crc32(row)}} for row in rows
        ]
'''


def build(store: Path, version: str, initialize: str = "pass") -> None:
    """Archive a version of the handler; its artifact is never opened."""
    from modelyard.archiver import write_archive

    sources = store / "sources"
    sources.mkdir(parents=True)
    (sources / "handler.py").write_text(HANDLER.format(version=version, initialize=initialize))
    (sources / "nothing.bin").write_bytes(b"nothing")
    write_archive(
        MODEL,
        version=version,
        artifact=sources / "nothing.bin",
        handler=str(sources / "handler.py"),
        output_dir=store,
    )
    shutil.rmtree(sources)


# -- what runs in the namespaces ------------------------------------------------------------------


def processes(words: bytes) -> list[int]:
    """Return the processes whose command line holds these words, oldest first."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if words in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return sorted(found)


def poll(condition: Callable[[], object], what: str, timeout_s: float = RECOVER_S) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Return whether this is answered with 200."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def is_ready() -> bool:
    """Return whether the application answers."""
    return answers(f"http://{HOST}:{PORT}/health/ready")


class Cells:
    """The application on a Ray of its own.

    Args:
        folder: folder of the stores; cells keep their own folders in it.
    """

    load: Load
    """What asks them now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.api = f"http://{HOST}:8265"
        self.cells = 2
        self.scaling: dict[str, float] = {}
        self.store = "one"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the application for a block, as on a cluster: `ray start`, `serve deploy`."""
        command = [RAY, "start", "--head", "--block"]
        with (self.folder / "ray.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            poll(lambda: answers(f"{self.api}/api/serve/applications/"), "Ray has started", START_S)
            self.deploy()
            poll(lambda: self.status()["status"] == "RUNNING", "cells are ready", START_S)
            poll(is_ready, "the proxy knows them")
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)

    def asked(self, fault: str) -> str:
        """Return the machine that clients ask meanwhile."""
        return HOST

    def deploy(self) -> None:
        """Have Ray run the application as it is described now."""
        application = {
            "name": APPLICATION,
            "route_prefix": "/",
            "import_path": "modelyard.plugins.cluster.ray:app",
            "args": {"model_store": str(self.folder / self.store), "cells": self.cells,
                     "cpus": 0.1, "workers": 1, "auth": "management", **self.scaling},
        }  # fmt: skip
        file = self.folder / "cells.yaml"  # JSON is YAML
        file.write_text(json.dumps({"applications": [application]}))
        ran = subprocess.run(
            [SERVE, "deploy", "--address", self.api, file], capture_output=True, text=True
        )
        if ran.returncode:
            raise SystemExit(ran.stderr[-2000:])

    def status(self) -> dict[str, Any]:
        """Return what Ray says of the application."""
        with urllib.request.urlopen(f"{self.api}/api/serve/applications/", timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)["applications"][APPLICATION]
        return said

    def ready(self) -> set[int]:
        """Return the servers that are ready."""
        found = set()
        for file in self.folder.glob("modelyard-*/cells/cell-*/server.json"):
            with contextlib.suppress(OSError, ValueError):
                about = json.loads(file.read_text())
                if answers(f"{about['inference']}/health/ready"):
                    found.add(int(about["pid"]))
        return found

    def whole(self, without: Collection[int] = ()) -> None:
        """Wait until as many servers are ready as there should be, none of these among them."""
        poll(
            lambda: len(left := self.ready()) == self.cells and left.isdisjoint(without),
            f"{self.cells} servers are ready",
        )

    def replaced(self, event: Callable[[], None]) -> None:
        """Do something that ends a cell; wait until another has come."""
        before = self.ready()
        event()
        poll(lambda: before - set(processes(SERVER)), "a server has gone")
        self.whole(without=before - set(processes(SERVER)))

    # The faults; each returns when the set is whole again.

    def kill_cell(self) -> str:
        """Kill a replica; its server ends with it."""
        self.replaced(lambda: os.kill(processes(CELL)[0], signal.SIGKILL))
        return ""

    def kill_server(self) -> str:
        """Kill the server inside of a replica."""
        self.replaced(lambda: os.kill(processes(SERVER)[0], signal.SIGKILL))
        return ""

    def kill_proxy(self) -> str:
        """Kill the HAProxy that clients ask."""
        pid = processes(PROXY)[-1]
        os.kill(pid, signal.SIGKILL)
        poll(lambda: pid not in processes(PROXY) and is_ready(), "there is another proxy")
        return ""

    def kill_large_proxy(self) -> str:
        """Kill the HAProxy that large bodies pass."""
        words = b"/haproxy.large.cfg"
        os.kill(pid := processes(words)[-1], signal.SIGKILL)
        poll(lambda: any(each > pid for each in processes(words)), "there is another one")
        return ""

    def hang_server(self) -> str:
        """Stop the server inside of a replica, which is there and does not run."""
        self.replaced(lambda: os.kill(processes(SERVER)[0], signal.SIGSTOP))
        return ""

    def hang_cell(self) -> str:
        """Stop a replica; its server goes on."""
        self.replaced(lambda: os.kill(processes(CELL)[0], signal.SIGSTOP))
        return ""

    def scale_up(self) -> str:
        """Make it three cells."""
        return self._deployed(cells=3)

    def scale_down(self) -> str:
        """Make it two cells again."""
        return self._deployed(cells=2)

    def update(self) -> str:
        """Roll out the next version of the archive."""
        without = self.ready()
        return self._deployed(store="two", without=without)

    def update_bad(self) -> str:
        """Roll out an archive whose workers do not start; some time later, what was there."""
        good, self.store = self.store, "bad"
        self.deploy()
        poll(lambda: self.status()["status"] == "DEPLOY_FAILED", "Ray gives it up")
        time.sleep(FAILED_S)
        kept = f"{len(self.ready())} of {self.cells} cells answered until it was taken back"
        self._deployed(store=good)
        return kept

    def follow(self) -> str:
        """Have Ray add cells while they are busy, and take them away when they are not."""
        self.scaling = {"max_cells": 3, "upscale_delay_s": 2, "downscale_delay_s": 5}
        all_clients, self.load.clients = self.load.clients, 1
        self._deployed(cells=1)
        said = []
        for self.load.clients, self.cells in ((all_clients, 3), (1, 1)):
            started = time.monotonic()
            self.whole()
            took_s = time.monotonic() - started
            said.append(f"{self.load.clients} clients: {self.cells} cells after {took_s:.0f} s")
        return ", ".join(said)

    def _deployed(
        self, cells: int | None = None, store: str | None = None, without: Collection[int] = ()
    ) -> str:
        """Deploy it with something changed; wait until all is so."""
        self.cells = cells or self.cells
        self.store = store or self.store
        self.deploy()
        self.whole(without)
        return ""


FAULTS: dict[str, Callable[[Cells], str]] = {
    "cell": Cells.kill_cell,
    "server": Cells.kill_server,
    "proxy": Cells.kill_proxy,
    "large-proxy": Cells.kill_large_proxy,
    "hung-server": Cells.hang_server,
    "up": Cells.scale_up,
    "down": Cells.scale_down,
    "update": Cells.update,
    "hung-cell": Cells.hang_cell,
    "bad-update": Cells.update_bad,
    "load": Cells.follow,
}


@dataclass
class Outcome:
    """What became of all requests during one fault."""

    fault: str
    accounts: dict[int, Account]
    seconds: float
    """The longest time until all was whole again."""
    note: str


async def during(
    cells: Cells, fault: str, event: Callable[[], str], clients: int, rate: float, times: int
) -> Outcome:
    """Do something so many times under load; return what became of the requests."""
    sizes = SMALL if fault == "load" else SIZES
    load = cells.load = Load(cells.asked(fault), PORT, PATH, sizes, clients, rate)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(BEFORE_S)
    seconds = 0.0
    for _ in range(times):
        started = time.monotonic()
        try:
            note = await asyncio.to_thread(event)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            note = str(error)[:200]
        seconds = max(seconds, time.monotonic() - started)
        await asyncio.sleep(AFTER_S)
    load.stop()
    await running
    return Outcome(fault, load.accounts, seconds, note)


def inside(folder: Path, faults: list[str], clients: int, rate: float, times: int) -> None:
    """Run the application and all faults; write each outcome as a line of JSON."""
    from benchmarks.chaos_nodes import FAULTS_OF_NODES, Nodes

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    both: list[tuple[Cells, dict[str, Callable[..., str]]]]
    both = [(Cells(folder), FAULTS), (Nodes(folder), FAULTS_OF_NODES)]
    for cells, known in both:
        if not (chosen := [fault for fault in faults if fault in known]):
            continue
        with cells.running():
            for fault in chosen:
                event = partial(known[fault], cells)
                outcome = asyncio.run(during(cells, fault, event, clients, rate, times))
                sys.stdout.write(json.dumps(vars(outcome), default=vars) + "\n")
                sys.stdout.flush()
                time.sleep(AFTER_S)


# -- what runs outside ----------------------------------------------------------------------------


def main() -> int:
    """Read the arguments, run, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=[*FAULTS, *NODE_FAULTS],
        help="repeatable; default: all of one node",
    )
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--rate", type=float, default=0, help="open loop: requests a second")
    parser.add_argument("--times", type=int, default=1, help="how often each fault happens")
    parser.add_argument("--nodes", action="store_true", help="all of two nodes (root, redis)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    faults = given.only or list(NODE_FAULTS if given.nodes else FAULTS)
    if given.inside:
        inside(given.inside, faults, given.clients, given.rate, given.times)
        return 0
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # Ray's sockets have long names
        folder = Path(name)
        build(folder / "one", "1.0")
        build(folder / "two", "2.0")
        build(folder / "bad", "3.0", 'raise RuntimeError("this version does not load")')
        outcomes = run(folder, faults, given.clients, given.rate, given.times)
    report(outcomes)
    is_well = len(outcomes) == len(faults) and not any(map(missed, outcomes))
    return 0 if is_well else 1


def surroundings(folder: str) -> dict[str, str]:
    """Return the variables of a Ray that keeps everything in a folder, and runs this code."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MODELYARD_", "RAY_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    # Nobody reaches its network; a token would be made in the user's home.
    own = {"TMPDIR": folder, "RAY_TMPDIR": folder, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
    ours = ray_environment(Settings().request_timeout_s)
    return {**kept, **ours, **own, "RAY_raylet_start_wait_time_s": f"{START_S:g}"}


def run(folder: Path, faults: list[str], clients: int, rate: float, times: int) -> list[Outcome]:
    """Run everything in namespaces of its own; return what was accounted for."""
    name = str(folder)
    only = [word for fault in faults for word in ("--only", fault)]
    command = [*ALONE, sys.executable, "-m", "benchmarks.chaos", "--inside", name,
               "--clients", str(clients), "--rate", str(rate), "--times", str(times),
               *only]  # fmt: skip
    outcomes = []
    with subprocess.Popen(
        command, cwd=folder, env=surroundings(name), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            read = json.loads(line)
            accounts = {int(size): Account(**each) for size, each in read.pop("accounts").items()}
            outcomes.append(Outcome(accounts=accounts, **read))
            Console(stderr=True).print(f"{read['fault']}: done after {read['seconds']:.0f} s")
    return outcomes


def missed(outcome: Outcome) -> int:
    """Return how many requests went wrong.

    Never answered, answered by what belongs to another, repeated by clients where HAProxy could,
    or late because a node went.
    """
    is_said = outcome.fault.endswith(("proxy", "worker"))  # what each had is the client's to repeat
    is_node = outcome.fault in LOSSES
    return sum(each.slowest_s > SOON_S for each in outcome.accounts.values() if is_node) + sum(
        each.lost + each.met.get(WRONG, 0) + (each.repeated if size <= HELD and not is_said else 0)
        for size, each in outcome.accounts.items()
    )


def report(outcomes: list[Outcome]) -> None:
    """Print what became of all requests."""
    table = Table(box=box.SIMPLE)
    for column in ("fault", "whole again", "sent", "answered at once", "to a repeat, up to 1 MB",
                   "above", "lost", "slowest", "versions", "what clients met"):  # fmt: skip
        table.add_column(column, justify="left" if "a" in column[:2] else "right")
    for outcome in outcomes:
        total = list(outcome.accounts.values())
        met: Counter[str] = sum((Counter(each.met) for each in total), Counter())
        versions: Counter[str] = sum((Counter(each.versions) for each in total), Counter())
        repeated = {
            is_held: sum(
                each.repeated
                for size, each in outcome.accounts.items()
                if (size <= HELD) is is_held
            )
            for is_held in (True, False)
        }
        table.add_row(
            outcome.fault,
            f"{outcome.seconds:.0f} s",
            str(sum(each.sent for each in total)),
            str(sum(each.at_once for each in total)),
            str(repeated[True]),
            str(repeated[False]),
            str(sum(each.lost for each in total)),
            f"{max(each.slowest_s for each in total):.1f} s",
            ", ".join(f"{n} of {version}" for version, n in sorted(versions.items())),
            "; ".join(filter(None, [outcome.note, *(f"{n} × {said}" for said, n in met.items())])),
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(main())
