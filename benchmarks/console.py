"""What open consoles cost the predictions beside them.

    python -m benchmarks.console [--consoles 5] [--pairs 8] [--seconds 5] [--connections 8]

Serves a handler that answers at once, so that the server process is what limits the rate, and
measures pairs of runs, with and without consoles, whichever comes first in turns. A console is what
its page is to the server: a connection that asks for an update every second. On a machine that
others use, CPU time per answer says more than the rate does: with one process at its limit they are
the same figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from benchmarks import procfs
from benchmarks.archives import build_echo
from benchmarks.server import Server
from benchmarks.wrk import run_wrk

SETTLE_S = 1.0
IDLE_S = 20.0
EVERY_S = 1.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--consoles", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="modelyard-console-") as name:
        folder = Path(name)
        subject = build_echo(folder)
        with Server(subject, 1, folder / "state") as server:
            about = json.loads((folder / "state" / "server.json").read_text())
            keys = json.loads((folder / "state" / "keys.json").read_text())
            send = subject.content_type, subject.requests

            def open_consoles() -> contextlib.AbstractContextManager[None]:
                url, token = about["management"], keys["management"]
                return consoles(url, token, subject.name, given.consoles)

            def share() -> float:
                """Return how much of a core the server takes, without other requests."""
                time.sleep(SETTLE_S)
                before = procfs.cpu_s(server.pid)
                time.sleep(IDLE_S)
                return (procfs.cpu_s(server.pid) - before) / IDLE_S

            def run() -> tuple[float, float]:
                """Return answers per second, and CPU seconds of the server per answer."""
                time.sleep(SETTLE_S)
                before = procfs.cpu_s(server.pid)
                load = run_wrk(server.url, given.connections, given.seconds, *send)
                return (
                    (load.requests - load.failures) / load.seconds,
                    (procfs.cpu_s(server.pid) - before) / load.requests,
                )

            run()
            alone = share()
            with open_consoles():
                watched = share()
            rates, costs = [], []
            for pair in range(given.pairs):
                found = {}
                for is_open in (True, False) if pair % 2 else (False, True):
                    with open_consoles() if is_open else contextlib.nullcontext():
                        found[is_open] = run()
                rates.append(found[True][0] / found[False][0] - 1)
                costs.append(found[True][1] / found[False][1] - 1)
                rate, cost = ([found[is_open][at] for is_open in (False, True)] for at in (0, 1))
                print(f"pair {pair + 1}: {rate[0]:.0f} → {rate[1]:.0f} answers/s, "
                      f"{cost[0] * 1e6:.1f} → {cost[1] * 1e6:.1f} µs CPU")  # fmt: skip
    print(f"{os.cpu_count()} cores, {given.consoles} consoles, medians of {given.pairs} pairs:")
    print(f"server without other requests: {alone:.2%} → {watched:.2%} of a core")
    print(f"rate {statistics.median(rates):+.2%}, CPU per answer {statistics.median(costs):+.2%}")


@contextlib.contextmanager
def consoles(url: str, token: str, model: str, count: int) -> Iterator[None]:
    """Keep so many pages open: every other one is a version's, the others list them all."""
    over = threading.Event()
    place = urlsplit(url).netloc
    cookie = sign_in(place, token)
    paths = ["/console/live", f"/console/models/{model}/1.0/live"]

    def look(number: int) -> None:
        connection = HTTPConnection(place, timeout=10)
        headers = {"Cookie": cookie, "HX-Request": "true"}
        over.wait(number * EVERY_S / count)
        while not over.wait(EVERY_S):
            connection.request("GET", paths[number % 2], headers=headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{paths[number % 2]}: {answer.status}")
        connection.close()

    threads = [threading.Thread(target=look, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def sign_in(place: str, token: str) -> str:
    """Return the cookie of a new session."""
    connection = HTTPConnection(place, timeout=10)
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    connection.request("POST", "/console/sign-in", urlencode({"token": token}), form)
    answer = connection.getresponse()
    cookie = str(answer.getheader("set-cookie")).partition(";")[0]
    connection.close()
    return cookie


if __name__ == "__main__":
    main()
