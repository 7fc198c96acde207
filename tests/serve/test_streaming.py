"""Answers in chunks, from a handler to a client."""

from __future__ import annotations

import http.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.live import LiveServer, build_archive, poll, start_server


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    one, two = "minWorkers: 1\nbatchSize: 1\n", "minWorkers: 1\nbatchSize: 2\nmaxBatchDelay: 5000\n"
    build_archive(shared_server.store, "streamer", config=one)
    build_archive(shared_server.store, "streamer", name="pair", config=two)
    shared_server.register_all("streamer", "pair")
    return shared_server


def restarts(server: LiveServer) -> int:
    return int(server.describe("streamer")["workers"][0]["restarts"])


def test_chunks_come_in_order_and_the_returned_value_is_the_last(server: LiveServer) -> None:
    answer = server.predict("streamer", "count 3")
    assert answer.text == '3.0 3.1 3.2 {"end":"3"}'


def test_status_and_headers_are_those_of_the_first_chunk(server: LiveServer) -> None:
    answer = server.predict("streamer", "count 1", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-count"]) == (202, "1")
    assert answer.headers["ts_stream_next"] == "true"
    assert answer.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in answer.headers
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


def test_an_answer_without_chunks_is_no_stream(server: LiveServer) -> None:
    answer = server.predict("streamer", "count 0")
    assert answer.json() == {"end": "0"}
    assert "ts_stream_next" not in answer.headers
    assert "transfer-encoding" not in answer.headers


def test_a_chunk_arrives_while_the_handler_still_works(server: LiveServer, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with server.client.stream("POST", "/predictions/streamer", content=f"wait {gate}") as answer:
        chunks = answer.iter_text()
        assert next(chunks) == "begun "
        gate.touch()
        assert "".join(chunks) == "end"


def test_the_connection_serves_on_after_a_stream(server: LiveServer) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=20)
    for count in ("2", "1"):
        connection.request("POST", "/predictions/streamer", f"count {count}")
        assert connection.getresponse().read().endswith(b'{"end":"%s"}' % count.encode())
    connection.close()


def test_requests_of_a_batch_are_streamed_each_to_its_client(server: LiveServer) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(
            lambda body: server.predict("pair", body), ("count 2", "count 2")
        )
    assert first.text == second.text == '2.0 2.1 {"end":"2"}'


@pytest.mark.parametrize("body", ["fail 1", "unfit"])
def test_a_failure_after_the_first_chunk_breaks_the_connection(
    server: LiveServer, body: str
) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        server.predict("streamer", body, headers={"x-request-id": body.replace(" ", "-")})
    server.logs(f"request {body.replace(' ', '-')}: the stream is broken")
    assert server.predict("streamer", "count 1").status_code == 202


def test_a_failure_before_the_first_chunk_is_an_error_as_any(server: LiveServer) -> None:
    answer = server.predict("streamer", "fail 0")
    assert answer.status_code == 500
    assert answer.json()["message"] == "ValueError: no more"


def test_a_handler_is_interrupted_when_its_client_has_left(server: LiveServer, notes: Path) -> None:
    told = notes / "told"
    with server.client.stream("POST", "/predictions/streamer", content=f"forever {told}") as answer:
        assert next(answer.iter_text()).startswith("more ")
    poll(told.exists, "the handler is interrupted")
    assert server.predict("streamer", "count 1").status_code == 202


def test_a_stream_is_not_tried_again_when_its_worker_dies(server: LiveServer, notes: Path) -> None:
    runs, before = notes / "runs", restarts(server)
    with pytest.raises(httpx.RemoteProtocolError):
        server.predict("streamer", f"die {runs}")
    poll(lambda: restarts(server) > before, "the worker is replaced")
    assert server.predict("streamer", "count 1").status_code == 202
    assert runs.read_text() == "run\n"


def test_a_stop_waits_for_the_end_of_a_stream(tmp_path: Path) -> None:
    build_archive(tmp_path / "store", "streamer")
    server = start_server(tmp_path / "state", tmp_path / "store", "--models=streamer")
    gate = tmp_path / "gate"
    with (
        httpx.Client(base_url=server.about["inference"], timeout=30, verify=False) as client,
        client.stream("POST", "/predictions/streamer", content=f"wait {gate}") as answer,
    ):
        chunks = answer.iter_text()
        assert next(chunks) == "begun "
        server.signal()
        server.logs("stopping; ")
        gate.touch()
        assert "".join(chunks) == "end"
    server.close_clients()
    assert server.wait() == 0
