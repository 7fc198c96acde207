"""Answers that are kept: what finds them, what is never kept, and with what they end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.archiver import write_archive
from modelyard.serve.dataplane.cache import ENTRY_BYTES
from tests.serve.live import LiveServer, build_archive, poll, running

COUNTER = """
import time
from pathlib import Path
from modelyard.handlers import BadInput

count = 0

def handle(data, context):
    global count
    if data is None:
        return None
    answers = []
    for at, row in enumerate(data):
        count += 1
        word, *rest = bytes(row["body"]).decode().split()
        if word == "bad":
            raise BadInput("bad")
        if word == "gate":
            while not Path(rest[0]).exists():
                time.sleep(0.005)
        if word == "stream":
            context.send_intermediate(["begun "])
        if word == "header":
            context.set_response_header(at, *rest)
        who = context.get_request_header(at, "x-user")
        answers.append({"count": count, "who": who})
    return answers
"""
SETTINGS = {
    "model_settings": {
        "counter": {"cacheAnswers": True, "cacheIgnores": ["X-Amzn-Trace-Id"], "jobQueueSize": 1,
                    "minWorkers": 1, "batchSize": 1},
        "tensors": {"cacheAnswers": True, "minWorkers": 1},
    },
    "answer_cache_bytes": 8192,
}  # fmt: skip
HEADER = "inference-header-content-length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("cache")
    (store := folder / "store").mkdir()
    (config := folder / "config.yaml").write_text(json.dumps(SETTINGS))
    (folder / "handler.py").write_text(COUNTER)
    build_archive(store, "tensors")
    archive = {"artifact": store / ".build" / "weights.bin", "output_dir": store}
    for name, version in (("counter", "1.0"), ("newer", "2.0")):
        code = str(folder / "handler.py")
        write_archive(name, version=version, handler=code, **archive)  # type: ignore[arg-type]
    with running(folder / "state", store, f"--config={config}") as server:
        server.register_all("counter.mar", "tensors.mar")
        yield server


def ask(server: LiveServer, body: str, path: str = "counter", **headers: str) -> httpx.Response:
    spelled = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.predict(path, body, headers=spelled)


def outcomes(*answers: httpx.Response) -> list[str]:
    return [answer.headers["x-cache"] for answer in answers]


def kept(server: LiveServer, model: str = "counter") -> dict[str, int]:
    status: dict[str, int] = server.describe(model)["cacheStatus"]
    return status


# -- what finds an answer ----------------------------------------------------------------------


def test_the_same_request_gets_the_same_answer_without_a_worker(server: LiveServer) -> None:
    labels = {"model": "counter", "kind": "predict"}
    first = ask(server, "same")
    ran = server.metric("modelyard_handler_seconds_count", **labels)
    asked = server.metric("modelyard_requests_total", **labels, code="200")
    again = [ask(server, "same") for _ in range(3)]
    assert outcomes(first, *again) == ["miss", "hit", "hit", "hit"]
    assert {each.content for each in again} == {first.content}
    assert {each.headers["x-model-version"] for each in again} == {"1.0"}
    assert server.metric("modelyard_handler_seconds_count", **labels) == ran
    assert server.metric("modelyard_requests_total", **labels, code="200") == asked + 3
    assert server.metric("modelyard_cache_lookups_total", **labels, outcome="hit") >= 3
    status = kept(server)
    assert server.metric("modelyard_cache_bytes", model="counter") == status["bytes"]
    assert status["bytes"] > status["entries"] * ENTRY_BYTES and status["limitBytes"] == 8192


def test_whatever_a_handler_can_read_makes_another_request(server: LiveServer) -> None:
    ways: list[Callable[[], httpx.Response]] = [
        lambda: ask(server, "one"),
        lambda: ask(server, "two"),
        lambda: ask(server, "one", "counter?a=1"),
        lambda: ask(server, "one", "counter/1.0/rest"),
        lambda: ask(server, "one", x_user="me"),
        lambda: ask(server, "one", x_user="you"),
        lambda: ask(server, "one", content_type="application/x-own"),
        lambda: server.client.post("/explanations/counter", content="one"),
    ]
    answers = [way() for way in ways]
    assert outcomes(*answers) == ["miss"] * len(ways)
    assert len({each.json()["count"] for each in answers[:-1]}) == len(ways) - 1
    assert [each.json()["who"] for each in answers[4:6]] == ["me", "you"]
    again = ask(server, "one", x_user="me", x_amzn_trace_id="Root=1", x_request_id="another",
                x_request_timeout="9s", x_request_priority="low")  # fmt: skip
    assert outcomes(again) == ["hit"] and again.json() == answers[4].json()
    assert again.headers["x-request-id"] == "another"


def test_every_protocol_finds_its_own_answers(server: LiveServer) -> None:
    row = [[0.5] * 8] * 8
    tensor: dict[str, Any] = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32"}
    flat = {"inputs": [{**tensor, "data": [0.5] * 64}]}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": 256}}],
                       "parameters": {"binary_data_output": True}}).encode()  # fmt: skip
    binary = head + b"\0\0\0\x3f" * 64
    post = server.client.post
    ways: list[Callable[[], httpx.Response]] = [
        lambda: post("/predictions/tensors", json=[row]),
        lambda: post("/v1/models/tensors:predict", json={"instances": [[row], [row]]}),
        lambda: post("/v2/models/tensors/infer", json=flat),
        lambda: post("/v2/models/tensors/infer", content=binary, headers={HEADER: str(len(head))}),
    ]
    for way in ways:
        first, second = way(), way()
        assert (first.status_code, second.content) == (200, first.content), first.text
        assert outcomes(first, second) == ["miss", "hit"]
        assert first.headers.get(HEADER) == second.headers.get(HEADER)


def test_an_etag_saves_the_answer(server: LiveServer) -> None:
    first = ask(server, "tagged")
    tag = first.headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    assert first.headers["cache-control"] == "private, no-cache"
    for tags in (tag, f'"other", W/{tag}'):
        has_it = ask(server, "tagged", if_none_match=tags)
        assert (has_it.status_code, has_it.content, has_it.headers["etag"]) == (304, b"", tag)
        assert "content-length" not in has_it.headers and outcomes(has_it) == ["hit"]
    assert ask(server, "tagged", if_none_match='"other"').json() == first.json()
    url = "/v2/models/tensors/infer"
    body = {"inputs": [{"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32",
                        "data": [0.25] * 64}]}  # fmt: skip
    tag = server.client.post(url, json=body).headers["etag"]
    fresh = {"If-None-Match": tag, "Cache-Control": "no-cache"}
    assert server.client.post(url, json=body, headers=fresh).status_code == 304


def test_who_asks_for_the_same_meanwhile_waits_for_that_answer(
    server: LiveServer, threads: ThreadPoolExecutor, gate: Path
) -> None:
    ask(server, "ready")
    so_far = server.handed_over("counter")
    first = threads.submit(ask, server, f"gate {gate}", x_request_timeout="20s")
    poll(lambda: server.handed_over("counter") == so_far + 1, "it runs")
    before = kept(server)["joined"]
    others = [threads.submit(ask, server, f"gate {gate}") for _ in range(4)]
    poll(lambda: kept(server)["joined"] == before + 4, "the others wait for it")
    assert server.waiting("counter") == 0  # though the queue has one place
    hit = ask(server, "ready")
    gate.touch()
    assert {each.result().content for each in others} == {first.result().content}
    assert outcomes(*(each.result() for each in others)) == ["joined"] * 4
    assert outcomes(hit) == ["hit"]


# -- what is never kept ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    ["header cache-control no-store", "header Cache-Control max-age=0", "header Vary *",
     "header cache-control private", "header set-cookie a=b", "stream", "bad"],
)  # fmt: skip
def test_what_is_not_kept(server: LiveServer, body: str) -> None:
    before = kept(server)
    first, second = ask(server, body), ask(server, body)
    assert first.status_code == second.status_code == (400 if body == "bad" else 200)
    assert body == "bad" or outcomes(first, second) == ["miss", "miss"]
    assert kept(server)["entries"] <= before["entries"] + (body.endswith("=0"))
    assert first.status_code == 400 or first.content != second.content


def test_a_client_may_ask_for_a_new_answer(server: LiveServer) -> None:
    first, second = ask(server, "anew"), ask(server, "anew", cache_control="no-cache")
    third, fourth = ask(server, "anew"), ask(server, "anew", cache_control="no-store")
    fifth = ask(server, "anew")
    assert outcomes(second, third, fourth, fifth) == ["bypass", "hit", "bypass", "hit"]
    assert third.json() == second.json() == fifth.json() != first.json()
    assert fourth.json() not in (first.json(), second.json())
    assert ask(server, "x" * (1 << 20) + "x").headers["x-cache"] == "bypass"


def test_memory_is_bounded_and_who_was_used_last_stays(server: LiveServer) -> None:
    ask(server, "stays")
    for at in range(20):
        ask(server, f"filler {at}")
        assert ask(server, "stays").headers["x-cache"] == "hit"
    status = kept(server)
    assert status["bytes"] + kept(server, "tensors")["bytes"] <= 8192
    assert status["evictions"] > 5
    assert server.metric("modelyard_cache_evictions_total", model="counter") == status["evictions"]
    assert ask(server, "filler 0").headers["x-cache"] == "miss"


# -- with what answers end ---------------------------------------------------------------------


def test_no_answer_outlives_its_version(server: LiveServer) -> None:
    first = ask(server, "lasting")
    server.register("newer.mar", model_name="counter")
    server.management.put("/models/counter/2.0/set-default")
    second = ask(server, "lasting")
    assert outcomes(second, ask(server, "lasting", "counter/1.0")) == ["miss", "hit"]
    assert second.headers["x-model-version"] == "2.0"
    server.management.put("/models/counter/1.0/set-default")
    assert outcomes(ask(server, "lasting")) == ["hit"] and first.headers["x-cache"] == "miss"
    assert server.management.delete("/models/counter/2.0").status_code == 200
    server.register("newer.mar", model_name="counter")
    assert outcomes(ask(server, "lasting", "counter/2.0")) == ["miss"]
    assert server.management.delete("/models/counter/2.0").status_code == 200
    assert 'version="2.0"' not in server.metrics.get("/metrics").text
