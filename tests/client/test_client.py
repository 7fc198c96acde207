"""The client, beside a real server and beside one that misbehaves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import http.server
import inspect
import itertools
import json
import multiprocessing
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from modelyard_client import (
    AsyncClient,
    BadAnswer,
    Client,
    ClientError,
    ExplainOptions,
    NoAnswer,
    RequestFailed,
    Retries,
)
from modelyard_client.explanation import read_explanations
from modelyard_client.options import Method
from modelyard_client.retries import Answer, Attempt, Pause, Request, read_retry_after
from modelyard_client.tensors import read_outputs, write_request

from modelyard.base.explain_options import EXPLAIN_OPTIONS
from tests.serve.live import LiveServer, build_archive, make_notes_folder


@pytest.fixture(scope="module")
def server(shared_server: LiveServer) -> LiveServer:
    names = ("echo", "picky", "streamer", "tensors")
    for name in names:
        build_archive(shared_server.store, name, config="minWorkers: 1\n")
    shared_server.register_all(*names)
    return shared_server


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.about["inference"]) as client:
        yield client


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "seen", "content_type"),
    [
        (b"\xff", "\xff", "application/octet-stream"),
        ("é", "é", "text/plain; charset=utf-8"),
        ({"a": [1, np.float32(0.5)]}, {"a": [1, 0.5]}, "application/json"),
    ],
)
def test_a_body_goes_out_as_what_it_is(
    client: Client, body: Any, seen: Any, content_type: str
) -> None:
    answer = client.predict("echo/1.0", body)
    assert (answer["body"], answer["content_type"]) == (seen, content_type)
    headers = {name.lower(): value for name, value in answer["headers"].items()}
    assert headers["user-agent"].startswith("modelyard-client/")
    assert 0 < float(headers["x-request-timeout"]) <= 60


def test_a_file_goes_out_with_the_type_of_its_name(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    answer = client.predict("echo", tmp_path / "a.json")
    assert (answer["body"], answer["content_type"]) == ([1], "application/json")
    with pytest.raises(FileNotFoundError):
        client.predict("echo", tmp_path / "none")


def test_an_answer_is_what_it_says_it_is(client: Client) -> None:
    assert client.predict("picky", b"hello") == "fine: hello"
    assert client.models() == ["echo", "picky", "streamer", "tensors"]
    assert client.is_ready()
    assert client.metadata("echo/1.0")["name"] == "echo"


@pytest.mark.parametrize(
    ("model", "body", "status", "type"),
    [
        ("nope", b"x", 404, "ModelNotFoundException"),
        ("echo/9", b"x", 404, "ModelVersionNotFoundException"),
        ("a b%2F", b"x", 404, "ModelNotFoundException"),
        ("picky", b"bad", 400, "BadRequestException"),
    ],
)
def test_an_error_is_the_servers(
    client: Client, model: str, body: bytes, status: int, type: str
) -> None:
    with pytest.raises(RequestFailed) as failed:
        client.predict(model, body)
    assert (failed.value.status, failed.value.type) == (status, type)
    assert failed.value.request_id and failed.value.request_id in str(failed.value)


def test_the_typed_options_of_an_explanation_are_the_servers() -> None:
    assert ExplainOptions.__annotations__.keys() == EXPLAIN_OPTIONS.keys() - {"format"}
    assert {*get_args(Method)} >= {*EXPLAIN_OPTIONS["method"].choices}


def test_arrays_go_and_come_as_bytes(client: Client) -> None:
    sent = {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "turned": np.arange(6, dtype=">i4").reshape(3, 2).T,
        "flags": np.array([[True], [False]]),
        "texts": np.array([["é"], ["b"]]),
        "objects": np.array([[b"\xff"], ["x"]], dtype=object),
    }
    got = client.infer("tensors/1.0", sent)
    assert {name: array.tolist() for name, array in got.items()} == {
        **{name: sent[name].tolist() for name in ("half", "turned", "flags")},
        "texts": [["é".encode()], [b"b"]],
        "objects": [[b"\xff"], [b"x"]],
    }
    assert got["half"].dtype == np.float16
    again = pickle.loads(pickle.dumps(got))
    assert (again.version, again.request_id) == ("1.0", got.request_id) and got.request_id
    got["half"][0, 0] = 5  # it is the caller's own
    assert list(client.infer("tensors", sent, outputs=["flags"])) == ["flags"]
    for wrong in (np.array(["2020-01-01"], np.datetime64), np.array([1, "x"], object), 1j):
        with pytest.raises(TypeError, match="expected"):
            client.infer("tensors", {"x": wrong})


def test_a_stream_comes_piece_by_piece(client: Client) -> None:
    gate = make_notes_folder() / "gate"
    with client.stream("streamer", f"wait {gate}") as pieces:
        assert next(pieces) == b"begun "
        gate.touch()
        assert b"".join(pieces) == b"end"
    with pytest.raises(RequestFailed, match="404"), client.stream("nope", b"x"):
        pass
    broken = client.stream("streamer", "fail 1")
    with pytest.raises(NoAnswer, match="the stream broke"), broken as pieces:
        list(pieces)


def test_the_same_with_asyncio(server: LiveServer) -> None:
    async def ask() -> None:
        async with AsyncClient(server.about["inference"]) as client:
            answers = await asyncio.gather(*(client.predict("picky", b"%d" % n) for n in range(8)))
            assert answers == [f"fine: {n}" for n in range(8)]
            got = await client.infer("tensors", {"x": np.ones((1, 2), np.float32)})
            assert got["x"].tolist() == [[1, 1]]
            async with client.stream("streamer", "count 2") as pieces:
                assert b"".join([piece async for piece in pieces]) == b'2.0 2.1 {"end":"2"}'
            assert await client.is_ready() and "echo" in await client.models()
            assert (await client.metadata("echo"))["versions"] == ["1.0"]
            with pytest.raises(RequestFailed, match="404"):
                await client.explain("nope", b"x")

    asyncio.run(ask())


def test_both_clients_have_the_same_calls() -> None:
    def calls(of: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(call).parameters)
            for name, call in vars(of).items()
            if inspect.isfunction(call) and not name.startswith("__")
        }

    assert calls(Client) == calls(AsyncClient)
    constructors = [inspect.signature(each).parameters for each in (Client, AsyncClient)]
    assert constructors[0] == constructors[1]


# -- what is sent again --------------------------------------------------------------------------


class Misbehaving(http.server.ThreadingHTTPServer):
    """Answers with one thing after the other: status and headers, or nothing at all."""

    daemon_threads = True

    def __init__(self, *answers: tuple[int, dict[str, str]] | str) -> None:
        self.answers = itertools.chain(answers, itertools.repeat((200, {})))
        self.asked: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Misbehave)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Misbehave(http.server.BaseHTTPRequestHandler):
    server: Misbehaving

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append({k.lower(): v for k, v in self.headers.items()})
        answer = next(self.server.answers)
        if isinstance(answer, str):
            self.wfile.write(answer.encode())
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, headers = answer
        body = headers.pop("body", "ok").encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


BUSY = (503, {"retry-after": "0"})


@pytest.mark.parametrize(
    ("answers", "idempotent", "asked", "outcome"),
    [
        ([BUSY, BUSY], False, 3, b"ok"),
        ([(429, {"retry-after": "0"})], False, 2, b"ok"),
        ([BUSY] * 9, False, 4, RequestFailed),
        ([(503, {})], False, 1, RequestFailed),
        ([(503, {}), (502, {}), (504, {})], True, 4, b"ok"),
        ([(500, {})], True, 1, RequestFailed),
        ([(400, {"retry-after": "0"})], True, 1, RequestFailed),
        ([(302, {"location": "http://127.0.0.1:9/"})], True, 1, RequestFailed),
        ([""], False, 1, NoAnswer),
        (["", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"], True, 3, b"ok"),
        ([(503, {"retry-after": "3600"})], True, 1, RequestFailed),
    ],
)
def test_what_may_have_run_is_sent_again_only_where_that_does_no_harm(
    answers: list[Any], idempotent: bool, asked: int, outcome: bytes | type[Exception]
) -> None:
    copies = [(each[0], dict(each[1])) if isinstance(each, tuple) else each for each in answers]
    with Misbehaving(*copies) as server, Client(server.url, idempotent=idempotent) as client:
        if isinstance(outcome, bytes):
            assert client.predict("m", b"x") == outcome
        else:
            with pytest.raises(outcome):
                client.predict("m", b"x")
        assert len(server.asked) == asked
        times = [float(each["x-request-timeout"]) for each in server.asked]
        assert times == sorted(times, reverse=True), "each attempt has less time left"
        server.shutdown()


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    steps = Retries(attempts=3, timeout_s=5, draw=lambda low, high: high).send(
        Request("POST", "/predictions/m")
    )
    request = httpx.Request("POST", f"http://127.0.0.1:{port}/predictions/m")
    refused = httpx.ConnectError("refused", request=request)
    assert isinstance(next(steps), Attempt)
    first, again = steps.send(refused), steps.send(None)
    assert isinstance(first, Pause) and isinstance(again, Attempt)
    second = steps.send(refused)
    assert isinstance(second, Pause) and second.seconds == 2 * first.seconds
    steps.send(None)
    with pytest.raises(StopIteration) as end:
        steps.send(Answer(200, {}))
    assert end.value.value.status == 200
    with (
        Client(f"http://127.0.0.1:{port}", timeout_s=0.3) as client,
        pytest.raises(NoAnswer, match=f"no answer from http://127.0.0.1:{port}/predictions/m "),
    ):
        client.predict("m", b"x")


def test_a_call_ends_with_its_time(server: LiveServer) -> None:
    late = pytest.raises(ClientError, match=r"504|503|in time")
    with Client(server.about["inference"], timeout_s=0.2, idempotent=True) as client, late:
        client.infer("tensors", {"form": np.array([b"sleep"])})


SLOW = b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 40\r\n\r\n" + b"x" * 40
SLOW_AFTER = {
    "nothing": 0,
    "half of the head": 25,
    "the head": len(SLOW) - 40,
    "some": len(SLOW) - 9,
}


@contextlib.contextmanager
def dripping(at_once: int, pause_s: float = 0.0) -> Iterator[str]:
    """Yield the URL of a server that sends so many bytes at once, and others one by one."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listening.accept()
                threading.Thread(target=drip, args=[accepted], daemon=True).start()

    def drip(accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            accepted.recv(1 << 16)
            accepted.sendall(SLOW[:at_once])
            for byte in SLOW[at_once:]:
                time.sleep(0.1)
                accepted.sendall(bytes([byte]))
                if pause_s:
                    time.sleep(pause_s)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("at_once", SLOW_AFTER.values(), ids=[*SLOW_AFTER])
@pytest.mark.parametrize("body", [b"x", b"x" * (1 << 24)], ids=["short", "never read"])
def test_an_answer_that_comes_byte_by_byte_ends_with_the_calls_time(
    at_once: int, body: bytes
) -> None:
    async def ask(url: str) -> None:
        async with AsyncClient(url, timeout_s=0.5) as client:
            await client.predict("m", body)

    def ask_without(url: str) -> None:
        with Client(url, timeout_s=60) as client:
            client.with_options(timeout_s=0.5).predict("m", body)

    for run in (ask_without, lambda url: asyncio.run(ask(url))):
        with dripping(at_once) as url, pytest.raises(NoAnswer, match="in time"):
            began = time.monotonic()
            run(url)
        assert time.monotonic() - began < 1.5  # nearly three seconds, were it read to its end


def test_who_goes_silent_meanwhile_has_only_what_is_left_of_the_time() -> None:
    with dripping(len(SLOW) - 40, pause_s=1.2) as url, Client(url, timeout_s=1.5) as client:
        began = time.monotonic()
        with pytest.raises(NoAnswer, match="in time"):
            client.predict("m", b"x")
    assert time.monotonic() - began < 2.4  # 1.3 and 1.5 s, had the second byte all of it again


def test_options_are_of_the_calls_that_they_are_given_for() -> None:
    with Misbehaving() as server, Client(server.url) as client:
        headers = {"traceparent": "00-1-2-03"}
        own = client.with_options(headers=headers, priority="high", timeout_s=5)
        own.with_options(priority="low").predict("m", b"x")
        own.predict("m", b"x")
        client.predict("m", b"x")
        server.shutdown()
    seen = [(each.get("traceparent"), each.get("x-request-priority")) for each in server.asked]
    assert seen == [("00-1-2-03", "low"), ("00-1-2-03", "high"), (None, None)]
    assert [float(each["x-request-timeout"]) <= 5 for each in server.asked] == [True, True, False]


def test_an_answer_says_who_gave_it(server: LiveServer) -> None:
    with Client(server.about["inference"]) as client:
        own = client.with_options(headers={"X-Request-Id": "one"})
        answer = own.ask("echo", b"x")
    assert (answer.version, answer.request_id, answer.status) == ("1.0", "one", 200)


def fail(url: str) -> None:
    """Call what is not there, in another process."""
    with Client(url) as client:
        client.predict("nobody", b"x")


def test_errors_pass_from_process_to_process(server: LiveServer) -> None:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        failed = pool.submit(fail, server.about["inference"]).exception()
    assert isinstance(failed, RequestFailed)
    assert (failed.status, failed.type) == (404, "ModelNotFoundException")
    for error in (failed, NoAnswer("nobody"), BadAnswer("bad")):
        twin = pickle.loads(pickle.dumps(copy.copy(error)))  # its own bytes, as pools send them
        assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2", 2.0), (None, None), ("soon", None), ("-1", None), ("1 Jan 1970 00:00:00 GMT", 0.0)],
)
def test_when_to_come_back_is_read(value: str | None, seconds: float | None) -> None:
    assert read_retry_after(value) == seconds


