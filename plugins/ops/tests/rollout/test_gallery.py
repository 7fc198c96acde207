"""Candidates that are wrong only beside other requests, the second time, or for clients.

Each becomes no default; neither does it make a client wait for long. Their twins do. All of them
follow the same version, one after the other on one server, at 300 requests a second in bursts.
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.candidates import PacedLoad
from modelyard.archiver import write_archive
from plugins.ops.tests.rollout.gallery import handlers
from tests.serve.live import LiveServer, poll, running

HANDLERS = Path(handlers.__file__)
GOOD = ("Right", "Near", "Summed")
NAMES = [
    each.name for each in ast.parse(HANDLERS.read_text()).body if isinstance(each, ast.ClassDef)
]
BAD = [name for name in NAMES if name not in GOOD]
BY_DAY = ("FirstRow", "OnlyForClients", "Near")
ENDED = ("default", "returned", "failed")
RATE = 300
HEADING = (
    f"{'CANDIDATE':<17} {'ENDED AS':<9} {'AFTER':>6} {'COMPARED':>8} {'DIFFER':>6} {'AGAIN':>9} "
    f"{'OWN':>9} {'CLIENTS':>8} {'WRONG':>5}  WHY"
)


def bodies() -> list[bytes]:
    """Return requests of one to twelve numbers, of which some begin alike."""
    draw = Random(0)
    return [
        ",".join(f"{draw.uniform(-3, 3):.3f}" for _ in range(draw.randint(1, 12))).encode()
        for _ in range(3000)
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serve the right one, with all the others in the store."""
    folder = tmp_path_factory.mktemp("gallery")
    (weights := folder / "weights.bin").write_bytes(b"none")
    (config := folder / "model-config.yaml").write_text("minWorkers: 2\nbatchSize: 8\n")
    store = folder / "store"
    store.mkdir()
    for number, name in enumerate(["Right", *NAMES]):
        made = write_archive(
            "gallery", version=f"{number + 1}.0", artifact=weights, config_file=config,
            handler=f"{HANDLERS}:{name}", output_dir=folder / "out", force=True,
        )  # fmt: skip
        made.rename(store / (f"{name}.mar" if number else "live.mar"))
    with running(folder / "state", store, "--models", "gallery=live.mar") as server:
        yield server


def roll_out(server: LiveServer, name: str, inputs: list[bytes]) -> tuple[str, str]:
    """Roll a candidate out under load, and back; return how it ended, and a line of the table."""
    query = {
        "url": f"{name}.mar", "shadow": "100%", "canary": "50", "for": "2s",
        "rule": "disagreement<=4%, confidence 90%, p99<=1000, least 100",
    }  # fmt: skip
    path = "/models/gallery/rollout"
    began = time.monotonic()
    load = PacedLoad(server.address, "gallery", inputs, RATE, connections=16, in_bursts=True)
    with load as clients:
        answer = server.management.post(path, params=query)
        assert answer.status_code == 200, answer.text
        version = answer.json()["candidate"]["version"]

        def ended() -> Any:
            found = server.management.get(path).json()
            return found if found["state"] in ENDED else None

        found = poll(ended, f"{name} ends", 60)
    after_s = time.monotonic() - began
    if found["state"] == "default":
        assert server.management.post(f"{path}/back").status_code == 200
    assert server.management.post(f"{path}/abort").status_code == 200
    own = [each for each in clients.outcomes if each.version == version]
    wrong = sum(
        each.label != next(iter(handlers.score(list(map(float, inputs[each.body].split(b","))))))
        for each in own
    )
    assert clients.count() == {200: len(clients.outcomes)}
    again, answered = found["again"], found["own"]
    of_again, of_own = (f"{each['differs']}/{each['compared']}" for each in (again, answered))
    return str(found["state"]), (
        f"{name:<17} {found['state']:<9} {after_s:>4.1f} s {found['compared']:>8} "
        f"{found['verdicts'].get('differs', 0):>6} {of_again:>9} {of_own:>9} {len(own):>8} "
        f"{wrong:>5}  {found['events'][-1]['why'][:150]}"
    )


def check(server: LiveServer, names: list[str]) -> None:
    """Roll candidates out, print what became of them, and compare it with what they are."""
    inputs, misses, alarms = bodies(), list[str](), list[str]()
    lines = [HEADING]
    for name in names:
        state, line = roll_out(server, name, inputs)
        lines.append(line)
        if (state == "default") != (name in GOOD):
            (alarms if name in GOOD else misses).append(name)
    bad = sum(name not in GOOD for name in names)
    lines.append(f"{bad - len(misses)} of {bad} refused, {len(alarms)} false alarms")
    table = "\n".join(lines)
    sys.stdout.write(f"\n{table}\n")
    assert (misses, alarms) == ([], []), table


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_what_is_wrong_only_beside_others_or_for_clients_is_refused(
    server: LiveServer,
) -> None:
    check(server, list(BY_DAY))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_fault_of_the_gallery_is_refused_and_its_twins_are_not(server: LiveServer) -> None:
    assert len(BAD) >= 20
    check(server, NAMES)
