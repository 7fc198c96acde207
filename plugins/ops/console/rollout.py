"""The page of a model's roll-out: what was compared, what is judged of it, and the buttons."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from modelyard.plugins.ops.console.answers import cut
from modelyard.plugins.ops.console.models import ModelPages
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.plugins.ops.rollout.control import Rollouts
from modelyard.plugins.ops.rollout.plan import format_share, parse_plan
from modelyard.serve.control.store import list_archives
from modelyard.serve.errors import Conflict, NoRollout, ServeError
from modelyard.serve.http.connection import Answer
from modelyard.serve.settings import Settings

ROLLOUT = "/rollout"
ROOT = "../../.."
"""The way from the page to the console's first; its updates come from one level below."""
STATES = ("candidate", "shadow", "canary", "default")
"""In the order of a roll-out that goes well."""
ENDS = {"returned": "bad", "aborted": "warn", "failed": "bad"}
SHARES = {
    "disagreement": "Answers that differ",
    "noise": "Noise: the live version from itself",
    "excess": "More than noise",
    "failures": "More failures than the live version",
    "labels": "Labels that agree",
}
VERDICTS = {
    "equal": "equal",
    "within_tolerance": "within tolerance",
    "differs": "differs",
    "candidate_failed": "the candidate failed",
    "live_failed": "the live version failed",
}
MOST_WORST = 20
MOST_SHOWN = 2000
"""Characters of an answer."""
JUDGED = {"pass": "good", "fail": "bad"}


class Interval(NamedTuple):
    """A share and its bounds, as a text and as places on a line of 100."""

    name: str
    estimate: str
    bounds: str
    left: float
    at: float
    width: float


class Count(NamedTuple):
    """How often a verdict was given."""

    name: str
    requests: int
    share: float

    @property
    def percent(self) -> str:
        """The share, as people read it."""
        return _percent(self.share)


class Side(NamedTuple):
    """What one of the two versions has answered."""

    name: str
    p50: float | None
    """Seconds."""
    p99: float | None
    requests: int | None
    failed: int | None


class Different(NamedTuple):
    """A request that the two versions answered differently."""

    id: str
    at: str
    difference: str
    sides: Sequence[tuple[str, str]]
    """What stands in a side's heading, and its text."""


class RolloutPages:
    """The pages.

    Args:
        models: pages of the same versions.
        renderer: makes their HTML.
        rollouts: what they show and change.
        settings: of the server.
    """

    def __init__(
        self, models: ModelPages, renderer: Renderer, rollouts: Rollouts, settings: Settings
    ) -> None:
        self._models = models
        self._renderer = renderer
        self._rollouts = rollouts
        self._settings = settings

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        place = f"/models/{{model}}/{{version}}{ROLLOUT}"
        return [
            Page("GET", place, "view", self._page),
            Page("GET", f"{place}/live", "view", self._live),
            Page("POST", f"{place}/start", "manage", self._start),
            Page("POST", f"{place}/promote", "manage", self._promote),
            Page("POST", f"{place}/back", "manage", self._back),
            Page("POST", f"{place}/abort", "manage", self._abort),
        ]

    async def _page(self, visit: Visit) -> Answer:
        model = self._models.find(visit)
        values = {**self._models.common(model, ROLLOUT), **self._values(visit)}
        if values["status"] is None or values["status"]["state"] not in STATES[:3]:
            values["files"] = list_archives(self._settings.model_store)
        return self._renderer.page(visit, "rollout.html", values)

    async def _live(self, visit: Visit) -> Answer:
        model = self._models.find(visit)
        values = {**self._models.common(model, ROLLOUT), **self._values(visit)}
        common = {"root": ROOT, "session": visit.session}
        return self._renderer.part("live_rollout.html", {**common, **values})

    def _values(self, visit: Visit) -> dict[str, Any]:
        """Return what the page shows of the roll-out; of none, where there is none."""
        try:
            status = self._rollouts.status(visit.places["model"])
        except NoRollout:
            return {"status": None}
        return {"status": status, **describe(status)}

    # -- what is changed -------------------------------------------------------------------------

    async def _start(self, visit: Visit) -> Answer:
        def said(name: str) -> str | None:
            return visit.fields.get(name, "").strip() or None

        async def start(name: str) -> str:
            plan = parse_plan(
                visit.fields.get("file", ""), said("shadow"), said("for"), said("canary"),
                said("rule"), said("expect"), "keep_inputs" in visit.fields,
            )  # fmt: skip
            await self._rollouts.start(name, plan)
            return f"the roll-out of {plan.file} has begun"

        return await self._do(visit, start)

    async def _promote(self, visit: Visit) -> Answer:
        async def promote(name: str) -> str:
            self._refuse_stale(visit)
            found = await self._rollouts.promote(name, None, "force" in visit.fields)
            return f"{name} {found['candidate']['version']} is {label(found)}"

        return await self._do(visit, promote)

    async def _back(self, visit: Visit) -> Answer:
        async def back(name: str) -> str:
            found = await self._rollouts.back(name)
            return f"{name} {found['live']['version']} answers everything again"

        return await self._do(visit, back)

    async def _abort(self, visit: Visit) -> Answer:
        async def abort(name: str) -> str:
            self._refuse_stale(visit)
            found = await self._rollouts.abort(name)
            return f"the roll-out of {name} {found['candidate']['version']} is aborted"

        return await self._do(visit, abort)

    async def _do(self, visit: Visit, act: Any) -> Answer:
        """Do what a button says, and return to the page, which says what came of it."""
        model, session = self._models.find(visit), visit.session
        assert session is not None
        try:
            session.tell("done", await act(model.name))
        except ServeError as error:
            session.tell("failed", str(error))
        return visit.redirect(f"/models/{model.name}/{model.version}{ROLLOUT}")

    def _refuse_stale(self, visit: Visit) -> None:
        """Raise where the roll-out is no longer what the button was beside."""
        status = self._rollouts.status(visit.places["model"])
        if visit.fields.get("seen") != label(status):
            raise Conflict(
                f"the roll-out is {label(status)} meanwhile; look at it again before you act"
            )


