"""What is remembered of one roll-out: in memory, and in the state file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Any

from modelyard.plugins.ops.rollout.plan import Plan
from modelyard.serve.control.registry import ModelVersion

MOST_EVENTS = 100
"""Of one roll-out; the oldest go."""


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
KEPT = (*ACTIVE, State.RETURNED, State.FAILED)
"""States in which there is a candidate."""


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


@dataclass
class Record:
    """One roll-out."""

    model: str
    plan: Plan
    salt: str
    candidate: Version
    live: Version
    state: State = State.CANDIDATE
    since: str = field(default_factory=now)
    step: int = 0
    """Of the plan's steps, while it is a canary."""
    workers: int = 1
    """Of the candidate."""
    events: list[dict[str, str]] = field(default_factory=list)

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

    def note(self, before: str, why: str) -> None:
        """Keep an event that led to the present state."""
        self.events.append({"at": now(), "from": before, "to": self.label, "why": why})
        del self.events[:-MOST_EVENTS]

    @property
    def label(self) -> str:
        """The state, and the share of a canary."""
        if self.state is State.CANARY:
            return f"{self.state} {self.share * 100:.6g} %"
        return str(self.state)

    def to_json(self) -> dict[str, Any]:
        """Return what the state file holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Record:
        """Return what the state file holds.

        Raises:
            ValueError: it is not a roll-out.
        """
        try:
            known = {each.name for each in fields(cls)}
            values = {key: value for key, value in content.items() if key in known}
            plan = {**values.pop("plan")}
            plan["steps"] = tuple(map(float, plan["steps"]))
            live, candidate = Version(**values.pop("live")), Version(**values.pop("candidate"))
            state = State(values.pop("state"))
            record = cls(plan=Plan(**plan), live=live, candidate=candidate, state=state, **values)
            if state is State.CANARY:
                record.plan.steps[record.step]
        except (TypeError, KeyError, LookupError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return record
