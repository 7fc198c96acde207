"""Who is let in by the drop-in: each route and method, with each key, directly and by a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from modelyard.plugins.grpc import health, oip
from modelyard.plugins.torchserve import grpc_face
from modelyard.plugins.torchserve.app import create_server
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.settings import Address
from tests.serve.test_app import settings_in
from tests.serve.test_let_in import APIS, IN, PROXIED, WRONG

HERE = Address("127.0.0.1", 0)
OPEN = ("/ping", "/ping/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready",
        "/", "/api-description")  # fmt: skip
ROUTES = {
    "inference": [
        *((method, f"/{first}/nobody{rest}")
          for first in ("predictions", "explanations", "prediction", "nobody/1.0/predict", "nobody")
          for rest in ("", "/1.0", "/", "/1.0/more", "/predict")
          for method in ("POST", "OPTIONS")),
        ("POST", "/v1/models/nobody:predict"), ("POST", "/v1/models/nobody:explain"),
        ("GET", "/v1/models"), ("GET", "/v2"), ("GET", "/v2/models"), ("GET", "/v2/models/nobody"),
        ("GET", "/v2/models/nobody/ready"), ("GET", "/v2/models/nobody/versions/1.0"),
        ("POST", "/v2/models/nobody/infer"), ("POST", "/v2/models/nobody/versions/1.0/infer"),
        ("POST", "/v2/models/nobody/explain"), ("POST", "/v2/repository/index"),
        ("POST", "/models/nobody/invoke"), ("POST", "/invocations"),
        ("POST", "/invocations?model_name=nobody"), ("POST", "/wfpredict/nobody"),
        ("GET", "/nowhere"), ("POST", "//predictions/nobody"), ("POST", "/%70redictions/nobody"),
        ("POST", "/predictions%2Fnobody"), ("HEAD", "/predictions/nobody"),
    ],
    "management": [
        *((method, path) for path in ("/models", "/models/nobody", "/models/nobody/1.0",
                                      "/models/nobody/1.0/set-default", "/v1/models/nobody",
                                      "/workflows", "/workflows/nobody", "/models/nobody/rollout")
          for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS")),
        ("GET", "/nowhere"), ("POST", "/v2/repository/models/nobody/load"),
    ],
    "metrics": [("GET", "/metrics"), ("POST", "/metrics"), ("GET", "/metrics?name[]=x")],
}  # fmt: skip
CHANGES = [f"/v2/repository/models/nobody/{verb}" for verb in ("load", "unload")]
"""Paths of the inference API that take the management key."""
INFERENCE_CALLS = [
    *(f"/{grpc_face.INFERENCE_SERVICE}/{name}" for name in ("Ping", "Predictions")),
    *oip.INFERS[:1], f"/{oip.SERVICE}/ModelMetadata", "/a.B/C",
]  # fmt: skip
MANAGEMENT_CALLS = [
    f"/{grpc_face.MANAGEMENT_SERVICE}/{name}"
    for name in ("DescribeModel", "ListModels", "RegisterModel", "ScaleWorker", "SetDefault",
                 "UnregisterModel")
]  # fmt: skip
AUTH = "Authorization"
REFUSED = "Token Authorization failed"

Ask = Callable[..., Awaitable[str]]
Keys = dict[str, str]


def with_server(
    folder: Path, is_off: bool | None, then: Callable[[Ask, Ask, Keys], Awaitable[None]]
) -> None:
    """Serve without models in this process; `then` gets what asks by HTTP and by gRPC."""

    async def run() -> None:
        dialect = TorchServeSettings(
            directory=folder, inference_address=HERE, management_address=Address("127.0.0.2", 0),
            metrics_address=Address("127.0.0.3", 0), grpc_inference_port=0, enable_model_api=True,
            grpc_management_address="127.0.0.2", grpc_management_port=0,
            ts_open_inference_protocol="oip", disable_token_authorization=is_off,
        )  # fmt: skip
        server = create_server(dialect, None, settings_in(folder))
        for listener in server.listeners:
            await listener.start()
        for face in server.faces:
            await face.start()
        urls = {api: each.url for api, each in zip(APIS, server.listeners, strict=True)}
        calls = {name.removeprefix("grpc_"): url.partition("//")[2]
                 for face in server.faces for name, url in face.urls.items()}  # fmt: skip
        keys = {}
        if not is_off:
            found = json.loads((folder / "key_file.json").read_text())
            keys = {name: entry["key"] for name, entry in found.items()}
        async with contextlib.AsyncExitStack() as stack:
            channels = {
                api: await stack.enter_async_context(grpc.aio.insecure_channel(where))
                for api, where in calls.items()
            }

            async def by_http(api: str, method: str, path: str, sent: Keys) -> str:
                """Ask without a client of HTTP, which takes longer than the server."""
                url = httpx.URL(urls[api])
                lines = [f"{method} {path} HTTP/1.1", f"Host: {url.netloc.decode()}",
                         "Connection: close", "Content-Length: 0",
                         *(f"{name}: {value}" for name, value in sent.items())]  # fmt: skip
                reader, writer = await asyncio.open_connection(url.host, url.port)
                writer.write("\r\n".join([*lines, "\r\n"]).encode("latin-1"))
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 "), answer
                says_so = method == "HEAD" or REFUSED.encode() in answer
                return "refused" if answer[9:12] == b"400" and says_so else IN

            async def by_grpc(api: str, method: str, sent: Keys) -> str:
                metadata = tuple((name.lower(), value) for name, value in sent.items())
                try:
                    call = channels[api].unary_unary(method)
                    await call(b"", timeout=20, metadata=metadata)
                except grpc.aio.AioRpcError as error:
                    is_refused = error.code() == grpc.StatusCode.PERMISSION_DENIED
                    return "refused" if is_refused and REFUSED in error.details() else IN
                return IN

            await then(by_http, by_grpc, keys)
        for face in server.faces:
            await face.stop(0)
        for listener in server.listeners:
            await listener.stop_accepting()
            listener.close_idle(0)

    asyncio.run(run())


def ways(keys: Keys) -> list[tuple[str | None, Keys]]:
    """Return each key and each wrong one, directly and by a proxy: whose it is, and the headers."""
    shown: list[tuple[str | None, Keys]] = [(None, {})]
    shown += [(name, {AUTH: f"Bearer {key}"}) for name, key in keys.items()]
    shown += [("unknown", {AUTH: f"bearer {keys['inference']}"})]
    return [(whose, {**headers, **proxy}) for whose, headers in shown
            for proxy in ({}, {"X-Forwarded-For": "203.0.113.9"})]  # fmt: skip


@pytest.mark.parametrize(
    "is_off",
    [pytest.param(None, id="unsaid"), pytest.param(False, id="tokens", marks=pytest.mark.nightly)],
)
def test_every_route_takes_its_key_alone_and_a_proxy_is_not_this_machine(
    tmp_path: Path, is_off: bool | None
) -> None:
    async def check(by_http: Ask, by_grpc: Ask, keys: Keys) -> None:
        def wanted(api: str, whose: str | None, sent: Keys) -> str:
            """Predictions of this machine need no key where nothing is said; metrics never do."""
            is_free = api == "metrics" or (api == "inference" and is_off is None)
            if whose is None:
                return IN if is_free and not sent else "refused"
            return IN if whose == ("management" if api == "management" else "inference") else (
                "refused"
            )  # fmt: skip

        for whose, sent in ways(keys):
            for api, routes in ROUTES.items():
                for method, path in routes:
                    outcome = await by_http(api, method, path, sent)
                    assert outcome == wanted(api, whose, sent), (api, method, path, sent)
            for path in OPEN:
                for api in ("inference", "management"):
                    if api == "inference" or path in ("/", "/api-description"):
                        assert await by_http(api, "GET", path, sent) == IN, (api, path, sent)
            for path in CHANGES:
                outcome = await by_http("inference", "POST", path, sent)
                assert outcome == wanted("management", whose, sent), (path, sent)
            for api, calls in (("inference", INFERENCE_CALLS), ("management", MANAGEMENT_CALLS)):
                for call in calls:
                    outcome = await by_grpc(api, call, sent)
                    assert outcome == wanted(api, whose, sent), (call, sent)
            for call in (*oip.CHANGES, *health.OPEN[:1], *oip.OPEN):
                outcome = await by_grpc("inference", call, sent)
                is_change = call in oip.CHANGES
                assert outcome == (wanted("management", whose, sent) if is_change else IN), call
        for sent in (*({proxy: "x"} for proxy in PROXIED), *({AUTH: value} for value in WRONG)):
            assert await by_http("inference", "POST", "/predictions/nobody", sent) == "refused"
            assert await by_http("metrics", "GET", "/metrics", sent) == "refused"
            assert await by_grpc("inference", INFERENCE_CALLS[1], sent) == "refused"

    with_server(tmp_path, is_off, check)


def test_where_no_tokens_are_asked_for_none_is_looked_at(tmp_path: Path) -> None:
    """As TorchServe does with `disable_token_authorization`, behind whatever lets clients in."""

    async def check(by_http: Ask, by_grpc: Ask, _: Keys) -> None:
        for value in WRONG:
            sent = {AUTH: value, "Via": "1.1 a"}
            for api, routes in ROUTES.items():
                assert await by_http(api, *routes[0], sent) == IN
            assert await by_grpc("inference", INFERENCE_CALLS[1], sent) == IN
            assert await by_grpc("management", MANAGEMENT_CALLS[1], sent) == IN

    with_server(tmp_path, True, check)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, ["predictions of this machine need no token; management, and requests with a proxy's",
              "X-Forwarded", "key_file.json", "disable_token_authorization=false asks everybody"]),
        ({"disable_token_authorization": False}, ["predictions and management need a token of"]),
        ({"inference_address": Address("0.0.0.0", 0)}, ["predictions and management need a token"]),
        ({"disable_token_authorization": True}, ["every API is open"]),
    ],
)  # fmt: skip
def test_it_says_what_is_open_to_whom(
    tmp_path: Path, said: dict[str, Any], words: list[str]
) -> None:
    settings = TorchServeSettings(directory=tmp_path, **said)
    assert [word for word in words if word not in settings.who_is_let_in] == []
