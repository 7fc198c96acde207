"""Pairs of requests to a real server that keeps answers: which share one, and which must not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.archiver import write_archive
from tests.adversary.gallery import Row, judge
from tests.serve.live import LiveServer, running

ECHO = """
count = 0

def handle(data, context):
    global count
    if data is None:
        return None
    answers = []
    for row in data:
        count += 1
        answers.append({"count": count, "version": context.manifest["model"]["modelVersion"]})
    return answers
"""
OWN = {"cacheAnswers": True, "cacheIgnores": ["X-Amzn-Trace-Id"], "minWorkers": 1, "batchSize": 1}
SETTINGS = {"model_settings": {"echo": OWN, "other": OWN}, "answer_cache_bytes": 1 << 20}

Sent = dict[str, Any]
"""What a request has beside the usual: path, content, headers, params."""

APART: list[tuple[str, Sent, Sent]] = [
    ("one byte", {"content": b"aa"}, {"content": b"ab"}),
    ("a byte more", {"content": b"aa"}, {"content": b"aa\0"}),
    ("a space behind", {"content": b"aa"}, {"content": b"aa "}),
    ("a line behind", {"content": b"aa"}, {"content": b"aa\n"}),
    ("upper case", {"content": b"aa"}, {"content": b"AA"}),
    ("another normal form", {"content": "\u00e9".encode()}, {"content": "e\u0301".encode()}),
    ("another order of keys", {"content": b'{"a":1,"b":2}'}, {"content": b'{"b":2,"a":1}'}),
    ("1.0 for 1", {"content": b"[1]"}, {"content": b"[1.0]"}),
    ("another media type", {"headers": {"content-type": "text/plain"}},
     {"headers": {"content-type": "application/json"}}),
    ("another charset", {"headers": {"content-type": "text/plain; charset=utf-8"}},
     {"headers": {"content-type": "text/plain; charset=latin-1"}}),
    ("no media type", {"headers": {"content-type": "text/plain"}}, {}),
    ("a header", {}, {"headers": {"x-user": "me"}}),
    ("another value", {"headers": {"x-user": "me"}}, {"headers": {"x-user": "you"}}),
    ("an empty value", {}, {"headers": {"x-user": ""}}),
    ("upper case of a value", {"headers": {"x-user": "me"}}, {"headers": {"x-user": "ME"}}),
    ("another header", {"headers": {"x-user": "me"}}, {"headers": {"x-owner": "me"}}),
    ("a value cut elsewhere", {"headers": {"x-a": "b", "x-c": "d"}},
     {"headers": {"x-a": "bx-c", "x-d": ""}}),
    ("its name in upper case", {"headers": {"x-user": "me"}}, {"headers": {"X-USER": "me"}}),
    ("language", {"headers": {"accept-language": "de"}}, {"headers": {"accept-language": "en"}}),
    ("what it accepts", {"headers": {"accept": "application/json"}},
     {"headers": {"accept": "text/csv"}}),
    ("a cookie", {"headers": {"cookie": "a=1"}}, {"headers": {"cookie": "a=2"}}),
    ("a key", {"headers": {"x-api-key": "a"}}, {"headers": {"x-api-key": "b"}}),
    ("no key", {"headers": {"x-api-key": "a"}}, {}),
    ("a parameter", {}, {"params": {"a": "1"}}),
    ("another parameter", {"params": {"a": "1"}}, {"params": {"a": "2"}}),
    ("a parameter twice", {"params": {"a": "1"}}, {"params": {"a": ["1", "1"]}}),
    ("a parameter for the body", {"content": b"a=1"}, {"content": b"", "params": {"a": "1"}}),
    ("a longer path", {}, {"path": "/predictions/echo/1.0/more"}),
    ("another model", {}, {"path": "/predictions/other"}),
    ("another version", {"path": "/predictions/echo/1.0"}, {"path": "/predictions/echo/2.0"}),
    ("an explanation", {}, {"path": "/explanations/echo"}),
]  # fmt: skip
TOGETHER: list[tuple[str, Sent, Sent]] = [
    ("the same", {}, {}),
    ("the same header", {"headers": {"x-user": "me"}}, {"headers": {"x-user": "me"}}),
    ("an id", {}, {"headers": {"x-request-id": "another"}}),
    ("a deadline", {}, {"headers": {"x-request-timeout": "9s"}}),
    ("a priority", {}, {"headers": {"x-request-priority": "low"}}),
    ("what is ignored", {}, {"headers": {"x-amzn-trace-id": "Root=1"}}),
    ("a tag of another answer", {}, {"headers": {"if-none-match": '"other"'}}),
    ("the same parameter", {"params": {"a": "1"}}, {"params": {"a": "1"}}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("cache")
    (store := folder / "store").mkdir()
    (config := folder / "config.yaml").write_text(json.dumps(SETTINGS))
    (folder / "handler.py").write_text(ECHO)
    (artifact := folder / "weights.bin").write_bytes(b"none")
    for file, version in (("echo", "1.0"), ("echo2", "2.0"), ("other", "1.0")):
        write_archive(
            file,
            version=version,
            handler=str(folder / "handler.py"),
            artifact=artifact,
            output_dir=store,
        )
    with running(folder / "state", store, f"--config={config}") as server:
        server.register_all("echo.mar", "other.mar")
        server.register("echo2.mar", model_name="echo")
        yield server


def ask(server: LiveServer, number: int, sent: Sent) -> httpx.Response:
    """Send a request that has a number in its body, so that no pair meets another."""
    given = {"path": "/predictions/echo", **sent}
    content = given.pop("content", b"") + b"|%d" % number
    return server.client.post(given.pop("path"), content=content, **given)


def test_requests_share_an_answer_only_where_no_handler_could_tell_them_apart(
    server: LiveServer,
) -> None:
    rows = []
    pairs = [(True, pair) for pair in APART] + [(False, pair) for pair in TOGETHER]
    for number, (is_apart, (change, one, other)) in enumerate(pairs):
        first, second = (ask(server, number, each) for each in (one, other))
        assert first.status_code == 200, first.text
        is_new = first.content != second.content or second.headers["x-cache"] != "hit"
        rows.append(Row("cache", change, is_apart, is_new))
    judge(rows)


def test_every_pair_is_asked_again_in_the_other_order(server: LiveServer) -> None:
    rows = []
    for number, (change, one, other) in enumerate([*APART, *TOGETHER], 1000):
        ask(server, number, other)
        second = ask(server, number, one)
        rows.append(
            Row("cache", change, number - 1000 < len(APART), second.headers["x-cache"] != "hit")
        )
    judge(rows)
