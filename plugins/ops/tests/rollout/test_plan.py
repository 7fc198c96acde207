"""What an operator says of a roll-out, which side a request is on, what is remembered."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelyard.plugins.ops.rollout.record import (
    Plan,
    Record,
    State,
    Version,
    parse_plan,
    parse_time,
)
from modelyard.plugins.ops.rollout.shadow import Canary, place
from modelyard.serve.control.registry import Registry
from modelyard.serve.control.saved import describe_models, read_models, read_notes, write_models
from modelyard.serve.control.state import StateDir
from modelyard.serve.errors import BadRequest

IDS = [f"request-{number}" for number in range(4000)]


def test_a_plan_is_read_as_it_is_written() -> None:
    plan = parse_plan("two.mar", "2.5%", "10m", "1, 10,50%,100", header="X-User")
    assert plan == Plan("two.mar", 0.025, 600.0, (0.01, 0.1, 0.5), header="x-user")
    assert parse_plan("two.mar") == Plan("two.mar", 0.05, None, (0.01, 0.1, 0.5))
    assert parse_plan("two.mar", "0", canary="").steps == ()
    assert [parse_time("for", text) for text in ("90", "1.5s", "2h", "1d")] == [
        90,
        1.5,
        7200,
        86400,
    ]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("shadow", "101"), ("shadow", "-1"), ("shadow", "a few"), ("for_", "10 min"),
        ("for_", "-1s"), ("for_", "400d"), ("canary", "10,10"), ("canary", "50,10"),
        ("canary", "0,10"), ("canary", ",".join(map(str, range(1, 40)))), ("header", "a b"),
        ("rule", "x" * 1001),
    ],
)  # fmt: skip
def test_a_plan_that_makes_no_sense_is_refused(option: str, text: str) -> None:
    with pytest.raises(BadRequest, match="expected"):
        parse_plan("two.mar", **{option: text})  # type: ignore[arg-type]


def test_a_request_is_on_the_same_side_always_and_sides_are_as_large_as_said() -> None:
    live, candidate = cast("Any", "live"), cast("Any", "candidate")
    split = Canary(live, candidate, "salt", 0.1, b"x-user")
    chosen = [split.choose(id, []) for id in IDS]
    assert chosen == [split.choose(id, []) for id in IDS]
    assert chosen.count(candidate) == pytest.approx(400, rel=0.15)
    first = {id for id, side in zip(IDS, chosen, strict=True) if side == candidate}
    split = Canary(live, candidate, "salt", 0.5, b"x-user")
    assert first <= {id for id in IDS if split.choose(id, []) == candidate}
    of_a_user = {split.choose(id, [(b"x-user", b"ann")]) for id in IDS}
    assert len(of_a_user) == 1
    other = [id for id in IDS if place("another salt", id) < 0.1]
    assert len(first & set(other)) < 100


def record(state: State = State.CANARY) -> Record:
    versions = (Version("2.0", "d2", "two.mar", "onnx"), Version("1.0", "d1", "one.mar", "pt2"))
    return Record("echo", Plan("two.mar", 0.05, 600.0), "salt", *versions, state=state, step=1)


def test_a_roll_out_is_remembered_beside_the_models(tmp_path: Path) -> None:
    state, registry = StateDir(tmp_path), Registry()
    before = record(State.SHADOW).moved(State.CANARY, 1, "promoted")
    registry.notes = {"rollouts": dict}
    write_models(state, describe_models(registry))
    assert read_notes(state) == {}
    assert "rollouts" not in json.loads(state.models_file.read_text())
    registry.notes = {"rollouts": lambda: {"echo": before.to_json()}, "others": lambda: [1]}
    write_models(state, describe_models(registry))
    registry.notes = read_notes(state)  # which are written again, whoever wrote them
    write_models(state, describe_models(registry))
    found = {name: note() for name, note in read_notes(state).items()}
    assert (read_models(state), Record.from_json(found["rollouts"]["echo"])) == ([], before)
    assert found["others"] == [1]
    assert before.label == "canary 10 %"
    state.models_file.write_text('{"models": [{"file": "one.mar"}]}')  # of an older server
    assert ([spec.location for spec in read_models(state)], read_notes(state)) == (
        ["one.mar"], {},
    )  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [{"state": "unheard"}, {"plan": {}}, {"live": None}, {"step": 9}, {"candidate": {"x": 1}}],
)
def test_what_is_damaged_is_no_roll_out(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Record.from_json({**record().to_json(), **damage})


def test_only_the_latest_events_are_kept() -> None:
    events = record()
    for number in range(300):
        events = events.moved(State.CANARY, 1, str(number))
    assert [events.events[0]["why"], events.events[-1]["why"]] == ["200", "299"]


def test_versions_of_another_format_are_told_apart() -> None:
    manifest = {"model": {"serializedFile": "digits.onnx"}}
    model = SimpleNamespace(version="2", digest="d", file="two.mar", manifest=manifest)
    assert Version.of(cast("Any", model)) == Version("2", "d", "two.mar", "onnx")
