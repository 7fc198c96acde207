"""Inference and management over HTTP, as TorchServe's clients know them, on one real server."""

from __future__ import annotations

import json
import random
import socket
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.archiver import write_archive
from modelyard.plugins.torchserve.inference import form_field
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.dataplane.form import MAX_PARTS
from modelyard.serve.errors import BadRequest
from modelyard.serve.front.models import EXTENSIONS
from modelyard.serve.settings import Address
from plugins.torchserve.tests.live import Home
from tests.serve.live import SOURCES, poll

ECHO = """
import json

def handle(data, context):
    if data is None:
        return None
    headers = context.get_all_request_header(0)
    if headers.get("describe") == "True":
        return [{"a": 1}]
    if data[0].get("body") == b"fail":
        raise ValueError("as it was asked")
    row = {k: v.decode() if isinstance(v, bytearray) else v for k, v in data[0].items()}
    said = {k: headers[k] for k in ("explain", "url_path") if k in headers}
    return [{"row": row, "said": said, "name": context.model_name}]
"""
BROKEN = "raise ValueError('no such weights')\n"
SLEEPY = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(0.3)
    return ["done"] * len(data)
"""
MORTAL = """
import os

def handle(data, context):
    if data is None:
        return None
    if (data[0]["body"] or b"").startswith(b"end"):
        os.kill(os.getpid(), 11)
    return ["alive"]
"""
HEADERS = {
    "pragma": "no-cache",
    "cache-control": "no-cache; no-store, must-revalidate, private",
    "expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}


def write_mar(
    file: Path,
    handler: str = ECHO,
    name: str | None = "echo",
    version: str = "1.0",
    config: str = "",
) -> None:
    """Write an archive as torch-model-archiver does; without a name, without a manifest."""
    model = {"modelName": name, "handler": "h.py", "modelVersion": version}
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("h.py", handler)
        if config:
            model["configFile"] = "c.yaml"
            zipped.writestr("c.yaml", config)
        if name:
            manifest = {"runtime": "python", "model": model}
            zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a folder of archives over HTTP."""
    folder = tmp_path_factory.mktemp("remote")
    write_mar(folder / "remote.mar", name="remote")
    write_mar(folder / "broken_remote.mar", BROKEN, "broken_remote")
    (folder / "page.mar").write_text("<html></html>")
    handler = partial(QuietHandler, directory=str(folder))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, remote: str) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home"))
    write_mar(home.store / "echo.mar")
    write_mar(home.store / "two.mar", version="2.0")
    write_mar(home.store / "bad.mar", BROKEN, "bad")
    write_mar(home.store / "nameless.mar", name=None)
    tensors = (SOURCES / "tensors" / "handler.py").read_text(encoding="utf-8")
    write_mar(home.store / "tensors.mar", tensors, "tensors")
    write_mar(home.store / "seq.mar", name="seq", config="sequenceBatching: true\n")
    write_mar(home.store / "conf.mar", name="conf", config="minWorkers: 1\nmaxWorkers: 3\n")
    hasty = "minWorkers: 1\nclientTimeoutInMills: 900\n"
    write_mar(home.store / "sleepy.mar", SLEEPY, "sleepy", config=hasty)
    write_mar(home.store / "mortal.mar", MORTAL, "mortal", config="minWorkers: 1\n")
    (home.store / "garbage.mar").write_bytes(b"no archive")
    home.start(
        "--models",
        "echo.mar,garbage.mar",
        properties={
            "enable_model_api": "true",
            "allowed_urls": f"{remote}/.*",
            "cors_allowed_origin": "https://app.example",
            "ts_open_inference_protocol": "oip",
            "max_request_size": "5000",
            "default_workers_per_model": "1",
            "metrics_mode": "prometheus",
        },
    )
    home.wait_for_workers("echo")
    yield home
    home.stop()


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[httpx.Client]:
    with home.client() as client:
        yield client


@pytest.fixture(scope="module")
def management(home: Home) -> Iterator[httpx.Client]:
    with home.client("management") as client:
        yield client