# -- tokens, certificates, hostile answers -------------------------------------------------------


def test_a_token_of_a_file_counts_as_soon_as_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with Misbehaving() as server, Client(server.url, token=file) as client:
        with pytest.raises(FileNotFoundError):
            client.predict("m", b"x")
        for token in ("one", "two"):
            file.write_text(f"{token}\n")
            client.predict("m", b"x")
        file.write_text("x" * 5000)
        with pytest.raises(ValueError, match="holds no token, or too long a one"):
            client.predict("m", b"x")
        assert [each["authorization"] for each in server.asked] == ["Bearer one", "Bearer two"]
        server.shutdown()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Client("localhost:8080"), "expected http://HOST:PORT"),
        (lambda: Client("http://localhost:port"), "is not a URL"),
        (lambda: Client("https://localhost", ca="/nowhere.pem"), "cannot use the certificates"),
        (lambda: AsyncClient("ftp://localhost"), "expected http://HOST:PORT"),
        (lambda: Client("http://a", timeout_s=0), "above 0"),
        (lambda: Client("http://a").with_options(timeout_s=-1), "above 0"),
        (lambda: Client("http://a").with_options(priority="urgent"), "one of"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"content-type": "application/json", "body": "{"}, "not application/json"),
        ({"content-type": "text/plain", "body": "x" * 2000}, "more than 1000 bytes"),
        ({"content-encoding": "gzip", "body": "plain text"}, "cannot be decoded"),
    ],
)
def test_an_answer_that_is_not_what_it_says_is_refused(headers: dict[str, str], said: str) -> None:
    with (
        Misbehaving((200, headers)) as server,
        Client(server.url, max_answer_bytes=1000) as client,
        pytest.raises(BadAnswer, match=said),
    ):
        client.predict("m", b"x")


