"""The inference API of a real server process: bodies, answers, errors, batches."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from modelyard.base.plugins import registered
from tests.serve.live import LiveServer, build_archive, poll, running

LIMIT = 100_000
OPERATIONS = Path(__file__).with_name("operations.jsonl")
"""One operation of /openapi.json a line, with its method and path."""
SCANS = Path(__file__).parents[2] / "examples" / "digits" / "scans"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, digits_store: Path) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("inference")
    store = folder / "store"
    build_archive(store, "echo")
    build_archive(store, "picky")
    build_archive(store, "slow")
    (store / "digits.mar").symlink_to(digits_store / "pt2.mar")
    config = folder / "modelyard.yaml"
    config.write_text(f"max_request_bytes: {LIMIT}\nworkers: 1\n", encoding="utf-8")
    with running(folder / "state", store, f"--config={config}") as server:
        server.register_all("echo", "picky", "slow")
        server.register_all("digits", model_name="digits")
        yield server


def error_of(answer: httpx.Response) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/json"
    content: dict[str, object] = answer.json()
    assert set(content) == {"code", "type", "message", "error", "request_id"}
    assert content["error"] == content["message"]
    assert content["code"] == answer.status_code
    assert content["request_id"] == answer.headers["x-request-id"]
    return content


def is_well(server: LiveServer) -> bool:
    ping = server.client.get("/ping")
    return ping.json() == {"status": "Healthy"} and server.predict("echo", "x").status_code == 200


# -- predictions -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_a_scan_is_read_by_post_and_by_put_as_curl_t_sends_it(
    server: LiveServer, method: str
) -> None:
    body = (SCANS / "7.png").read_bytes()
    answer = server.client.request(method, "/predictions/digits", content=body)
    assert answer.status_code == 200, answer.text
    labels = answer.json()
    assert next(iter(labels)) == max(labels, key=labels.__getitem__) == "7"
    assert sum(labels.values()) == pytest.approx(1, abs=1e-5)


def test_a_scan_may_be_sent_as_a_form(server: LiveServer) -> None:
    file = ("7.png", (SCANS / "7.png").read_bytes(), "image/png")
    answer = server.client.post("/predictions/digits", files={"data": file})
    assert answer.status_code == 200, answer.text
    assert next(iter(answer.json())) == "7"


def test_a_version_may_be_named(server: LiveServer) -> None:
    answer = server.client.post("/predictions/echo/1.0", content=b"x")
    assert (answer.status_code, answer.json()["version"]) == (200, "1.0")


def test_a_handler_is_told_query_path_and_request_id(server: LiveServer) -> None:
    answer = server.client.post(
        "/predictions/echo/1.0/more/%E2%82%AC%00?a=1&b=%20",
        content=b"x",
        headers={"X-Request-ID": "my-own.id"},
    )
    told = answer.json()
    assert told["query"] == {"a": "1", "b": " "}
    assert told["url_path"] == "more/\u20ac%00"
    assert told["request_id"] == answer.headers["x-request-id"] == "my-own.id"


def test_an_explanation_reaches_the_handler_as_one(server: LiveServer) -> None:
    assert server.client.post("/explanations/echo", content=b"x").json()["explain"] == "True"
    assert server.predict("echo", b"x").json()["explain"] == "False"


def test_a_handler_sees_headers_as_the_client_spelled_them(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    for name in ("Content-Type", "content-type", "CONTENT-type"):  # on one connection
        connection.request("POST", "/predictions/echo", "[1]", {name: "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert answer["headers"][name] == answer["content_type"] == "application/json"
        assert len([one for one in answer["headers"] if one.lower() == "content-type"]) == 1
        assert answer["headers"]["Host"]
    connection.close()


def test_what_a_handler_measures_is_on_the_metrics_api(server: LiveServer) -> None:
    labels = {"ModelName": "echo", "Level": "Model"}
    before = server.metric("Echoes", **labels)
    assert server.predict("echo").status_code == 200
    assert server.metric("Echoes", **labels) == before + 1
    only = server.metrics.get("/metrics", params={"name[]": "Echoes"}).text
    assert [line.split()[2:] for line in only.splitlines() if "# TYPE" in line] == [
        ["Echoes", "counter"]
    ]


@pytest.mark.parametrize("id", ["", "a b", "x" * 129, "\u00e9"])
def test_a_request_id_that_does_not_belong_in_a_log_is_replaced(
    server: LiveServer, id: str
) -> None:
    headers = {b"X-Request-ID": id.encode("latin-1")}
    answer = server.client.post("/predictions/echo", content=b"x", headers=headers)
    assert answer.headers["x-request-id"] != id
    assert len(answer.headers["x-request-id"]) == 36


def test_no_answer_may_be_kept_by_a_cache(server: LiveServer) -> None:
    for answer in (server.predict("echo", b"x"), server.predict("cats"), server.client.get("/x")):
        assert "no-store" in answer.headers["cache-control"]


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/predictions/cats", "ModelNotFoundException", "Model not found: cats"),
        ("/explanations/cats", "ModelNotFoundException", "Model not found: cats"),
        (
            "/predictions/echo/9.9",
            "ModelVersionNotFoundException",
            "Model version: 9.9 does not exist for model: echo",
        ),
        (
            "/predictions/",
            "ResourceNotFoundException",
            "this API has no /predictions/",
        ),
        ("/predictions/%2e%2e%2fecho", "ModelNotFoundException", "Model not found: .."),
        ("/predictions/..%00", "ModelNotFoundException", "Model not found: ..\0"),
    ],
)
def test_what_is_not_there_is_named(server: LiveServer, path: str, kind: str, message: str) -> None:
    error = error_of(server.client.post(path, content=b"x"))
    assert (error["code"], error["type"]) == (404, kind)
    said, _, instead = str(error["message"]).partition("; ")
    assert said == message
    if "Model" in kind:
        has_model = "version" in message
        there = "it has 1.0" if has_model else "this server has digits, echo, picky, slow"
        assert sorted(re.split("[ ,]+", instead)) == sorted(re.split("[ ,]+", there))


def test_a_wrong_method_is_refused(server: LiveServer) -> None:
    answer = server.client.get("/predictions/echo")
    assert error_of(answer)["type"] == "MethodNotAllowedException"
    assert answer.status_code == 405


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"", "the body is empty"), (b"no image", "image"), (b"\x89PNG\r\n\x1a\n\0\0", "image")],
    ids=["empty", "text", "broken png"],
)
@pytest.mark.parametrize("api", ["predictions", "explanations"])
def test_a_body_that_is_no_image_is_the_clients_fault(
    server: LiveServer, api: str, body: bytes, message: str
) -> None:
    error = error_of(server.client.post(f"/{api}/digits", content=body))
    assert (error["code"], error["type"]) == (400, "BadRequestException")
    assert message in str(error["message"])


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("method=lime", "method"),
        ("target=77", "target"),
        ("target=-1", "target"),
        ("baseline=grey", "baseline"),
        ("n_steps=0", "n_steps"),
        ("n_steps=1000000000", "n_steps"),
        ("n_steps=ten", "n_steps"),
        ("tolerance=0", "tolerance"),
        ("tolerance=nan", "tolerance"),
        ("format=gif", "format"),
        ("steps=10", "steps"),
    ],
)
def test_an_option_of_an_explanation_that_is_wrong_is_named(
    server: LiveServer, query: str, field: str
) -> None:
    body = (SCANS / "7.png").read_bytes()
    error = error_of(server.client.post(f"/explanations/digits?{query}", content=body))
    assert error["code"] == 400
    assert field in str(error["message"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"bad", 400, "body is bad; expected anything else"),
        (b"broken", 500, "ZeroDivisionError: "),
        (b"teapot", 418, "short and stout"),
        (b"nowhere", 500, "no such status"),
        (b"unprintable", 500, "Unprintable"),
        (b"exit", 500, "SystemExit: 3"),
        (b"nul header", 500, "the handler set the header 'x-note'"),
        (b"split header", 500, "the handler set the header 'x-note'"),
        (b"status 999", 500, "the handler set the status 999"),
    ],
    ids=lambda value: value.decode() if isinstance(value, bytes) else None,
)
def test_what_a_handler_gets_wrong_is_one_json_error(
    server: LiveServer, body: bytes, status: int, message: str
) -> None:
    error = error_of(server.predict("picky", body))
    assert error["code"] == status
    assert message in str(error["message"])
    assert "handler.py" not in str(error["message"])


def test_a_handler_sets_status_and_headers(server: LiveServer) -> None:
    assert server.predict("picky", b"status 202").status_code == 202
    answer = server.predict("picky", b"own header")
    assert (answer.headers["content-type"], answer.headers["x-note"]) == ("text/csv", "mine")


def test_a_sick_model_keeps_its_worker(server: LiveServer) -> None:
    assert server.describe("picky")["workers"][0]["restarts"] == 0


def test_bad_requests_among_good_ones_fail_alone(server: LiveServer) -> None:
    bodies = [b"one", b"bad", b"two", b"broken", b"three", b"bad", b"four", b"five"] * 3
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: server.predict("picky", body), bodies))
    expected = {b"bad": 400, b"broken": 500}
    assert [answer.status_code for answer in answers] == [expected.get(b, 200) for b in bodies]
    assert [answer.text for answer in answers if answer.status_code == 200] == [
        f"fine: {body.decode()}" for body in bodies if body not in expected
    ]


# -- body over the limit -----------------------------------------------------------------------


def test_a_body_of_the_limit_is_taken(server: LiveServer) -> None:
    assert len(server.predict("echo", b"x" * LIMIT).json()["body"]) == LIMIT


def test_a_body_that_is_declared_too_long_is_refused_before_it_is_sent(server: LiveServer) -> None:
    with socket.create_connection(server.address, 10) as client:
        client.sendall(
            b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % (LIMIT + 1)
        )
        head = client.recv(65536)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in head
    assert is_well(server)


@pytest.mark.parametrize("size", [LIMIT + 1, 30_000_000])
def test_a_client_that_sends_on_can_read_why_its_body_was_refused(
    server: LiveServer, size: int
) -> None:
    host, port = server.address
    connection = http.client.HTTPConnection(host, port, timeout=20)
    connection.request("POST", "/predictions/echo", b"x" * size)
    answer = connection.getresponse()
    error = json.loads(answer.read())
    connection.close()
    assert (answer.status, error["type"]) == (413, "RequestTooLargeException")
    assert f"larger than {LIMIT} bytes" in error["message"]
    assert is_well(server)


def test_a_chunked_body_is_refused_when_it_crosses_the_limit(server: LiveServer) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 10_000

    answer = server.client.post("/predictions/echo", content=chunks())
    assert error_of(answer)["code"] == 413
    assert is_well(server)


def test_a_chunked_body_within_the_limit_is_taken(server: LiveServer) -> None:
    parts = [b"one ", b"two ", b"three"]
    answer = server.client.post("/predictions/echo", content=iter(parts))
    assert answer.json()["body"] == "one two three"


def test_a_client_that_leaves_while_it_sends_harms_nobody(server: LiveServer) -> None:
    with socket.create_connection(server.address, 10) as client:
        client.sendall(
            b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nhalf"
        )
    assert is_well(server)


# -- batches -----------------------------------------------------------------------------------


def test_what_waits_while_a_worker_is_busy_becomes_one_batch(
    server: LiveServer, gate: Path, threads: ThreadPoolExecutor
) -> None:
    series = {"model": "slow", "kind": "predict"}

    def handed_over() -> float:
        return server.metric("modelyard_queue_time_seconds_count", **series)

    before = handed_over()
    bodies = [str(at) for at in range(8)]
    first = threads.submit(server.predict, "slow", str(gate))
    poll(gate.with_name("gate.began").exists, "the worker is busy")
    waiting = [threads.submit(server.predict, "slow", body) for body in bodies]
    poll(lambda: handed_over() == before + 9, "the others wait at the worker")
    gate.touch()
    assert first.result().json() == {"batch": [str(gate)]}
    for each in waiting:
        assert sorted(each.result().json()["batch"]) == bodies


def test_the_worker_tells_how_long_requests_waited_there_and_how_long_the_handler_took(
    server: LiveServer, gate: Path, threads: ThreadPoolExecutor
) -> None:
    series = {"model": "slow", "kind": "predict"}

    def seconds() -> tuple[float, float]:
        queue, handler = (
            server.metric(f"modelyard_{name}_seconds_sum", **series)
            for name in ("worker_queue", "handler")
        )
        return queue, handler

    def handed_over() -> float:
        return server.metric("modelyard_queue_time_seconds_count", **series)

    before, count = seconds(), handed_over()
    first = threads.submit(server.predict, "slow", str(gate))
    poll(gate.with_name("gate.began").exists, "the worker is busy")
    second = threads.submit(server.predict, "slow", "x")
    poll(lambda: handed_over() == count + 2, "the other waits at the worker")
    time.sleep(0.1)
    gate.touch()
    assert {first.result().status_code, second.result().status_code} == {200}
    queue, handler = seconds()
    assert handler - before[1] >= 0.1
    assert queue - before[0] >= 0.1
    for name in ("worker_queue", "handler"):
        assert server.metric(f"modelyard_{name}_seconds_count", **series) == count + 2


@pytest.mark.parametrize(
    "path",
    ["/ping", "/health/live", "/health/ready", "/v2", "/v2/models/echo", "/docs", "/openapi.json"],
)
def test_head_is_answered_as_get_without_the_body(server: LiveServer, path: str) -> None:
    got, head = server.client.get(path), server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(got.content))
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_of_what_cannot_be_got_says_what_can(server: LiveServer) -> None:
    head = server.client.head("/predictions/echo")
    assert (head.status_code, head.headers["allow"]) == (405, "POST")
    assert server.client.post("/ping").headers["allow"] == "GET, HEAD"
    assert server.management.options("/models").headers["allow"] == "GET, POST, HEAD"
    assert server.management.get("/models?limit=1000").status_code == 200
    assert server.management.head("/models").status_code == 200
    assert server.metrics.head("/metrics").status_code == 200
    assert is_well(server)


def test_a_compressed_body_is_refused_and_an_identical_one_is_not(server: LiveServer) -> None:
    compressed = {"Content-Encoding": "gzip"}
    answer = server.predict("echo", gzip.compress(b"x"), headers=compressed)
    assert error_of(answer)["message"] == ("Content-Encoding is 'gzip'; send the body without one")
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    plain = {"Content-Encoding": "identity"}
    assert server.predict("echo", b"x", headers=plain).status_code == 200


def test_a_small_file_of_many_pixels_is_refused_undecoded(server: LiveServer) -> None:
    file = io.BytesIO()
    Image.new("1", (5001, 5000)).save(file, "PNG")
    assert len(file.getvalue()) < LIMIT
    error = error_of(server.predict("digits", file.getvalue()))
    assert error["code"] == 400
    assert "5001 × 5000 pixels; the limit is 25000000 in all (max_image_pixels)" in error["message"]  # type: ignore[operator]


# -- tokens and documentation ------------------------------------------------------------------


def test_on_loopback_no_token_is_needed(server: LiveServer) -> None:
    assert "authorization" not in server.client.headers
    assert server.client.get("/health/ready").json() == {"ready": True}
    assert server.client.get("/health/live").json() == {"live": True}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Host": "evil.example:8080"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
    ids=["rebound", "name", "origin", "site"],
)
def test_no_api_takes_a_foreign_name_or_page(server: LiveServer, headers: dict[str, str]) -> None:
    asked = (
        (server.client, "POST", "/predictions/echo"),
        (server.client, "GET", "/openapi.json"),
        (server.management, "POST", "/models?url=picky.mar&model_name=evil"),
        (server.metrics, "GET", "/metrics"),
    )
    for client, method, path in asked:
        error = error_of(client.request(method, path, headers=headers))
        assert (error["code"], error["type"]) == (403, "ForbiddenException")
    assert server.management.get("/models/evil").status_code == 404
    own = {"Origin": str(server.client.base_url), "Sec-Fetch-Site": "same-origin"}
    assert server.predict("echo", "x", headers=own).status_code == 200


# -- the Open Inference Protocol -----------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/versions/1.0"])
def test_a_model_tells_its_inputs_and_outputs(server: LiveServer, version: str) -> None:
    path = f"/v2/models/digits{version}"
    described = server.client.get(path).json()
    (given,), (answered,) = described["inputs"], described["outputs"]
    assert (described["name"], described["versions"]) == ("digits", ["1.0"])
    assert given["datatype"] == answered["datatype"] == "FP32"
    assert given["shape"][0] == answered["shape"][0] == -1
    assert server.client.get(f"{path}/ready").json() == {"name": "digits", "ready": True}
    assert server.client.get("/v2/health/ready").json() == {"ready": True}
    assert server.client.get("/v2").json()["name"] == "modelyard"


DOCUMENTED = {
    "/ping": {"get"},
    "/health/live": {"get"},
    "/health/ready": {"get"},
    "/predictions/{model}": {"post"},
    "/predictions/{model}/{version}": {"post"},
    "/explanations/{model}": {"post"},
    "/explanations/{model}/{version}": {"post"},
    "/openapi/{model}.json": {"get"},
    "/openapi/{model}/{version}.json": {"get"},
    "/": {"get"},
    "/v1/models": {"get"},
    "/v1/models/{model}": {"get"},
    "/v1/models/{model}:predict": {"post"},
    "/v1/models/{model}:explain": {"post"},
    "/v2/repository/models/{model}/load": {"post"},
    "/v2/repository/models/{model}/unload": {"post"},
    "/v2": {"get"},
    "/v2/health/live": {"get"},
    "/v2/health/ready": {"get"},
    "/v2/models": {"get"},
    "/v2/repository/index": {"post"},
    "/v2/models/{model}": {"get"},
    "/v2/models/{model}/ready": {"get"},
    "/v2/models/{model}/infer": {"post"},
    "/v2/models/{model}/infer_stream": {"post"},
    "/v2/models/{model}/generate": {"post"},
    "/v2/models/{model}/generate_stream": {"post"},
    "/v2/models/{model}/versions/{version}": {"get"},
    "/v2/models/{model}/versions/{version}/ready": {"get"},
    "/v2/models/{model}/versions/{version}/infer": {"post"},
    "/models": {"get", "post"},
    "/models/{model}": {"get", "put", "delete"},
    "/models/{model}/{version}": {"get", "put", "delete"},
    "/models/{model}/{version}/set-default": {"put"},
    "/metrics": {"get"},
}


TAGS = {
    *("inference", "open inference protocol", "management", "health", "KServe v1"),
    *("documentation", "metrics"),
}
"""Tags of core's operations; those of plug-ins have others."""