def error(answer: httpx.Response) -> tuple[int, str, str]:
    """Check the form of an error; return status, type and message."""
    content = answer.json()
    assert list(content) == ["code", "type", "message"]
    assert content["code"] == answer.status_code
    assert answer.text == json.dumps(content, indent=2) + "\n"
    assert answer.headers["connection"] == "close"
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, content["type"], content["message"]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"/"
            for path in folder.rglob("*")}  # fmt: skip


# -- inference ---------------------------------------------------------------------------------

PLAIN = {"explain": "False", "url_path": ""}


@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    ("path", "row", "said"),
    [
        ("/predictions/echo", {"body": "x"}, PLAIN),
        ("/predictions/echo/", {"body": "x"}, PLAIN),
        ("/predictions/%65cho/1.0", {"body": "x"}, PLAIN),
        ("/predictions/echo/1.0/a/b?c=1", {"body": "x"}, {**PLAIN, "url_path": "a/b"}),
        ("/explanations/echo", {"body": "x"}, {**PLAIN, "explain": "True"}),
        ("/v1/models/echo:predict", {"body": "x"}, {"explain": "False"}),
        ("/v1/models/echo:explain", {"body": "x"}, {"explain": "True"}),
        ("/v2/models/echo/explain", {"body": "x"}, {"explain": "True"}),
        ("/invocations?model_name=echo&b=2", {"model_name": "echo", "b": "2", "body": "x"}, {}),
        ("/invocations", {"body": "x"}, {}),
        ("/models/echo/invoke?b=2", {"b": "2", "body": "x"}, {}),
        ("/echo/predict?b=2", {"b": "2", "body": "x"}, {}),
        ("/echo/1.0/predict", {"body": "x"}, {}),
    ],
)
def test_every_route_predicts_in_every_method(
    client: httpx.Client, method: str, path: str, row: dict[str, str], said: dict[str, str]
) -> None:
    answer = client.request(method, path, content=b"x")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"row": row, "said": said, "name": "echo"}
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert len(answer.headers["x-request-id"]) == 36
    assert not {"server", "date"} & set(answer.headers)


def test_head_is_answered_as_get_without_the_body(
    client: httpx.Client, management: httpx.Client
) -> None:
    for api, path in ((client, "/ping"), (management, "/models"), (management, "/models/echo")):
        head = api.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert int(head.headers["content-length"]) > 10


def test_a_compressed_body_goes_to_the_handler_as_it_is(client: httpx.Client) -> None:
    answer = client.post("/predictions/echo", content=b"zip", headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["row"]) == (200, {"body": "zip"})


def test_only_pages_that_cors_allows_may_call(
    client: httpx.Client, management: httpx.Client
) -> None:
    page = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    evil = {**page, "Origin": "https://evil.example"}
    for api, path in ((client, "/predictions/echo"), (management, "/models/echo")):
        method = "POST" if api is client else "GET"
        assert api.request(method, path, headers=page).status_code == 200
        for headers in (evil, {"Host": "evil.example"}):
            answer = api.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (403, "ForbiddenException")


@pytest.mark.parametrize(
    "form",
    [
        {"data": {"model_name": "echo", "a": "1"}},
        {"files": {"model_name": (None, "echo"), "a": b"1"}},
    ],
    ids=["urlencoded", "multipart"],
)
def test_a_form_may_name_the_model(client: httpx.Client, form: dict[str, Any]) -> None:
    row = client.post("/invocations", **form).json()["row"]
    assert (row["model_name"], row["a"]) == ("echo", "1")
    form = {key: {**value, "model_name": (None, "cat")} if key == "files" else
            {**value, "model_name": "cat"} for key, value in form.items()}  # fmt: skip
    assert error(client.post("/invocations", **form))[2] == "Model not found: cat"


