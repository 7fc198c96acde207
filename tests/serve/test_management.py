"""The management and metrics APIs of a real server process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from modelyard.serve.api.management import management_routes
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import Registry
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.policy import Policy
from modelyard.serve.settings import load_settings
from tests.serve.live import LiveServer, build_archive, is_alive, poll, running


def documented() -> dict[str, dict[str, object]]:
    """Return the paths that the server's management API documents."""
    settings, registry, metrics = load_settings({}, None, {}), Registry(), Metrics()
    api = FastAPI()
    api.include_router(management_routes(registry, Lifecycle(Policy(settings), registry, metrics)))
    paths: dict[str, dict[str, object]] = api.openapi()["paths"]
    return paths


ROUTES = [
    (method.upper(), path.format(model="echo", version="1.0"))
    for path, item in documented().items()
    for method in item
]
OTHER_REQUESTS = [
    ("GET", "/"),
    ("GET", "/nowhere"),
    ("GET", "/models/"),
    ("GET", "//models"),
    ("GET", "/MODELS"),
    ("GET", "/%6dodels"),
    ("GET", "/models;x"),
    ("GET", "/openapi.json"),
    ("GET", "/docs/"),
    ("GET", "/ping"),
    ("GET", "/metrics"),
    ("HEAD", "/models"),
    ("OPTIONS", "/models"),
    ("PATCH", "/models"),
    ("TRACE", "/models"),
    ("POST", "/predictions/echo"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("management")
    store = folder / "store"
    build_archive(store, "echo")
    shutil.copy(build_archive(store, "echo", name="echo2", version="2.0"), store / "second.mar")
    for behaviour in ("picky", "breaks_on_import", "breaks_on_initialize"):
        build_archive(store, behaviour)
    build_archive(store, "slow_to_end")
    request = folder / "request.bin"
    request.write_text("hello", encoding="utf-8")
    build_archive(store, "picky", name="right", examples=[f'{request}="fine: hello"'])
    build_archive(store, "picky", name="wrong", examples=[f'{request}="fine: goodbye"'])
    damage(build_archive(store, "picky", name="damaged"))
    escape(store / "escapes.mar")
    (store / "no_zip.mar").write_bytes(b"this is not a zip")
    build_archive(store, "picky", name="odd", config="batchSize: many\n")
    with running(folder / "state", store, "--workers=1", "--models=echo") as server:
        yield server


def damage(file: Path) -> None:
    """Change one byte of the handler inside an archive."""
    content = bytearray(file.read_bytes())
    content[content.index(b"short and stout")] ^= 1
    file.write_bytes(content)


def escape(file: Path) -> None:
    """Write an archive that holds a path outside itself."""
    manifest = {"runtime": "python", "model": {"modelName": "escapes", "handler": "h.py"}}
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        zipped.writestr("h.py", "")
        zipped.writestr("../escaped.txt", "outside")


def error_of(answer: httpx.Response) -> dict[str, object]:
    content: dict[str, object] = answer.json()
    assert content["code"] == answer.status_code
    assert content["request_id"] == answer.headers["x-request-id"]
    return content


def names(server: LiveServer) -> list[str]:
    return [model["modelName"] for model in server.management.get("/models").json()["models"]]


def unpacked(server: LiveServer) -> list[str]:
    return sorted(folder.name for folder in (server.state_dir / "unpacked").glob("*-*"))


# -- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES + OTHER_REQUESTS)
@pytest.mark.parametrize("token", [None, "wrong", "inference"])
def test_nothing_is_answered_without_the_right_token(
    server: LiveServer, method: str, path: str, token: str | None
) -> None:
    given = server.inference_token if token == "inference" else token
    headers = {"Authorization": f"Bearer {given}"} if given else {}
    before = names(server)
    with httpx.Client(base_url=server.about["management"], timeout=20, verify=False) as anybody:
        answer = anybody.request(method, path, headers=headers, params={"url": "picky"})
    is_known = token == "inference"
    assert answer.status_code == (403 if is_known else 401)
    assert answer.headers.get("www-authenticate") == (None if is_known else "Bearer")
    if method != "HEAD":
        kind = "ForbiddenException" if is_known else "InvalidKeyException"
        assert error_of(answer)["type"] == kind
    assert names(server) == before


def test_every_route_is_there_with_the_right_token(server: LiveServer) -> None:
    assert len(ROUTES) == 9
    for method, path in ROUTES:
        if method == "GET":
            assert server.management.get(path).status_code == 200


def test_tokens_are_not_written_to_any_log(server: LiveServer) -> None:
    for file in (server.state_dir / "logs").rglob("*.log"):
        text = file.read_text(encoding="utf-8")
        assert server.token not in text
        assert server.inference_token not in text


# -- what is served ----------------------------------------------------------------------------


def test_models_are_listed_page_by_page(server: LiveServer) -> None:
    assert server.register("picky").status_code == 200
    assert server.management.get("/models").json() == {
        "models": [
            {"modelName": "echo", "modelUrl": "echo.mar"},
            {"modelName": "picky", "modelUrl": "picky.mar"},
        ]
    }
    first = server.management.get("/models", params={"limit": 1}).json()
    assert [model["modelName"] for model in first["models"]] == ["echo"]
    second = {"limit": 1, "next_page_token": first["nextPageToken"]}
    page = server.management.get("/models", params=second).json()
    assert [model["modelName"] for model in page["models"]] == ["picky"]
    assert server.management.delete("/models/picky").status_code == 200


def test_a_model_is_described_with_its_workers_and_queue(server: LiveServer) -> None:
    described = server.describe("echo")
    assert described["modelVersion"] == "1.0"
    assert described["isDefault"] is True
    assert described["batchSize"] == 8
    (worker,) = described["workers"]
    assert worker["status"] == "READY"
    assert is_alive(worker["pid"])
    assert worker["memoryUsage"] > 1_000_000
    assert described["jobQueueStatus"] == {
        "remainingCapacity": 100,
        "pendingRequests": 0,
        "pendingExplanations": 0,
        "pendingHigh": 0,
        "pendingNormal": 0,
        "pendingLow": 0,
    }


def test_a_model_is_registered_scaled_and_unregistered(server: LiveServer) -> None:
    answer = server.register("picky", initial_workers=2)
    assert answer.json() == {
        "status": 'Model "picky" Version: 1.0 registered with 2 initial workers'
    }
    first = server.worker_pids("picky")
    assert len(first) == 2

    answer = server.management.put("/models/picky", params={"min_worker": 1})
    assert answer.json() == {"status": "Workers scaled to 1 for model: picky"}
    assert server.worker_pids("picky") == first[:1]
    poll(lambda: not is_alive(first[1]), "the surplus worker ends", 5)

    answer = server.management.put("/models/picky/1.0", params={"min_worker": 0})
    assert answer.json() == {"status": "Workers scaled to 0 for model: picky, version: 1.0"}
    refused = server.predict("picky", b"x")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "picky 1.0 has no workers; scale it up" in refused.json()["message"]
    assert server.client.get("/ping").json() == {"status": "Healthy"}

    server.management.put("/models/picky", params={"min_worker": 1})
    assert server.predict("picky", b"x").text == "fine: x"
    (last,) = server.worker_pids("picky")
    answer = server.management.delete("/models/picky")
    assert answer.json() == {"status": 'Model "picky" unregistered'}
    assert server.predict("picky", b"x").status_code == 404
    assert not is_alive(last)
    assert names(server) == ["echo"]
    assert [name.partition("-")[0] for name in unpacked(server)] == ["echo"]


def test_a_second_version_takes_over_when_it_is_told_to(server: LiveServer) -> None:
    assert server.register("second", model_name="echo").status_code == 200

    def answering() -> str:
        return str(server.predict("echo", b"x").json()["version"])

    assert answering() == "1.0"
    assert server.client.post("/predictions/echo/2.0", content=b"x").json()["version"] == "2.0"
    every = server.management.get("/models/echo/all").json()
    assert [(one["modelVersion"], one["isDefault"]) for one in every] == [
        ("1.0", True),
        ("2.0", False),
    ]
    answer = server.management.put("/models/echo/2.0/set-default")
    assert answer.json() == {
        "status": 'Default version successfully updated for model "echo" to "2.0"'
    }
    assert answering() == "2.0"

    error = error_of(server.management.delete("/models/echo/2.0"))
    assert (error["code"], error["type"]) == (403, "InvalidModelVersionException")
    assert error["message"] == "Cannot remove default version for model echo"

    server.management.put("/models/echo/1.0/set-default")
    assert server.management.delete("/models/echo/2.0").status_code == 200
    assert answering() == "1.0"
    assert server.client.post("/predictions/echo/2.0", content=b"x").status_code == 404


def test_an_archive_may_be_registered_under_another_name(server: LiveServer) -> None:
    assert server.register("right", model_name="renamed").status_code == 200
    assert server.predict("renamed", b"x").text == "fine: x"
    assert server.management.delete("/models/renamed").status_code == 200


def test_many_at_once_change_the_same_model_one_after_the_other(server: LiveServer) -> None:
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: server.register("picky"), range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    with ThreadPoolExecutor(4) as threads:
        removed = threads.map(lambda _: server.management.delete("/models/picky"), range(4))
        assert sorted(answer.status_code for answer in removed) == [200, 404, 404, 404]
    assert names(server) == ["echo"]


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "code", "kind", "message"),
    [
        ("nowhere", 404, "ModelNotFoundException", "Model not found at: nowhere"),
        ("../state/keys.json", 400, "BadRequestException", "the name of a file in the model store"),
        ("http://127.0.0.1/x.mar", 400, "BadRequestException", "fetched needs #sha256="),
        (
            "http://127.0.0.1/x.mar#sha256=0000000000000000000000000000000000000000000000000000000000000000",
            400,
            "BadRequestException",
            "no pattern of allowed_urls",
        ),
        ("echo", 409, "ConflictStatusException", "already registered for model echo"),
        ("damaged", 400, "InvalidModelException", "the file is damaged or was changed"),
        ("escapes", 400, "InvalidModelException", "../escaped.txt"),
        ("no_zip", 400, "InvalidModelException", "no_zip.mar"),
        ("odd", 400, "BadRequestException", "batchSize: expected a whole number"),
        (
            "breaks_on_import",
            500,
            "InternalServerException",
            "No module named 'a_library_that_nobody_has' (handler.py:3)",
        ),
        (
            "breaks_on_initialize",
            500,
            "InternalServerException",
            "ValueError: the vocabulary holds no words (handler.py:6)",
        ),
        (
            "wrong",
            400,
            "InvalidModelException",
            "expected 'fine: goodbye', got 'fine: hello'; the weights, the labels or the",
        ),
    ],
)
def test_an_archive_that_cannot_be_served_says_why_and_leaves_nothing(
    server: LiveServer, file: str, code: int, kind: str, message: str
) -> None:
    before, state = unpacked(server), (server.state_dir / "models.json").read_bytes()
    error = error_of(server.register(file))
    assert (error["code"], error["type"]) == (code, kind)
    assert message in str(error["message"])
    assert str(server.state_dir) not in str(error["message"])
    assert names(server) == ["echo"]
    assert unpacked(server) == before
    assert (server.state_dir / "models.json").read_bytes() == state
    assert not (server.state_dir / "escaped.txt").exists()
    assert f'model="{file}"' not in server.metrics.get("/metrics").text or file == "echo"


