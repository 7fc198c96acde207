"""Pages of what is served: all models, one version as it works, and what may be changed of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

from modelyard.plugins.ops.console.readings import RECENT, TOTAL, Key, Percentile, Reading, Watch
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.visit import Page, Visit
from modelyard.serve.control.register import Lifecycle, pools_of
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.metrics import KINDS
from modelyard.serve.dataplane.pool import Pool, ReplicaSlot
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import Answer, Headers
from modelyard.serve.memory import resident_bytes
from modelyard.serve.settings import MOST_WORKERS

JSON: Headers = [(b"content-type", b"application/json")]
NEWEST = 5
"""Readings that each update brings: a page that was held up for so long misses none."""
KEPT_PARTS = 128
"""Updates that are made once for all who look."""


class Tab(NamedTuple):
    """One page of a model version."""

    path: str
    """Behind `/models/{model}/{version}`."""
    title: str


TABS = (Tab("", "Live"), Tab("/try", "Try it"), Tab("/archive", "Archive"),
        Tab("/rollout", "Roll-out"))  # fmt: skip
"""Of every version, in this order."""


@dataclass(frozen=True)
class State:
    """What a version can do now, in a word for people and one for the style sheet."""

    word: str
    kind: str
    """`good`, `warn` or `bad`."""


def state_of(model: ModelVersion) -> State:
    """Return whether a version answers, and with how many of its workers."""
    slots, ready = model.pool.slots, model.pool.ready_count
    if not slots:
        return State("no workers", "warn")
    if ready == len(slots):
        return State("ready", "good")
    if ready:
        return State(f"{ready} of {len(slots)} ready", "warn")
    return State("failing" if model.pool.why_none is not None else "starting", "bad")


class WorkerRow(NamedTuple):
    """One worker, as a table shows it."""

    name: str
    state: str
    kind: str
    pid: int | None
    restarts: int
    memory: int | None
    device: str


class KindRow(NamedTuple):
    """What a version has answered of one kind since it was registered."""

    name: str
    answered: int
    errors: int
    refused: int
    waiting: int
    in_flight: int
    mean_s: float | None


class ModelPages:
    """The pages, and what answers their forms."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        renderer: Renderer,
        watch: Watch,
        tabs: Sequence[Tab],
        may_unregister: bool,
    ) -> None:
        self._tabs = tabs
        self._may_unregister = may_unregister
        self._lifecycle = lifecycle
        self._registry = lifecycle.registry
        self._renderer = renderer
        self._watch = watch
        self._parts: dict[Key, tuple[int, Answer]] = {}

    def pages(self) -> Sequence[Page]:
        """Return them all."""
        version = "/models/{model}/{version}"
        unregister = Page("POST", f"{version}/unregister", "manage", self._unregister)
        return [
            *([unregister] if self._may_unregister else []),
            Page("GET", "", "view", self._overview),
            Page("GET", "/", "view", self._go_home),
            Page("GET", "/live", "view", self._live_overview),
            Page("GET", "/points", "view", self._points),
            Page("GET", "/models/{model}", "view", self._go_to_default),
            Page("GET", version, "view", self._version),
            Page("GET", f"{version}/live", "view", self._live_version),
            Page("GET", f"{version}/points", "view", self._points),
            Page("POST", f"{version}/scale", "manage", self._scale),
            Page("POST", f"{version}/default", "manage", self._set_default),
        ]

    def find(self, visit: Visit) -> ModelVersion:
        """Return the version that a path names.

        Raises:
            ModelNotFound, VersionNotFound.
        """
        return self._registry.get(visit.places["model"], visit.places["version"])

    # -- what is shown ---------------------------------------------------------------------------

    async def _go_home(self, visit: Visit) -> Answer:
        return visit.redirect("")

    async def _go_to_default(self, visit: Visit) -> Answer:
        model = self._registry.get(visit.places["model"])
        return visit.redirect(place_of(model))

    async def _overview(self, visit: Visit) -> Answer:
        self._watch.look()
        return self._renderer.page(visit, "overview.html", self._overview_values())

    async def _live_overview(self, visit: Visit) -> Answer:
        return self._part(TOTAL, "live_overview.html")

    async def _version(self, visit: Visit) -> Answer:
        model = self.find(visit)
        self._watch.look((model.name, model.version))
        values = {**self.common(model, ""), **self._version_values(model)}
        return self._renderer.page(visit, "version.html", values)

    async def _live_version(self, visit: Visit) -> Answer:
        model = self.find(visit)
        return self._part((model.name, model.version), "live_version.html")

    async def _points(self, visit: Visit) -> Answer:
        key = TOTAL
        if visit.places:
            model = self.find(visit)
            key = model.name, model.version
        return 200, list(JSON), json.dumps(list(map(point, self._watch.look(key)))).encode()

    def common(self, model: ModelVersion, tab: str) -> dict[str, object]:
        """Return what every page of a version needs.

        Args:
            tab: path of the page among `TABS`.
        """
        versions = self._registry.versions(model.name)
        return {
            "model": model,
            "place": place_of(model),
            "tabs": self._tabs,
            "tab": tab,
            "is_default": self._registry.is_default(model),
            "others": [other for other in versions if other is not model],
        }

    def _part(self, key: Key, template: str) -> Answer:
        """Return an update, made once per reading for all who look."""
        window = self._watch.look(key)
        number, answer = self._parts.get(key, (-1, None))
        if answer is None or number != self._watch.number:
            values = self._overview_values() if key == TOTAL else self._version_values(
                self._registry.get(*key)
            )  # fmt: skip
            newest = json.dumps(list(map(point, list(window)[-NEWEST:])))
            if len(self._parts) >= KEPT_PARTS:
                self._parts.clear()
            # `root` is that of the page into which the update goes.
            root = "console" if key == TOTAL else "../.."
            answer = self._renderer.part(template, {**values, "root": root, "newest": newest})
            self._parts[key] = self._watch.number, answer
        status, headers, body = answer
        return status, list(headers), body

    def _overview_values(self) -> dict[str, object]:
        models = list(self._registry)
        latest = self._watch.latest
        return {
            "rows": [
                {
                    "model": model,
                    "place": place_of(model),
                    "is_default": self._registry.is_default(model),
                    "state": state_of(model),
                    "reading": latest.get((model.name, model.version)),
                    "memory": self._memory(pools_of(model)),
                }
                for model in models
            ],
            "total": latest.get(TOTAL),
            "memory": self._memory(pool for model in models for pool in pools_of(model)),
            "server_memory": resident_bytes(),
            "failing": [model for model in models if state_of(model).kind == "bad"],
            "recent_s": RECENT,
        }

    def _version_values(self, model: ModelVersion) -> dict[str, object]:
        workers = [self._row(model, slot, "predict") for slot in model.pool.slots]
        if model.explainers is not None:
            workers += [self._row(model, slot, "explain") for slot in model.explainers.slots]
        return {
            "model": model,
            "place": place_of(model),
            "state": state_of(model),
            "why_none": model.pool.why_none,
            "reading": self._watch.latest.get((model.name, model.version)),
            "workers": workers,
            "kinds": list(self._kinds(model)),
            "kept": model.kept.describe() if model.kept is not None else None,
            "memory": self._memory(pools_of(model)),
            "recent_s": RECENT,
            "most_workers": MOST_WORKERS,
            "may_unregister": self._may_unregister,
        }

    def _kinds(self, model: ModelVersion) -> Iterable[KindRow]:
        for kind, name in enumerate(KINDS):
            metrics, batcher = model.metrics.kinds[kind], model.batchers[kind]
            pool = model.explainers if kind and model.explainers is not None else model.pool
            answered, errors, refused = metrics.counted()
            timed = sum(metrics.latency.counts)
            mean_s = metrics.latency.total / timed if timed else None
            yield KindRow(
                name, answered, errors, refused, batcher.queued, pool.in_flight(kind), mean_s
            )

    def _row(self, model: ModelVersion, slot: ReplicaSlot, kind: str) -> WorkerRow:
        pid = slot.worker.pid if slot.worker is not None else None
        state, word = ("ready", "good") if slot.is_ready else ("starting", "warn")
        if slot.is_closing:
            state, word = "ending", "warn"
        elif slot.has_given_up:
            state, word = "given up", "bad"
        memory = self._watch.memory.get(pid) if pid is not None else None
        device = model.config.device
        return WorkerRow(f"{kind} {slot.number}", state, word, pid, slot.restarts, memory, device)

    def _memory(self, pools: Iterable[Pool]) -> int | None:
        """Return what the workers hold; None before that was read."""
        pids = [slot.worker.pid for pool in pools for slot in pool.slots if slot.worker]
        found = [self._watch.memory[pid] for pid in pids if pid in self._watch.memory]
        return sum(found) if found else None

    # -- what is changed -------------------------------------------------------------------------

    async def _scale(self, visit: Visit) -> Answer:
        model = self.find(visit)
        text = visit.fields.get("workers", "")
        if not text.isascii() or not text.isdecimal() or int(text[:6]) > MOST_WORKERS:
            raise BadRequest(f"workers: expected 0 to {MOST_WORKERS}, got {text[:40]!a}")
        await self._lifecycle.scale(model, int(text))
        return self._done(visit, model, f"{model.name} {model.version} has {int(text)} workers")

    async def _set_default(self, visit: Visit) -> Answer:
        model = self.find(visit)
        self._lifecycle.set_default(model.name, model.version)
        return self._done(visit, model, f"{model.version} answers now where no version is named")

    async def _unregister(self, visit: Visit) -> Answer:
        model = self.find(visit)
        typed = visit.fields.get("confirm", "")
        if typed != model.name:
            raise BadRequest(
                f"type the model's name, {model.name}, to unregister it; got {typed[:40]!a}"
            )
        await self._lifecycle.unregister(model)
        assert visit.session is not None
        visit.session.tell("done", f"{model.name} {model.version} is unregistered")
        return visit.redirect("")

    def _done(self, visit: Visit, model: ModelVersion, text: str) -> Answer:
        assert visit.session is not None
        visit.session.tell("done", text)
        return visit.redirect(place_of(model))


def place_of(model: ModelVersion) -> str:
    """Return a version's path behind the console's; a dialect may take names of any characters."""
    return f"/models/{quote(model.name, safe='')}/{quote(model.version, safe='')}"


def point(reading: Reading) -> list[float | None]:
    """Return a reading as plots have it: times in seconds and milliseconds, shares in percent."""

    def ms(of: Percentile | None) -> float | None:
        return round(of.seconds * 1e3, 4) if of is not None else None

    return [
        round(reading.at, 2),
        round(reading.rate, 2),
        round(reading.errors, 2),
        round(reading.refused, 2),
        ms(reading.p50),
        ms(reading.p99),
        round(reading.batch, 2) if reading.batch is not None else None,
        reading.queue,
        round(reading.busy * 100, 1) if reading.busy is not None else None,
    ]