@pytest.mark.parametrize("as_files", [False, True], ids=["urlencoded", "multipart"])
def test_a_form_of_many_fields_is_not_read(as_files: bool) -> None:
    """The server looks for the model's name in it: 6 MB of fields would take it 2 s."""
    fields = {f"a{at}": "1" for at in range(MAX_PARTS + 1)}
    form = httpx.Request("POST", "http://x", **{"files" if as_files else "data": fields})  # type: ignore[arg-type]
    headers = [(name.lower(), value) for name, value in form.headers.raw]
    with pytest.raises(BadRequest):
        form_field(headers, form.read(), "model_name")


NO_ROUTE = (
    404,
    "ResourceNotFoundException",
    "Requested resource is not found, please refer to API document.",
)
NO_METHOD = (
    405,
    "MethodNotAllowedException",
    "Requested method is not allowed, please refer to API document.",
)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", NO_ROUTE),
        ("GET", "/", NO_METHOD),
        ("POST", "/predictions", NO_ROUTE),
        ("POST", "/predictions/", NO_ROUTE),
        ("GET", "/models", NO_ROUTE),
        ("GET", "/metrics", NO_ROUTE),
        ("POST", "/models/echo/1.0/invoke", NO_ROUTE),
        ("POST", "/v1/models/echo:other", NO_ROUTE),
        ("POST", "/predictions/cat", (404, "ModelNotFoundException", "Model not found: cat")),
        ("POST", "/cat/predict", (404, "ModelNotFoundException", "Model not found: cat")),
        (
            "POST",
            "/predictions/echo/9",
            (
                404,
                "ModelVersionNotFoundException",
                "Model version: 9 does not exist for model: echo",
            ),
        ),
        (
            "POST",
            "/wfpredict/w",
            (400, "BadRequestException", "workflows are not served by Modelyard"),
        ),
        ("OPTIONS", "/predictions/cat", (404, "ModelNotFoundException", "Model not found: cat")),
    ],
)
def test_what_is_not_there_is_said_in_torchserves_words(
    client: httpx.Client, method: str, path: str, expected: tuple[int, str, str]
) -> None:
    assert error(client.request(method, path)) == expected


@pytest.mark.parametrize("api", ["inference", "management"])
def test_a_body_over_the_limit_is_413_and_says_nothing(home: Home, api: str) -> None:
    path = {"inference": "/predictions/echo", "management": "/models?url=echo.mar"}[api]
    with home.client(api) as client:
        answer = client.post(path, content=b"0" * 6000)
    assert (answer.status_code, answer.content) == (413, b"")


@pytest.mark.parametrize("api", ["inference", "management", "metrics"])
@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["nonsense", "no Host", "long line"],
)
def test_what_is_no_http_is_400_in_torchserves_words(home: Home, api: str, data: bytes) -> None:
    url = httpx.URL(home.about[api])
    with socket.create_connection((url.host, url.port or 0), 20) as client:
        client.sendall(data)
        head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"\r\nx-modelyard-reason: " in head
    assert json.loads(body) == {
        "code": 400,
        "type": "BadRequestException",
        "message": "Invalid HTTP message.",
    }


def test_probes_and_the_open_inference_protocol(client: httpx.Client) -> None:
    assert client.get("/ping/?x=1").json() == {"status": "Healthy"}
    assert client.get("/health/live").json() == {"live": True}
    assert client.get("/health/ready").json() == {"ready": True}
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    about = client.get("/v2").json()
    assert (about["name"], about["extensions"]) == ("Torchserve", list(EXTENSIONS))
    assert about["extenstion"] == ["kserve", "kubeflow"]
    described = {"name": "echo", "versions": ["1.0"], "platform": "pytorch"}
    described |= {"inputs": [], "outputs": []}
    for path in ("/v2/models/echo", "/v2/models/echo/versions/1.0"):
        assert client.get(path).json() == described
        assert client.get(f"{path}/ready").json() == {"name": "echo", "ready": True}
    unknown = client.get("/v2/models/cat")
    assert (unknown.status_code, unknown.json()["error"]) == (404, "Model not found: cat")


