"""The red team's table: what each attempt gets from a server with walls, and without."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from modelyard.serve.walls import landlock, mounts
from tests.archives.red_team.attempts import ATTEMPTS
from tests.serve.walls.identities import OURS, is_possible
from tests.serve.walls.matrix import BEGIN, END, IDENTITIES, PAGE, RECORD, run_as, table, through

RECORDED: dict[str, list[str]] = json.loads(RECORD.read_text(encoding="utf-8"))
GROUPS = list(dict.fromkeys(group for group, _ in ATTEMPTS.values()))
CONTAINER = "root in a container" if OURS == "root" else "container"
HERE = OURS if mounts.why_not() is None else CONTAINER
"""As who the attempts were recorded that ours are compared with."""

needs_all = pytest.mark.skipif(
    landlock.version() < landlock.SCOPES_SINCE, reason="this kernel lacks walls"
)


@cache
def ours() -> dict[str, Any]:
    """Return what the attempts get as who runs the tests."""
    return run_as(OURS)


@needs_all
@pytest.mark.parametrize("group", GROUPS)
def test_a_handler_gets_nothing_that_it_tries(group: str) -> None:
    got = {
        name: answer["got"]
        for name, answer in ours().items()
        if "got" in answer and ATTEMPTS[name][0] == group
    }
    assert got.keys() <= {*RECORDED[HERE]}, got


def test_what_gets_through_is_stated() -> None:
    """Names are looked up without opening anything, without namespaces in the state folder too, and
    then /dev/shm is everybody's."""
    stated = {"looking", "looking elsewhere", "shared memory"}
    for identity in IDENTITIES:
        groups = {ATTEMPTS[name][0] for name in RECORDED[identity]}
        assert groups <= (stated if "container" in identity else {"looking elsewhere"}), identity


def test_the_page_shows_what_was_recorded() -> None:
    shown = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert shown.strip() == table(RECORDED)


def test_each_attempt_that_this_machine_has_gets_through_without_walls() -> None:
    """What never does is nothing that a wall refuses."""
    real = {*RECORDED["root, no walls"], *RECORDED["user, no walls"]}
    absent = {
        *(f"read device: /dev/{name}" for name in ("mem", "port")),
        *(f"ask the kernel: {name}" for name in ("init_module", "kexec_load")),
        *("call by another table", "open device: /dev/tty", "never be ended", "raise a limit"),
        *(f"make socket: {name}" for name in ("ALG", "RDS", "TIPC", "CAN", "Bluetooth", "SMC")),
    }
    assert {*ATTEMPTS} - real == absent


@needs_all
@pytest.mark.slow
@pytest.mark.parametrize("has_walls", [True, False], ids=["walls", "no walls"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_every_identity_gets_what_was_recorded(identity: str, has_walls: bool) -> None:
    key = identity if has_walls else f"{identity}, no walls"
    if key not in RECORDED or not is_possible(identity):
        pytest.skip("not recorded, or not to be had here")
    assert through(run_as(identity, has_walls)) == RECORDED[key]
