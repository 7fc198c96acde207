"""What is found in readings, and what of it goes out."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.server
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from modelyard.plugins.ops.console import events as sending
from modelyard.plugins.ops.console.events import (
    LEAST_BURST,
    MOST_EVENTS,
    MOST_TEXT,
    MOST_WAITING,
    SIGNATURE,
    STORM,
    Alerts,
    Events,
    marks,
)
from modelyard.plugins.ops.console.readings import RECENT, TOTAL, Watch
from modelyard.serve.dataplane.metrics import Metrics, VersionMetrics
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings, load_settings
from tests.serve.live import poll

KEY = "m", "1"


class Served:
    """A registry of one version with one worker, and its console's watch; time is moved by hand."""

    def __init__(self) -> None:
        worker = SimpleNamespace(pid=7, is_ready=True)
        self.slot = SimpleNamespace(number=1, restarts=0, ended="", worker=worker)
        self.pool = SimpleNamespace(slots=[self.slot], ready_count=1, busy_s=0.0, why_none=None)
        metrics = VersionMetrics(Metrics(), *KEY)
        queue = SimpleNamespace(waiting=0)
        self.model = SimpleNamespace(
            name="m", version="1", metrics=metrics, pool=self.pool, pools=[self.pool],
            batchers=[queue, queue],
            explainers=None, file="m.mar", digest="d" * 64,
        )  # fmt: skip
        self.predict = metrics.kinds[0]
        self.now = 0.0
        self.watch = Watch(cast("Any", [self.model]))
        self.events = Events(lambda: self.now)
        self.watch.on_reading = self.events.look

    def go_on(self, seconds: int, code: int = 200, rate: int = 5, took_s: float = 0.004) -> None:
        for _ in range(seconds):
            for _ in range(rate):
                self.predict.answered(code, took_s)
                if code == 503:
                    self.predict.refused_full.inc(1)
            deque(self.watch._read(self.now, self.now), 0)
            deque(self.watch.on_reading(self.watch), 0)
            self.now += 1

    def kinds(self) -> list[str]:
        return [each.kind for each in reversed(self.events.of(KEY))]


@pytest.fixture
def served() -> Served:
    served = Served()
    served.go_on(2 * RECENT)
    assert served.kinds() == []
    return served


@pytest.mark.parametrize(
    ("code", "kind"), [(503, "refusals"), (504, "time-outs"), (500, "errors"), (507, "errors")]
)
def test_a_burst_is_one_event_with_an_end(served: Served, code: int, kind: str) -> None:
    served.go_on(4, code)
    assert served.kinds() == [kind]
    served.go_on(3 * RECENT)
    (event,) = served.events.of(KEY)
    assert event.until is not None and RECENT <= event.until - event.at <= RECENT + 5
    assert event.level == "bad" and marks([event]) == [[event.at, event.until, "bad", kind]]
    served.go_on(4, code)
    assert served.kinds() == [kind, kind]


def test_a_few_failures_and_clients_mistakes_are_no_burst(served: Served) -> None:
    served.go_on(1, 500, LEAST_BURST - 1)
    served.go_on(5, 404)
    assert served.kinds() == []


def test_a_restart_says_how_the_worker_ended_and_leads_to_its_log(served: Served) -> None:
    served.slot.restarts, served.slot.ended = 1, "killed from outside"
    served.go_on(1)
    (event,) = served.events.of(TOTAL)
    assert (event.kind, event.key) == ("restart", KEY)
    assert "worker predict 1: killed from outside" in event.text
    assert event.place == "/models/m/1/log?worker=predict-1"


def test_three_restarts_in_a_minute_are_a_storm(served: Served) -> None:
    for _ in range(STORM):
        served.slot.restarts += 1
        served.go_on(10)
    assert served.kinds() == ["restart"] * STORM + ["restart storm"]
    for _ in range(STORM):
        served.slot.restarts += 1
        served.go_on(40)
    assert served.kinds().count("restart storm") == 1


def test_answers_that_take_three_times_as_long_are_an_event(served: Served) -> None:
    served.go_on(4 * RECENT)
    served.go_on(2 * RECENT, took_s=0.2)
    assert served.kinds() == ["slower"]


def test_a_worker_that_has_grown_is_an_event(served: Served) -> None:
    for size in (300_000_000, 390_000_000, 700_000_000):
        served.watch.memory = {7: size}
        served.go_on(1)
    (event,) = served.events.of(KEY)
    assert event.text == "worker predict 1 has 700 MB, it had 300" and "log" in event.place


def test_a_version_without_workers_that_start_says_why(served: Served) -> None:
    served.pool.why_none = "no worker could be started: no module named x"
    served.go_on(2)
    (event,) = served.events.of(KEY)
    assert event.kind == "no worker" and "no module named x" in event.text


