"""What an operator says of a roll-out when it starts, and what is remembered of it afterwards."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import Query
from pydantic import TypeAdapter

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.metrics import COUNTER, GAUGE, Family, Metrics
from modelyard.serve.errors import BadRequest

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%?")
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}|")
MOST_STEPS = 20
LONGEST_S = 366 * 86_400.0
MOST_TEXT = 1000
"""Characters of a rule, and of what is expected."""
MOST_EVENTS = 100
"""Events of one roll-out that are kept; the oldest go."""


@dataclass(frozen=True)
class Plan:
    """How a candidate becomes the default."""

    file: str
    """Location of the candidate, as `models register` takes it."""
    shadow: float = 0.05
    """Share of the predictions that are copied to the candidate; 0 copies none."""
    for_s: float | None = None
    """How long a state lasts at least before the next one begins by itself; None: none does."""
    steps: tuple[float, ...] = (0.01, 0.1, 0.5)
    """Shares that the candidate answers, before it answers all."""
    rule: str = ""
    """What must hold; empty for the usual."""
    expect: str = ""
    """Differences that are meant; empty for none."""
    keeps_inputs: bool = False
    """Whether the requests of the worst differences are shown."""
    header: str = ""
    """The request header whose value decides the side; empty for the request's id."""


def parse_plan(
    url: Annotated[str, Query(description="File name of an archive in the model store.")],
    shadow: Annotated[str, Query(description="Share of the predictions that is copied.")] = "5%",
    for_: Annotated[
        str, Query(alias="for", description="How long a step lasts, then the next: 10m.")
    ] = "",
    canary: Annotated[str, Query(description="Shares that it answers, step by step.")] = "1,10,50",
    rule: Annotated[str, Query(description="What must hold.")] = "",
    expect: Annotated[str, Query(description="Differences that are meant.")] = "",
    keep_inputs: Annotated[bool, Query(description="Show the worst requests.")] = False,
    header: Annotated[str, Query(description="Whose value decides the side.")] = "",
) -> Plan:
    """Return the plan that parameters write.

    Raises:
        BadRequest: says which of them is wrong, and what is expected.
    """
    if not _HEADER.fullmatch(header):
        raise BadRequest(f"header: expected the name of a header, got {header[:60]!r}")
    for name, text in (("rule", rule), ("expect", expect)):
        if len(text) > MOST_TEXT:
            raise BadRequest(f"{name}: expected at most {MOST_TEXT} characters, got {len(text)}")
    share, time_s = parse_share("shadow", shadow), parse_time("for", for_) if for_ else None
    steps = parse_steps(canary)
    return Plan(url, share, time_s, steps, rule, expect, keep_inputs, header.lower())


def parse_share(name: str, text: str) -> float:
    """Return the share that a number of percent is, with or without its sign.

    Raises:
        BadRequest: it is not one, or not one from 0 to 100.
    """
    match = _SHARE.fullmatch(text.strip())
    if match is None or float(match[1]) > 100:
        raise BadRequest(f"{name}: expected a percentage from 0 to 100 such as 5%, got {text!r}")
    return round(float(match[1]) / 100, 9)


def parse_steps(text: str) -> tuple[float, ...]:
    """Return ever larger shares, of percentages between commas.

    Raises:
        BadRequest: one is wrong, or not above the one before it.
    """
    steps = tuple(parse_share("canary", part) for part in text.split(",") if part.strip())
    if len(steps) > MOST_STEPS:
        raise BadRequest(f"canary: expected at most {MOST_STEPS} steps, got {len(steps)}")
    if any(after <= before for before, after in zip((0.0, *steps), steps, strict=False)):
        raise BadRequest(f"canary: expected ever larger percentages such as 1,10,50, got {text!r}")
    return tuple(step for step in steps if step < 1)  # all of them is the default


def parse_time(name: str, text: str) -> float:
    """Return the seconds that `90`, `90s`, `10m`, `2h` or `1d` says.

    Raises:
        BadRequest: it is not a time, or too long a one.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise BadRequest(f"{name}: expected a time such as 90s, 10m or 2h, got {text!r}")
    return seconds


def format_share(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share * 100:.6g} %"


class State(StrEnum):
    """Where a roll-out is."""

    CANDIDATE = "candidate"
    """Loaded; it gets no traffic."""
    SHADOW = "shadow"
    """It gets copies of requests, and nobody its answers."""
    CANARY = "canary"
    """It answers a share."""
    DEFAULT = "default"
    """It answers; the version before is kept."""
    RETURNED = "returned"
    """It answered, and does not any more."""
    ABORTED = "aborted"
    """An operator ended it before it answered all."""
    FAILED = "failed"
    """It was judged before it answered anybody, or could not be loaded again."""


ACTIVE = (State.CANDIDATE, State.SHADOW, State.CANARY)
"""States in which a roll-out decides over both versions."""
WITH_CANDIDATE = (*ACTIVE, State.RETURNED, State.FAILED)
"""States in which there is a candidate."""
Step = tuple[State, int]
"""A state and, of a canary, which of the plan's steps."""


