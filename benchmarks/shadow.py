"""What a shadow costs: CPU of the server per request, and the rate of clients in a closed loop.

    python -m benchmarks.shadow [same near] [--rate 300] [--seconds 6] [--rounds 3]

Serves a model of 2 ms a batch, of 8 at most, in one worker, and begins a roll-out of a copy of it
(`same`), or of one whose numbers are off by a millionth (`near`), which are compared one by one.
Each round measures without a roll-out, with copies of half of the requests and of all, one after
the other on the same server: at a steady rate over 8 connections, and in a closed loop of 16. A
copy's cost is the CPU time of the server process beyond that of no roll-out, over the copies that
were compared; its workers and the process that compares are others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.candidates import PacedLoad
from benchmarks.procfs import cpu_s
from benchmarks.rollouts import Operator, serving
from benchmarks.wrk import run_wrk
from modelyard.archiver import write_archive

HANDLER = '''\
"""Names the likeliest digit of a number, in 2 ms."""
import time


def handle(data, context):
    """Answer each row."""
    if data is None:
        return None
    time.sleep(0.002)
    off = {off}
    return [
        {{str(d): (0.9 if d == int(row["body"]) % 10 else 0.011) + off for d in range(10)}}
        for row in data
    ]
'''
CANDIDATES = {"same": 0.0, "near": 1e-6}
SHARES = (0, 50, 100)
CONNECTIONS = 16
SETTLE_S = 1.0


def archive(store: Path, folder: Path, version: str, off: float) -> str:
    """Archive a version of the model; return its file."""
    (weights := folder / "weights.bin").write_bytes(b"none")
    (config := folder / "model-config.yaml").write_text("minWorkers: 1\nbatchSize: 8\n")
    (handler := folder / "shadowed.py").write_text(HANDLER.format(off=off))
    made = write_archive(
        "shadowed", version=version, artifact=weights, handler=str(handler),
        output_dir=folder / "out", config_file=config, force=True,
    )  # fmt: skip
    store.mkdir(exist_ok=True)
    return made.rename(store / f"{version}.mar").name


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("candidates", nargs="*", help="same, near; both unless one is named")
    parser.add_argument("--rate", type=float, default=300, help="requests a second")
    parser.add_argument("--seconds", type=float, default=6, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    given.candidates = given.candidates or list(CANDIDATES)
    with tempfile.TemporaryDirectory(prefix="modelyard-shadow-") as name:
        folder, store = Path(name), Path(name, "store")
        archive(store, folder, "1.0", 0.0)
        for candidate in given.candidates:
            archive(store, folder, candidate, CANDIDATES[candidate])
        (body := folder / "body.txt").write_text("7")
        with serving(store, folder / "state", "1.0.mar") as (about, operator, _):
            for candidate in given.candidates:
                measure(candidate, about, operator, body, given)


def measure(candidate: str, about: dict, operator: Operator, body: Path, given) -> None:  # type: ignore[no-untyped-def, type-arg]
    """Measure one candidate and print its lines."""
    url, pid = about["inference"], int(about["pid"])
    split = urlsplit(url)
    address = (split.hostname or "", split.port or 0)
    found = defaultdict(list)
    for _ in range(given.rounds):
        for share in SHARES:
            if share:
                operator.ask(
                    "POST", "/models/shadowed/rollout", url=f"{candidate}.mar",
                    shadow=f"{share}%", canary="50",
                )  # fmt: skip
            time.sleep(SETTLE_S)
            before, copies = cpu_s(pid), compared(operator)
            with PacedLoad(address, "shadowed", [b"7", b"12"], given.rate) as clients:
                time.sleep(given.seconds)
            cpu, copies = cpu_s(pid) - before, compared(operator) - copies
            requests = len(clients.outcomes)
            found[share, "us"].append(1e6 * cpu / requests)
            found[share, "copies"].append(copies / requests)
            before, copies = cpu_s(pid), compared(operator)
            load = run_wrk(
                f"{url}/predictions/shadowed", CONNECTIONS, given.seconds, "text/plain", [body]
            )
            cpu, copies = cpu_s(pid) - before, compared(operator) - copies
            found[share, "rate"].append(load.requests / load.seconds)
            found[share, "loop us"].append(1e6 * cpu / load.requests)
            found[share, "loop copies"].append(copies / load.requests)
            if share:
                operator.ask("POST", "/models/shadowed/rollout/abort")
    print(f"{candidate}: share, us a request (compared, us a copy) at {given.rate:g}/s, then in a "
          f"closed loop, answers a second")  # fmt: skip
    none = {key: statistics.median(found[0, key]) for key in ("us", "loop us", "rate")}
    for share in SHARES:
        of = {key: statistics.median(found[share, key])
              for key in ("us", "copies", "rate", "loop us", "loop copies")}  # fmt: skip
        one, other = (
            f"{of[us]:5.0f} us ({of[copied]:.2f}, "
            f"{(of[us] - none[us]) / of[copied] if of[copied] else 0:4.0f} us)"
            for us, copied in (("us", "copies"), ("loop us", "loop copies"))
        )
        print(
            f"{share:4} %  {one}   {other}   {of['rate']:6.0f}/s = {of['rate'] / none['rate']:.2f}"
        )


def compared(operator: Operator) -> int:
    """Return how many copies were compared so far; 0 without a roll-out."""
    try:
        return int(operator.ask("GET", "/models/shadowed/rollout")["compared"])
    except OSError:  # there is none
        return 0


if __name__ == "__main__":
    main()