def test_tensors_by_name(client: httpx.Client, management: httpx.Client) -> None:
    assert management.post("/models?url=tensors.mar&initial_workers=1").status_code == 200
    given = {"name": "x", "datatype": "INT64", "shape": [2], "data": [1, (1 << 63) - 1]}
    for path in ("/v2/models/tensors/infer", "/v2/models/tensors/versions/1.0/infer"):
        answer = client.post(path, json={"inputs": [given], "id": "7"})
        assert (answer.json()["id"], answer.json()["outputs"]) == ("7", [given])
        refused = client.post(path, json={"inputs": [{**given, "shape": [3]}]})
        assert (refused.status_code, refused.json()["code"]) == (400, 400)
        assert refused.json()["error"] == refused.json()["message"]
        assert client.get(path).status_code == 405
    assert "tensors" in client.get("/v2/models").json()["models"]
    too_long = client.post("/v2/models/tensors/infer", content=b"x" * (6553500 + 1))
    assert (too_long.status_code, "max_request" in too_long.json()["error"]) == (413, True)

    repository = "/v2/repository"
    assert "tensors" in {each["name"] for each in client.post(f"{repository}/index").json()}
    assert client.post(f"{repository}/models/tensors/unload").json()["unload"]
    assert client.get("/v2/models/tensors/ready").status_code == 404
    assert client.post(f"{repository}/models/tensors/load").json()["load"]
    assert client.get("/v2/models/tensors/ready").json()["ready"]
    assert client.post(f"{repository}/models/nothing/load").status_code == 404
    assert client.post(f"{repository}/models/tensors/unload").status_code == 200


@pytest.mark.parametrize(
    ("oip", "envelope", "reads"),
    [
        (None, None, False),
        ("false", None, False),
        ("oip", None, True),
        ("TRUE", None, True),
        ("true", "kserve", True),
        ("true", "kservev2", False),
        ("true", "body", False),
    ],
)
def test_bodies_are_the_handlers_unless_the_protocol_is_on(
    tmp_path: Path, oip: str | None, envelope: Any, reads: bool
) -> None:
    address = Address("127.0.0.1", 0)
    settings = TorchServeSettings(
        directory=tmp_path, inference_address=address, management_address=address,
        metrics_address=address, ts_open_inference_protocol=oip, service_envelope=envelope,
    )  # fmt: skip
    assert settings.has_tensors is reads


def test_a_client_may_choose_a_uuid_as_its_request_id(client: httpx.Client) -> None:
    id = "123E4567-e89b-12d3-a456-426614174000"
    for given, same in ((id, True), ("abc", False), (id + "0", False)):
        answer = client.post("/predictions/echo", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) is same


@pytest.mark.parametrize(
    ("api", "path", "title", "shown"),
    [
        ("inference", "/", "TorchServe APIs", "/predictions/{model_name}"),
        ("management", "/", "TorchServe APIs", "/models/{model_name}/{model_version}/set-default"),
        ("inference", "/predictions/echo", "RESTful API for: echo", "/prediction/echo"),
    ],
)
def test_options_describes(home: Home, api: str, path: str, title: str, shown: str) -> None:
    with home.client(api) as client:
        document = client.options(path).json()
        assert (document["openapi"], document["info"]["title"]) == ("3.0.1", title)
        assert shown in document["paths"]
        if path == "/":
            assert client.get("/api-description").json() == document


def test_options_describes_all_three_routes_of_a_model(management: httpx.Client) -> None:
    document = management.options("/models/echo").json()
    assert document["info"]["title"] == "RESTful Management API for: echo"
    model = "/models/{model_name}"
    versions = f"{model}/{{model_version}}"
    assert set(document["paths"]) == {model, versions, f"{versions}/set-default"}