def now() -> str:
    """Return the time, as JSON has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@dataclass(frozen=True)
class Version:
    """What a model version is, while it is there and afterwards."""

    version: str
    digest: str
    file: str
    format: str

    @classmethod
    def of(cls, model: ModelVersion) -> Version:
        """Return it of one that is registered."""
        artifact = str((model.manifest or {}).get("model", {}).get("serializedFile") or "")
        format = PurePath(artifact).suffix.removeprefix(".")
        return cls(model.version, model.digest, model.file, format)


@dataclass(frozen=True)
class Record:
    """One roll-out in one state."""

    model: str
    plan: Plan
    salt: str
    candidate: Version
    live: Version
    state: State = State.CANDIDATE
    since: str = field(default_factory=now)
    step: int = 0
    """Place of a canary among the plan's steps."""
    workers: int = 1
    """How many the candidate had when the server ended."""
    events: tuple[dict[str, str], ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether it decides over both versions."""
        return self.state in ACTIVE

    @property
    def share(self) -> float:
        """What share of the requests the candidate answers."""
        if self.state is State.CANARY:
            return self.plan.steps[self.step]
        return 1.0 if self.state is State.DEFAULT else 0.0

    @property
    def label(self) -> str:
        """The state, and the share of a canary."""
        return f"{self.state} {format_share(self.share)}" if self.state == "canary" else self.state

    @property
    def next(self) -> Step | None:
        """State and step that follow; None where nothing does."""
        if not self.is_active:
            return None
        if self.state is State.CANDIDATE and self.plan.shadow:
            return State.SHADOW, 0
        step = self.step + 1 if self.state is State.CANARY else 0
        return (State.CANARY, step) if step < len(self.plan.steps) else (State.DEFAULT, 0)

    @property
    def next_name(self) -> str | None:
        """What `to` of a promotion says for what follows."""
        if self.next is None:
            return None
        state, step = self.next
        return f"{self.plan.steps[step] * 100:.9g}%" if state is State.CANARY else state

    def moved(self, state: State, step: int, why: str, before: str | None = None) -> Record:
        """Return it in another state, with the event that led there."""
        record = replace(self, state=state, step=step, since=now())
        before = self.label if before is None else before
        event = {"at": record.since, "from": before, "to": record.label, "why": why}
        return replace(record, events=(*self.events, event)[-MOST_EVENTS:])

    def to_json(self) -> dict[str, Any]:
        """Return what the state file holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Record:
        """Return what the state file holds.

        Raises:
            ValueError: it is not a roll-out.
        """
        record: Record = TypeAdapter(cls).validate_python(content)
        if not 0 <= record.step < max(1, len(record.plan.steps)):
            raise ValueError(f"its step is {record.step} of {len(record.plan.steps)}")
        return record


# -- what is exposed of it (Prometheus) ------------------------------------------------------------


_LABELS = ("model", "candidate")
_KINDS: dict[str, tuple[Any, ...]] = {
    "compared": (COUNTER, "Answers that were compared, by verdict.", "verdict"),
    "noise": (COUNTER, "Second answers of the live version, by verdict.", "verdict"),
    "shadow_dropped": (COUNTER, "Copies that were not compared, by reason.", "reason"),
    "returned": (COUNTER, "Candidates that were taken back after they had answered."),
    "state": (GAUGE, "1 for the state that a roll-out is in.", "state"),
    "canary_share": (GAUGE, "Share of the requests that the candidate answers."),
}
"""Name → its kind, its text, and its label beside those of all."""


def rollout_families(metrics: Metrics) -> dict[str, Family]:
    """Return the metrics of all roll-outs of one server, by name."""
    return {
        name: metrics.add(kind, f"rollout_{name}", (*_LABELS, *more), text)
        for name, (kind, text, *more) in _KINDS.items()
    }


class RolloutMetrics:
    """The metrics of one roll-out."""

    def __init__(self, families: dict[str, Family], record: Record) -> None:
        self._families = families
        self._values = record.model, record.candidate.version
        self._state = ""
        self.count("returned", by=0)

    def count(self, name: str, *more: str, by: int = 1) -> None:
        """Count something."""
        self._families[name].count(*self._values, *more).inc(by)

    def entered(self, record: Record) -> None:
        """Expose the state, and what share the candidate answers."""
        state, share = self._families["state"], self._families["canary_share"]
        if self._state:
            state.count(*self._values, self._state).value = 0
        self._state = record.state
        state.count(*self._values, self._state).value = 1
        share.count(*self._values).value = record.share

    def remove(self) -> None:
        """Forget the series."""
        for family in self._families.values():
            family.forget(*self._values)