def label(status: Mapping[str, Any]) -> str:
    """Return the state, and the share of a canary."""
    if status["state"] == "canary":
        return f"canary {format_share(status['canaryShare'])}"
    return str(status["state"])


def describe(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a roll-out that the management API describes."""
    bounds = status.get("bounds") or {}
    shown = {name: bounds[name] for name in SHARES if _is_bound(bounds.get(name))}
    judged = status.get("judgement") or {}
    counted = {**dict.fromkeys(VERDICTS, 0), **(status.get("verdicts") or {})}
    total = sum(counted.values())
    return {
        "label": label(status),
        "steps": list(_steps(status)),
        "is_active": status["state"] in STATES[:3],
        "may_return": status["state"] in ("canary", "default"),
        "intervals": list(_intervals(shown)),
        "verdicts": [
            Count(VERDICTS.get(name, name), count, count / total if total else 0.0)
            for name, count in counted.items()
        ],
        "verdict": judged.get("verdict", "not enough traffic"),
        "verdict_kind": JUDGED.get(judged.get("verdict", ""), "warn"),
        "reasons": [cut(str(each), 500) for each in judged.get("reasons") or ()],
        "sides": list(_sides(status)),
        "ratio": _ratio(bounds.get("p99RatioBounds") or bounds.get("p99Ratio")),
        "worst": [_different(each) for each in (status.get("worst") or ())[:MOST_WORST]],
        "cut": cut,
        "when": when,
    }


def when(text: str) -> str:
    """Return a time of the management API as people read it."""
    return f"{text[:19].replace('T', ' ')} UTC"


def _steps(status: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield each step of a roll-out, and `done`, `now` or nothing of it."""
    names = ["candidate", "shadow"]
    names += [f"canary {format_share(step)}" for step in status.get("steps") or ()]
    names.append("default")
    here = label(status)
    place = names.index(here) if here in names else -1
    for at, name in enumerate(names):
        yield name, "now" if at == place else "done" if at < place else ""


def _is_bound(bound: Any) -> bool:
    return isinstance(bound, Mapping) and bound.get("estimate") is not None


def _intervals(bounds: Mapping[str, Mapping[str, Any]]) -> Iterable[Interval]:
    """Yield shares on one scale, which ends at the largest of them; those near all on their own."""
    finite = [min(1.0, max(0.0, _number(bound["high"]))) for name, bound in bounds.items()
              if name != "labels"]  # fmt: skip
    most = max([*finite, 0.001])
    for name, bound in bounds.items():
        first = 0.0 if name != "labels" else 1 - most
        low, at, high = (
            max(0.0, min(100.0, 100 * (_number(bound[key]) - first) / most))
            for key in ("low", "estimate", "high")
        )
        said = f"{_percent(bound['low'])} to {_percent(bound['high'])}"
        yield Interval(
            SHARES[name], _percent(bound["estimate"]), said, round(low, 2), round(at, 2),
            round(max(high - low, 0.6), 2),
        )  # fmt: skip


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.inf


def _percent(value: Any) -> str:
    number = _number(value)
    return f"{number * 100:.3g} %".replace("-", "−") if math.isfinite(number) else "unknown"


def _sides(status: Mapping[str, Any]) -> Iterable[Side]:
    """Yield what both versions have answered, and how fast."""
    for key, name in (("live", "live version"), ("candidate", "candidate")):
        latency = (status.get("latency") or {}).get(key) or {}
        answered = (status.get("answered") or {}).get(key) or {}
        yield Side(
            name,
            latency.get("p50"),
            latency.get("p99"),
            answered.get("requests"),
            answered.get("failed"),
        )


def _ratio(bound: Any) -> str:
    """Return the ratio of the 99th percentiles, in words."""
    if not isinstance(bound, Mapping):
        return f"{bound:.2f}" if isinstance(bound, int | float) else ""
    estimate, low, high = (_number(bound.get(key)) for key in ("estimate", "low", "high"))
    if not math.isfinite(estimate):
        return ""
    end = f"{high:.2f}" if math.isfinite(high) else "any number"
    return f"{estimate:.2f}, from {low if math.isfinite(low) else 0:.2f} to {end}"


def _different(found: Mapping[str, Any]) -> Different:
    sides = [("live version", found.get("live")), ("candidate", found.get("candidate"))]
    if "input" in found:
        sides.append(("request", found["input"]))
    return Different(
        cut(str(found.get("requestId", "")), 200),
        str(found.get("at", "")),
        cut(str(found.get("difference") or "they differ"), 500),
        [_side(name, side) for name, side in sides],
    )


def _side(name: str, side: Any) -> tuple[str, str]:
    """Return an answer's heading and text."""
    if not isinstance(side, Mapping):
        return name, cut(str(side), MOST_SHOWN)
    status = f", status {side['status']}" if "status" in side else ""
    text = side.get("text")
    if text is None:
        text = f"{side.get('bytes', 0)} bytes" if "base64" in side else json.dumps(dict(side))
    return f"{name}{status}", cut(str(text), MOST_SHOWN)
