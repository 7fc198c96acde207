"""What has happened on a server: a bounded list, which pages show and plots are marked with.

Nothing on the way of a request tells of it: what is counted is looked at once a second, when it has
been read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote, urlsplit

from modelyard.plugins.ops.console.readings import RECENT, TOTAL, Key, Watch
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane.metrics import KINDS
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings

MOST_EVENTS = 300
"""Events that are remembered; the oldest go."""
MOST_TEXT = 500
"""Characters of one; the rest is cut."""
LEAST_BURST = 10
"""Refusals, or failures, in `RECENT` readings that are a burst; one in `BURST_SHARE` at least."""
BURST_SHARE = 0.05
STORM = 3
"""Restarts of one version within `STORM_S` that are a storm."""
STORM_S = 60.0
SLOWER = 3.0
"""A median latency is slower that is so many times the hour's."""
LEAST_POINTS = 3
"""Points of the hour without which there is nothing to be slower than."""
GROWN, GROWN_BYTES = 1.5, 100_000_000
"""Growth of a worker since it was first looked at that is worth an event: times, and bytes."""
LOG = "/log"
"""Page of a version's workers' logs."""
BURSTS = {
    "refused": ("refusals", "were refused (503): more came than its workers could take", ""),
    "late": ("time-outs", "had no answer in time (504)", ""),
    "failed": ("errors", "failed in the handler or its worker (500 and above)", LOG),
}
"""What is counted → kind of its burst, what it is, and the version's page that says more."""
GOOD = ("registered", "promoted", "scaled")
BAD = ("restart storm", "refusals", "time-outs", "errors", "returned", "failed", "no worker",
       "not registered")  # fmt: skip


@dataclass
class Event:
    """One thing that has happened."""

    number: int
    """Number from 1 up, in order."""
    at: float
    """Seconds since 1970."""
    kind: str
    key: Key
    """Version that it is about; `TOTAL` for the server."""
    text: str
    place: str = ""
    """Path behind the console's of the page that says more."""
    until: float | None = None
    """End of a burst; None while it goes on, and of what has no end."""

    @property
    def level(self) -> str:
        """`good`, `warn` or `bad`, for the style sheet."""
        return "bad" if self.kind in BAD else "good" if self.kind in GOOD else "warn"


