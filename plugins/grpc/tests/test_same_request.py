"""A request is the same request whatever protocol it came by: values, errors, metrics, deadline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest
from grpc import StatusCode

from modelyard.archiver import write_archive
from modelyard.plugins.grpc.protos import message
from tests.serve.live import LiveServer, poll, running

HEADER = "inference-header-content-length"
MOST_BYTES = 20_000
LATE_S = 0.1
SLOW = """
import time

def handle(data, context):
    if data is not None and not context.get_request_header(0, "describe"):
        time.sleep(0.5)
    return data and [0.0] * len(data)
"""
FAILING = """
def handle(data, context):
    if data and not context.get_request_header(0, "describe"):
        raise RuntimeError("as it was asked")
    return [0.0]
"""
CLASSES = {
    StatusCode.INVALID_ARGUMENT: 400, StatusCode.NOT_FOUND: 404, StatusCode.RESOURCE_EXHAUSTED: 413,
    StatusCode.INTERNAL: 500, StatusCode.UNAVAILABLE: 503, StatusCode.DEADLINE_EXCEEDED: 504,
}  # fmt: skip


class Asked(NamedTuple):
    """One request, without a protocol."""

    expected: int
    """Its class: 200, 400, 404, 413, 500, 503; late ones are 504."""
    picture: Any
    model: str = "numbers"
    timeout_s: float = 0.0


class Said(NamedTuple):
    """One answer, without a protocol."""

    code: int
    values: Any = None
    error: str = ""
    version: str = ""


def picture(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape or (1, 8, 8), np.float32)


ASKED = [
    *(Asked(200, picture(seed)) for seed in range(24)),
    *(Asked(200, picture(seed), timeout_s=30.0) for seed in range(4)),
    *(Asked(400, picture(1, *shape)) for shape in ((1, 8, 7), (8, 8), (1, 8, 8, 1), (2, 8, 8))),
    *(Asked(400, np.full((1, 8, 8), text, object)) for text in (b"one", b"", b"1")),
    *(Asked(413, picture(1, 1, 100, size)) for size in (100, 200)),
    *(Asked(404, picture(seed), "nothing") for seed in range(3)),
    *(Asked(503, picture(seed), "unready") for seed in range(3)),
    *(Asked(500, picture(seed), "failing") for seed in range(4)),
    *(Asked(504, picture(seed), "slow", LATE_S) for seed in range(3)),
]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, digits_artifacts: dict[str, Path]
) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("same")
    (store := folder / "store").mkdir()
    (config := folder / "config.yaml").write_text(f"max_request_bytes: {MOST_BYTES}\n")
    archive = {"version": "1.0", "artifact": digits_artifacts["onnx"], "output_dir": store}
    write_archive("numbers", handler="base_handler", **archive)  # type: ignore[arg-type]
    for name, code in (("slow", SLOW), ("failing", FAILING)):
        (folder / "handler.py").write_text(code)
        write_archive(name, handler=str(folder / "handler.py"), **archive)  # type: ignore[arg-type]
    (folder / "handler.py").write_text(SLOW)
    (batches := folder / "model-config.yaml").write_text("batchSize: 1\n")
    write_archive("single", handler=str(folder / "handler.py"), config_file=batches, **archive)  # type: ignore[arg-type]
    with running(folder / "state", store, f"--config={config}") as server:
        server.register_all("numbers.mar", "slow.mar", "failing.mar", initial_workers=1)
        server.register_all("numbers.mar", model_name="unready", initial_workers=0)
        yield server


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as threads:
        yield threads


def as_json(values: np.ndarray) -> Any:
    return json.loads(json.dumps(values.tolist(), default=lambda each: each.decode()))


def post(server: LiveServer, asked: Asked, path: str, **body: Any) -> Said | Any:
    headers = {"x-request-timeout": f"{asked.timeout_s}s"} if asked.timeout_s else {}
    headers |= body.pop("headers", {})
    answer = server.client.post(path, headers=headers, **body)
    if answer.status_code == 200:
        return answer
    return Said(answer.status_code, error=answer.json()["error"], version=version_of(answer))


def version_of(answer: httpx.Response) -> str:
    return str(answer.headers.get("x-model-version", ""))


def predict(server: LiveServer, asked: Asked) -> Said:
    answer = post(server, asked, f"/predictions/{asked.model}", json=as_json(asked.picture))
    return answer if isinstance(answer, Said) else Said(200, answer.json(), "", version_of(answer))


def predict_instance(server: LiveServer, asked: Asked) -> Said:
    path = f"/v1/models/{asked.model}:predict"
    answer = post(server, asked, path, json={"instances": [as_json(asked.picture)]})
    if isinstance(answer, Said):
        return answer
    return Said(200, answer.json()["predictions"][0], "", version_of(answer))


def tensor(asked: Asked) -> dict[str, Any]:
    datatype = "BYTES" if asked.picture.dtype == object else "FP32"
    return {"name": "image", "shape": [1, *asked.picture.shape], "datatype": datatype}


def packed(values: np.ndarray) -> bytes:
    if values.dtype != object:
        return values.tobytes()
    return b"".join(len(each).to_bytes(4, "little") + each for each in values.reshape(-1))


def infer(server: LiveServer, asked: Asked) -> Said:
    given = {**tensor(asked), "data": as_json(asked.picture)}
    body: dict[str, Any] = {"inputs": [given]}
    if asked.timeout_s:
        body["parameters"] = {"timeout": int(asked.timeout_s * 1e6)}
    answer = post(server, asked._replace(timeout_s=0), f"/v2/models/{asked.model}/infer", json=body)
    if isinstance(answer, Said):
        return answer
    return Said(200, answer.json()["outputs"][0]["data"], "", version_of(answer))


def infer_binary(server: LiveServer, asked: Asked) -> Said:
    data = packed(asked.picture)
    given = {**tensor(asked), "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    answer = post(
        server, asked, f"/v2/models/{asked.model}/infer", content=head + data,
        headers={HEADER: str(len(head))},
    )  # fmt: skip
    if isinstance(answer, Said):
        return answer
    values = np.frombuffer(answer.content[int(answer.headers[HEADER]) :], np.float32)
    return Said(200, values, "", version_of(answer))


def infer_by_grpc(server: LiveServer, asked: Asked) -> Said:
    request = message("inference.ModelInferRequest")(model_name=asked.model)
    request.inputs.add(**tensor(asked))
    request.raw_input_contents.append(packed(asked.picture))
    with grpc.insecure_channel(server.grpc) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", lambda m: m.SerializeToString(),
            message("inference.ModelInferResponse").FromString,
        )  # fmt: skip
        call = method.future(request, timeout=asked.timeout_s or 60)
        found = {**dict(call.initial_metadata()), **dict(call.trailing_metadata() or ())}
        version = found.get("x-model-version", "")
        if (error := call.exception()) is not None:
            return Said(CLASSES[error.code()], None, error.details(), version)
        answer = call.result()
    (raw,) = answer.raw_output_contents
    is_float = answer.outputs[0].datatype == "FP32"
    return Said(200, np.frombuffer(raw, np.float32) if is_float else raw, "", version)


Protocol = Callable[[LiveServer, Asked], Said]
PROTOCOLS: tuple[Protocol, ...] = (
    predict, infer, infer_binary, infer_by_grpc, predict_instance,
)  # fmt: skip


def counted(server: LiveServer) -> Counter[tuple[str, ...]]:
    """Return how many requests were answered so far, by model and class."""
    found: Counter[tuple[str, ...]] = Counter()
    for line in server.metrics.get("/metrics").text.splitlines():
        sample, _, value = line.rpartition(" ")
        name, _, rest = sample.rstrip("}").partition("{")
        if name in ("modelyard_requests_total", "modelyard_unrouted_requests_total"):
            labels = dict(pair.split("=") for pair in rest.replace('"', "").split(","))
            late = labels.get("model") == "slow"  # refused at once, or when its time is over
            code = "late" if late and labels["code"] in ("503", "504") else labels["code"]
            found[name, labels.get("model", ""), code] += int(float(value))
    return found


def has_counted(server: LiveServer, before: Counter[tuple[str, ...]]) -> bool:
    return sum((counted(server) - before).values()) >= len(ASKED)


def test_the_same_requests_by_five_protocols(server: LiveServer) -> None:
    assert len(ASKED) == 50
    said: dict[str, list[Said]] = {}
    counts = {}
    for protocol in PROTOCOLS:
        before = counted(server)
        said[protocol.__name__] = [protocol(server, asked) for asked in ASKED]
        # A client of gRPC knows by itself that its time is over; the server counts that soon.
        poll(partial(has_counted, server, before), "all are counted")
        counts[protocol.__name__] = counted(server) - before
    first = said[predict.__name__]
    for name, answers in said.items():
        for at, (asked, answer, other) in enumerate(zip(ASKED, answers, first, strict=True)):
            where = f"request {at} by {name}: {answer}"
            code = 504 if asked.expected == 504 and answer.code == 503 else answer.code
            assert code == asked.expected, where
            if code == 200:
                same = np.array(other.values, np.float32)
                assert np.array_equal(np.array(answer.values, np.float32), same), where
            else:
                assert answer.error, where
            is_given_up = asked.expected == 504 and name == infer_by_grpc.__name__  # by the client
            if code != 413 and not is_given_up:  # too large is seen before the model is looked for
                assert answer.version == ("" if code == 404 else "1.0"), where
        assert counts[name] == counts[predict.__name__], name
    assert sum(counts[predict.__name__].values()) == 50


def test_rows_of_a_request_are_counted_as_rows(server: LiveServer) -> None:
    rows = picture(1, 5, 1, 8, 8)

    def size() -> tuple[float, float]:
        labels = {"model": "numbers", "kind": "predict"}
        name = "modelyard_batch_size"
        return tuple(server.metric(f"{name}_{part}", **labels) for part in ("count", "sum"))  # type: ignore[return-value]

    tensors = {"name": "image", "shape": [5, 1, 8, 8], "datatype": "FP32", "data": as_json(rows)}
    for path, body in (
        ("/v1/models/numbers:predict", {"instances": as_json(rows)}),
        ("/v2/models/numbers/infer", {"inputs": [tensors]}),
    ):
        before = size()
        assert server.client.post(path, json=body).status_code == 200
        assert size() == (before[0] + 1, before[1] + 5)


@pytest.mark.nightly
def test_under_a_flood_a_time_is_refused_or_taken_alike(
    server: LiveServer, threads: ThreadPoolExecutor
) -> None:
    """Each answer takes half a second, and six or more wait."""
    server.register_all("single.mar", initial_workers=1)
    asked = Asked(200, picture(1), "single", 30.0)
    assert predict(server, asked).code == infer_by_grpc(server, asked).code == 200
    flood = [threads.submit(protocol, server, asked) for protocol in (predict, infer_by_grpc) * 8]
    poll(lambda: server.waiting("single") >= 6, "they wait")
    hurried = asked._replace(timeout_s=1.5)
    began = monotonic()
    refused = [protocol(server, hurried) for protocol in (predict, infer, infer_by_grpc)]
    assert monotonic() - began < 1.5  # at once, not when its time was over
    assert [each.code for each in refused] == [503] * 3, refused
    patient = [threads.submit(protocol, server, asked) for protocol in (infer, infer_by_grpc)]
    assert {each.result().code for each in (*flood, *patient)} == {200}
