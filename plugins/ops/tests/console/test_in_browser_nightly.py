"""The console in a real browser: under load, for long, with many models, by keys alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from modelyard.archiver import write_archive
from modelyard.serve.http.tokens import make_grant
from plugins.ops.tests.console.visits import WIDTHS, Visitor, visiting
from tests.browser import Browser, choices
from tests.serve.live import LiveServer, build_archive, poll, running
from tests.shared import DIGITS

pytestmark = pytest.mark.nightly

VIEWER = "v" * 40
MANY = 50
SOAK_S = float(os.environ.get("MODELYARD_CONSOLE_SOAK_S", "120"))
"""How long a page stays open under load; an hour shows more than two minutes."""
HEAP_ROOM_BYTES = 2 << 20
"""By which the heap of a page may differ from one look to a later one."""
SCRIPT = "<img src=x onerror=window.hacked=1>"
SEVEN = DIGITS / "scans" / "7.png"


@pytest.fixture(scope="module")
def server(
    digits_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Start a server with two models, a candidate in its store, and a token that only shows."""
    folder = tmp_path_factory.mktemp("console")
    store = folder / "store"
    build_archive(store, "echo", config="maxBatchDelay: 0\n")
    for version, format in (("1.0", "onnx"), ("2.0", "pt2")):
        made = write_archive(
            "digits",
            version=version,
            artifact=digits_artifacts[format],
            handler="image_classifier",
            output_dir=store / ".build",
            extra_files=[DIGITS / "index_to_name.json"],
            config_file=DIGITS / "model-config.yaml",
            examples=[f"{SEVEN}=7"],
            force=True,
        )
        made.rename(store / f"digits-{version}.mar")
    tokens = folder / "tokens.txt"
    tokens.write_text(f"{make_grant('looker', 'view', VIEWER)}\n", encoding="utf-8")
    options = ["--workers=1", "--models=echo", "--models=digits-1.0", f"--token-file={tokens}"]
    with running(folder / "state", store, *options) as server:
        yield server


@pytest.fixture
def visitor(driver: str, server: LiveServer, tmp_path: Path) -> Iterator[Visitor]:
    with visiting(driver, server, tmp_path) as visitor:
        visitor.sign_in(server.token)
        yield visitor


def bearer(server: LiveServer) -> dict[str, str]:
    """Return the header that a client of this server needs."""
    return {"Authorization": f"Bearer {server.inference_token}"}


@contextmanager
def load(server: LiveServer, model: str = "digits", clients: int = 2) -> Iterator[None]:
    """Keep a model busy for a block; fail where an answer is not one."""
    is_over, failed = threading.Event(), []

    def ask() -> None:
        with httpx.Client(
            base_url=server.client.base_url, headers=bearer(server), timeout=60
        ) as client:
            while not is_over.is_set():
                answer = client.post(f"/predictions/{model}", content=SEVEN.read_bytes())
                if answer.status_code != 200:
                    failed.append(answer.text)
                time.sleep(0.005)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert failed == []


def figures(page: Browser) -> dict[str, str]:
    """Return the figures at the head of a page, by name."""
    return dict(page.run(
        """return [...document.querySelectorAll('.figure')].map(
            each => ['dt', 'dd'].map(part => each.querySelector(part).textContent));"""
    ))  # fmt: skip


def test_figures_and_plots_follow_the_load(visitor: Visitor, server: LiveServer) -> None:
    page = visitor.open("/models/digits/1.0")
    page.wait(lambda: figures(page)["Answers"].startswith("0"), "nothing is answered")
    plot = page.find("[data-plot=rate] .canvas")
    with load(server):
        page.wait(lambda: not figures(page)["Answers"].startswith("0"), "answers are counted")
        page.wait(lambda: "ms" in figures(page)["p99"], "their latency is")
        page.wait(lambda: "answers: 0 now" not in plot.label and "now" in plot.label, "so they are")
    page.wait(lambda: figures(page)["Answers"].startswith("0"), "the load is over")


def test_a_worker_that_is_killed_is_seen_to_come_back(visitor: Visitor, server: LiveServer) -> None:
    page = visitor.open("/models/echo/1.0")
    (pid,) = server.worker_pids("echo")
    page.shows(str(pid), "#live")
    os.kill(pid, signal.SIGKILL)
    page.wait(
        lambda: any(
            row.startswith("predict 1 ready") and str(pid) not in row and " 1 " in row
            for row in choices(page.find_all("#live tbody tr"))
        ),
        "another worker is ready",
    )