def test_a_failed_prediction_is_a_request_without_latency(
    home: Home, client: httpx.Client, management: httpx.Client
) -> None:
    given: dict[str, Any] = {"url": "echo.mar", "model_name": "timed", "initial_workers": 1}
    assert management.post("/models", params=given).status_code == 200

    def series() -> set[str]:
        lines = home.get("/metrics", "metrics").text.splitlines()
        return {line.partition("{")[0] for line in lines if 'model_name="timed"' in line}

    assert client.post("/predictions/timed", content=b"fail").status_code == 503
    counted = {"ts_inference_requests_total"}
    assert series() == counted
    assert client.post("/predictions/timed", content=b"1").status_code == 200
    timed = {"ts_inference_latency_microseconds", "ts_queue_latency_microseconds"}
    assert series() == counted | timed
    assert management.delete("/models/timed").status_code == 200


def test_a_request_may_say_how_long_it_waits_and_only_then_is_refused_for_that(
    client: httpx.Client, management: httpx.Client
) -> None:
    management.post("/models", params={"url": "sleepy.mar", "initial_workers": 1,
                                       "synchronous": "true"})  # fmt: skip
    path = "/predictions/sleepy"
    assert client.post(path, content=b"").status_code == 200
    with ThreadPoolExecutor(5) as threads:
        sent = [threads.submit(client.post, path, content=b"") for _ in range(5)]
        status = partial(management.get, "/models/sleepy")
        poll(lambda: status().json()[0]["jobQueueStatus"]["pendingRequests"], "some wait")
        refused = client.post(path, content=b"", headers={"X-Request-Timeout": "350ms"})
        answers = [answer.result().status_code for answer in sent]
    assert error(refused)[:2] == (503, "ServiceUnavailableException")
    reason = refused.headers["x-modelyard-reason"]
    assert reason.startswith("no answer is to be expected within the request's 0.35 s")
    # Those that do not say so wait until the end of their time, as in TorchServe.
    assert set(answers) <= {200, 504}
    wrong = client.post(path, content=b"", headers={"X-Request-Timeout": "soon"})
    assert error(wrong)[:2] == (400, "BadRequestException")
    management.delete("/models/sleepy")


# -- management --------------------------------------------------------------------------------


def status(answer: httpx.Response) -> tuple[int, str]:
    assert list(answer.json()) == ["status"]
    return answer.status_code, answer.json()["status"]


def test_the_life_of_a_model(home: Home, client: httpx.Client, management: httpx.Client) -> None:
    given = {"url": "echo.mar", "model_name": "a b", "initial_workers": 0, "batch_size": 4}
    assert status(management.post("/models", json=given)) == (
        200,
        'Model "a b" Version: 1.0 registered with 0 initial workers. Use scale workers API to add '
        "workers for the model.",
    )
    refusal = error(client.post("/predictions/a b/1.0"))
    assert refusal[:2] == (503, "ServiceUnavailableException")
    assert refusal[2].startswith('Model "a b" Version 1.0 has no worker to serve inference request')
    asked = management.get("/models/a b?customized=true")
    assert error(asked) == (
        503,
        "ServiceUnavailableException",
        'Model "a b" has no worker to serve describe request. Please use scale workers API to add '
        "workers.",
    )
    assert management.get("/v1/models/a b").json() == {"name": "a b", "ready": False}
    again = {"url": "echo.mar", "model_name": "a b"}
    assert error(management.post("/models", params=again)) == (
        409,
        "ConflictStatusException",
        "Model version 1.0 is already registered for model a b",
    )
    started = management.put("/models/a b?min_worker=1")
    assert status(started) == (202, "Processing worker updates...")
    home.wait_for_workers("a b")
    (described,) = management.get("/models/a b?customized=true").json()
    assert described["customizedMetadata"] == {"a": 1}
    assert (described["minWorkers"], described["maxWorkers"], described["batchSize"]) == (1, 1, 4)
    assert management.get("/v1/models/a b").json() == {"name": "a b", "ready": True}

    second: dict[str, Any] = {"url": "two.mar", "model_name": "a b", "initial_workers": 0}
    assert management.post("/models", params=second).status_code == 200
    assert error(management.delete("/models/a b")) == (
        403,
        "InvalidModelVersionException",
        "Cannot remove default version for model a b",
    )
    assert error(management.put("/models/a b/7/set-default")) == (
        404,
        "ModelVersionNotFoundException",
        "Model version 7 does not exist for model a b",
    )
    assert status(management.put("/models/a b/2.0/set-default")) == (
        200,
        'Default version successfully updated for model "a b" to "2.0"',
    )
    assert status(management.delete("/models/a b/1.0")) == (200, 'Model "a b" unregistered')
    assert status(management.delete("/models/a b")) == (200, 'Model "a b" unregistered')
    assert error(management.delete("/models/a b"))[2] == "Model not found: a b"


