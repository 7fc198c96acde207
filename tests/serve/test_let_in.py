"""Who is let in: each route, with each token, by each way; in every mode of the setting `auth`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from modelyard.serve.api.inference import right_of
from modelyard.serve.api.oip import OPEN_PATHS
from modelyard.serve.api.routes import DOCS_PATHS
from modelyard.serve.app import create_server
from modelyard.serve.control.state import StateDir, read_key
from modelyard.serve.http.tokens import PROXIES
from modelyard.serve.policy import Policy
from modelyard.serve.settings import load_settings

WRONG = (
    "Bearer abcd1234", "bearer abcd1234", "Bearer", "", "abcd1234", "Basic YWJjZDoxMjM0",
    "Token abcd1234",
)  # fmt: skip
"""Values of `Authorization` that are not a token of any server."""
PROXIED = (*sorted(name.decode() for name in PROXIES), "x-forwarded-for", "X-Forwarded-Whatever")
"""Headers of proxies."""
SPELLED = (
    "/predictions/nobody/", "//predictions/nobody", "/PREDICTIONS/nobody", "/%70redictions/nobody",
    "/predictions%2Fnobody", "/predictions/x/../nobody", "/nowhere",
)  # fmt: skip
"""Paths that reach a route by another name, or none."""
OPEN = {*OPEN_PATHS, *DOCS_PATHS}
IN, UNKNOWN, UNFIT = "let in", "401", "403"
APIS = ("inference", "management", "metrics")


class Asking:
    """A server in this process, and how its token checks end."""

    def __init__(self, urls: dict[str, str], keys: dict[str, str]) -> None:
        self.urls, self.keys = urls, keys
        self.open: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        """API → a connection that is kept: a client's library would take most of the time."""

    async def request(
        self, api: str, method: str, path: str, headers: dict[str, str]
    ) -> tuple[int, str, str]:
        """Send a request without a body; return status, head and body of its answer."""
        address = self.urls[api].removeprefix("http://")
        host, _, port = address.partition(":")
        if api not in self.open:
            self.open[api] = await asyncio.open_connection(host, int(port))
        reader, writer = self.open[api]
        lines = [f"{method} {path} HTTP/1.1", f"Host: {address}", "Content-Length: 0"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"^content-length: (\d+)", head, re.M)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if "connection: close" in head:
            self.close(api)
        return int(head.split()[1]), head, body.decode()

    def close(self, api: str) -> None:
        """Close the connection to an API."""
        self.open.pop(api)[1].close()

    async def __call__(
        self, api: str, path: str, token: str | None = None, proxy: str = "", method: str = "POST"
    ) -> str:
        """Return whether a request is let in, or how it is refused."""
        headers = {} if token is None else {"Authorization": token}
        headers |= {proxy: "203.0.113.9"} if proxy else {}
        status, head, body = await self.request(api, method, path, headers)
        if status == 401:
            assert "\r\nwww-authenticate: bearer\r\n" in head
            return UNKNOWN
        return UNFIT if "; this needs one that may" in body else IN

    async def routes(self, api: str) -> list[tuple[str, str]]:
        """Return method and path of everything that an API describes, for a model without name."""
        key = self.keys["management" if api == "management" else "inference"]
        headers = {"Authorization": f"Bearer {key}"}
        found = json.loads((await self.request(api, "GET", "/openapi.json", headers))[2])
        return [
            (method.upper(), re.sub(r"\{\w+\}", "nobody", path))
            for path, methods in found["paths"].items()
            for method in methods
        ]


def with_server(folder: Path, then: Callable[[Asking], Awaitable[None]], **said: object) -> None:
    """Serve without models in this process, with these settings."""

    async def run() -> None:
        ports = {"port": 0, "management_port": 0, "metrics_port": 0}
        settings = load_settings({**ports, "state_dir": folder, **said}, None, {})
        state = StateDir(settings.state_dir)
        state.create()
        server = create_server(Policy(settings))
        for listener in server.listeners:
            await listener.start()
        urls = {api: each.url for api, each in zip(APIS, server.listeners, strict=True)}
        keys = {api: read_key(state.key_file, api) for api in ("inference", "management")}
        asking = Asking(urls, keys)
        try:
            await then(asking)
        finally:
            for api in tuple(asking.open):
                asking.close(api)
            for listener in server.listeners:
                await listener.stop_accepting()
                listener.close_idle(0)

    asyncio.run(run())


OF_TEXTS = (
    *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/embed", "/rerank", "/tokenize", "/info"),
)