def documents(server: LiveServer) -> list[dict[str, Any]]:
    """Return what the three APIs say of themselves, but for what plug-ins add."""
    clients = (server.client, server.management, server.metrics)
    found = [client.get("/openapi.json").json() for client in clients]
    for document in found:
        paths = document["paths"].items()
        document["paths"] = {
            path: item
            for path, item in paths
            if any(TAGS & {*operation["tags"]} for operation in item.values())
        }
    return found


def test_each_api_describes_itself_at_the_address_by_which_it_was_asked(
    server: LiveServer,
) -> None:
    described = {
        path: set(item)
        for document in documents(server)
        for path, item in document["paths"].items()
    }
    assert described == DOCUMENTED
    for document, path in zip(
        documents(server), ("/predictions/{model}", "/models", "/metrics"), strict=True
    ):
        assert path in document["paths"]
        assert document["servers"] == [{"url": "."}]


def test_every_operation_says_what_it_may_be_refused_with(server: LiveServer) -> None:
    for document in documents(server):
        shared = document["components"]["responses"]
        for path, item in document["paths"].items():
            is_open = path == "/ping" or path.endswith(("/health/live", "/health/ready"))
            for operation in item.values():
                responses = operation["responses"]
                assert {"200", "403", "405", "408", "414", "431"} <= responses.keys(), path
                assert ("401" in responses) is not is_open, path
                assert (operation.get("security") == []) is is_open, path
                assert ("404" in responses) is ("{model}" in path or path == "/models"), path
                for response in responses.values():
                    assert response.get("$ref", "").rpartition("/")[2] in {"", *shared}