def test_workers_between_least_and_most_are_left_alone(
    home: Home, management: httpx.Client
) -> None:
    """Neither minWorkers nor maxWorkers is the number of workers; scaling acts on what exceeds."""
    assert status(management.post("/models?url=conf.mar"))[1].endswith("with 1 initial workers")
    (described,) = management.get("/models/conf").json()
    assert (described["minWorkers"], described["maxWorkers"]) == (1, 3)
    (worker,) = described["workers"]
    scaled = management.put("/models/conf?min_worker=0&max_worker=2&synchronous=true")
    assert status(scaled) == (200, "Workers scaled to 0 for model: conf")
    (described,) = management.get("/models/conf").json()
    assert (described["minWorkers"], described["maxWorkers"]) == (0, 2)
    assert described["workers"][0]["pid"] == worker["pid"]
    scaled = management.put("/models/conf?min_worker=0&max_worker=0&synchronous=true")
    assert scaled.status_code == 200
    assert management.get("/models/conf").json()[0]["workers"] == []
    assert management.delete("/models/conf").status_code == 200


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", (400, "BadRequestException", "Parameter url is required.")),
        ("url=", (404, "ModelNotFoundException", "empty url")),
        ("url=ftp://x/echo.mar", None),
        ("url=/etc/passwd", None),
        ("url=..", (404, "ModelNotFoundException", "Relative path is not allowed in url: ..")),
        ("url=a/../echo.mar", None),
        ("url=%252e%252e", None),
        ("url=C:\\echo2", None),
        ("url=x%00", None),
        ("url=" + "x" * 3000, None),
        ("url=.hidden", None),
        ("url=garbage.mar&model_name=g", (400, "InvalidModelException", None)),
        ("url=nameless.mar", (400, "InvalidModelException", "Model name is not defined.")),
        ("url=echo.mar&model_name=a/b", (400, "InvalidModelException", None)),
        ("url=echo.mar&model_name=..", (400, "InvalidModelException", None)),
        ("url=echo.mar&model_name=a%00", (400, "InvalidModelException", None)),
        ("url=echo.mar&runtime=X", (400, "BadRequestException", "Invalid RuntimeType value: X")),
        ("url=echo.mar&runtime=LSP", (400, "BadRequestException", None)),
        ("url=echo.mar&initial_workers=99999", (400, "BadRequestException", None)),
        ("url=seq.mar", (400, "BadRequestException", None)),
        ("url=echo.mar&s3_sse_kms=true", (400, "BadRequestException", None)),
    ],
)
def test_a_registration_that_is_refused_changes_nothing(
    home: Home, management: httpx.Client, query: str, expected: tuple[int, str, str] | None
) -> None:
    store, models = tree(home.store), management.get("/models").json()
    code, kind, message = error(management.post(f"/models?{query}"))
    wanted = expected or (404, "ModelNotFoundException", None)
    assert (code, kind) == wanted[:2]
    assert wanted[2] in (None, message)
    assert str(home.folder) not in message
    assert tree(home.store) == store
    assert management.get("/models").json() == models