def test_fifty_models_are_one_page(visitor: Visitor, server: LiveServer) -> None:
    names = [f"many-{at:02}" for at in range(MANY)]
    archive = build_archive(server.store, "echo", name="many-00")
    for name in names:
        answer = server.register(archive.name, model_name=name, initial_workers=0)
        assert answer.status_code == 200, answer.text
    try:
        page = visitor.open()
        page.shows(names[-1])
        assert len(page.find_all("table:not(.u-legend) tbody tr")) == MANY + len(("echo", "digits"))
        for width in WIDTHS:
            page.resize(width)
            assert page.overflow() == ""
        page.resize(WIDTHS[1])
        page.find(f'a[href$="/models/{names[-1]}/1.0"]').click()
        page.shows("no workers")
        visitor.open()  # or its page asks for a version that has gone
    finally:
        for name in names:
            server.management.delete(f"/models/{name}")


def test_a_page_that_stays_open_under_load_does_not_grow(
    visitor: Visitor, server: LiveServer
) -> None:
    page = visitor.open("/models/digits/1.0")
    with load(server):
        time.sleep(min(60.0, SOAK_S / 2))  # its plots fill, and the script's caches
        heaps, nodes = [page.heap_bytes()], [page.nodes()]
        end = time.monotonic() + SOAK_S
        while time.monotonic() < end:
            time.sleep(10)
            visitor.browser.look()  # or the browser keeps what it has to tell
            heaps.append(page.heap_bytes())
            nodes.append(page.nodes())
    assert min(heaps[-3:]) < heaps[0] + HEAP_ROOM_BYTES, heaps
    assert min(nodes[-3:]) < nodes[0] * 1.2, nodes
    assert "/sign-in" not in page.address


def test_keys_alone_lead_from_the_sign_in_to_an_answer(
    driver: str, server: LiveServer, tmp_path: Path
) -> None:
    with visiting(driver, server, tmp_path) as visitor:
        page = visitor.sign_in(server.token)

        def go_to(what: str) -> None:
            for _ in range(60):
                page.press("Tab")
                if what in page.focused.label:
                    assert page.run(
                        "return getComputedStyle(document.activeElement).outlineStyle"
                    ) != "none", f"nobody sees that {what} has the focus"  # fmt: skip
                    return
            raise AssertionError(f"no way to {what} by keys")

        go_to("Skip to the content")
        go_to("digits")
        page.press("Enter")
        page.wait(lambda: "/models/digits/1.0" in page.address, "the model's page opens")
        go_to("Try it")
        page.press("Enter")
        page.wait(lambda: page.address.endswith("/try"), "the form opens")
        go_to("File")
        page.press("Down", "Down")
        assert page.focused.label.startswith("Golden request 1")
        go_to("Predict")
        page.press("Enter")
        page.shows("in the handler", "#answers")
        assert page.text("#answers tbody tr th") == "7"


PAGES = ["", "/log", "/models/digits/1.0", "/models/digits/1.0/try", "/models/digits/1.0/archive",
         "/models/digits/1.0/rollout"]  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_a_page_can_be_read_at_every_width_in_both_schemes_and_aloud(
    visitor: Visitor, server: LiveServer, path: str
) -> None:
    with load(server, clients=1):
        page = visitor.open(path)
        for width in WIDTHS:
            page.resize(width)
            assert page.overflow() == ""
        page.resize(WIDTHS[1])
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            time.sleep(0.5)  # colours of links change by and by
            assert page.faint_texts() == []
    assert len(page.find_all("h1")) == len(page.find_all("main")) == 1
    controls = page.find_all("input:not([type=hidden]), select, textarea, button, a, summary")
    assert [control.id for control in controls if control.is_shown and not control.label] == []
    nameless = "main table:not(:has(caption)):not([role=img] *)"
    assert choices(page.find_all(nameless)) == []


def test_a_script_in_an_input_or_an_answer_is_text(
    visitor: Visitor, server: LiveServer, tmp_path: Path
) -> None:
    page = visitor.open("/models/echo/1.0/try")
    file = tmp_path / f"{SCRIPT}.txt"
    file.write_text(f"{SCRIPT} <script>window.hacked=1</script>")
    page.find("input[name=file]").type(str(file))
    for ask in ("predict", "explain"):
        page.find(f"button[value={ask}]").click()
        page.shows(SCRIPT, "#answers")
    assert page.run("return window.hacked") is None


def test_who_may_only_look_finds_nothing_that_acts(
    driver: str, server: LiveServer, tmp_path: Path
) -> None:
    with visiting(driver, server, tmp_path) as visitor:
        page = visitor.sign_in(VIEWER)
        page.shows("read only")
        for path in ("", "/rollout"):
            visitor.open(f"/models/digits/1.0{path}")
            assert [each for each in choices(page.find_all("main form button")) if each] == []
        visitor.open("/models/digits/1.0/try")
        assert not any(each.value_of("disabled") is False for each in page.find_all(".try button"))
        visitor.forgiven = ["403"]
        status = page.run(
            """const form = new FormData(document.querySelector('form.try'));
            const to = location.pathname + '/predict';
            return fetch(to, {method: 'POST', body: form}).then(answer => answer.status);"""
        )
        assert status == 403


