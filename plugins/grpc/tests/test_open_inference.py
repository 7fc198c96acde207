"""The Open Inference Protocol by HTTP and gRPC: the same requests, the same answers."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from modelyard.plugins.grpc.messages import MOST_WHOLE
from modelyard.plugins.grpc.protos import message
from tests.serve.live import LiveServer, build_archive
from tests.shared import DIGITS

SERVICE = "/inference.GRPCInferenceService/"
HEADER = "inference-header-content-length"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, digits_store: Path) -> LiveServer:
    """Serve the digits model and a handler of an author's."""
    shutil.copy(digits_store / "onnx.mar", shared_server.store / "digits-oip.mar")
    build_archive(shared_server.store, "tensors")
    shared_server.register_all("digits-oip.mar", model_name="digits")
    shared_server.register_all("tensors.mar")
    return shared_server


@pytest.fixture(scope="module")
def channel(server: LiveServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as made:
        yield made


@pytest.fixture
def ask(channel: grpc.Channel) -> Callable[..., Any]:
    def call(called: str, /, **fields: Any) -> Any:
        request, answer = (message(f"inference.{called}{end}") for end in ("Request", "Response"))
        method = channel.unary_unary(
            SERVICE + called, request.SerializeToString, answer.FromString
        )  # fmt: skip
        given = fields.pop("request", None) or request(**fields)
        return method(given, timeout=20)

    return call


def scans(*digits: int) -> np.ndarray:
    """Return scans as the network takes them."""
    files = [Image.open(DIGITS / "scans" / f"{digit}.png").convert("L") for digit in digits]
    return np.stack([np.asarray(file, np.float32)[None] / 255 for file in files])


def as_json(image: np.ndarray) -> dict[str, Any]:
    return {"name": "image", "shape": list(image.shape), "datatype": "FP32",
            "data": image.reshape(-1).tolist()}  # fmt: skip


def as_message(image: np.ndarray, is_raw: bool = True, model: str = "digits") -> Any:
    request = message("inference.ModelInferRequest")(model_name=model)
    tensor = request.inputs.add(name="image", datatype="FP32", shape=image.shape)
    if is_raw:
        request.raw_input_contents.append(image.tobytes())
    else:
        tensor.contents.fp32_contents.extend(image.reshape(-1).tolist())
    return request


def test_one_answer_by_every_way(server: LiveServer, ask: Callable[..., Any]) -> None:
    image = scans(3, 7)
    url = "/v2/models/digits/infer"
    plain = server.client.post(url, json={"inputs": [as_json(image)], "id": "a"})
    assert plain.status_code == 200, plain.text
    (output,) = plain.json()["outputs"]
    assert (plain.json()["model_name"], plain.json()["id"]) == ("digits", "a")
    assert (output["name"], output["shape"], output["datatype"]) == ("logits", [2, 10], "FP32")
    logits = np.array(output["data"], np.float32).reshape(2, 10)
    assert logits.argmax(1).tolist() == [3, 7]

    head = json.dumps({
        "inputs": [{"name": "image", "shape": [2, 1, 8, 8], "datatype": "FP32",
                    "parameters": {"binary_data_size": image.nbytes}}],
        "parameters": {"binary_data_output": True},
    }).encode()  # fmt: skip
    packed = server.client.post(
        url, content=head + image.tobytes(), headers={HEADER: str(len(head))}
    )
    length = int(packed.headers[HEADER])
    assert packed.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(packed.content[length:], np.float32).tolist() == logits.ravel().tolist()

    raw = ask("ModelInfer", request=as_message(image))
    assert np.frombuffer(raw.raw_output_contents[0], np.float32).tolist() == logits.ravel().tolist()
    typed = ask("ModelInfer", request=as_message(image, is_raw=False))
    assert list(typed.outputs[0].contents.fp32_contents) == logits.ravel().tolist()
    assert not typed.raw_output_contents


@pytest.mark.parametrize("what", ["shape", "parameters", "texts", "numbers", "fields"])
def test_what_would_take_long_to_read_is_refused(channel: grpc.Channel, what: str) -> None:
    request = as_message(scans(1), is_raw=False)
    if what == "shape":
        request.inputs[0].shape.extend([1] * 100)
    elif what == "parameters":
        for at in range(1000):
            request.inputs[0].parameters[str(at)].bool_param = True
    elif what == "texts":
        tensor = request.inputs.add(name="t", datatype="BYTES", shape=[300_000])
        tensor.contents.bytes_contents.extend([b""] * 300_000)
    elif what == "numbers":
        tensor = request.inputs.add(name="n", datatype="INT8", shape=[MOST_WHOLE + 1])
        tensor.contents.int_contents.extend([1] * (MOST_WHOLE + 1))
    data = request.SerializeToString() + (b"\x3a\0" * 5000 if what == "fields" else b"")
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"{SERVICE}ModelInfer")(data, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert any(word in caught.value.details() for word in ("at most", "more than"))


def test_rows_of_several_requests_share_calls_and_are_counted(server: LiveServer) -> None:
    body = {"inputs": [as_json(scans(3, 7, 1))]}
    with ThreadPoolExecutor(8) as threads:
        post = server.client.post
        answers = list(threads.map(lambda _: post("/v2/models/digits/infer", json=body), range(24)))
    first = answers[0].json()["outputs"][0]["data"]
    for answer in answers:
        assert np.allclose(answer.json()["outputs"][0]["data"], first, atol=1e-5)
    too_many = server.client.post(
        "/v2/models/digits/infer", json={"inputs": [as_json(scans(*[1] * 9))]}
    )
    assert too_many.status_code == 400
    assert "batch=1..8" in too_many.json()["error"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"inputs": []}, "inputs is"),
        ({"inputs": [{**as_json(scans(1)), "name": "y"}]}, '"image" is missing'),
        ({"inputs": [as_json(scans(1)), {**as_json(scans(1)), "name": "y"}]}, '"y" is unknown'),
        ({"inputs": [{**as_json(scans(1)), "datatype": "FP64"}]}, "is FP64; expected FP32"),
        ({"inputs": [{**as_json(scans(1)), "shape": [1, 64]}]}, "shape [1, 64]; expected [batch"),
        ({"inputs": [as_json(scans(1))], "outputs": [{"name": "y"}]}, "expected logits"),
    ],
)
def test_what_the_signature_does_not_have(
    server: LiveServer, ask: Callable[..., Any], given: dict[str, Any], reason: str
) -> None:
    answer = server.client.post("/v2/models/digits/infer", json=given)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]
    assert answer.json()["message"] == answer.json()["error"]


