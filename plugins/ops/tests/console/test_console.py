"""The console of a real server: who may see it, what it shows, what it changes, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest

from modelyard.plugins.ops.console.readings import COLUMNS
from modelyard.plugins.ops.console.render import POLICY
from modelyard.plugins.ops.console.visit import FORM_BYTES
from modelyard.serve.http.tokens import make_grant
from tests.serve.live import LiveServer, build_archive, poll, running

VIEWER, CLIENT, LEAVER = "v" * 40, "c" * 40, "l" * 40
SCRIPT = "<script>alert(1)</script>"
PAGES = ["/console", "/console/models/echo/1.0", "/console/log"]
ACTIONS = ["scale", "default", "unregister"]
ELSEWHERE = "https://friend.example"


class Browser:
    """Keeps cookies and follows no redirect, as a browser's address bar shows them."""

    opened: ClassVar[list[httpx.Client]] = []

    def __init__(self, server: LiveServer, token: str = "") -> None:
        # Without TLS there are no certificates to load, which takes longer than most tests here.
        self.client = httpx.Client(base_url=server.about["management"], timeout=60, verify=False)
        self.opened.append(self.client)
        if token:
            answer = self.post("/sign-in", token=token)
            assert answer.status_code == 303, answer.text

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=_named(headers))

    def post(self, path: str, headers: dict[str, str] | None = None, /, **fields: str) -> Any:
        """Send a form to a path of the console."""
        return self.client.post(f"/console{path}", data=fields, headers=_named(headers or {}))

    def csrf(self) -> str:
        """Return what the forms of this session's pages carry."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.get("/console").text)
        assert found is not None
        return found[1]


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("console")
    store = folder / "store"
    build_archive(store, "echo", version="2.0").rename(store / "second.mar")
    build_archive(store, "echo")
    build_archive(store, "picky").rename(store / f"{SCRIPT.replace('/', '_')}.mar")
    tokens = folder / "tokens.txt"
    rights = {VIEWER: "view", CLIENT: "predict", LEAVER: "manage"}
    lines = [str(make_grant(token[:3], right, token)) for token, right in rights.items()]
    tokens.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    config = folder / "modelyard.yaml"
    config.write_text(
        f"allowed_origins: ['{ELSEWHERE}']\nmodel_settings: {{echo: {{cacheAnswers: true}}}}\n",
        encoding="utf-8",
    )
    options = ["--workers=1", "--models=echo", f"--token-file={tokens}", f"--config={config}"]
    with running(folder / "state", store, *options) as server:
        yield server
        while Browser.opened:
            Browser.opened.pop().close()


@pytest.fixture(scope="module")
def operator(server: LiveServer) -> Browser:
    return Browser(server, server.token)


@pytest.fixture(scope="module")
def viewer(server: LiveServer) -> Browser:
    return Browser(server, VIEWER)


@pytest.fixture
def nobody(server: LiveServer) -> Browser:
    return Browser(server)


# -- signing in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, "/console/live", "/console/log/lines", "/console/points"])
def test_who_is_not_signed_in_is_led_there(nobody: Browser, path: str) -> None:
    answer = nobody.get(path)
    assert answer.status_code == 303
    assert str(answer.url.join(answer.headers["location"])).endswith("/console/sign-in")
    part = nobody.get(path, hx_request="true")
    assert (part.status_code, part.headers["hx-refresh"], part.text) == (401, "true", "")


def test_a_sign_in_sets_a_cookie_that_scripts_and_other_sites_do_not_get(
    server: LiveServer, nobody: Browser
) -> None:
    answer = nobody.post("/sign-in", token=server.token)
    cookie = answer.headers["set-cookie"]
    assert re.fullmatch(
        r"modelyard-console-\d+=[\w-]{43}; HttpOnly; SameSite=Strict; Max-Age=43200", cookie
    )
    assert answer.url.join(answer.headers["location"]).path == "/console"
    assert nobody.get("/console").status_code == 200
    assert server.token not in cookie
    secure = nobody.post("/sign-in", {"x_forwarded_proto": "https"}, token=server.token)
    assert secure.headers["set-cookie"].endswith("; Secure")


def test_signing_out_ends_the_session_and_not_only_the_cookie(server: LiveServer) -> None:
    browser = Browser(server, server.token)
    kept = dict(browser.client.cookies)
    assert browser.post("/sign-out", csrf=browser.csrf()).status_code == 303
    assert not browser.client.cookies
    browser.client.cookies.update(kept)
    assert browser.get("/console").status_code == 303


@pytest.mark.parametrize(
    ("token", "status", "text"),
    [("x" * 40, 401, "does not know"), (CLIENT, 403, "may predict"), ("é", 401, "does not know")],
)
def test_a_token_that_may_not_look_is_refused(
    server: LiveServer, nobody: Browser, token: str, status: int, text: str
) -> None:
    answer = nobody.post("/sign-in", token=token)
    assert answer.status_code == status and text in answer.text
    assert "set-cookie" not in answer.headers and token not in answer.text
    assert nobody.get("/console").status_code == 303


def test_a_session_ends_with_its_token(server: LiveServer) -> None:
    browser = Browser(server, LEAVER)
    assert browser.get("/console").status_code == 200
    tokens = server.state_dir.parent / "tokens.txt"
    before = tokens.read_text(encoding="utf-8")
    tokens.write_text("\n".join(before.splitlines()[:2]), encoding="utf-8")
    poll(lambda: browser.get("/console").status_code == 303, "the session ends")
    tokens.write_text(before, encoding="utf-8")


# -- what is shown ---------------------------------------------------------------------------------


def test_the_pages_show_what_is_served_and_done(server: LiveServer, viewer: Browser) -> None:
    token = {"Authorization": f"Bearer {server.inference_token}"}
    viewer.get("/console/models/echo/1.0")
    for _ in range(3):
        assert server.predict("echo", b"x", headers=token).status_code == 200
    found = poll(
        lambda: re.search(r"<th scope=\"row\">predict</th><td[^>]*>(\d+)<",
                          viewer.get("/console/models/echo/1.0/live").text),
        "the page counts",
    )  # fmt: skip
    assert int(found[1]) >= 3
    kept = viewer.get("/console/models/echo/1.0").text.partition("Answers that are kept")[2]
    assert '<th scope="row">2</th><td data-name="Not found" class="n">1</td>' in kept
    points = poll(lambda: viewer.get("/console/models/echo/1.0/points").json(), "a reading")
    assert all(len(point) == COLUMNS for point in points)
    overview = viewer.get("/console").text
    assert 'href="console/models/echo/1.0"' in overview and "1 of 1" in poll(
        lambda: "1 of 1" in (text := viewer.get("/console/live").text) and text, "workers"
    )
    assert server.describe("echo")["digest"] in viewer.get("/console/models/echo/1.0").text
    assert "echo 1.0 registered" in viewer.get("/console/log").text
    assert "registered" not in viewer.get("/console/log/lines?level=ERROR").text
    assert viewer.get("/console/models/echo").headers["location"].endswith("/models/echo/1.0")


@pytest.mark.parametrize("path", [*PAGES, "/console/sign-in", "/console/live", "/console/nowhere"])
def test_no_page_lets_anything_run_or_frame_it(viewer: Browser, path: str) -> None:
    answer = viewer.get(path)
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert "no-store" in answer.headers["cache-control"]
    # What the policy would forbid is not there either, nor anything from elsewhere.
    forbidden = r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style|javascript:"
    assert not re.search(forbidden, answer.text)
    assert not re.search(r"(src|href|action)=.(https?:)?//", answer.text)


def test_the_files_of_pages_are_there_with_their_licences(nobody: Browser) -> None:
    page = nobody.get("/console/sign-in").text
    files = re.findall(r'(?:src|href)="\./(static/[^"]+)"', page)
    assert len(set(files)) == 7
    for file in files:
        answer = nobody.get(f"/console/{file}")
        assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]
    for library in ("htmx-4.0.1", "uplot-1.6.32"):
        assert "WARRANT" in nobody.get(f"/console/static/{library}.LICENSE").text
    for name in ("../app.py", "..%2Fapp.py", "%2e%2e/app.py", "", "sign_in.html"):
        assert nobody.get(f"/console/static/{name}").status_code in (303, 404)


# -- what is changed -------------------------------------------------------------------------------


def test_an_operator_scales_and_sets_the_default_and_unregisters(
    server: LiveServer, operator: Browser
) -> None:
    server.register_all("second.mar", initial_workers=1)
    place, csrf = "/models/echo/2.0", operator.csrf()
    assert operator.post(f"{place}/scale", csrf=csrf, workers="2").status_code == 303
    page = operator.get(f"/console{place}").text
    assert "echo 2.0 has 2 workers" in page and 'value="2"' in page
    assert "has 2 workers" not in operator.get(f"/console{place}").text  # it is said once
    assert operator.post(f"{place}/default", csrf=csrf).status_code == 303
    assert server.describe("echo")["modelVersion"] == "2.0"
    assert operator.post("/models/echo/1.0/default", csrf=csrf).status_code == 303
    wrong = operator.post(f"{place}/unregister", csrf=csrf, confirm="ech")
    assert wrong.status_code == 400 and "type the model&#39;s name, echo" in wrong.text
    assert operator.post(f"{place}/unregister", csrf=csrf, confirm="echo").status_code == 303
    gone = operator.get(f"/console{place}")
    assert gone.status_code == 404 and "2.0 does not exist" in gone.text


@pytest.mark.parametrize("workers", ["-1", "1025", "", "x", "1.5", "٣", "9" * 400])
def test_a_number_that_is_not_one_is_refused(operator: Browser, workers: str) -> None:
    answer = operator.post("/models/echo/1.0/scale", csrf=operator.csrf(), workers=workers)
    assert answer.status_code == 400 and "expected 0 to 1024" in answer.text


@pytest.mark.parametrize("action", ACTIONS)
def test_who_may_only_look_finds_no_button_and_no_way(viewer: Browser, action: str) -> None:
    page = viewer.get("/console/models/echo/1.0").text
    assert f"/{action}" not in page and "read only" in page
    answer = viewer.post(f"/models/echo/1.0/{action}", csrf=viewer.csrf(), confirm="echo")
    assert answer.status_code == 403 and "needs one that may manage" in answer.text


@pytest.mark.parametrize("action", ["sign-out", *(f"models/echo/1.0/{each}" for each in ACTIONS)])
def test_every_form_needs_the_word_of_its_session(
    operator: Browser, viewer: Browser, action: str
) -> None:
    words: list[dict[str, str]] = [{}, {"csrf": ""}, {"csrf": "x" * 43}, {"csrf": viewer.csrf()}]
    for word in words:
        answer = operator.post(f"/{action}", confirm="echo", workers="1", **word)
        assert answer.status_code == 403 and "not of a page of this session" in answer.text
    assert operator.get("/console").status_code == 200


@pytest.mark.parametrize("path", ["/sign-in", "/sign-out", "/models/echo/1.0/scale"])
@pytest.mark.parametrize(
    "headers",
    [
        {"sec_fetch_site": "cross-site", "origin": "https://evil.example"},
        {"sec_fetch_site": "same-site", "origin": "http://localhost:3000"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site", "origin": ELSEWHERE},  # may call the APIs, by a token
        {"origin": ELSEWHERE},
    ],
    ids=lambda headers: "-".join(headers.values()),
)
def test_no_page_of_elsewhere_acts(
    server: LiveServer, operator: Browser, path: str, headers: dict[str, str]
) -> None:
    fields = {"csrf": operator.csrf(), "token": server.token, "workers": "1"}
    answer = operator.post(path, headers, **fields)
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert operator.get("/console").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8081", "0.0.0.0:8081"])
def test_a_name_that_is_not_the_servers_is_refused(operator: Browser, host: str) -> None:
    for path in ("/console", "/console/static/console.js"):
        assert operator.get(path, host=host).status_code == 403


def test_bodies_are_bounded_before_they_are_read(nobody: Browser, operator: Browser) -> None:
    """The head alone is answered: nobody waits for so much, or for what has no length."""
    for browser, path in ((nobody, "/sign-in"), (operator, "/models/echo/1.0/scale")):
        large = browser.post(path, token="x" * FORM_BYTES)
        assert large.status_code == 413 and str(FORM_BYTES) in large.text
    chunked = nobody.client.post("/console/sign-in", content=iter([b"token=x"]))
    assert chunked.status_code == 400 and "Content-Length" in chunked.text
    many = "&".join(f"a{i}=1" for i in range(101))
    form = "application/x-www-form-urlencoded", "application/json", "multipart/form-data"
    for body, kind in zip((many, "{}", "x", "x"), (*form, f"{form[2]}; boundary=b"), strict=True):
        headers = {"content-type": kind}
        answer = nobody.client.post("/console/sign-in", content=body, headers=headers)
        assert answer.status_code == 400, kind


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/console/nowhere", 404),
        ("GET", "/console/models/none/1.0", 404),
        ("GET", "/console/models/echo/9", 404),
        ("DELETE", "/console", 405),
        ("POST", "/console/log", 405),
        ("GET", "/console/models/echo/1.0/scale", 405),
        ("GET", "/console/log?level=LOUD", 400),
        ("GET", f"/console/log?contains={'x' * 201}", 400),
        ("GET", "/consolex", 401),
        ("GET", "/models", 401),
        ("HEAD", "/console", 200),
    ],
)
def test_other_requests_are_refused(operator: Browser, method: str, path: str, status: int) -> None:
    """A session opens the console alone: the API itself takes tokens, and no cookie."""
    assert operator.client.request(method, path).status_code == status


def test_a_stored_script_is_text(server: LiveServer, operator: Browser) -> None:
    """In a file's name, in the log, and in what a form says of itself."""
    server.management.get("/models", headers={"Host": SCRIPT})
    file = f"{SCRIPT.replace('/', '_')}.mar"
    assert server.register(file).status_code == 200
    server.register(f"nowhere{SCRIPT}.mar")
    shown = [
        operator.get("/console/models/picky/1.0").text,
        operator.get(f"/console/log?contains={SCRIPT}").text,
        operator.get(f"/console/models/{SCRIPT}").text,
        operator.post("/models/echo/1.0/unregister", csrf=operator.csrf(), confirm=SCRIPT).text,
    ]
    for text in shown:
        assert "&lt;script&gt;alert(1)" in text
        assert "<script>alert" not in text


