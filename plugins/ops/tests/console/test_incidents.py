"""Who opens the console after an incident is led to its cause, by the pages' own links."""

from __future__ import annotations

import html
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from plugins.ops.tests.console.incidents import CONFIGS, INCIDENTS, QUICK, Incident, build
from plugins.ops.tests.console.test_console import Browser
from plugins.ops.tests.console.visits import visiting
from tests.browser import Browser as RealBrowser
from tests.serve.live import LiveServer, poll, running, start_server

MODELS = [*CONFIGS, "returned-1.0", "promoted-1.0"]
OPTIONS = ["--workers=1", *(f"--models={name}" for name in MODELS)]
ROW = re.compile(r'<li id="event-\d+">(.*?)</li>', re.DOTALL)
MOST_CLICKS = 3
SHOTS = os.environ.get("MODELYARD_CONSOLE_SHOTS", "")
"""Folder for pictures of each page that a cause was read on."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("incidents") / "store"
    build(store)
    return store


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start a server with everything that can go wrong on it."""
    with running(tmp_path_factory.mktemp("state"), store, *OPTIONS) as server:
        yield server
        while Browser.opened:
            Browser.opened.pop().close()


def find(page: str, incident: Incident) -> tuple[str, str] | None:
    """Return the words of an incident's event on a page, and where it leads."""
    for row in ROW.findall(page):
        words = html.unescape(re.sub(r"<[^>]+>", "", row))
        kind = re.search(r'<span class="state \w+">([^<]+)<', row)
        link = re.search(r'href="([^"]+)"', row)
        if kind and kind[1] == incident.event and incident.subject in words:
            return words, html.unescape(link[1]) if link else ""
    return None


@pytest.mark.parametrize("name", QUICK)
def test_the_pages_lead_to_the_cause_of_an_incident(server: LiveServer, name: str) -> None:
    incident = INCIDENTS[name]
    incident.stage(server)
    who = Browser(server, server.token)  # comes only now
    event = poll(lambda: find(who.get("/console").text, incident), "its event is shown")
    words, link = event
    page = who.client.get(str(httpx.URL(f"{server.about['management']}/console").join(link)))
    assert page.status_code == 200, link
    seen = words + html.unescape(page.text)
    assert [cause for cause in incident.cause if cause not in seen] == [], words
    marks = re.search(r'data-marks="([^"]+)"', who.get("/console").text)
    assert marks is not None and incident.event in html.unescape(marks[1])


@pytest.mark.nightly
def test_a_server_that_was_killed_says_so_once_it_is_back(store: Path, tmp_path: Path) -> None:
    options = ["--workers=1", "--models=killed"]
    server = start_server(tmp_path / "state", store, *options)
    server.close_clients()
    server.signal(signal.SIGKILL)
    server.wait()
    with running(tmp_path / "state", store, *options) as again:
        who = Browser(again, again.token)
        assert f"the one before, process {server.pid}, died" in who.get("/console").text
        who.client.close()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_ten_incidents_by_day_after_and_at_most_three_clicks(
    driver: str, server: LiveServer, store: Path, tmp_path: Path
) -> None:
    """The figure: how many of ten causes are found, by real clicks in a real browser."""
    found: dict[str, bool] = {}
    for name, incident in INCIDENTS.items():
        if name not in QUICK or not _is_staged(server, incident):
            incident.stage(server)
        with visiting(driver, server, tmp_path) as visitor:
            page = visitor.sign_in(server.token)
            found[name] = read_cause(page, incident, name)
    options = ["--workers=1", "--models=killed"]
    old = start_server(tmp_path / "state", store, *options)
    old.close_clients()
    old.signal(signal.SIGKILL)
    old.wait()
    again = Incident(lambda server: None, "server started", "died", ["the one before"])
    with (
        running(tmp_path / "state", store, *options) as new,
        visiting(driver, new, tmp_path) as visitor,
    ):
        found["server restarted"] = read_cause(visitor.sign_in(new.token), again, "restarted")
    assert len(found) == 10 and [name for name in found if not found[name]] == []


def _is_staged(server: LiveServer, incident: Incident) -> bool:
    who = Browser(server, server.token)
    return find(who.get("/console").text, incident) is not None


def read_cause(page: RealBrowser, incident: Incident, name: str) -> bool:
    """Find the event, follow its link as a person does; return whether the cause stands there."""
    first = page.address.rstrip("/")
    if SHOTS:
        page.wait(lambda: page.find_all("#events li"), "events are shown")
        page.screenshot(Path(SHOTS) / f"{name.replace(' ', '-')}-first.png")
    seen = str(page.wait(lambda: click(page, incident), f"the event of {name}"))
    page.wait(lambda: page.address.rstrip("/") != first, "it opens")
    page.wait(lambda: page.find_all("h1"), "it is there")
    seen, clicks = seen + page.text(), 1
    if SHOTS:
        for width in (360, 1440):
            page.resize(width)
            for scheme in ("light", "dark"):
                page.prefer(scheme)
                page.screenshot(Path(SHOTS) / f"{name.replace(' ', '-')}-{width}-{scheme}.png")
        page.resize(1440)
    assert clicks <= MOST_CLICKS
    return all(cause in seen for cause in incident.cause)


def click(page: RealBrowser, incident: Incident) -> str:
    """Click the link of an event, if it is there, and return what its row says."""
    for row in page.find_all("#events li"):
        words = row.text
        if incident.subject in words and row.find(".state").text == incident.event:
            row.find("a").click()
            return words
    return ""
