"""Pages of what is served: all models, one version as it works, and what may be changed of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modelyard.plugins.ops.console.events import LOG, Events, marks, place_of
from modelyard.plugins.ops.console.readings import RECENT, TOTAL, Key, Watch
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import UNLOADED, ModelVersion
from modelyard.serve.dataplane.heap import resident_bytes
from modelyard.serve.dataplane.metrics import KINDS
from modelyard.serve.dataplane.pool import ReplicaSlot
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import Answer
from modelyard.serve.settings import MOST_WORKERS

NEWEST = 3
"""Points that an update brings along."""
KEPT_PARTS = 100
"""Updates that are kept until the next reading, for all who look."""
SHOWN_EVENTS = 20
TABS = (("", "Live"), ("/try", "Try it"), ("/archive", "Archive"), (LOG, "Log"),
        ("/rollout", "Roll-out"))  # fmt: skip
"""Pages of every version, in this order: path behind `/models/{model}/{version}`, and title."""
State = tuple[str, str]
"""A word for people, and one for the style sheet: `good`, `warn` or `bad`."""


def state_of(model: ModelVersion) -> State:
    """Return whether a version answers, and with how many of its workers."""
    slots, ready = model.pool.slots, model.pool.ready_count
    if not ready and model.pool.load is not None and model.pool.least:
        state, reason = model.state
        if state == "LOADING":
            return "loading", "warn"
        return ("unloaded", "good") if reason == UNLOADED else ("failing", "bad")
    if not slots:
        return "no workers", "warn"
    if ready == len(slots):
        return "ready", "good"
    if ready:
        return f"{ready} of {len(slots)} ready", "warn"
    return "failing" if model.pool.why_none is not None else "starting", "bad"


def state_of_worker(slot: ReplicaSlot) -> State:
    """Return what a worker is doing."""
    if slot.is_closing:
        return "ending", "warn"
    if slot.has_given_up:
        return "given up", "bad"
    return ("ready", "good") if slot.is_ready else ("starting", "warn")


@dataclass(frozen=True)
class ModelPages:
    """The pages, and what answers their forms."""

    lifecycle: Lifecycle
    watch: Watch
    events: Events
    may_register: bool
    """Whether operators may register and remove versions."""
    _parts: dict[Key, tuple[int, Answer]] = field(default_factory=dict)

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        version = "/models/{model}/{version}"
        unregister = Page("POST", f"{version}/unregister", "manage", self._unregister)
        return [
            *([unregister] if self.may_register else []),
            Page("GET", "", "view", self._overview),
            Page("GET", "/", "view", self._redirect),
            Page("GET", "/live", "view", self._live),
            Page("GET", "/points", "view", self._points),
            Page("GET", "/models/{model}", "view", self._redirect),
            Page("GET", version, "view", self._version),
            Page("GET", f"{version}/live", "view", self._live),
            Page("GET", f"{version}/points", "view", self._points),
            Page("POST", f"{version}/scale", "manage", self._scale),
            Page("POST", f"{version}/default", "manage", self._set_default),
        ]

    def _place(self, model: ModelVersion) -> str:
        return place_of(model.name, model.version)

    def get(self, name: str, version: str | None = None) -> ModelVersion:
        """Return a version, the default one unless named.

        Raises:
            ModelNotFound, VersionNotFound.
        """
        return self.lifecycle.registry.get(name, version)

    def find(self, visit: Visit) -> ModelVersion:
        """Return the version that a path names, as `get` does."""
        return self.get(visit.places["model"], visit.places["version"])

    # -- what is shown ---------------------------------------------------------------------------

    async def _redirect(self, visit: Visit) -> Answer:
        name = visit.places.get("model")
        return visit.redirect(self._place(self.get(name)) if name is not None else "")

    async def _overview(self, visit: Visit) -> Answer:
        self.watch.look()
        return visit.page("overview.html", self._overview_values())

    async def _version(self, visit: Visit) -> Answer:
        model = self.find(visit)
        self.watch.look((model.name, model.version))
        values = {**self.common(model, ""), **self._version_values(model)}
        return visit.page("version.html", values)

    def _key(self, visit: Visit) -> Key:
        if not visit.places:
            return TOTAL
        model = self.find(visit)
        return model.name, model.version

    async def _points(self, visit: Visit) -> Answer:
        points = self.watch.look(self._key(visit)).points(visit.query.get("span") == "hour")
        return 200, [(b"content-type", b"application/json")], json.dumps(points).encode()

    async def _live(self, visit: Visit) -> Answer:
        """Return an update, made once per reading for all who look."""
        key = self._key(visit)
        history = self.watch.look(key)
        number, answer = self._parts.get(key, (-1, None))
        if answer is None or number != self.watch.number:
            newest = json.dumps(history.points(most=NEWEST))
            # `root` is that of the page into which the update goes.
            if key == TOTAL:
                values = {**self._overview_values(), "root": "console"}
            else:
                values = {**self._version_values(self.get(*key)), "root": "../.."}
            if len(self._parts) >= KEPT_PARTS:
                self._parts.clear()
            template = "live_overview.html" if key == TOTAL else "live_version.html"
            answer = visit.part(template, {**values, "newest": newest})
            self._parts[key] = self.watch.number, answer
        status, headers, body = answer
        return status, list(headers), body

    def common(self, model: ModelVersion, tab: str) -> dict[str, Any]:
        """Return what every page of a version needs.

        Args:
            tab: path of the page among `TABS`.
        """
        versions = self.lifecycle.registry.versions(model.name)
        return {
            "model": model,
            "place": self._place(model),
            "tabs": TABS if self.may_register else TABS[:-1],
            "tab": tab,
            "is_default": self.lifecycle.registry.is_default(model),
            "others": [other for other in versions if other is not model],
        }

    def _overview_values(self) -> dict[str, Any]:
        models, latest = list(self.lifecycle.registry), self.watch.latest
        return {
            "rows": [
                {
                    "model": model,
                    "place": self._place(model),
                    "is_default": self.lifecycle.registry.is_default(model),
                    "state": state_of(model),
                    "reading": latest.get((model.name, model.version)),
                    "memory": self.watch.memory_of(model.pools),
                }
                for model in models
            ],
            "total": latest.get(TOTAL),
            "memory": self.watch.memory_of(pool for model in models for pool in model.pools),
            "server_memory": resident_bytes(),
            "failing": [model for model in models if state_of(model)[1] == "bad"],
            "recent_s": RECENT,
            **self._event_values(TOTAL),
        }

    def _version_values(self, model: ModelVersion) -> dict[str, Any]:
        memory = self.watch.memory
        return {
            "model": model,
            "place": self._place(model),
            "state": state_of(model),
            "why_none": model.pool.why_none,
            "reading": self.watch.latest.get((model.name, model.version)),
            "workers": [
                (f"{kind} {slot.number}", state_of_worker(slot), slot, memory, kind)
                for kind, pool in zip(KINDS, model.pools, strict=False)
                for slot in pool.slots
            ],
            "kinds": [self._counts(model, kind) for kind in range(len(KINDS))],
            "kept": model.answers.describe() if model.answers is not None else None,
            "memory": self.watch.memory_of(model.pools),
            "recent_s": RECENT,
            "most_workers": MOST_WORKERS,
            "may_unregister": self.may_register,
            **self._event_values((model.name, model.version)),
        }

    def _counts(self, model: ModelVersion, kind: int) -> dict[str, Any]:
        """Return what a version has answered of one kind since it was registered."""
        metrics = model.metrics.kinds[kind]
        pool = model.pools[-kind]  # the only one, where there are no explainers
        timed = sum(metrics.latency.counts)
        return {
            "name": KINDS[kind],
            **metrics.counted()._asdict(),
            "waiting": model.batchers[kind].queued,
            "in_flight": pool.in_flight(kind),
            "mean_s": metrics.latency.total / timed if timed else None,
        }

    def _event_values(self, key: Key) -> dict[str, Any]:
        events = self.events.of(key)
        return {"events": events[:SHOWN_EVENTS], "marks": json.dumps(marks(events)), "key": key}

    # -- what is changed -------------------------------------------------------------------------

    async def _scale(self, visit: Visit) -> Answer:
        model = self.find(visit)
        text = visit.fields.get("workers", "")
        if not text.isascii() or not text.isdecimal() or int(text[:6]) > MOST_WORKERS:
            raise BadRequest(f"workers: expected 0 to {MOST_WORKERS}, got {text[:40]!a}")
        await self.lifecycle.scale(model, int(text))
        return visit.done(
            f"{model.name} {model.version} has {int(text)} workers", self._place(model)
        )

    async def _set_default(self, visit: Visit) -> Answer:
        model = self.find(visit)
        self.lifecycle.set_default(model.name, model.version)
        said = f"{model.version} answers now where no version is named"
        return visit.done(said, self._place(model))

    async def _unregister(self, visit: Visit) -> Answer:
        model = self.find(visit)
        typed = visit.fields.get("confirm", "")
        if typed != model.name:
            raise BadRequest(
                f"type the model's name, {model.name}, to unregister it; got {typed[:40]!a}"
            )
        await self.lifecycle.unregister(model)
        return visit.done(f"{model.name} {model.version} is unregistered", "")