@pytest.mark.parametrize(
    ("method", "path", "parameters", "field"),
    [
        ("POST", "/models", {}, "url"),
        ("POST", "/models", {"url": "picky", "initial_workers": "-1"}, "initial_workers"),
        ("POST", "/models", {"url": "picky", "initial_workers": "many"}, "initial_workers"),
        ("POST", "/models", {"url": "picky", "model_name": "../x"}, "model name"),
        ("POST", "/models", {"url": "picky", "model_name": "-rf"}, "model name"),
        ("POST", "/models", {"url": "picky", "model_name": "a\0b"}, "model name"),
        ("PUT", "/models/echo", {"min_worker": "-1"}, "min_worker"),
        ("PUT", "/models/echo", {"min_worker": "2000"}, "min_worker"),
        ("PUT", "/models/echo", {"min_worker": "2", "max_worker": "1"}, "max_worker"),
        ("GET", "/models", {"limit": "0"}, "limit"),
        ("GET", "/models", {"next_page_token": "x"}, "next_page_token"),
    ],
)
def test_a_wrong_parameter_is_named(
    server: LiveServer, method: str, path: str, parameters: dict[str, str], field: str
) -> None:
    error = error_of(server.management.request(method, path, params=parameters))
    assert error["code"] == 400
    assert field in str(error["message"])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/models/cats"),
        ("GET", "/models/echo/9"),
        ("PUT", "/models/cats"),
        ("PUT", "/models/echo/9"),
        ("PUT", "/models/echo/9/set-default"),
        ("DELETE", "/models/cats"),
        ("DELETE", "/models/echo/9"),
    ],
)
def test_an_unknown_model_or_version_is_404(server: LiveServer, method: str, path: str) -> None:
    assert error_of(server.management.request(method, path))["code"] == 404