def tensors(head: Any, tail: bytes = b"", length: int | str | None = None) -> Answer:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    named = {"inference-header-content-length": str(len(text) if length is None else length)}
    return Answer(200, named, text + tail)


def output(size: Any = 8, shape: Any = (2,), datatype: str = "FP32") -> dict[str, Any]:
    return {"outputs": [{"name": "y", "datatype": datatype, "shape": shape,
                         "parameters": {"binary_data_size": size}}]}  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        tensors(b"["),
        tensors([]),
        tensors({"outputs": [{"name": "y"}]}),
        tensors(output(), b"1234"),
        tensors(output(), b"123456789"),
        tensors(output(-8), b"12345678"),
        tensors(output(True), b"1"),
        tensors(output(shape=[3]), b"12345678"),
        tensors(output(shape=[1 << 62, 1 << 62]), b"12345678"),
        tensors(output(shape=[-1, -2]), b"12345678"),
        tensors(output(shape=[1] * 100), b"12345678"),
        tensors(output(datatype="FP8"), b"12345678"),
        tensors(output(), b"12345678", length=10**9),
        tensors(output(), b"12345678", length="x"),
    ],
)
def test_tensors_that_are_not_what_they_say_are_refused(answer: Answer) -> None:
    with pytest.raises(BadAnswer, match="does not hold tensors as bytes"):
        read_outputs(answer)