@pytest.mark.parametrize("url", ["bad.mar", "broken_remote.mar"])
def test_a_model_that_cannot_load_is_removed_again(
    home: Home, management: httpx.Client, remote: str, url: str
) -> None:
    store = tree(home.store)
    location = url if url == "bad.mar" else f"{remote}/{url}"
    answer = management.post("/models", params={"url": location, "initial_workers": 1})
    name = url.removesuffix(".mar")
    assert error(answer) == (
        500,
        "InternalServerException",
        f"Failed to start workers for model {name} version: 1.0",
    )
    assert "ValueError: no such weights (h.py:1)" in answer.headers["x-modelyard-reason"]
    assert management.get(f"/models/{name}").status_code == 404
    assert tree(home.store) == store


def test_a_model_that_loads_in_the_background_is_tried_again_and_can_go(
    management: httpx.Client,
) -> None:
    begun = management.post("/models?url=bad.mar&initial_workers=1&synchronous=false")
    assert status(begun) == (202, "Processing worker updates...")
    (described,) = management.get("/models/bad").json()
    assert [worker["status"] for worker in described["workers"]] == ["UNLOADING"]
    assert status(management.delete("/models/bad")) == (200, 'Model "bad" unregistered')


def test_an_archive_is_fetched_and_goes_with_its_model(
    home: Home, management: httpx.Client, remote: str
) -> None:
    url = f"{remote}/remote.mar"
    given: dict[str, Any] = {"url": url, "initial_workers": 0}
    assert management.post("/models", params=given).status_code == 200
    assert management.get("/models/remote").json()[0]["modelUrl"] == url
    assert (home.store / "remote.mar").is_file()
    assert error(management.post("/models", params=given)) == (
        500,
        "InternalServerException",
        "Model file already exists remote.mar",
    )
    assert management.delete("/models/remote").status_code == 200
    assert not (home.store / "remote.mar").exists()
    missing = f"{remote}/missing.mar"
    assert error(management.post("/models", params={"url": missing})) == (
        400,
        "DownloadArchiveException",
        f"Failed to download archive from: {missing}",
    )
    other = "http://example.com/x.mar"
    assert error(management.post("/models", params={"url": other})) == (
        404,
        "ModelNotFoundException",
        f"Given URL {other} does not match any allowed URL(s)",
    )
    page = management.post("/models", params={"url": f"{remote}/page.mar"})
    assert error(page)[:2] == (400, "InvalidModelException")
    assert not (home.store / "page.mar").exists()


@pytest.mark.parametrize(
    ("query", "answered", "token"),
    [
        ("", 3, None),
        ("?limit=2", 2, "2"),
        ("?limit=3", 3, "3"),
        ("?limit=0", 0, "0"),
        ("?limit=-5", 3, None),
        ("?limit=many&next_page_token=x", 3, None),
        ("?next_page_token=2", 1, None),
        ("?next_page_token=-1", 3, None),
        ("?next_page_token=9", 0, None),
    ],
)
def test_models_are_listed_page_by_page(
    management: httpx.Client, query: str, answered: int, token: str | None
) -> None:
    for name in ("b", "c"):
        given: dict[str, Any] = {"url": "echo.mar", "model_name": name, "initial_workers": 0}
        assert management.post("/models", params=given).status_code in (200, 409)
    listed = management.get(f"/models{query}").json()
    assert (len(listed["models"]), listed.get("nextPageToken")) == (answered, token)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("PATCH", "/models", NO_METHOD),
        ("POST", "/models/echo", NO_METHOD),
        ("POST", "/v1/models/echo", NO_METHOD),
        ("GET", "/models/echo/1.0/set-default", NO_METHOD),
        ("GET", "/models/echo/1.0/other", NO_ROUTE),
        ("GET", "/nothing", NO_ROUTE),
        ("GET", "/ping", NO_ROUTE),
        ("GET", "/token?type=inference", NO_ROUTE),
        ("POST", "/workflows", (400, "BadRequestException",
                                "workflows are not served by Modelyard")),
        ("PUT", "/models/echo?max_worker=0", (400, "BadRequestException",
                                              "max_worker cannot be less than min_worker.")),
    ],
)  # fmt: skip
def test_what_management_does_not_do(
    management: httpx.Client, method: str, path: str, expected: tuple[int, str, str]
) -> None:
    assert error(management.request(method, path)) == expected