def test_a_worker_that_cannot_be_spawned_is_an_error_and_not_a_wait(server: LiveServer) -> None:
    in_the_way = server.state_dir / "logs" / "unloggable-1.0" / "worker-1.log"
    in_the_way.mkdir(parents=True)
    assert server.register("picky", model_name="unloggable").status_code == 500
    assert names(server) == ["echo"]


def test_a_change_that_cannot_be_saved_is_not_made(server: LiveServer) -> None:
    """As on a full disk: here a folder is where the file of the state should be."""
    file = server.state_dir / "models.json"
    saved = file.read_bytes()
    folders = unpacked(server)
    file.unlink()
    file.mkdir()
    try:
        for method, path in (
            ("POST", "/models?url=picky&model_name=unsaved&initial_workers=0"),
            ("DELETE", "/models/echo"),
            ("PUT", "/models/echo?min_worker=2"),
        ):
            answer = error_of(server.management.request(method, path))
            assert (answer["code"], "could not be saved" in str(answer["message"])) == (500, True)
        assert names(server) == ["echo"]
        assert unpacked(server) == folders
        assert server.predict("echo", b"x").status_code == 200
        assert server.describe("echo")["minWorkers"] == 1
    finally:
        file.rmdir()
        file.write_bytes(saved)
    assert server.management.put("/models/echo?min_worker=1").status_code == 200
    assert len(server.worker_pids("echo")) == 1


