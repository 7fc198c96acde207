"""One server, every protocol: a request is the same request whatever it came by."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from modelyard.archiver import write_archive
from modelyard.serve.api.events import event
from modelyard.serve.api.inference import COUNTED_BYTES, count_instances
from modelyard.serve.http.application import changes_models, with_pauses
from tests.serve.live import LiveServer, build_archive, running

INDEX, MODELS = "/v2/repository/index", "/v2/repository/models"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, digits_artifacts: dict[str, Path]
) -> Iterator[LiveServer]:
    """Start a server whose models may be loaded and unloaded by name."""
    folder = tmp_path_factory.mktemp("protocols")
    (store := folder / "store").mkdir()
    build_archive(store, "tensors")
    build_archive(store, "streamer")
    write_archive(
        "numbers", version="1.0", artifact=digits_artifacts["onnx"], handler="base_handler",
        output_dir=store,
    )  # fmt: skip
    (folder / "config.yaml").write_text("allow_load: true\n")
    with running(folder / "state", store, f"--config={folder / 'config.yaml'}") as server:
        server.register_all("tensors.mar", "numbers.mar", initial_workers=1)
        yield server


@pytest.fixture
def operator(server: LiveServer) -> Iterator[httpx.Client]:
    """Return a client of the inference API that may change what is served."""
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(
        base_url=server.client.base_url, headers=headers, timeout=60, verify=False
    ) as client:
        yield client


def states(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: each["state"] for each in answer.json()}


def test_models_are_loaded_and_unloaded_by_name(server: LiveServer, operator: httpx.Client) -> None:
    assert operator.post(f"{MODELS}/streamer/load").json() == {"name": "streamer", "load": True}
    assert states(server.client.post(INDEX))["streamer"] == "READY"
    assert operator.post(f"{MODELS}/streamer/load", json={}).status_code == 200  # once more
    unload = {"parameters": {"unload_dependents": False}}  # as tritonclient sends it
    assert operator.post(f"{MODELS}/streamer/unload", json=unload).status_code == 200
    assert states(server.client.post(INDEX))["streamer"] == "UNAVAILABLE"
    assert "streamer" not in states(server.client.post(INDEX, json={"ready": True}))
    assert server.predict("streamer").status_code == 404


@pytest.mark.nightly
def test_versions_come_back_as_they_were(server: LiveServer, operator: httpx.Client) -> None:
    for version in ("1", "2"):
        file = build_archive(server.store, "echo", name="echoes", version=version)
        shutil.move(file, server.store / f"e-{version}.mar")
        server.register_all(f"e-{version}.mar", model_name="echoes", initial_workers=1)
    server.management.put("/models/echoes/2/set-default")
    for change in ("unload", "load"):
        assert operator.post(f"{MODELS}/echoes/{change}").status_code == 200
    about = server.management.get("/models/echoes/all").json()
    assert {each["modelVersion"]: each["isDefault"] for each in about} == {"1": False, "2": True}
    operator.post(f"{MODELS}/echoes/unload")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("models/nothing/load", b"", 404),
        ("models/nothing/unload", b"", 404),
        ("models/..%2Fkeys/load", b"", 404),
        ("models/.hidden/load", b"", 400),
        ("models/streamer/load", b'{"parameters": {"config": "{}"}}', 400),
        ("models/streamer/load", b"nonsense", 400),
        ("index", b"[]", 400),
        ("index", b'{"ready": 1}', 400),
        ("index", b'{"ready": true, "ready": false}', 400),
    ],
)
def test_what_a_repository_refuses(
    operator: httpx.Client, path: str, body: bytes, status: int
) -> None:
    answer = operator.post(f"/v2/repository/{path}", content=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]


def test_the_index_is_asked_for_in_few_bytes(server: LiveServer) -> None:
    """What is wrong with 6 MB of JSON takes seconds to say, in which nobody else is answered."""
    for body in (b"[" + b"{}," * 6000 + b'":"]', b'{"ready": true, "a": "%s"}' % (b":" * 16384)):
        answer = server.client.post(INDEX, content=body)
        assert answer.status_code == 400
        assert "at most 16384 are read" in answer.text


def test_changes_need_the_token_of_operators(server: LiveServer) -> None:
    paths = [f"{MODELS}/streamer/load", f"{MODELS}/tensors/unload"]
    for path in paths:
        assert server.client.post(path).status_code == 401
        headers = {"Authorization": f"Bearer {server.inference_token}"}
        assert server.client.post(path, headers=headers).status_code == 403
    assert states(server.client.post(INDEX))["tensors"] == "READY"


def test_every_change_is_one_by_its_path() -> None:
    for path in (f"{MODELS}/a/load", f"{MODELS}/a/unload"):
        assert changes_models(path)
    for path in (INDEX, "/v2/models/a/infer"):
        assert not changes_models(path)


# -- KServe's first protocol ----------------------------------------------------------------------


def picture(seed: int) -> list[Any]:
    """Return what the digits network takes, (1, 8, 8)."""
    numbers: list[Any] = np.random.default_rng(seed).random((1, 8, 8)).round(3).tolist()
    return numbers


def test_each_instance_is_a_body_of_its_own(server: LiveServer) -> None:
    given = [picture(seed) for seed in range(20)]  # more than a batch
    apart = [server.client.post("/predictions/numbers", json=each).json() for each in given]
    answer = server.client.post("/v1/models/numbers:predict", json={"instances": given})
    assert answer.headers["content-type"] == "application/json"
    assert np.allclose(answer.json()["predictions"], apart, atol=1e-5)


def test_models_of_kserve(server: LiveServer) -> None:
    assert server.client.get("/").json() == {"status": "alive"}
    assert {"numbers", "tensors"} <= set(server.client.get("/v1/models").json()["models"])
    assert server.client.get("/v1/models/numbers").json() == {"name": "numbers", "ready": True}
    assert server.client.get("/v1/models/nothing").status_code == 404
    assert server.client.post("/v1/models/nothing:predict", json={}).status_code == 404
    for path in ("/v1/models/numbers:predict", "/v1/models/numbers:explain"):
        assert server.client.get(path).status_code == 405
    assert server.client.post("/v1/models/numbers:classify").status_code in (404, 405)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "JSON"),
        (b"[1]", "instances"),
        (b"{}", "instances"),
        (b'{"instances": []}', "0 of them"),
        (b'{"instances": {"a": 1}}', "instances"),
        (b'{"instances": [NaN]}', "JSON"),
        (b'{"instances": [[1, 2]]}', "image"),
        (b'{"instances": [{"b64": 1}]}', "base64"),
    ],
)
def test_instances_that_are_refused(server: LiveServer, body: bytes, reason: str) -> None:
    answer = server.client.post("/v1/models/numbers:predict", content=body)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]


def test_a_bad_instance_is_its_own_requests_fault(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    bodies = [{"instances": [picture(1), [at] if at % 3 == 0 else picture(2)]} for at in range(12)]
    post = server.client.post
    url = "/v1/models/numbers:predict"
    answers = list(threads.map(lambda body: post(url, json=body), bodies))
    assert [each.status_code for each in answers] == [400, 200, 200] * 4


@pytest.mark.nightly
def test_explained_instances(server: LiveServer) -> None:
    url = "/v1/models/numbers:explain?method=feature_ablation&target=3"
    answer = server.client.post(url, json={"instances": [picture(1), picture(2)]})
    assert answer.status_code == 200, answer.text
    assert [each["target"] for each in answer.json()["explanations"]] == [3, 3]
    wrong = server.client.post("/v1/models/numbers:explain?method=nothing", json={"instances": [1]})
    assert wrong.status_code == 400


def test_what_is_streamed_comes_in_one_for_each_instance(
    server: LiveServer, operator: httpx.Client
) -> None:
    operator.post(f"{MODELS}/streamer/load")
    body = {"instances": ["count 2", "count 2"]}
    answer = server.client.post("/v1/models/streamer:predict", json=body)
    assert answer.json() == {"predictions": [["2.0 ", "2.1 ", {"end": "2"}]] * 2}
    failed = server.client.post("/v1/models/streamer:predict", json={"instances": ["fail 1"]})
    assert failed.status_code == 500
    operator.post(f"{MODELS}/streamer/unload")


def test_instances_are_counted_before_they_are_read() -> None:
    assert count_instances(json.dumps({"instances": [[1, 2], "]["]}).encode()) == 2
    assert count_instances(b'{"instances": 7}') == count_instances(b"[") == 0
    assert count_instances(b"[" * (COUNTED_BYTES + 1)) == 0
    long = json.dumps({"instances": [picture(seed) for seed in range(100)]}).encode()
    assert len(long) > COUNTED_BYTES
    assert abs(count_instances(long) - 100) <= 5


# -- streams --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streamer(server: LiveServer) -> LiveServer:
    server.register_all("streamer.mar", initial_workers=1)
    return server


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code < 300, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = answer.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_pieces_of_an_answer_are_events(streamer: LiveServer) -> None:
    post = streamer.client.post
    own = {"model_name": "streamer", "model_version": "1.0"}
    texts = ["2.0 ", "2.1 ", '{"end":"2"}']
    found = post("/v2/models/streamer/generate_stream", json="count 2")
    assert events(found) == [{**own, "text_output": text} for text in texts]
    assert (found.status_code, found.headers["x-count"]) == (202, "2")
    whole = post("/v2/models/streamer/generate", json="count 2").json()
    assert whole == {**own, "text_output": "".join(texts)}

    accept = {"accept": "text/event-stream", "content-type": "text/plain"}
    plain = streamer.predict("streamer", "count 2", headers=accept)
    assert plain.text == "".join(f"data: {text}\n\n" for text in texts)
    assert streamer.predict("streamer", "count 2").text == "".join(texts)  # as ever
    picture_of = streamer.client.post("/predictions/numbers", json=picture(1), headers=accept)
    assert picture_of.headers["content-type"] == "application/json"  # it does not stream


def test_a_stream_that_breaks_ends_with_an_error(streamer: LiveServer) -> None:
    post = streamer.client.post
    part, error = events(post("/v2/models/streamer/generate_stream", json="fail 1"))
    assert (part["text_output"], error) == ("part ", {"error": "ValueError: no more"})
    for route, asked in (("generate_stream", "fail 0"), ("generate", "fail 1")):
        whole = post(f"/v2/models/streamer/{route}", json=asked)
        assert (whole.status_code, whole.json()["error"]) == (500, "ValueError: no more")


def test_streamed_tensors(streamer: LiveServer) -> None:
    def body(text: str, **more: Any) -> dict[str, Any]:
        given = {"name": "body", "shape": [1], "datatype": "BYTES", "data": [text]}
        return {"inputs": [given], **more}

    def values(answer: dict[str, Any]) -> list[Any]:
        return [each["data"][0] for each in answer["outputs"]]

    post = streamer.client.post
    url = "/v2/models/streamer/infer_stream"
    found = events(post(url, json=body("count 2", id="a")))
    assert [values(each) for each in found] == [["2.0 "], ["2.1 "], ["2"]]
    assert {each["id"] for each in found} == {"a"}
    whole = post("/v2/models/streamer/infer", json=body("count 2")).json()
    assert json.loads(values(whole)[0]) == ["2.0 ", "2.1 ", {"end": "2"}]
    (one,) = events(post("/v2/models/tensors/infer_stream", json=body("x")))
    assert values(one) == ["x"]  # what does not stream is one event
    binary = {"parameters": {"binary_data_output": True}}
    assert "binary" in events(post(url, json=body("count 2", **binary)))[0]["error"]
    refused = post("/v2/models/tensors/infer_stream", json=body("x", **binary))
    assert (refused.status_code, "binary" in refused.json()["error"]) == (400, True)


def test_routes_of_streams_are_posted_to(streamer: LiveServer) -> None:
    for route in ("generate", "generate_stream", "infer_stream"):
        assert streamer.client.get(f"/v2/models/streamer/{route}").status_code == 405
        assert streamer.client.post(f"/v2/models/nothing/{route}").status_code == 404


def test_an_event_has_a_line_for_each_line() -> None:
    assert event(b"a\nb\r\nc\rd") == b"data: a\ndata: b\ndata: c\ndata: d\n\n"


def test_who_waits_is_told_that_more_comes() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await gate.wait()
        yield b"b"

    async def read() -> list[Any]:
        found: list[Any] = []
        async for chunk in with_pauses(slow(), 0.01):
            found.append(chunk)
            if found.count(None) == 2:
                gate.set()
        return found

    gate = asyncio.Event()
    assert asyncio.run(read())[:4] == [b"a", None, None, b"b"]
