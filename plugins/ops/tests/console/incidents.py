"""Ten incidents of a server, staged; and what leads to their causes for who comes afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from modelyard.archiver import write_archive
from tests.serve.live import LiveServer, build_archive, poll

HANDLER = Path(__file__).with_name("troubled.py")
CONFIGS = {
    "killed": "",
    "leaking": "",
    "flooded": "jobQueueSize: 2\n",
    "slowed": "",
    "raising": "",
    "late": "clientTimeoutInMills: 300\n",
}
"""Model → its settings; each has one incident."""


class Incident(NamedTuple):
    """What happens, and what leads to its cause from the console's first page."""

    stage: Callable[[LiveServer], None]
    event: str
    """Kind of its event."""
    subject: str
    """What the event names: a model's name, or what else it says."""
    cause: Sequence[str]
    """What stands in the event, or on the page that it leads to."""


def build(store: Path) -> None:
    """Archive everything that is staged with."""
    weights = store / ".build" / "weights.bin"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"none")
    for name, config in CONFIGS.items():
        file = weights.with_name("model-config.yaml")
        file.write_text(f"maxBatchDelay: 0\n{config}")
        write_archive(name, version="1.0", artifact=weights, handler=str(HANDLER),
                      output_dir=store, config_file=file, force=True)  # fmt: skip
    for name, behaviour in (("returned", "failing"), ("promoted", "wrong")):
        for version, handler in (("1.0", "good"), ("2.0", behaviour)):
            made = build_archive(store, "rolled", name=name, version=version,
                                 handler=f"{handler}.py")  # fmt: skip
            made.rename(store / f"{name}-{version}.mar")
    build_archive(store, "breaks_on_import")


def ask(server: LiveServer, model: str, *bodies: str) -> set[int]:
    """Send bodies, all at once; return the statuses of their answers."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return {each.status_code for each in threads.map(
            lambda body: server.predict(model, body), bodies)}  # fmt: skip


def kill(server: LiveServer) -> None:
    (pid,) = server.worker_pids("killed")
    os.kill(pid, signal.SIGKILL)
    poll(lambda: server.restarts("killed") == 1 and server.worker_pids("killed"), "it is back")


def leak(server: LiveServer) -> None:
    """Leak 300 MB, after the worker was looked at once."""
    assert ask(server, "leaking", "x") == {200}
    time.sleep(3)
    assert ask(server, "leaking", *["leak 100"] * 3) == {200}
    time.sleep(35)  # memory is read twice a minute while nobody looks


def flood(server: LiveServer) -> None:
    assert ask(server, "flooded", *["sleep 0.2"] * 60) == {200, 503}


def slow(server: LiveServer) -> None:
    """Be fast for forty seconds, then slow for ten."""
    with going_on(server, "slowed", "x"):
        time.sleep(42)
    with going_on(server, "slowed", "sleep 0.1"):
        time.sleep(14)


@contextmanager
def going_on(server: LiveServer, model: str, body: str) -> Iterator[None]:
    """Ask for a block."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.02):
            ask(server, model, body)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def raise_errors(server: LiveServer) -> None:
    assert ask(server, "raising", *["raise"] * 12) == {500}


def be_late(server: LiveServer) -> None:
    assert ask(server, "late", *["sleep 1"] * 12) <= {503, 504}


def fail_to_register(server: LiveServer) -> None:
    assert server.register("breaks_on_import.mar", synchronous=True).status_code >= 400


def start_rollout(server: LiveServer, name: str) -> None:
    query = {"url": f"{name}-2.0.mar", "shadow": "100", "canary": "50",
             "rule": "least 5, confidence 80%, disagreement<=50%"}  # fmt: skip
    place = f"/models/{name}/rollout"
    assert server.management.post(place, params=query).status_code == 200


def promote(server: LiveServer, name: str, to: str) -> None:
    query: dict[str, str | bool] = {"to": to, "force": True}
    answer = server.management.post(f"/models/{name}/rollout/promote", params=query)
    assert answer.status_code == 200, answer.text


def compared(server: LiveServer, name: str) -> int:
    return int(server.management.get(f"/models/{name}/rollout").json()["compared"])


def have_returned(server: LiveServer) -> None:
    """Have a canary fail until it is taken back."""
    start_rollout(server, "returned")
    promote(server, "returned", "50%")

    def is_back() -> bool:
        ask(server, "returned", "7", "17", "27", "37", "1", "2")
        return bool(server.management.get("/models/returned/rollout").json()["state"] == "returned")

    poll(is_back, "it is taken back", 60)


def have_promoted(server: LiveServer) -> None:
    """Promote a version although it differs."""
    start_rollout(server, "promoted")

    def differs() -> bool:
        for body in ("37", "137", "5"):
            assert ask(server, "promoted", body) == {200}
        about = server.management.get("/models/promoted/rollout").json()
        return bool(about["verdicts"].get("differs", 0) >= 2)

    poll(differs, "differences are seen", 60)
    promote(server, "promoted", "default")


INCIDENTS = {
    "worker killed": Incident(kill, "restart", "killed", ["killed from outside"]),
    "memory leak": Incident(leak, "memory of predict 1", "leaking", ["MB, it had"]),
    "overload": Incident(flood, "refusals", "flooded", ["more came than", "up to 2 requests"]),
    "slow model": Incident(slow, "slower", "slowed", ["is usual", "slowed 1.0"]),
    "returned": Incident(have_returned, "returned", "returned 2.0", ["failed at"]),
    "promoted": Incident(have_promoted, "promoted", "promoted 2.0",
                         ["default: promoted by", "Worst differences"]),
    "errors": Incident(raise_errors, "errors", "raising", ["the price list is empty"]),
    "not registered": Incident(fail_to_register, "not registered", "breaks_on_import",
                               ["a_library_that_nobody_has"]),
    "time-outs": Incident(be_late, "time-outs", "late", ["no answer in time", "300"]),
}  # fmt: skip
"""All but the tenth, a server that is killed and started again."""
QUICK = ("worker killed", "overload", "returned", "promoted", "errors", "not registered",
         "time-outs")  # fmt: skip