def test_tokens_stand_in_no_address_and_in_no_log(server: LiveServer, operator: Browser) -> None:
    cookie = next(iter(operator.client.cookies.values()))
    server.logs("signed in")
    for secret in (server.token, VIEWER, CLIENT, "x" * 40, cookie, operator.csrf()):
        assert secret not in server.log
    assert operator.csrf() not in str(operator.get("/console").url)
    for page in PAGES:
        text = operator.get(page).text
        assert server.token not in text and cookie not in text
        assert f"?{operator.csrf()}" not in text and 'method="get"' not in text.replace(
            'class="panel filter" method="get"', ""
        )


def test_the_form_of_a_roll_out_offers_what_can_follow_and_the_page_sees_one_begun_elsewhere(
    server: LiveServer, operator: Browser
) -> None:
    place = "/console/models/echo/1.0/rollout"
    page = operator.get(place).text
    assert re.findall(r'<option value="([^"]+)">([^<]+)<', page) == [
        ("second.mar", "2.0: second.mar")
    ]
    assert 'name="header"' in page and "is under way" in operator.get(f"{place}/live").text
    fields = {"file": "second.mar", "header": "not a header"}
    assert operator.post("/models/echo/1.0/rollout/start", csrf=operator.csrf(), **fields)
    assert "expected the name of a header" in operator.get(place).text
    begun = server.management.post("/models/echo/rollout", params={"url": "second.mar"})
    assert begun.status_code == 200, begun.text
    try:
        live = operator.get(f"{place}/live").text
        assert "data-active" in live and "shadow" in live
        events = operator.get("/console").text.partition('id="events"')[2]
        assert "roll-out begun" in events
    finally:
        assert server.management.post("/models/echo/rollout/abort").status_code == 200
    link = re.search(r'aborted.*?href="([^"]+)"', operator.get("/console").text, re.DOTALL)
    assert link is not None
    assert operator.client.get(f"/{link[1]}").status_code == 200


def test_a_workers_log_is_one_link_from_its_row(server: LiveServer, viewer: Browser) -> None:
    page = viewer.get("/console/models/echo/1.0").text
    assert '/models/echo/1.0/log?worker=predict-1"' in page
    shown = viewer.get("/console/models/echo/1.0/log?worker=predict-1")
    assert shown.status_code == 200 and "Log of worker predict-1" in shown.text
    for wrong in ("../x-1", "predict-..", "predict-", "predict-1234567", "train-1", "<script>-1"):
        found = viewer.client.get("/console/models/echo/1.0/log", params={"worker": wrong})
        assert found.status_code == 400 and "<script>" not in found.text


def test_who_is_signed_out_reads_why(server: LiveServer) -> None:
    browser = Browser(server)
    browser.client.cookies.set(f"modelyard-console-{browser.client.base_url.port}", "x" * 43)
    assert "started anew" in browser.get("/console/sign-in").text
    assert "started anew" not in Browser(server).get("/console/sign-in").text