def expected(api: str, path: str, whose: str | None, is_open: bool) -> str:
    """Return how a check ends: without a token, with one of an API, or with an unknown one."""
    if path in OPEN or (whose is None and is_open):
        return IN
    if whose is None or whose == "unknown":
        return UNKNOWN
    right = {"inference": right_of(path), "management": "manage", "metrics": "metrics"}[api]
    # Who may not ask for answers has nothing to put there; texts are answered elsewhere too.
    if "sharedmemory" in path or path in OF_TEXTS:
        right = "predict"
    own = "management" if right == "manage" else "inference"
    return IN if right is None or whose == own else UNFIT


def tokens_of(keys: dict[str, str]) -> list[tuple[str | None, str | None]]:
    """Return whose they are, and how a request shows them."""
    cut = keys["inference"][:-1]
    shown = [(None, None), *((whose, f"Bearer {key}") for whose, key in keys.items())]
    return [*shown, *(("unknown", value) for value in (f"Bearer {cut}", *WRONG))]


def test_every_route_takes_its_tokens_alone_and_a_proxy_is_not_this_machine(tmp_path: Path) -> None:
    """Predictions of this machine need no token where nothing is said."""

    async def check(ask: Asking) -> None:
        count = 0
        for api in APIS:
            for method, path in await ask.routes(api):
                for whose, token in tokens_of(ask.keys):
                    for proxy in ("", "X-Forwarded-For"):
                        is_open = api != "management" and not proxy
                        outcome = await ask(api, path, token, proxy, method)
                        wanted = expected(api, path, whose, is_open)
                        assert outcome == wanted, (api, method, path, token, proxy)
                        count += 1
        assert count > 900, "routes are missing"
        for path in SPELLED:
            assert await ask("inference", path) == IN, path
            assert await ask("inference", path, WRONG[0]) == UNKNOWN, path
            assert await ask("inference", path, None, "Via") == UNKNOWN, path
        right = f"Bearer {ask.keys['inference']}"
        for proxy in PROXIED:
            for api, path in (("inference", "/predictions/nobody"), ("metrics", "/metrics")):
                assert await ask(api, path, None, proxy) == UNKNOWN, (api, proxy)
                assert await ask(api, path, right, proxy) == IN, (api, proxy)

    with_server(tmp_path, check)


@pytest.mark.parametrize(
    ("said", "is_open", "opens_to_proxies", "manages"),
    [
        ({"auth": "always"}, False, False, False),
        ({"auth": "management"}, True, True, False),
        ({"auth": "never"}, True, False, True),
        ({"auth": "never", "insecure": True}, True, True, True),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_each_mode_lets_in_whom_it_says(
    tmp_path: Path, said: dict[str, object], is_open: bool, opens_to_proxies: bool, manages: bool
) -> None:
    """Where a gateway lets clients in, or nobody is meant to need a token, none is looked at."""
    paths = [
        ("inference", "/predictions/nobody"), ("inference", "/explanations/nobody"),
        ("inference", "/v2/models/nobody"), ("inference", "/ping"), ("metrics", "/metrics"),
        ("management", "/models"), ("management", "/docs"),
    ]  # fmt: skip

    async def check(ask: Asking) -> None:
        for api, path in paths:
            is_free = manages if api == "management" else is_open
            for whose, token in tokens_of(ask.keys):
                for proxy in ("", "Forwarded"):
                    outcome = await ask(api, path, token, proxy)
                    wanted = expected(api, path, whose, is_free and not proxy)
                    if is_free and opens_to_proxies:
                        wanted = IN
                    assert outcome == wanted, (api, path, token, proxy)
        # The console asks for a token by itself, unless nobody needs one.
        for path in ("/console", "/console/static/console.css", "/console/sign-in"):
            is_closed = manages and not opens_to_proxies
            outcome = await ask("management", path, None, "Via", "GET")
            assert outcome == (UNKNOWN if is_closed else IN), path
            assert await ask("management", path, method="GET") == IN

    with_server(tmp_path, check, **said)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, ["predictions and metrics are open to this machine, but for requests with a proxy's"]),
        ({"host": "0.0.0.0"}, ["every API asks for a token"]),
        ({"auth": "always"}, ["every API asks for a token"]),
        ({"auth": "management"}, ["predictions and metrics are open to whoever reaches", "always"]),
        ({"auth": "never"}, ["all APIs are open to this machine, but", "auth: always asks"]),
        ({"auth": "never", "insecure": True}, ["all APIs are open to whoever reaches the server"]),
    ],
)
def test_a_start_says_what_is_open_to_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: dict[str, object], words: list[str]
) -> None:
    caplog.set_level("INFO", "modelyard.serve.app")

    async def check(_: Asking) -> None:
        for word in words:
            assert word in caplog.text

    with_server(tmp_path, check, **said)