def test_versions_that_come_before_the_start_is_over_are_one_event() -> None:
    served = Served()
    served.events.changed(cast("Any", served.model), True)
    served.events.open("; the one before died")
    served.events.changed(cast("Any", served.model), True)
    served.events.changed(cast("Any", served.model), False)
    served.events.told({"kind": "promoted", "model": "m", "version": "1", "text": "t",
                        "page": "/rollout"})  # fmt: skip
    served.events.told({"kind": "not registered", "model": "x.mar", "version": "", "text": "t"})
    found = served.events.of(TOTAL)[::-1]
    assert [each.kind for each in found] == [
        "server started", "registered", "unregistered", "promoted", "not registered",
    ]  # fmt: skip
    assert "one before died" in found[0].text
    assert [each.place for each in found[3:]] == ["/models/m/1/rollout", "/log"]


def test_events_and_their_texts_are_bounded() -> None:
    events = Events()
    for number in range(MOST_EVENTS + 5):
        events.add("restart", ("m", str(number)), "x" * 2 * MOST_TEXT)
    assert len(events.of(TOTAL)) == MOST_EVENTS and len(events.of(TOTAL, 3)) == 3
    assert [each.number for each in events.of(TOTAL, 2)] == [MOST_EVENTS + 5, MOST_EVENTS + 4]
    assert len(events.of(TOTAL)[0].text) == MOST_TEXT + 1


# -- alerts ----------------------------------------------------------------------------------------


class Receiver(http.server.BaseHTTPRequestHandler):
    """Answers with the statuses that a test lists, and keeps what it got."""

    statuses: ClassVar[list[int]] = []
    got: ClassVar[list[tuple[str, bytes, str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, body, self.headers.get(SIGNATURE, "")))
        self.send_response(self.statuses.pop(0) if self.statuses else 204)
        self.send_header("location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start what takes alerts, and return its address; tries come at once."""
    monkeypatch.setattr(sending, "PAUSES_S", (0.0, 0.01, 0.02))
    Receiver.statuses, Receiver.got = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook?a=b"
    server.shutdown()
    thread.join()
    server.server_close()


def send(settings: Settings, *kinds: str) -> None:
    """Have events of these kinds sent, to their end."""

    async def run() -> None:
        events, alerts = Events(), Alerts(settings)
        events.on_event.append(alerts)
        for kind in kinds:
            began = time.perf_counter()
            events.add(kind, KEY, "why")
            assert time.perf_counter() - began < 1  # whatever the other end does
        if alerts._task is not None:
            await alerts._task

    asyncio.run(run())


def test_alerts_of_the_wanted_kinds_are_sent_and_signed(receiver: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"secret\n")
    settings = load_settings({"alert_url": receiver, "alert_key_file": tmp_path / "key"})
    send(settings, "restart storm", "restart", "returned")
    kinds = [json.loads(body)["kind"] for _, body, _ in Receiver.got]
    assert kinds == ["restart-storm", "returned"]
    path, body, signature = Receiver.got[0]
    assert path == "/hook?a=b" and json.loads(body)["text"] == "why"
    assert signature == f"sha256={hmac.new(b'secret', body, hashlib.sha256).hexdigest()}"


@pytest.mark.parametrize(
    ("statuses", "tries"), [([500, 503, 204], 3), ([302, 302, 302], 3), ([500] * 3, 3), ([200], 1)]
)
def test_tries_are_bounded_and_no_redirect_is_followed(
    receiver: str, statuses: list[int], tries: int
) -> None:
    Receiver.statuses = list(statuses)
    send(load_settings({"alert_url": receiver}), "failed")
    assert [path for path, _, _ in Receiver.got] == ["/hook?a=b"] * tries


def test_who_does_not_answer_costs_a_bounded_time_and_few_alerts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sending, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(sending, "TIMEOUT_S", 0.05)
    silent = http.server.HTTPServer(("127.0.0.1", 0), Receiver)  # accepts, and reads nothing
    settings = load_settings({"alert_url": f"http://127.0.0.1:{silent.server_port}/"})

    async def run() -> None:
        alerts = Alerts(settings)
        event = Events().add("failed", KEY, "why")
        for _ in range(2 * MOST_WAITING):
            alerts(event)
        assert alerts._waiting.qsize() == MOST_WAITING
        await asyncio.to_thread(poll, lambda: "an alert is lost" in caplog.text, "it is given up")
        alerts.close()

    asyncio.run(run())
    silent.server_close()
    assert f"{MOST_WAITING} wait already" in caplog.text


@pytest.mark.parametrize("url", ["ftp://x/", "file:///etc/passwd", "https://u:p@x/", "http://x y"])
def test_an_address_that_is_not_one_is_refused(url: str) -> None:
    with pytest.raises(StartError, match="alert-url"):
        load_settings({"alert_url": url})


def test_unknown_kinds_and_missing_keys_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for setting, value in (("alert_events", "rain"), ("alert_key_file", tmp_path / "none"),
                           ("alert_key_file", tmp_path / "empty")):  # fmt: skip
        with pytest.raises(StartError, match=setting):
            Alerts(load_settings({setting: value}))