def test_classes_by_their_labels(server: LiveServer) -> None:
    asked = {"inputs": [as_json(scans(7))],
             "outputs": [{"name": "logits", "parameters": {"classification": 1}}]}  # fmt: skip
    (output,) = server.client.post("/v2/models/digits/infer", json=asked).json()["outputs"]
    value, index, label = output["data"][0].split(":")
    assert (index, label, output["shape"]) == ("7", "7", [1, 1])
    assert float(value) > 0


@pytest.mark.parametrize(
    ("form", "outputs"),
    [
        ("array", {"output": ("INT16", [3], [0, 1, 2])}),
        ("text", {"output": ("BYTES", [1], ["héllo"])}),
        ("object", {"output": ("BYTES", [1], ['{"cat":0.25,"dog":[1]}'])}),
        ("", {"form": ("BYTES", [1], [""]), "y": ("BOOL", [1, 2], [True, False])}),
    ],
)
def test_an_authors_handler_takes_arrays_and_answers_in_its_own_way(
    server: LiveServer, form: str, outputs: dict[str, Any]
) -> None:
    asked = {"inputs": [
        {"name": "form", "shape": [1], "datatype": "BYTES", "data": [form]},
        {"name": "y", "shape": [1, 2], "datatype": "BOOL", "data": [True, False]},
    ]}  # fmt: skip
    answer = server.client.post("/v2/models/tensors/infer", json=asked)
    found = {each["name"]: (each["datatype"], each["shape"], each["data"])
             for each in answer.json()["outputs"]}  # fmt: skip
    assert found == outputs
    refused = server.client.post(
        "/v2/models/tensors/infer", json={**asked, "outputs": [{"name": "nothing"}]}
    )
    assert refused.status_code == 400


def test_what_json_cannot_say_is_an_error_of_its_own_request(server: LiveServer) -> None:
    asked = {"inputs": [{"name": "form", "shape": [1], "datatype": "BYTES", "data": ["nan"]}]}
    answer = server.client.post("/v2/models/tensors/infer", json=asked)
    assert answer.status_code == 500
    assert "binary_data" in answer.json()["error"]
    binary = {**asked, "parameters": {"binary_data_output": True}}
    assert server.client.post("/v2/models/tensors/infer", json=binary).status_code == 200


def test_metadata_says_what_is_served(server: LiveServer, ask: Callable[..., Any]) -> None:
    about = ask("ModelMetadata", name="digits")
    described = server.client.get("/v2/models/digits").json()
    assert [(each.name, each.datatype, list(each.shape)) for each in about.inputs] == [
        (each["name"], each["datatype"], each["shape"]) for each in described["inputs"]
    ]
    assert ask("ServerLive").live
    assert ask("ServerReady").ready
    assert ask("ModelReady", name="digits").ready
    assert "binary_tensor_data" in ask("ServerMetadata").extensions
    assert list(ask("ServerMetadata").extensions) == server.client.get("/v2").json()["extensions"]
    index = server.client.post("/v2/repository/index").json()
    assert {"digits", "tensors"} <= {each["name"] for each in index}
    assert [each.name for each in ask("RepositoryIndex").models] == [each["name"] for each in index]


