"""Two nodes of a Ray cluster, each in namespaces of its own, on a bridge with the clients.

Node a has the head, node b is a further one; Ray's head keeps what it knows in a Redis beside the
clients, and both are started again by a loop, as a service would. Root is needed, and Debian's
`redis-server`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import RAY, START_S, Cells, answers, poll, processes

GATEWAY, HEAD, OTHER = "10.77.0.254", "10.77.0.1", "10.77.0.2"
ADDRESSES = {"a": HEAD, "b": OTHER}
DISK, SILENT_S = "1200m", 20.0
REDIS_PORT = 6399
START = {
    "a": f"--head --port 6379 --dashboard-host {HEAD} --node-ip-address {HEAD}",
    "b": f"--address {HEAD}:6379 --node-ip-address {OTHER}",
}
NODE = """\
mount -t tmpfs -o size={disk} none {place} && ip link set lo up
until ip link set n{name} up 2>/dev/null; do sleep 0.1; done
ip addr add {address}/24 dev n{name} && ip route add default via {gateway}
while :; do {ray} start {start} --num-cpus 4 --object-store-memory 100000000 --block; sleep 1; done
"""


class Nodes(Cells):
    """The application on a cluster of two nodes, one cell on each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.api = f"http://{HEAD}:8265"
        self.scaling = {"cells_per_node": 1}
        self.place = folder / "node"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the cluster and the application for a block."""
        for words in ("link add br0 type bridge", "link set br0 up",
                      f"addr add {GATEWAY}/24 dev br0"):  # fmt: skip
            subprocess.run(["ip", *words.split()], check=True)
        self.place.mkdir()
        os.environ |= {"TMPDIR": str(self.place), "RAY_TMPDIR": str(self.place),
                       "RAY_REDIS_ADDRESS": f"{GATEWAY}:{REDIS_PORT}",
                       "RAY_external_storage_namespace": "chaos"}  # fmt: skip
        redis = subprocess.Popen(
            ["redis-server", "--bind", GATEWAY, "--port", str(REDIS_PORT), "--save", "",
             "--protected-mode", "no", "--dir", self.folder], stdout=subprocess.DEVNULL
        )  # fmt: skip
        try:
            self.start("a")
            poll(lambda: answers(f"{self.api}/api/serve/applications/"), "Ray has started", START_S)
            self.start("b")
            poll(lambda: self.alive() == 2, "both nodes are known", START_S)
            self.deploy()
            self.whole()
            yield
        finally:
            for node in self.nodes.values():
                node.kill()
            redis.kill()

    def start(self, name: str) -> None:
        """Start a node and connect it."""
        script = NODE.format(disk=DISK, place=self.place, name=name, address=ADDRESSES[name],
                             gateway=GATEWAY, ray=RAY, start=START[name])  # fmt: skip
        with (self.folder / f"node-{name}.log").open("ab") as log:
            node = self.nodes[name] = subprocess.Popen(
                ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
                 "sh", "-c", script], stdout=log, stderr=log,
            )  # fmt: skip
        here, there = Path("/proc/self/ns/net"), Path(f"/proc/{node.pid}/ns/net")
        poll(lambda: here.readlink() != there.readlink(), "the node has its network")
        for words in (
            f"link add br-{name} type veth peer name n{name}",
            f"link set n{name} netns {node.pid}",
            f"link set br-{name} master br0 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)

    def of(self, name: str, words: bytes) -> list[int]:
        """Return the processes of a node that run this; workers have networks of their own."""
        found = []
        for pid in processes(words):
            with contextlib.suppress(psutil.Error):
                if self.nodes[name].pid in (each.pid for each in psutil.Process(pid).parents()):
                    found.append(pid)
        return found

    def asked(self, fault: str) -> str:
        """Return the node that stays."""
        return OTHER if fault == "head" else HEAD

    def alive(self) -> int:
        """Return how many nodes Ray knows to live."""
        with urllib.request.urlopen(f"{self.api}/api/v0/nodes", timeout=10) as answer:
            rows = json.load(answer)["data"]["result"]["result"]
        return sum(row["state"] == "ALIVE" for row in rows)

    def placed(self) -> dict[str, str]:
        """Return cell → node, of the cells that Ray has running."""
        with contextlib.suppress(OSError, KeyError, ValueError):
            cells = self.status()["deployments"]["cell"]["replicas"]
            return {
                each["replica_id"]: each["node_ip"] for each in cells if each["state"] == "RUNNING"
            }
        return {}

    def spread(self) -> list[str]:
        """Return the nodes of these cells."""
        return sorted(self.placed().values())

    def whole(self, *without: Any) -> None:
        """Wait until each node has its cell, and answers."""
        poll(lambda: self.spread() == [HEAD, OTHER], "a cell on each node", START_S)
        for address in (HEAD, OTHER):
            poll(lambda at=address: answers(f"http://{at}:8000/health/ready"), "it answers")  # type: ignore[misc]

    # The faults; each returns when the set is whole again.

    def silent(self) -> str:
        """Cut node b off without a word, and connect it again."""
        subprocess.run(["ip", "link", "set", "br-b", "down"], check=True)
        time.sleep(SILENT_S)
        subprocess.run(["ip", "link", "set", "br-b", "up"], check=True)
        self.whole()
        return ""

    def kill_node(self) -> str:
        """Kill everything on node b; another machine comes in its place."""
        self.nodes["b"].kill()
        self.nodes["b"].wait()
        poll(lambda: self.spread() == [HEAD], "Ray knows")
        self.start("b")
        self.whole()
        return ""

    def kill_head(self) -> str:
        """Kill the head's store of node a; its service starts the head again. Clients ask b."""
        os.kill(self.of("a", b"gcs_server")[0], signal.SIGKILL)
        time.sleep(3)
        started = time.monotonic()
        poll(lambda: answers(f"{self.api}/api/serve/applications/"), "the head is back")
        back_s = time.monotonic() - started + 3
        self.whole()
        return f"head back after {back_s:.0f} s"

    def fill_disk(self) -> str:
        """Fill the disk of node b for its archives and logs; make room later."""
        root = Path(f"/proc/{self.of('b', b'raylet')[0]}/root{self.place}/full")
        with contextlib.suppress(OSError), root.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
        time.sleep(SILENT_S)
        left = os.statvfs(root.parent).f_bavail
        root.unlink()
        self.whole()
        return f"{left} blocks were left"

    def update_full(self) -> str:
        """Roll out the next version of the archive, where each node is full."""
        before, self.store = self.placed(), "two" if self.store == "one" else "one"
        self.deploy()
        poll(lambda: (now := self.placed()) and before.keys().isdisjoint(now), "no old cell runs")
        self.whole()
        return ""

    def hang_worker(self) -> str:
        """Stop a worker of node a; the process that forks them is older, and is called the same."""
        worker = self.of("a", b"modelyard.serve.worker")[-1]
        os.kill(worker, signal.SIGSTOP)
        poll(lambda: worker not in self.of("a", b"modelyard.serve.worker"), "it is replaced")
        self.whole()
        return ""


FAULTS_OF_NODES = {
    "silent": Nodes.silent,
    "node": Nodes.kill_node,
    "head": Nodes.kill_head,
    "disk": Nodes.fill_disk,
    "hung-worker": Nodes.hang_worker,
    "full-update": Nodes.update_full,
}
"""What is asked for by these names."""