@pytest.mark.skipif(not registered("methods"), reason="recorded with the methods of plug-ins")
def test_every_operation_is_described_as_it_was_recorded(server: LiveServer) -> None:
    described = [
        json.dumps({"method": method, "path": path, **operation}, sort_keys=True)
        for document in documents(server)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    recorded = map(json.loads, OPERATIONS.read_text(encoding="utf-8").splitlines())
    assert sorted(described) == sorted(json.dumps(each, sort_keys=True) for each in recorded)


def test_no_option_of_an_explanation_is_filled_in(server: LiveServer) -> None:
    """A page of JavaScript takes the first example, and sees names that are numbers first."""
    document = server.client.get("/openapi.json").json()
    parameters = document["paths"]["/explanations/{model}"]["post"]["parameters"]
    offered = [
        each["examples"] for each in parameters if each["in"] == "query" and "examples" in each
    ]
    assert len(offered) >= 2
    for examples in offered:
        assert next(iter(examples.values())) == {"value": ""}
        assert not any(name.isdigit() for name in examples)


def test_each_api_has_a_page_that_needs_nothing_from_elsewhere_and_no_token(
    server: LiveServer,
) -> None:
    for api in ("inference", "management", "metrics"):
        with httpx.Client(base_url=server.about[api], verify=False) as browser:
            page = browser.get("/docs")
            assert page.status_code == 200
            assert "connect-src 'self'" in page.headers["content-security-policy"]
            named = re.findall(r'(?:src|href)="([^"]*)"', page.text)
            assert len(named) == 5
            for address in named:
                assert not address.startswith(("/", "http"))
                assert browser.get(f"/{address}").status_code == 200
            assert 'url: "openapi.json"' in browser.get("/docs/own/docs.js").text


@pytest.mark.parametrize("path", ["../../etc/passwd", "%2e%2e/%2e%2e/docs.py", "..%2fdocs.py"])
def test_the_documentations_files_are_all_that_is_served(server: LiveServer, path: str) -> None:
    assert server.client.get(f"/docs/assets/{path}").status_code == 404


def test_a_body_without_an_end_is_refused_when_it_crosses_the_limit(server: LiveServer) -> None:
    with socket.create_connection(server.address, 10) as client:
        client.sendall(
            b"POST /predictions/echo HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%s\r\n" % (LIMIT + 1, b"x" * (LIMIT + 1))
        )
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert is_well(server)