def test_nothing_is_loaded_by_a_server_that_does_not_say_so(
    server: LiveServer, ask: Callable[..., Any]
) -> None:
    codes = grpc.StatusCode
    for model, status, code in (
        ("tensors", 403, codes.PERMISSION_DENIED),
        ("nope", 404, codes.NOT_FOUND),
    ):
        for change in ("load", "unload"):
            answer = server.client.post(f"/v2/repository/models/{model}/{change}")
            assert (answer.status_code, "allow_load" in answer.json()["error"]) == (status, True)
            with pytest.raises(grpc.RpcError, match="allow_load") as raised:
                ask(f"RepositoryModel{change.title()}", model_name=model)
            assert raised.value.code() == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: setattr(m, "model_name", "nope"), grpc.StatusCode.NOT_FOUND),
        (lambda m: setattr(m, "model_version", "99"), grpc.StatusCode.NOT_FOUND),
        (lambda m: m.raw_input_contents.append(b"x"), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda m: m.inputs[0].contents.fp32_contents.append(1), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda m: setattr(m.inputs[0], "datatype", "FP64"), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda m: m.inputs[0].shape.append(2), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda m: m.ClearField("inputs"), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda m: m.outputs.add(name="nothing"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_what_grpc_refuses(
    ask: Callable[..., Any], change: Callable[[Any], None], code: grpc.StatusCode
) -> None:
    request = as_message(scans(1))
    change(request)
    with pytest.raises(grpc.RpcError) as raised:
        ask("ModelInfer", request=request)
    assert raised.value.code() == code
    assert raised.value.details()


def test_bytes_that_are_no_message(channel: grpc.Channel) -> None:
    method = channel.unary_unary(SERVICE + "ModelInfer", bytes, bytes)
    with pytest.raises(grpc.RpcError) as raised:
        method(b"\xff" * 10, timeout=10)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_typed_contents_of_every_kind(ask: Callable[..., Any]) -> None:
    kinds: dict[str, tuple[str, list[Any]]] = {
        "BOOL": ("bool", [True, False]), "INT8": ("int", [-128, 127]), "INT32": ("int", [-1, 5]),
        "INT64": ("int64", [-(1 << 63), (1 << 63) - 1]), "UINT16": ("uint", [65535]),
        "UINT64": ("uint64", [(1 << 64) - 1]), "FP32": ("fp32", [0.5, -0.0]),
        "FP64": ("fp64", [0.1, 5e-324]), "BYTES": ("bytes", [b"\xff", b""]),
    }  # fmt: skip
    for datatype, (field, values) in kinds.items():
        request = message("inference.ModelInferRequest")(model_name="tensors")
        tensor = request.inputs.add(name="x", datatype=datatype, shape=[1, len(values)])
        getattr(tensor.contents, f"{field}_contents").extend(values)
        tensor.contents.MergeFromString(b"\xf8\x01\x01")  # a field of a later protocol
        answer = ask("ModelInfer", request=request)
        assert list(getattr(answer.outputs[0].contents, f"{field}_contents")) == values
        assert list(answer.outputs[0].shape) == [1, len(values)]
    wrong = message("inference.ModelInferRequest")(model_name="tensors")
    wrong.inputs.add(name="x", datatype="INT8", shape=[1]).contents.int_contents.append(300)
    with pytest.raises(grpc.RpcError, match="beyond INT8"):
        ask("ModelInfer", request=wrong)


def test_a_stream_answers_in_order_and_goes_on_after_an_error(channel: grpc.Channel) -> None:
    answer = message("inference.ModelStreamInferResponse")
    method = channel.stream_stream(
        SERVICE + "ModelStreamInfer", lambda m: m.SerializeToString(), answer.FromString
    )
    requests = [as_message(scans(digit)) for digit in (3, 7)] + [as_message(scans(1), model="no")]
    many = requests * 20
    answers = list(method(iter(many), timeout=60))
    assert len(answers) == len(many)
    for at, found in enumerate(answers):
        if at % 3 == 2:
            assert "no" in found.error_message
        else:
            raw = found.infer_response.raw_output_contents[0]
            assert np.frombuffer(raw, np.float32).argmax() == (3, 7)[at % 3]


def test_a_stream_may_run_ahead_of_its_answers(channel: grpc.Channel) -> None:
    answer = message("inference.ModelStreamInferResponse")
    method = channel.stream_stream(
        SERVICE + "ModelStreamInfer", lambda m: m.SerializeToString(), answer.FromString
    )
    # All of them are there before the first is answered, and refused one behind the other.
    many = [as_message(scans(3)), *[as_message(scans(1), model="no")] * 1500, as_message(scans(7))]
    first, *refused, last = method(iter(many), timeout=60)
    for found, digit in ((first, 3), (last, 7)):
        raw = found.infer_response.raw_output_contents[0]
        assert np.frombuffer(raw, np.float32).argmax() == digit
    assert len(refused) == 1500
    assert all("no" in found.error_message for found in refused)


def test_health_and_reflection(channel: grpc.Channel) -> None:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        lambda m: m.SerializeToString(),
        message("grpc.health.v1.HealthCheckResponse").FromString,
    )
    request = message("grpc.health.v1.HealthCheckRequest")
    assert check(request(), timeout=10).status == 1
    assert check(request(service="inference.GRPCInferenceService"), timeout=10).status == 1
    with pytest.raises(grpc.RpcError) as raised:
        check(request(service="nothing"), timeout=10)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        lambda m: m.SerializeToString(),
        message("grpc.health.v1.HealthCheckResponse").FromString,
    )
    watching = watch(request(), timeout=10)
    assert next(iter(watching)).status == 1
    watching.cancel()

    asked = message("grpc.reflection.v1.ServerReflectionRequest")
    for package in ("v1", "v1alpha"):
        reflect = channel.stream_stream(
            f"/grpc.reflection.{package}.ServerReflection/ServerReflectionInfo",
            lambda m: m.SerializeToString(),
            message("grpc.reflection.v1.ServerReflectionResponse").FromString,
        )
        listed, file, none = reflect(iter([
            asked(list_services=""),
            asked(file_containing_symbol="inference.GRPCInferenceService"),
            asked(file_by_filename="nothing.proto"),
        ]), timeout=10)  # fmt: skip
        names = [each.name for each in listed.list_services_response.service]
        assert "inference.GRPCInferenceService" in names
        assert b"ModelInferRequest" in file.file_descriptor_response.file_descriptor_proto[0]
        assert none.error_response.error_code == 5


