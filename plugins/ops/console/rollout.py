"""The page of a model's roll-out: what was compared, what is judged of it, and the buttons."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard.archiver import ArchiveError
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.read import peek
from modelyard.plugins.ops.console.answers import cut
from modelyard.plugins.ops.console.models import ModelPages
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.plugins.ops.rollout.control import NoRollout, Rollouts, check_follows
from modelyard.plugins.ops.rollout.record import ACTIVE, format_share, parse_plan
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.control.store import list_archives
from modelyard.serve.errors import Conflict, NoSuchRoute, ServeError
from modelyard.serve.http.connection import Answer

ROLLOUT = "/rollout"
ROOT = "../../.."
"""The way from the page to the console's first; its updates come from one level below."""
PLAN = ("shadow", "for", "canary", "rule", "expect", "header")
"""Texts of the form, as the management API has them."""
MOST_ARCHIVES = 500
"""Archives of the store that are looked at."""
SHARES = {
    "disagreement": "Answers that differ",
    "noise": "Noise: the live version from itself",
    "excess": "More than noise",
    "failures": "More failures than the live version",
    "labels": "Labels that agree",
}
STARTS = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lGO": "image/gif", "UklGR": "image/webp"}
"""How a picture begins in base64 → its media type."""
OCTETS = "application/octet-stream"
DONE = {
    "promote": "{model} {candidate[version]} is {label}",
    "back": "{model} {live[version]} answers everything again",
    "abort": "the roll-out of {model} {candidate[version]} is aborted",
}
"""What is said once a button's verb is done."""


@dataclass(frozen=True)
class RolloutPages:
    """The pages."""

    models: ModelPages
    """Pages of the same versions."""
    rollouts: Rollouts
    """What they show and change."""
    store: Path
    """The model store."""
    _manifests: dict[tuple[str, int, int], Manifest] = field(default_factory=dict)

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        place = f"/models/{{model}}/{{version}}{ROLLOUT}"
        return [
            Page("GET", place, "view", self._page),
            Page("GET", f"{place}/live", "view", self._live),
            Page("POST", f"{place}/{{verb}}", "manage", self._act),
        ]

    def _values(self, visit: Visit) -> dict[str, Any]:
        """Return what the page shows of the roll-out; of none, where there is none."""
        values = self.models.common(self.models.find(visit), ROLLOUT)
        try:
            return {**values, **describe(self.rollouts.status(visit.places["model"]))}
        except NoRollout:
            return {**values, "status": None}

    async def _page(self, visit: Visit) -> Answer:
        values = self._values(visit)
        values["followers"] = await asyncio.to_thread(self._followers, values["model"])
        return visit.page("rollout.html", values)

    def _followers(self, model: ModelVersion) -> Sequence[tuple[str, str]]:
        """Return file and version of the store's archives that can follow a version.

        Of as many as are new or have changed only the manifest is read, once.
        """
        store, found = self.store, []
        for name in list_archives(store)[:MOST_ARCHIVES]:
            try:
                stamp = (store / name).stat()
                key = name, stamp.st_mtime_ns, stamp.st_size
                if key not in self._manifests:
                    if len(self._manifests) >= 2 * MOST_ARCHIVES:
                        self._manifests.clear()
                    with peek(store / name) as (self._manifests[key], _, _):
                        pass
                manifest = self._manifests[key]
                check_follows(manifest, name, model)
                found.append((name, manifest.model_version))
            except (OSError, ArchiveError, Conflict):
                continue
        return found

    async def _live(self, visit: Visit) -> Answer:
        values = {"root": ROOT, "session": visit.session, **self._values(visit)}
        return visit.part("live_rollout.html", values)

    async def _act(self, visit: Visit) -> Answer:
        """Do what a button says, and return to the page, which says what came of it."""
        verb, fields, session = visit.places["verb"], visit.fields, visit.session
        if verb not in (*DONE, "start"):
            raise NoSuchRoute
        model = self.models.find(visit)
        name, rollouts = model.name, self.rollouts
        assert session is not None
        try:
            if verb == "start":
                said = {key: text for key in PLAN if (text := fields.get(key, "").strip())}
                for_s = {"for_": said.pop("for")} if "for" in said else {}
                plan = parse_plan(
                    fields.get("file", ""), **said, **for_s, keep_inputs="keep_inputs" in fields
                )
                await rollouts.start(name, plan)
                session.tell("done", f"the roll-out of {plan.file} has begun")
            else:
                seen = rollouts.status(name)["label"]
                if verb != "back" and fields.get("seen") != seen:
                    raise Conflict(
                        f"the roll-out is {seen} meanwhile; look at it again before you act"
                    )
                if verb == "promote":
                    found = await rollouts.promote(name, None, "force" in fields)
                else:
                    found = await (rollouts.back if verb == "back" else rollouts.abort)(name)
                session.tell("done", DONE[verb].format(**found))
        except ServeError as error:
            session.tell("failed", str(error))
        return visit.redirect(f"/models/{model.name}/{model.version}{ROLLOUT}")


def describe(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown of a roll-out that the management API describes."""
    bounds = status["bounds"]
    shown = {name: bounds[name] for name in SHARES if bounds[name]["estimate"] is not None}
    names = ["candidate", "shadow", *(f"canary {format_share(each)}" for each in status["steps"])]
    return {
        "status": status,
        "address_of": address_of,
        "steps": [*names, "default"],
        "is_active": status["state"] in ACTIVE,
        "intervals": list(_intervals(shown)),
        "cut": cut,
        "when": lambda text: f"{text[:19].replace('T', ' ')} UTC",
    }


def address_of(kept: Mapping[str, Any]) -> str:
    """Return the address that holds bytes which are kept whole, of a picture as one; else none."""
    text = kept.get("base64", "")
    if not text or len(text) // 4 * 3 - text.count("=") < kept["bytes"]:
        return ""
    media = next((STARTS[start] for start in STARTS if text.startswith(start)), OCTETS)
    return f"data:{media};base64,{text}"


def _intervals(bounds: Mapping[str, Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield shares on one scale, which ends at the largest of them; those near all on their own."""
    most = max([0.001, *(bound["high"] for name, bound in bounds.items() if name != "labels")])
    for name, bound in bounds.items():
        first = 0.0 if name != "labels" else 1 - most
        low, at, high = (
            max(0.0, min(100.0, 100 * (bound[key] - first) / most))
            for key in ("low", "estimate", "high")
        )
        yield {
            "name": SHARES[name],
            "estimate": percent(bound["estimate"]),
            "bounds": f"{percent(bound['low'])} to {percent(bound['high'])}",
            "left": round(low, 2),
            "at": round(at, 2),
            "width": round(max(high - low, 0.6), 2),
        }


def percent(value: float) -> str:
    """Return a share, as people read it."""
    return f"{value * 100:.3g} %".replace("-", "−")