class Events:
    """The events of one server, and what finds them."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._numbers = itertools.count(1)
        self._kept: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.on_event: list[Callable[[Event], None]] = []
        """Called with each new one."""
        self.is_open = False
        """Whether versions that come are worth an event: at the start they all do."""
        self._restarts: dict[tuple[Key, str], int] = {}
        self._storms: dict[tuple[Key, str], deque[float]] = {}
        self._going_on: dict[tuple[Key, str], Event] = {}
        self._settled: dict[int, int] = {}

    def add(self, kind: str, key: Key, text: str, place: str = "") -> Event:
        """Remember an event of now."""
        text = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
        event = Event(next(self._numbers), self._now(), kind, key, text, place)
        self._kept.append(event)
        for call in self.on_event:
            call(event)
        return event

    def of(self, key: Key, most: int = MOST_EVENTS) -> Sequence[Event]:
        """Return those of a version, of its model's roll-outs, and of the server; newest first."""
        shown = [each for each in self._kept if key == TOTAL or each.key in (key, TOTAL)]
        return shown[: -most - 1 : -1]

    def open(self, before: str) -> None:
        """Take that the server has started, and what is known of the one before it."""
        self.is_open = True
        self.add("server started", TOTAL, f"process {os.getpid()}{before}", "/log")

    def changed(self, model: ModelVersion, is_there: bool) -> None:
        """Take a version that comes or goes."""
        if self.is_open:
            text = f"archive {model.file}, {model.digest[:12]}" if is_there else "it is gone"
            place = place_of(model.name, model.version) if is_there else ""
            kind = "registered" if is_there else "unregistered"
            self.add(kind, (model.name, model.version), text, place)

    def told(self, event: Mapping[str, Any]) -> None:
        """Take what others tell of."""
        name, version = event["model"], event["version"]
        there = event["live"]["version"] if event["kind"] == "aborted" else version
        place = f"{place_of(name, there)}{event.get('page', '')}" if version else "/log"
        self.add(event["kind"], (name, version), event["text"], place)

    # -- what is found in readings ---------------------------------------------------------------

    def look(self, watch: Watch) -> Iterator[None]:
        """Compare a new reading with what was before, in a step for each version."""
        for model in watch.models:
            key = model.name, model.version
            self._look_at_workers(key, model, watch.memory)
            counted, before = watch.recent(key), watch.medians(key)
            for name, (kind, what, page) in BURSTS.items():
                count, answered = int(counted[name]), int(counted["answered"])
                is_burst = count >= max(LEAST_BURST, BURST_SHARE * answered)
                self._follow(key, kind, is_burst, f"{count} of {answered} requests {what}", page)
            p50 = watch.latest[key].p50
            usual = sorted(before)[len(before) // 2] if len(before) >= LEAST_POINTS else 0.0
            slower = p50 is not None and usual > 0 and p50.seconds * 1e3 > SLOWER * usual
            said = f"half of the answers take {p50.seconds * 1e3 if p50 else 0:.3g} ms and more, "
            self._follow(key, "slower", slower, f"{said}{usual:.3g} ms is usual", "")
            why = model.pool.why_none if model.pool.slots else None
            self._follow(key, "no worker", why is not None, why or "", "")
            yield
        known = {(each.name, each.version) for each in watch.models}
        tables: tuple[dict[tuple[Key, str], Any], ...] = (
            self._restarts, self._going_on, self._storms
        )  # fmt: skip
        for table in tables:
            for at in [each for each in table if each[0] not in known]:
                del table[at]

    def _look_at_workers(self, key: Key, model: ModelVersion, memory: Mapping[int, int]) -> None:
        for kind, pool in zip(KINDS, model.pools, strict=False):
            for slot in pool.slots:
                name = f"{kind} {slot.number}"
                page = f"{LOG}?worker={kind}-{slot.number}"
                before = self._restarts.get((key, name), 0)
                self._restarts[key, name] = slot.restarts
                if slot.restarts > before:
                    self.add("restart", key, f"worker {name}: {slot.ended}", place_of(*key) + page)
                    self._count_restart(key)
                pid = slot.worker.pid if slot.worker is not None else -1
                if (size := memory.get(pid)) is None:
                    continue
                first = self._settled.setdefault(pid, size)
                is_large = size > max(GROWN * first, first + GROWN_BYTES)
                text = f"worker {name} has {size / 1e6:.0f} MB, it had {first / 1e6:.0f}"
                self._follow(key, f"memory of {name}", is_large, text, page)
        if len(self._settled) > MOST_EVENTS:
            self._settled = {pid: size for pid, size in self._settled.items() if pid in memory}

    def _count_restart(self, key: Key) -> None:
        times = self._storms.setdefault((key, ""), deque(maxlen=STORM))
        times.append(self._now())
        if len(times) == STORM and times[-1] - times[0] <= STORM_S:
            self.add("restart storm", key, f"{STORM} restarts in {times[-1] - times[0]:.0f} s",
                     place_of(*key))  # fmt: skip
            times.clear()

    def _follow(self, key: Key, kind: str, is_so: bool, text: str, page: str) -> None:
        """Begin an event where something begins, and end it where it ends."""
        at = key, kind
        if is_so and at not in self._going_on:
            self._going_on[at] = self.add(kind, key, text, place_of(*key) + page)
        elif is_so and self._now() - self._going_on[at].at <= RECENT:  # until it is seen whole
            self._going_on[at].text = text
        elif not is_so and at in self._going_on:
            self._going_on.pop(at).until = self._now()


def place_of(name: str, version: str) -> str:
    """Return a version's path behind the console's; a dialect may take names of any characters."""
    return f"/models/{quote(name, safe='')}/{quote(version, safe='')}"


def marks(events: Sequence[Event]) -> list[list[object]]:
    """Return events as plots have them: time, end, level, kind."""
    return [[round(each.at, 2), each.until, each.level, each.kind] for each in events]


# -- events that go out ----------------------------------------------------------------------------


logger = logging.getLogger(__name__)

MOST_WAITING = 100
"""Alerts that wait to be sent; further ones are left out, and the log says so."""
TIMEOUT_S = 5.0
"""Time of one try, from the look-up of the name to the first line of the answer."""
PAUSES_S = (0.0, 2.0, 10.0)
"""Pause before each try."""
MOST_KEY_BYTES = 4096
SIGNATURE = "x-modelyard-signature"
ALERTED = ("restart-storm", "restart", "refusals", "time-outs", "errors", "no-worker", "returned",
         "failed", "promoted", "not-registered", "reasons-changed", "server-started")  # fmt: skip
"""Kinds of events that may go out, as `alert_events` has them."""


class Alerts:
    """Sends events of the kinds that are wanted: a POST of JSON that nobody waits for.

    Raises:
        StartError: the settings name an unknown kind, or a key that cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        self._url = settings.alert_url or ""
        self._kinds = frozenset(settings.alert_events)
        if unknown := sorted(self._kinds.difference(ALERTED)):
            known = ", ".join(ALERTED)
            raise StartError(
                f"alert_events: {unknown[0]!r} is not a kind; expected some of {known}"
            )
        self._key = b""
        if (file := settings.alert_key_file) is not None:
            try:
                with file.open("rb") as opened:
                    self._key = opened.read(MOST_KEY_BYTES).strip()
            except OSError as error:
                raise StartError(f"alert_key_file: cannot read {file}: {error.strerror}") from error
            if not self._key:
                raise StartError(f"alert_key_file: {file} is empty; expected a key of any bytes")
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    def __call__(self, event: Event) -> None:
        """Take an event; it is sent from a task."""
        kind = event.kind.replace(" ", "-")
        if not self._url or kind not in self._kinds:
            return
        content = {
            "kind": kind,
            "model": event.key[0],
            "version": event.key[1],
            "text": event.text,
            "at": datetime.fromtimestamp(event.at, UTC).isoformat(timespec="milliseconds"),
            "host": socket.gethostname(),
        }
        try:
            self._waiting.put_nowait(json.dumps(content).encode())
        except asyncio.QueueFull:
            logger.error("an alert is left out: %d wait already", MOST_WAITING)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        import httpx  # which few servers need

        # It reads the system's certificates.
        make_client = partial(httpx.AsyncClient, trust_env=False, timeout=None)
        async with await asyncio.to_thread(make_client) as client:
            while not self._waiting.empty():
                body, why = self._waiting.get_nowait(), ""
                headers = {"content-type": "application/json"}
                if self._key:
                    signed = hmac.new(self._key, body, hashlib.sha256).hexdigest()
                    headers[SIGNATURE] = f"sha256={signed}"
                for pause_s in PAUSES_S:
                    await asyncio.sleep(pause_s)
                    sent = client.stream("POST", self._url, content=body, headers=headers)
                    try:
                        # Of the answer its status alone; where it leads elsewhere, nobody follows.
                        async with asyncio.timeout(TIMEOUT_S), sent as answer:
                            if answer.is_success:
                                break
                            why = f"status {answer.status_code}"
                    except (OSError, TimeoutError, httpx.HTTPError) as error:
                        why = str(error) or type(error).__name__
                else:
                    host = urlsplit(self._url).hostname
                    tries = len(PAUSES_S)
                    logger.error("an alert is lost, %s was asked %d times: %s", host, tries, why)

    def close(self) -> None:
        """Send nothing more."""
        if self._task is not None:
            self._task.cancel()