def test_halves_that_numpy_does_not_know_come_as_floats() -> None:
    answer = tensors(output(4, [2], "BF16"), b"\x80\x3f\x20\xc0")
    assert read_outputs(answer)["y"].tolist() == [1.0, -2.5]
    body, headers = write_request({"x": [1.5]}, ["y"])
    assert body[int(headers["inference-header-content-length"]) :] == np.float64(1.5).tobytes()


def test_explanations_are_arrays() -> None:
    one = {"method": "saliency", "target": 3, "attributions": [[1, 2]], "f_input": 0.5}
    (single,) = read_explanations({"model": "m", **one})
    assert single.array.tolist() == [[1, 2]]
    assert (single.target, single.fields["model"], single.fields["f_input"]) == (3, "m", 0.5)
    named = {**one, "attributions": {"a": [1], "b": [2]}}
    both = read_explanations({"model": "m", "explanations": [one, named]})
    assert [each.fields["model"] for each in both] == ["m", "m"]
    assert isinstance(both[1].attributions, dict)
    assert set(both[1].attributions) == {"a", "b"}
    with pytest.raises(ValueError, match="several inputs, a, b"):
        _ = both[1].array
    photo = {name: value for name, value in one.items() if name != "attributions"}
    photo["regions"] = {"size": [2, 3], "labels": [0, 1], "counts": [4, 2], "values": [5.0, 7.0]}
    (of_photo,) = read_explanations({"model": "m", **photo})
    assert of_photo.attributions is None
    assert of_photo.regions is not None
    assert of_photo.regions["labels"].tolist() == [[0, 0, 1], [0, 0, 1]]
    with pytest.raises(ValueError, match="regions=False"):
        _ = of_photo.array
    wrongs: list[Any] = [[], {}]
    wrongs += [{**one, "attributions": wrong} for wrong in ("x", [[1], [2, 3]])]
    for wrong in wrongs:
        with pytest.raises(BadAnswer, match="is not an explanation"):
            read_explanations(wrong)