def test_a_time_is_held(server: LiveServer, channel: grpc.Channel) -> None:
    request = message("inference.ModelInferRequest")(model_name="tensors")
    request.inputs.add(name="form", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\5\0\0\0sleep")
    answer = message("inference.ModelInferResponse")
    method = channel.unary_unary(
        SERVICE + "ModelInfer", lambda m: m.SerializeToString(), answer.FromString
    )
    with pytest.raises(grpc.RpcError) as raised:
        method(request, timeout=0.3)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    head = {"parameters": {"timeout": 200_000}, "inputs": [
        {"name": "form", "shape": [1], "datatype": "BYTES", "data": ["sleep"]}]}  # fmt: skip
    answered = server.client.post("/v2/models/tensors/infer", json=head)
    assert answered.status_code in (503, 504)


def test_a_class_is_said_as_triton_says_it_or_as_metadata(
    server: LiveServer, channel: grpc.Channel
) -> None:
    def of_class(name: str) -> float:
        labels = {"model": "digits", "kind": "predict", "priority": name}
        return server.metric("modelyard_queue_time_by_priority_seconds_count", **labels)

    image, url = scans(3), "/v2/models/digits/infer"
    answer = message("inference.ModelInferResponse")
    method = channel.unary_unary(
        SERVICE + "ModelInfer", lambda m: m.SerializeToString(), answer.FromString
    )
    by_parameter = as_message(image)
    by_parameter.parameters["priority"].int64_param = 3
    for number, name in ((7, "low"), (1, "high"), (2, "normal"), (0, "normal")):
        before = of_class(name)
        asked = {"parameters": {"priority": number}, "inputs": [as_json(image)]}
        assert server.client.post(url, json=asked).status_code == 200
        assert of_class(name) == before + 1
    low, high = of_class("low"), of_class("high")
    method(by_parameter, timeout=20)
    method(as_message(image), timeout=20, metadata=(("x-request-priority", "high"),))
    assert (of_class("low"), of_class("high")) == (low + 1, high + 1)
    with pytest.raises(grpc.RpcError) as raised:
        method(as_message(image), timeout=20, metadata=(("x-request-priority", "top"),))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "expected one of high, normal, low" in raised.value.details()


def test_compressed_messages_are_read(server: LiveServer) -> None:
    with grpc.insecure_channel(server.grpc, compression=grpc.Compression.Gzip) as zipped:
        method = zipped.unary_unary(
            SERVICE + "ModelInfer",
            lambda m: m.SerializeToString(),
            message("inference.ModelInferResponse").FromString,
        )
        request = message("inference.ModelInferRequest")(model_name="tensors")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 10_000])
        request.raw_input_contents.append(struct.pack("<f", 1.5) * 10_000)
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(method(request, timeout=20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.raw_output_contents[0] for each in answers] == [
            request.raw_input_contents[0]
        ] * 4