def test_a_model_that_fails_at_the_start_is_logged_and_the_server_goes_on(home: Home) -> None:
    assert "Failed to load model: garbage.mar" in home.output.read_text(encoding="utf-8")


def test_predictions_are_explained_unasked_here_too(home: Home, tmp_path: Path) -> None:
    for name, content in {
        "w.bin": "none",
        "rows.json": "[{}]",
        "c.yaml": "explainShare: 1",
    }.items():
        (tmp_path / name).write_text(content)
    write_archive(
        "unasked",
        version="1.0",
        artifact=tmp_path / "w.bin",
        handler=str(SOURCES / "unasked" / "handler.py"),
        config_file=tmp_path / "c.yaml",
        reference=tmp_path / "rows.json",
        output_dir=home.store,
        dry_run=True,
    )
    with home.client("management") as client:
        client.post("/models?url=unasked.mar&initial_workers=1&synchronous=true")

    def gives_way() -> bool:
        with home.client() as client:
            predicted = client.post("/predictions/unasked", json={"do": "wait"})
            assert predicted.text == "predicted"
            return client.post("/explanations/unasked", json={}).text.endswith("ClientsLeft")

    poll(gives_way, "a prediction is explained, and gives way")
    with home.client("management") as client:
        assert client.delete("/models/unasked").status_code == 200


def test_many_operators_at_once_get_only_answers_that_are_documented(home: Home) -> None:
    path = "/models/crowd"
    changes = [
        ("POST", "/models?url=echo.mar&model_name=crowd&initial_workers=0", (200, 409)),
        ("POST", "/models?url=two.mar&model_name=crowd&initial_workers=0", (200, 409)),
        ("DELETE", path, (200, 403, 404)),
        ("DELETE", f"{path}/2.0", (200, 403, 404)),
        ("PUT", f"{path}?min_worker=0&synchronous=true", (200, 404)),
        ("PUT", f"{path}/2.0/set-default", (200, 404)),
        ("GET", f"{path}/all", (200, 404)),
    ]

    def operate(seed: int) -> None:
        dice = random.Random(seed)
        with home.client("management") as client:
            for method, place, documented in dice.choices(changes, k=20):
                answer = client.request(method, place)
                assert answer.status_code in documented, (method, place, answer.text)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(operate, range(8)))
    with home.client("management") as client:
        client.put(f"{path}/2.0/set-default")
        client.delete(f"{path}/1.0")
        client.delete(path)
        assert client.get(path).status_code == 404


# -- requests that end workers -----------------------------------------------------------------


def test_what_ends_workers_is_refused_and_so_is_who_sends_ever_new_ones(
    home: Home, client: httpx.Client, management: httpx.Client
) -> None:
    management.post("/models", params={"url": "mortal.mar", "initial_workers": 1})

    def ask(body: str, host: str = "127.0.0.1") -> httpx.Response:
        home.wait_for_workers("mortal")
        transport = httpx.HTTPTransport(local_address=host)
        with httpx.Client(transport=transport, base_url=client.base_url, timeout=60) as mine:
            return mine.post("/predictions/mortal", content=body)

    worker_died = (500, "InternalServerException", "Worker died.")
    assert error(ask("end 0", "127.0.0.7")) == worker_died
    status, kind, message = error(ask("end 0", "127.0.0.8"))
    assert (status, kind) == (400, "BadRequestException")
    assert message.startswith("this request has just ended two workers of the model, the last one")
    assert [error(ask(f"end {number}", "127.0.0.7")) for number in (1, 2)] == [worker_died] * 2
    refused = ask("harmless", "127.0.0.7")
    assert error(refused)[0] == 503
    assert refused.headers["x-modelyard-reason"].startswith(
        "requests of 127.0.0.7 have just ended 6 workers"
    )
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert ask("harmless").text == "alive"
