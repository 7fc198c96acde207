"""KServe's set-up: one port for inference and management, keys for each, models by snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from plugins.torchserve.tests.live import Home
from plugins.torchserve.tests.test_http import error, write_mar
from tests.serve.live import poll

PORT = "http://127.0.0.1:0"
SLOW = """
import pathlib, time

def handle(data, context):
    if data is None:
        return None
    gate = pathlib.Path(data[0]["body"].decode())
    (gate / "began").touch()
    while not (gate / "open").exists():
        time.sleep(0.01)
    return ["done"]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("one"))
    write_mar(home.store / "slow.mar", SLOW, "slow", config="useJobTicket: true\n")
    version = {
        "defaultVersion": True,
        "marName": "slow.mar",
        "minWorkers": 1,
        "maxWorkers": 5,
        "batchSize": 1,
        "maxBatchDelay": 200,
        "responseTimeout": 60,
    }
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {"slow": {"1.0": version}}}
    home.start(
        "--ncs",
        properties={
            "inference_address": PORT,
            "management_address": PORT,
            "metrics_address": PORT,
            "disable_token_authorization": "false",
            "enable_model_api": "true",
            "model_snapshot": json.dumps(snapshot),
        },
    )
    yield home
    home.stop()


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[httpx.Client]:
    with home.client() as client:
        yield client


def bearer(home: Home, name: str) -> dict[str, str]:
    keys = json.loads((home.folder / "key_file.json").read_text(encoding="utf-8"))
    return {"Authorization": f"Bearer {keys[name]['key']}"}


def ready(home: Home, client: httpx.Client) -> None:
    def is_ready() -> bool:
        described = client.get("/models/slow", headers=bearer(home, "management")).json()[0]
        return bool(described["workers"][0]["status"] == "READY")

    poll(is_ready, "the worker is ready")


REFUSED = (
    400,
    "InvalidKeyException",
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly",
)


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/predictions/slow", "inference"),
        ("POST", "/predictions/cat", "inference"),
        ("GET", "/nowhere", "inference"),
        ("OPTIONS", "/predictions/slow", "inference"),
        ("POST", "/models/slow/invoke", "inference"),
        ("POST", "/v1/models/slow:predict", "inference"),
        ("GET", "/models", "management"),
        ("GET", "/models/", "management"),
        ("GET", "/models/slow/1.0", "management"),
        ("GET", "/v1/models/slow", "management"),
        ("PUT", "/models/slow", "management"),
        ("POST", "/models?url=slow.mar", "management"),
        ("DELETE", "/models/slow", "management"),
    ],
)
def test_each_path_needs_the_key_of_its_api(
    home: Home, client: httpx.Client, method: str, path: str, name: str
) -> None:
    others = {"inference", "management", "API"} - {name}
    for headers in ({}, *(bearer(home, other) for other in others)):
        assert error(client.request(method, path, headers=headers)) == REFUSED


def test_each_api_answers_on_the_one_port(home: Home, client: httpx.Client) -> None:
    operator = bearer(home, "management")
    described = client.get("/models/slow/1.0", headers=operator).json()[0]
    shown = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout")
    assert [described[key] for key in shown] == [1, 5, 1, 200, 60]
    assert (described["loadedAtStartup"], described["useJobTicket"]) == (False, True)
    assert client.get("/v1/models/slow", headers=operator).json()["ready"] is True
    assert client.get("/ping").json() == {"status": "Healthy"}
    assert client.get("/metrics").status_code == 200
    paths = client.get("/api-description").json()["paths"]
    assert {"/ping", "/models", "/metrics", "/predictions/{model_name}"} <= set(paths)


def test_a_key_is_replaced_by_who_holds_the_third_one(home: Home, client: httpx.Client) -> None:
    old = bearer(home, "inference")
    assert error(client.get("/token?type=inference", headers=old))[1] == "InvalidKeyException"
    answer = client.get("/token?type=inference", headers=bearer(home, "API"))
    assert (answer.status_code, answer.text) == (200, "\n")
    assert answer.headers["content-type"] == "application/json"
    assert error(client.get("/nowhere", headers=old)) == REFUSED
    assert error(client.get("/nowhere", headers=bearer(home, "inference")))[0] == 404


def test_the_console_is_opened_by_the_management_key(home: Home, client: httpx.Client) -> None:
    assert client.get("/console").headers["location"] == "console/sign-in"
    keys = json.loads((home.folder / "key_file.json").read_text(encoding="utf-8"))
    for name in ("inference", "API"):
        refused = client.post("/console/sign-in", data={"token": keys[name]["key"]})
        assert refused.status_code == 401, name
    signed_in = client.post("/console/sign-in", data={"token": keys["management"]["key"]})
    assert signed_in.status_code == 303
    page = client.get("/console/models/slow/1.0").text
    assert "/scale" in page and "/unregister" in page
    client.cookies.clear()


def test_with_job_tickets_a_request_is_taken_only_by_an_idle_worker(
    home: Home, client: httpx.Client, tmp_path: Path
) -> None:
    ready(home, client)
    headers, gate = bearer(home, "inference"), str(tmp_path).encode()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.post, "/predictions/slow", content=gate, headers=headers)
        poll((tmp_path / "began").exists, "the worker is busy")
        refused = client.post("/predictions/slow", content=gate, headers=headers)
        (tmp_path / "open").touch()
        assert first.result().text == "done"
    assert error(refused)[:2] == (503, "ServiceUnavailableException")
    assert "no worker is idle" in refused.headers["x-modelyard-reason"]
    assert refused.headers["retry-after"] == "1"


def test_keys_are_in_no_log(home: Home) -> None:
    keys = json.loads((home.folder / "key_file.json").read_text(encoding="utf-8"))
    logs = [home.output, *home.logs.rglob("*.log"), *home.temp.rglob("*.log")]
    for text in (file.read_text(encoding="utf-8") for file in logs):
        assert not [name for name, entry in keys.items() if entry["key"] in text]


def test_where_nothing_is_said_inference_is_open_on_loopback_and_management_is_not(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path)
    file = home.folder / "ts.properties"
    addresses = (
        "inference_address=http://127.0.0.1:0\n",
        "management_address=http://localhost:0\n",
    )
    file.write_text("".join(addresses) + "enable_metrics_api=false\n", encoding="utf-8")
    try:
        flags = ("--start", "--ncs", "--model-store", home.store, "--ts-config", file)
        assert home.run(*flags)[0] == 0
        assert error(home.get("/nowhere", "inference"))[0] == 404
        with home.client() as client:  # a token that is shown must be right all the same
            client.headers["Authorization"] = "Bearer abcd1234"
            assert error(client.get("/nowhere")) == REFUSED
            assert client.get("/ping").status_code == 200
        assert error(home.get("/models")) == REFUSED
        # The console does not do what the settings keep the API from doing.
        keys = json.loads((home.folder / "key_file.json").read_text(encoding="utf-8"))
        with home.client("management") as client:
            client.post("/console/sign-in", data={"token": keys["management"]["key"]})
            assert client.get("/console").status_code == 200
            assert client.post("/console/models/m/1.0/unregister").status_code == 404
            assert (
                client.post("/console/models/m/1.0/scale", data={"workers": "1"}).status_code == 403
            )
    finally:
        home.stop()