# -- requests that meet a change ---------------------------------------------------------------


def test_a_request_that_arrives_while_its_model_goes_is_answered(server: LiveServer) -> None:
    """It found the model, was slow to send its body, and the workers were told to end meanwhile."""
    assert server.register("slow_to_end").status_code == 200
    with (
        ThreadPoolExecutor(1) as threads,
        socket.create_connection(server.address, 20) as client,
    ):
        client.sendall(
            b"POST /predictions/slow_to_end HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n"
        )
        assert client.recv(100).startswith(b"HTTP/1.1 100 ")  # the server waits for the body
        removed = threads.submit(server.management.delete, "/models/slow_to_end")
        poll(
            lambda: server.management.get("/models/slow_to_end").status_code == 404,
            "the model is no longer registered",
        )
        client.sendall(b"body")
        head = client.recv(65536)
        assert removed.result().status_code == 200
    assert head.split()[1] in (b"200", b"503"), head


# -- metrics -----------------------------------------------------------------------------------


def test_known_traffic_gives_known_counts(server: LiveServer) -> None:
    assert server.register("picky", model_name="counted").status_code == 200
    for body in (b"1", b"2", b"3", b"bad", b"broken"):
        server.predict("counted", body)
    server.client.post("/explanations/counted", content=b"x")
    (pid,) = server.worker_pids("counted")
    os.kill(pid, 9)
    poll(lambda: server.worker_pids("counted") not in ([], [pid]), "the worker is replaced")

    def count(name: str, **labels: str) -> float:
        return server.metric(f"modelyard_{name}", model="counted", version="1.0", **labels)

    assert count("requests_total", kind="predict", code="200") == 3
    assert count("requests_total", kind="predict", code="400") == 1
    assert count("errors_total", kind="predict", code="400") == 1
    assert count("errors_total", kind="predict", code="500") == 1
    assert count("errors_total", kind="predict", code="200") == 0
    assert count("requests_total", kind="explain", code="200") == 1
    assert count("request_latency_seconds_count", kind="predict") == 5
    assert count("queue_time_seconds_count", kind="predict") == 5
    assert count("batch_size_count", kind="predict") == 5
    assert count("batch_size_sum", kind="predict") == 5
    assert count("queue_length", kind="predict") == 0
    assert count("worker_restarts_total") == 1
    assert count("ready_workers") == 1
    assert server.management.delete("/models/counted").status_code == 200
    assert 'model="counted"' not in server.metrics.get("/metrics").text


def test_requests_for_no_model_are_counted_without_a_label_of_their_own(
    server: LiveServer,
) -> None:
    before = server.metric("modelyard_unrouted_requests_total", code="404")
    for at in range(3):
        server.predict(f"made-up-{at}", b"x")
    assert server.metric("modelyard_unrouted_requests_total", code="404") == before + 3
    assert "made-up" not in server.metrics.get("/metrics").text


def test_metrics_are_prometheus_text(server: LiveServer) -> None:
    answer = server.metrics.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for name in (
        "modelyard_requests_total",
        "modelyard_errors_total",
        "modelyard_request_latency_seconds",
        "modelyard_queue_time_seconds",
        "modelyard_worker_queue_seconds",
        "modelyard_handler_seconds",
        "modelyard_batch_size",
        "modelyard_queue_length",
        "modelyard_worker_restarts_total",
        "modelyard_ready_workers",
        "modelyard_unrouted_requests_total",
    ):
        assert f"# HELP {name.removesuffix('_total')}" in answer.text