def test_tables_are_searched_and_sorted_while_they_are_renewed(visitor: Visitor) -> None:
    page = visitor.open()
    rows = "#served tbody tr"
    page.wait(lambda: len(page.find_all(rows)) >= 2, "both are shown")

    def names() -> list[str]:
        return [row.text.split()[0] for row in page.find_all(rows) if row.is_shown]

    page.find("#served th:nth-child(1) button").click()
    page.wait(lambda: names() == sorted(names()), "sorted by name")
    page.find("#served th:nth-child(1) button").click()
    page.wait(lambda: names() == sorted(names(), reverse=True), "and the other way round")
    time.sleep(2.5)  # two updates
    assert names() == sorted(names(), reverse=True) and len(names()) >= 2
    page.find("#find").type("dig")
    page.wait(lambda: set(names()) == {"digits"}, "only what was looked for")
    time.sleep(2.5)
    assert set(names()) == {"digits"}


def test_an_hour_is_a_click_away(visitor: Visitor) -> None:
    page = visitor.open("/models/echo/1.0")
    plot = page.find("[data-plot=rate] .canvas")
    page.wait(lambda: "the last five minutes" in plot.label, "five minutes are shown")
    page.find("[data-span=hour]").click()
    page.wait(lambda: "the last hour" in plot.label and "now" in plot.label, "an hour is")


def test_a_roll_out_that_a_colleague_begins_is_seen(visitor: Visitor, server: LiveServer) -> None:
    page = visitor.open("/models/digits/1.0/rollout")
    page.shows("is under way", "#live")
    assert page.find("form[action$=start]").is_shown
    place, query = "/models/digits/rollout", {"url": "digits-2.0.mar"}
    assert server.management.post(place, params=query).status_code == 200
    page.shows("Candidate 2.0", "#live", 10)
    assert not page.find("form[action$=start]").is_shown
    assert server.management.post(f"{place}/abort").status_code == 200


def test_a_whole_roll_out_by_the_pages_buttons(visitor: Visitor, server: LiveServer) -> None:
    with load(server):
        page = visitor.open("/models/digits/1.0/rollout")
        page.find("#file").choose("digits-2.0.mar")
        page.find("#shadow").type("100%")
        page.find("#canary").type("50")
        page.find("#rule").type("p50<=1000, p99<=1000")
        page.find("form[action$=start] button").click()
        page.shows("has begun", timeout_s=60)
        page.shows("pass", "#live h2", timeout_s=120)
        assert "within tolerance" in page.text("#live")
        press(page, "promote")
        page.shows("is canary 50 %", timeout_s=60)
        page.shows("pass", "#live h2", timeout_s=120)
        press(page, "promote")
        page.shows("is default", timeout_s=60)
        assert answering(server) == "2.0"
        visitor.open("/models/digits/2.0/rollout")
        press(page, "back")
        page.shows("1.0 answers everything again", timeout_s=60)
        assert answering(server) == "1.0"


def answering(server: LiveServer) -> str:
    """Return which version answers a client that names none."""
    answer = server.predict("digits", SEVEN.read_bytes(), headers=bearer(server))
    return answer.headers["x-model-version"]


def press(page: Browser, what: str) -> None:
    """Press a button of a roll-out, and confirm it, while the page goes on renewing itself."""
    page.find(f"details[id^={what}] summary").click()
    time.sleep(2.5)
    page.find(f"details[id^={what}] form button").click()


def test_a_server_that_does_not_answer_is_said_to_be_lost(driver: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    build_archive(store, "echo")
    with running(tmp_path / "state", store, "--models=echo", "--workers=1") as server:
        with visiting(driver, server, tmp_path) as visitor:
            visitor.forgiven = ["Failed to load resource", "ERR_", "fetch", "htmx"]
            page = visitor.sign_in(server.token)
            page.shows("echo")
            server.signal(signal.SIGSTOP)
            try:
                page.shows("No answer from the server", timeout_s=40)
                color = "return getComputedStyle(document.querySelector('#served .state')).color"
                assert page.run(color) == page.run(color.replace("#served .state", "thead th"))
            finally:
                server.signal(signal.SIGCONT)
            page.wait(lambda: not page.find("[data-lost]").is_shown, "it answers again")
        poll(lambda: server.describe("echo"), "the server goes on")
