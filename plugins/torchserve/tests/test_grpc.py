"""TorchServe's APIs by gRPC, as its clients call them: grpcio's client, and one real server."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from modelyard.plugins.grpc.protos import message
from plugins.torchserve.tests.live import Home
from plugins.torchserve.tests.test_http import BROKEN, write_mar
from tests.serve.live import poll
from tests.serve.test_tls import make_pair

INFERENCE = "org.pytorch.serve.grpc.inference"
MANAGEMENT = "org.pytorch.serve.grpc.management"
PACKAGES = ("inference", "org.pytorch.serve.grpc.openinference")
"""Of the Open Inference Protocol."""
INTERNAL = "\norg.pytorch.serve.http.InternalServerException"
HANDLER = """
import os
import time

from ts.handler_utils.utils import send_intermediate_predict_response
from ts.utils.util import PredictionException


def handle(data, context):
    if data is None:
        return None
    if context.get_request_header(0, "describe"):
        return [{"a": 1}]
    row = data[0]
    verb, _, rest = bytes(row.get("data", b"")).decode().partition(" ")
    if verb == "fail":
        raise ValueError("secret")
    if verb == "code":
        raise PredictionException("code wanted", int(rest))
    if verb == "plain":
        raise PredictionException("no good")
    if verb == "memory":
        raise MemoryError
    if verb == "die":
        os._exit(3)
    if verb == "status":
        context.set_response_status(int(rest), "odd", 0)
        return ["but here"]
    if verb == "wait":
        while not os.path.exists(rest):
            time.sleep(0.01)
        return ["waited"]
    if verb in ("stream", "broken"):
        for part in range(int(rest)):
            send_intermediate_predict_response(
                [f"part {part} "], context.request_ids, "Intermediate", 200, context
            )
        if verb == "broken":
            raise ValueError("secret")
        return ["end"]
    if verb == "forever":
        try:
            while True:
                send_intermediate_predict_response(
                    ["more"], context.request_ids, "Intermediate", 200, context
                )
                time.sleep(0.01)
        finally:
            open(rest, "w").close()
    if verb == "bytes":
        return [bytes(int(rest))]
    if verb == "none":
        return [None]
    values = {name: [type(value).__name__, value.decode("latin-1")] for name, value in row.items()}
    return [{
        "row": values,
        "headers": context.get_all_request_header(0),
    }]
"""


class Stub:
    """Calls of one port, as a stub that grpcio's tools generate makes them."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.channel = channel
        self.metadata = metadata

    def ask(self, package: str, method: str, request: Any, **options: Any) -> Any:
        service = {INFERENCE: "InferenceAPIsService", MANAGEMENT: "ManagementAPIsService"}[package]
        name = f"/{package}.{service}/{method}"
        if method == "Ping":
            answer = message(f"{INFERENCE}.TorchServeHealthResponse")
        elif package == INFERENCE:
            answer = message(f"{INFERENCE}.PredictionResponse")
        else:
            answer = message(f"{MANAGEMENT}.ManagementResponse")
        make = self.channel.unary_stream if method == "StreamPredictions" else (
            self.channel.unary_unary
        )  # fmt: skip
        call = make(name, type(request).SerializeToString, answer.FromString)
        return call(request, timeout=options.pop("timeout", 30), metadata=self.metadata, **options)

    def ping(self) -> str:
        return str(self.ask(INFERENCE, "Ping", message("google.protobuf.Empty")()).health)

    def predict(self, data: bytes | str, model: str = "echo", version: str = "", **options: Any
                ) -> bytes:  # fmt: skip
        """Call as TorchServe's own client does."""
        given = data.encode() if isinstance(data, str) else data
        return bytes(self.ask(INFERENCE, "Predictions", request(model, version, data=given),
                              **options).prediction)  # fmt: skip

    def stream(self, data: str, **options: Any) -> Any:
        asked = request("echo", data=data.encode())
        return self.ask(INFERENCE, "StreamPredictions", asked, **options)

    def manage(self, called: str, /, **fields: Any) -> str:
        asked = message(f"{MANAGEMENT}.{called}Request")(**fields)
        return str(self.ask(MANAGEMENT, called, asked).msg)


def request(model: str, version: str = "", /, **values: bytes) -> Any:
    return message(f"{INFERENCE}.PredictionsRequest")(
        model_name=model, model_version=version, input=values
    )


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the code and the text of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home"))
    write_mar(home.store / "echo.mar", HANDLER, "echo")
    write_mar(home.store / "two.mar", HANDLER, "echo", "2.0")
    write_mar(home.store / "bad.mar", BROKEN, "bad")
    (home.store / "garbage.mar").write_bytes(b"no archive")
    home.start(
        "--models", "echo.mar",
        properties={
            "enable_model_api": "true",
            "default_workers_per_model": "1",
            "max_request_size": "5000000",
            "max_response_size": "3000000",
            "metrics_mode": "prometheus",
            "grpc_inference_address": "127.0.0.3",
            "grpc_management_address": "127.0.0.4",
        },
    )  # fmt: skip
    home.wait_for_workers("echo")
    yield home
    home.stop()


@pytest.fixture(scope="module")
def stub(home: Home) -> Iterator[Stub]:
    with grpc.insecure_channel(target(home, 0)) as channel:
        yield Stub(channel)


@pytest.fixture(scope="module")
def operator(home: Home) -> Iterator[Stub]:
    with grpc.insecure_channel(target(home, 1)) as channel:
        yield Stub(channel)


def target(home: Home, port: int) -> str:
    """Return where gRPC's inference (0) or management (1) API listens."""
    name = ("grpc_inference", "grpc_management")[port]
    return str(home.about["faces"][name].partition("//")[2])


# -- inference -----------------------------------------------------------------------------------


def test_the_handler_gets_every_value_as_it_came_and_no_header(stub: Stub) -> None:
    values = {"body": b'{"a": 1}', "bl\xe4tt": bytes(range(256)), "empty": b""}
    answer = stub.ask(INFERENCE, "Predictions", request("echo", **values))
    said = json.loads(answer.prediction)
    assert said["row"] == {name: ["bytearray", value.decode("latin-1")]
                           for name, value in values.items()}  # fmt: skip
    assert said["headers"] == {name: {"content-type": ""} for name in values}
    assert not answer.HasField("sequence_id")
    assert json.loads(stub.ask(INFERENCE, "Predictions", request("echo")).prediction)["row"] == {}
    assert stub.predict("x", version="1.0") == stub.predict("x")


def test_an_answer_is_the_body_that_http_sends(stub: Stub, home: Home) -> None:
    with home.client() as client:
        for asked in ("x", "none", "bytes 0", "bytes 127", "bytes 128", "bytes 2900000"):
            by_http = client.post("/predictions/echo", files={"data": (None, asked)})
            answer = stub.predict(asked)
            if asked == "x":
                assert json.loads(by_http.content)["row"] == json.loads(answer)["row"]
            else:
                assert answer == by_http.content
    assert stub.predict("status 404") == b"but here"
    assert stub.predict("none", compression=grpc.Compression.Gzip) == b"null"


def test_ping(stub: Stub) -> None:
    assert stub.ping() == '{\n  "status": "Healthy"\n}'


NO_MODEL = "\norg.pytorch.serve.archive.model.ModelNotFoundException"
NO_VERSION = "\norg.pytorch.serve.archive.model.ModelVersionNotFoundException"


@pytest.mark.parametrize(
    ("model", "data", "code", "text"),
    [
        ("nosuch", "x", "INTERNAL", f"Model not found: nosuch{NO_MODEL}"),
        ("", "x", "INTERNAL", "Parameter model_name is required.\nBadRequestException.()"),
        ("echo", "fail", "UNAVAILABLE", f"Prediction failed{INTERNAL}"),
        ("echo", "plain", "INTERNAL", f"no good{INTERNAL}"),
        ("echo", "code 404", "NOT_FOUND", f"code wanted{INTERNAL}"),
        ("echo", "code 413", "RESOURCE_EXHAUSTED", f"code wanted{INTERNAL}"),
        ("echo", "code 429", "RESOURCE_EXHAUSTED", f"code wanted{INTERNAL}"),
        ("echo", "code 503", "UNAVAILABLE", f"code wanted{INTERNAL}"),
        ("echo", "memory", "INTERNAL", f"Out of resources{INTERNAL}"),
        ("echo", "die", "INTERNAL", f"Worker died.{INTERNAL}"),
    ],
)
def test_a_call_that_fails(stub: Stub, model: str, data: str, code: str, text: str) -> None:
    assert refused(lambda: stub.predict(data, model)) == (code, text)


def test_an_unknown_version(stub: Stub) -> None:
    text = f"Model version: 9.9 does not exist for model: echo{NO_VERSION}"
    assert refused(lambda: stub.predict("x", version="9.9")) == ("INTERNAL", text)


def test_what_is_no_call_of_ours(stub: Stub) -> None:
    assert refused(lambda: stub.predict(b"x" * 5_000_000))[0] == "RESOURCE_EXHAUSTED"
    garbage = stub.channel.unary_unary(f"/{INFERENCE}.InferenceAPIsService/Predictions")
    assert refused(lambda: garbage(b"\xff\xff"))[0] == "INVALID_ARGUMENT"
    entry = b"\x12\0" * 5  # a value again and again: 6 MB of these took 4 s to read
    code, text = refused(lambda: garbage(b"\x1a%c%s" % (len(entry), entry)))
    assert code == "INVALID_ARGUMENT" and "more than 4 fields" in text
    other = stub.channel.unary_unary(f"/{INFERENCE}.InferenceAPIsService/Explanations")
    text = f"Method not found: {INFERENCE}.InferenceAPIsService/Explanations"
    assert refused(lambda: other(b"")) == ("UNIMPLEMENTED", text)
    sequence = stub.channel.stream_stream(f"/{INFERENCE}.InferenceAPIsService/StreamPredictions2")
    code, text = refused(lambda: list(sequence(iter([b""]))))
    assert code == "UNKNOWN" and "sequence batching" in text
    # The port of the other API, and HTTP/1.1.
    assert refused(lambda: stub.manage("ListModels"))[0] == "UNIMPLEMENTED"
    target = stub.channel.unary_unary
    assert refused(lambda: target("/inference.GRPCInferenceService/ServerLive")(b""))[0] == (
        "UNIMPLEMENTED"
    )
    assert stub.ping()


def test_a_deadline_and_a_client_that_leaves(stub: Stub, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    code, _ = refused(lambda: stub.predict(f"wait {gate}", timeout=0.5))
    assert code == "DEADLINE_EXCEEDED"
    # The worker still waits: the next ones are in the queue, one of them given up there.
    asked = request("echo", data=b"none")
    name = f"/{INFERENCE}.InferenceAPIsService/Predictions"
    call = stub.channel.unary_unary(name, type(asked).SerializeToString)
    left, stays = call.future(asked), call.future(asked)
    left.cancel()
    assert left.cancelled()
    gate.touch()
    assert stays.result(timeout=20)
    assert stub.predict("none") == b"null"


SIZED = """
import os
import time

def handle(data, context):
    if data is None:
        return None
    for row in data:
        gate = bytes(row.get("data") or row.get("body") or b"").decode()
        while gate and not os.path.exists(gate):
            open(gate + ".seen", "w").close()
            time.sleep(0.01)
    return [str(len(data))] * len(data)
"""


def test_requests_by_http_and_grpc_share_a_batch(
    home: Home, stub: Stub, operator: Stub, tmp_path: Path
) -> None:
    write_mar(home.store / "sized.mar", SIZED, "sized")
    operator.manage("RegisterModel", url="sized.mar", batch_size=4, synchronous=True)

    def waiting() -> int:
        (about,) = json.loads(operator.manage("DescribeModel", model_name="sized"))
        return int(about["jobQueueStatus"]["pendingRequests"])

    with ThreadPoolExecutor() as threads, home.client() as client:
        first = threads.submit(stub.predict, str(tmp_path / "gate"), "sized")
        poll((tmp_path / "gate.seen").exists, "the worker has the first")
        both = [
            threads.submit(lambda: client.post("/predictions/sized", content=b"").content),
            threads.submit(stub.predict, "", "sized"),
        ]
        poll(lambda: waiting() == 2, "both are in the queue")
        (tmp_path / "gate").touch()
        assert first.result() == b"1"
        assert [each.result() for each in both] == [b"2", b"2"]
    operator.manage("UnregisterModel", model_name="sized")


# -- streams -------------------------------------------------------------------------------------


def test_a_stream(stub: Stub) -> None:
    parts = [answer.prediction for answer in stub.stream("stream 3")]
    assert parts == [b"part 0 ", b"part 1 ", b"part 2 ", b"end"]
    assert [answer.prediction for answer in stub.stream("none")] == [b"null"]
    assert stub.predict("stream 3") == b"part 0 part 1 part 2 end"


def test_a_stream_that_breaks_keeps_its_parts(stub: Stub) -> None:
    answers = stub.stream("broken 2")
    assert [next(answers).prediction, next(answers).prediction] == [b"part 0 ", b"part 1 "]
    assert refused(lambda: next(answers)) == ("UNAVAILABLE", f"Prediction failed{INTERNAL}")
    assert refused(lambda: stub.predict("broken 2"))[0] == "UNAVAILABLE"
    assert refused(lambda: list(stub.stream("fail")))[0] == "UNAVAILABLE"
    assert stub.predict("none") == b"null"


def test_a_stream_that_nobody_reads_is_stopped(stub: Stub, tmp_path: Path) -> None:
    for way in ("cancel", "deadline"):
        note = tmp_path / way
        answers = stub.stream(f"forever {note}", timeout=0.6 if way == "deadline" else 30)
        assert next(answers).prediction == b"more"
        if way == "cancel":
            answers.cancel()
        else:
            assert refused(lambda: list(answers))[0] == "DEADLINE_EXCEEDED"  # noqa: B023
        poll(note.exists, "the handler is interrupted")
    assert stub.predict("none") == b"null"


# -- what stands around calls --------------------------------------------------------------------


def test_calls_are_counted_and_logged(stub: Stub, home: Home) -> None:
    def counted() -> float:
        text = home.get("/metrics", "metrics").text
        (found,) = re.findall(
            r'^ts_inference_requests_total\{model_name="echo",model_version="default".*\} (\S+)$',
            text, re.M)  # fmt: skip
        return float(found)

    before = counted()
    stub.predict("none")
    refused(lambda: stub.predict("code 404"))
    assert counted() == before + 2
    name = f"{INFERENCE}.InferenceAPIsService/Predictions"
    log = home.logs / "access_log.log"
    line = re.compile(rf'/127\.0\.0\.\d:\d+ "gRPC {re.escape(name)} HTTP/2.0" (0|5) \d+$', re.M)
    poll(lambda: {"0", "5"} <= set(line.findall(log.read_text())), "both stand in the access log")


def test_health_and_reflection(stub: Stub) -> None:
    check = stub.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert check(b"") == b"\x08\x01"
    ask = message("grpc.reflection.v1.ServerReflectionRequest")
    say = message("grpc.reflection.v1.ServerReflectionResponse")
    reflect = stub.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        ask.SerializeToString, say.FromString)  # fmt: skip
    asked = [ask(list_services=""), ask(file_containing_symbol=f"{INFERENCE}.InferenceAPIsService")]
    listed, file = reflect(iter(asked))
    assert f"{INFERENCE}.InferenceAPIsService" in [
        service.name for service in listed.list_services_response.service
    ]
    assert len(file.file_descriptor_response.file_descriptor_proto) == 2  # with empty.proto


# -- management ----------------------------------------------------------------------------------


def test_as_modelmesh_loads_and_unloads(
    home: Home, stub: Stub, operator: Stub, tmp_path: Path
) -> None:
    """Its adapter links an archive of elsewhere into the store, and asks what memory it takes."""
    write_mar(tmp_path / "pulled", HANDLER, "another")
    (home.store / "isvc__1.mar").symlink_to(tmp_path / "pulled")
    said = operator.manage(
        "RegisterModel", model_name="isvc__1", url="isvc__1.mar", synchronous=True,
        initial_workers=1, batch_size=4, max_batch_delay=5,
    )  # fmt: skip
    assert said == 'Model "isvc__1" Version: 1.0 registered with 1 initial workers'
    (about,) = json.loads(
        operator.manage("DescribeModel", model_name="isvc__1", model_version="all")
    )
    assert (about["batchSize"], about["maxBatchDelay"]) == (4, 5)
    assert [worker["memoryUsage"] > 0 for worker in about["workers"]] == [True]
    assert json.loads(stub.ping()) == {"status": "Healthy"}
    assert stub.predict("none", "isvc__1") == b"null"
    assert operator.manage("UnregisterModel", model_name="isvc__1")
    assert refused(lambda: operator.manage("UnregisterModel", model_name="isvc__1"))[0] == (
        "NOT_FOUND"
    )
    assert (tmp_path / "pulled").is_file()
    (home.store / "isvc__1.mar").unlink()


def test_the_life_of_a_model(stub: Stub, operator: Stub) -> None:
    """As ts_scripts/torchserve_grpc_client.py calls, and further."""
    manage = operator.manage
    given = {"url": "two.mar", "initial_workers": 1, "synchronous": True, "model_name": "new"}
    said = manage("RegisterModel", **given)
    assert said == 'Model "new" Version: 2.0 registered with 1 initial workers'
    assert b"row" in stub.predict("x", "new")
    code, text = refused(lambda: manage("RegisterModel", **given))
    assert code == "ALREADY_EXISTS" and text.endswith(".http.ConflictStatusException")
    (about,) = json.loads(manage("DescribeModel", model_name="new"))
    assert (about["modelVersion"], about["minWorkers"]) == ("2.0", 1)
    (about,) = json.loads(manage("DescribeModel", model_name="new", customized=True))
    assert about["customizedMetadata"] == {"a": 1}
    scaled = manage("ScaleWorker", model_name="new", model_version="2.0", min_worker=2,
                    synchronous=True)  # fmt: skip
    assert scaled == "Workers scaled to 2 for model: new, version: 2.0"
    assert manage("ScaleWorker", model_name="new") == "Processing worker updates..."
    (about,) = json.loads(manage("DescribeModel", model_name="new", model_version="all"))
    assert about["minWorkers"] == 1  # 0 counts as not given, and that as 1
    manage("RegisterModel", url="echo.mar", model_name="new")
    said = manage("SetDefault", model_name="new", model_version="1.0")
    assert said == 'Default version successfully updated for model "new" to "1.0"'
    code, text = refused(lambda: manage("UnregisterModel", model_name="new", model_version="1.0"))
    assert code == "FAILED_PRECONDITION" and "default version" in text
    for version in ("2.0", "1.0"):
        said = manage("UnregisterModel", model_name="new", model_version=version)
        assert said == 'Model "new" unregistered'
    text = f"Model not found: new{NO_MODEL}"
    assert refused(lambda: manage("UnregisterModel", model_name="new")) == ("NOT_FOUND", text)


def test_models_are_listed(operator: Stub) -> None:
    none = {"nextPageToken": "0", "models": []}
    assert json.loads(operator.manage("ListModels")) == none
    listed = {"models": [{"modelName": "echo", "modelUrl": "echo.mar"}]}
    assert json.loads(operator.manage("ListModels", limit=2)) == listed
    assert json.loads(operator.manage("ListModels", limit=-1)) == listed
    assert json.loads(operator.manage("ListModels", limit=2, next_page_token=1)) == {"models": []}


@pytest.mark.parametrize(
    ("called", "fields", "code", "text"),
    [
        ("RegisterModel", {}, "INVALID_ARGUMENT",
         "Parameter url is required.\norg.pytorch.serve.http.BadRequestException"),
        ("RegisterModel", {"url": "nosuch.mar"}, "NOT_FOUND",
         f"Model not found at: nosuch.mar{NO_MODEL}"),
        ("RegisterModel", {"url": "../x.mar"}, "NOT_FOUND",
         f"Relative path is not allowed in url: ../x.mar{NO_MODEL}"),
        ("RegisterModel", {"url": "garbage.mar"}, "INVALID_ARGUMENT",
         "InvalidModelException"),
        ("RegisterModel", {"url": "http://127.0.0.1:1/x.mar"}, "NOT_FOUND",
         f"does not match any allowed URL(s){NO_MODEL}"),
        ("RegisterModel", {"url": "bad.mar", "initial_workers": 1, "synchronous": True}, "INTERNAL",
         f"Failed to start workers for model bad version: 1.0{INTERNAL}"),
        ("RegisterModel", {"url": "two.mar", "initial_workers": 5000}, "INVALID_ARGUMENT",
         "BadRequestException"),
        ("RegisterModel", {"url": "two.mar", "runtime": "LSP"}, "INVALID_ARGUMENT",
         "BadRequestException"),
        ("ScaleWorker", {"model_name": "echo", "min_worker": 2, "max_worker": 1},
         "INVALID_ARGUMENT", "max_worker cannot be less than min_worker."
         "\norg.pytorch.serve.http.BadRequestException"),
        ("ScaleWorker", {"model_name": "nosuch"}, "NOT_FOUND",
         f"Model not found: nosuch{NO_MODEL}"),
        ("DescribeModel", {}, "NOT_FOUND", f"Model not found: {NO_MODEL}"),
        ("DescribeModel", {"model_name": "nosuch", "customized": True}, "INTERNAL",
         f"Model not found: nosuch{NO_MODEL}"),
        ("SetDefault", {"model_name": "echo", "model_version": "9"}, "NOT_FOUND",
         f"Model version 9 does not exist for model echo{NO_VERSION}"),
        ("SetDefault", {"model_name": "nosuch"}, "NOT_FOUND", f"Model not found: nosuch{NO_MODEL}"),
        ("SetDefault", {"model_name": "echo"}, "NOT_FOUND",
         f"Model version  does not exist for model echo{NO_VERSION}"),
        ("UnregisterModel", {}, "INVALID_ARGUMENT",
         "Parameter url is required.\norg.pytorch.serve.http.BadRequestException"),
        ("UnregisterModel", {"model_name": "echo", "model_version": "9"}, "NOT_FOUND",
         f"Model version: 9 does not exist for model: echo{NO_VERSION}"),
    ],
)  # fmt: skip
def test_what_management_refuses(
    operator: Stub, called: str, fields: dict[str, Any], code: str, text: str
) -> None:
    seen, details = refused(lambda: operator.manage(called, **fields))
    assert (seen, details.endswith(text)) == (code, True), details


def test_a_model_without_workers(home: Home, stub: Stub, operator: Stub) -> None:
    with home.client("management") as client:  # gRPC cannot say none
        idle: dict[str, str | int] = {"url": "two.mar", "model_name": "idle", "initial_workers": 0}
        assert client.post("/models", params=idle).status_code == 200
    try:
        text = 'Model "idle" has no worker to serve inference request.'
        code, details = refused(lambda: stub.predict("x", "idle"))
        assert (code, details.startswith(text)) == ("INTERNAL", True)
        assert details.endswith("\nInternalServerException.()")
        customized = {"model_name": "idle", "customized": True}
        assert refused(lambda: operator.manage("DescribeModel", **customized))[0] == "INTERNAL"
    finally:
        operator.manage("UnregisterModel", model_name="idle")


# -- tokens and TLS ------------------------------------------------------------------------------

DENIED = (
    "PERMISSION_DENIED",
    "Token Authorization failed. Token either incorrect, expired, or not provided correctly",
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Serve with tokens, and gRPC under TLS."""
    folder = tmp_path_factory.mktemp("guarded")
    home = Home(folder)
    write_mar(home.store / "echo.mar", HANDLER, "echo")
    key, certificate = make_pair()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    home.start(
        "--models", "echo.mar",
        properties={
            "disable_token_authorization": "false",
            "ts_open_inference_protocol": "true",
            "allowed_hosts": "models.example",
            "default_workers_per_model": "1",
            "enable_grpc_ssl": "true",
            "grpc_inference_address": "127.0.0.3",
            "grpc_management_address": "127.0.0.4",
            "certificate_file": "cert.pem",
            "private_key_file": "key.pem",
            "inference_address": "https://127.0.0.1:0",
            "grpc_inference_max_connection_age_ms": "500",
            "grpc_inference_max_connection_age_grace_ms": "1000",
        },
    )  # fmt: skip
    yield home
    home.stop()


@pytest.fixture
def secure(guarded: Home) -> Iterator[Callable[..., Stub]]:
    """Yield what makes a client that trusts the server's certificate alone.

    It takes the place of the server, and the name of a key in key_file.json.
    """
    trusted = grpc.ssl_channel_credentials((guarded.folder / "cert.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "models.example")]
    with contextlib.ExitStack() as stack:

        def make(where: str, key: str | None = None) -> Stub:
            channel = stack.enter_context(grpc.secure_channel(where, trusted, options))
            keys = json.loads((guarded.folder / "key_file.json").read_text())
            return Stub(channel, (("authorization", f"Bearer {keys[key]['key']}"),) if key else ())

        yield make


def test_each_port_needs_its_key(guarded: Home, secure: Callable[..., Stub]) -> None:
    inference, management = target(guarded, 0), target(guarded, 1)
    poll(lambda: secure(inference, "inference").predict("none") == b"null", "it is loaded")
    for key in (None, "management", "API"):
        stub = secure(inference, key)
        assert refused(lambda: stub.predict("x")) == DENIED  # noqa: B023
        assert refused(stub.ping) == DENIED
        assert refused(lambda: stub.channel.unary_unary("/a.B/C")(b"")) == DENIED  # noqa: B023
        assert stub.channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"
    assert '"echo"' in secure(management, "management").manage("ListModels", limit=1)
    for key in (None, "inference", "API"):
        stub = secure(management, key)
        assert refused(lambda: stub.manage("ListModels")) == DENIED  # noqa: B023
    changed = secure(management, "management")
    text = "Model API disabled\norg.pytorch.serve.archive.model.ModelException"
    for called in ("RegisterModel", "UnregisterModel"):
        assert refused(lambda: changed.manage(called)) == ("PERMISSION_DENIED", text)  # noqa: B023
    # As vitrivr sends its token: credentials of the call, not metadata.
    token = changed.metadata[0][1].removeprefix("Bearer ")
    changed.metadata = ()
    credentials = grpc.access_token_call_credentials(token)
    asked = message(f"{MANAGEMENT}.ListModelsRequest")(limit=1)
    answer = changed.ask(MANAGEMENT, "ListModels", asked, credentials=credentials)
    assert '"echo"' in answer.msg
    lower = secure(inference)
    lower.metadata = (("authorization", "bearer " + str(lower.metadata)),)
    assert refused(lower.ping) == DENIED


@pytest.mark.parametrize("package", PACKAGES)
def test_no_key_for_inference_changes_models(
    guarded: Home, secure: Callable[..., Stub], package: str
) -> None:
    for key in ("inference", None):
        stub = secure(target(guarded, 0), key)
        for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
            call = stub.channel.unary_unary(f"/{package}.GRPCInferenceService/{method}")
            code, _ = refused(lambda: call(b"\x12\x04echo", metadata=stub.metadata))  # noqa: B023
            assert code in ("PERMISSION_DENIED", "UNIMPLEMENTED")
    secure(target(guarded, 0), "inference").predict("none")


def test_a_key_that_was_replaced_opens_nothing(guarded: Home, secure: Callable[..., Stub]) -> None:
    old = secure(target(guarded, 0), "inference")
    assert old.ping()
    keys = json.loads((guarded.folder / "key_file.json").read_text())
    headers = {"Authorization": f"Bearer {keys['API']['key']}"}
    url = f"{guarded.about['management']}/token?type=inference"
    assert httpx.get(url, headers=headers).status_code == 200
    assert refused(old.ping) == DENIED
    assert secure(target(guarded, 0), "inference").ping()


def test_https_and_grpc_share_a_certificate(guarded: Home, secure: Callable[..., Stub]) -> None:
    assert secure(target(guarded, 0), "inference").ping()
    context = ssl.create_default_context(cafile=guarded.folder / "cert.pem")
    context.check_hostname = False
    with httpx.Client(verify=context) as client:
        assert client.get(f"{guarded.about['inference']}/ping").status_code == 200


def test_a_client_without_tls_or_with_another_certificate_gets_nothing(
    guarded: Home, secure: Callable[..., Stub]
) -> None:
    where = target(guarded, 0)
    with grpc.insecure_channel(where) as plain:
        assert refused(Stub(plain).ping)[0] == "UNAVAILABLE"
    _, other = make_pair()
    wrong = grpc.ssl_channel_credentials(other.public_bytes(Encoding.PEM))
    options = [("grpc.ssl_target_name_override", "models.example")]
    with grpc.secure_channel(where, wrong, options) as channel:
        assert refused(Stub(channel).ping)[0] == "UNAVAILABLE"
    assert secure(where, "inference").ping()


def test_a_connection_of_some_age_is_left_and_another_one_opened(
    guarded: Home, secure: Callable[..., Stub], tmp_path: Path
) -> None:
    stub = secure(target(guarded, 0), "inference")
    code, _ = refused(lambda: stub.predict(f"wait {tmp_path / 'never'}"))
    assert code == "UNAVAILABLE"  # when the grace was over
    assert stub.ping()


# -- the Open Inference Protocol -----------------------------------------------------------------

DOUBLE = """
import numpy as np

def handle(data, context):  # what the envelope makes of a request: one dict for each input
    if data is None:
        return None
    answers = []
    for one in data:
        if one["datatype"] == "BYTES":
            answers.append([f"{one['name']} {one['data']}"])
        else:
            answers.append((2 * np.array(one["data"])).tolist())
    return answers
"""


@pytest.fixture(scope="module")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    """Serve as KServe starts TorchServe for its protocol v2 by gRPC."""
    home = Home(tmp_path_factory.mktemp("kserve"))
    write_mar(home.store / "double.mar", DOUBLE, "double")
    home.start(
        "--models", "double.mar",
        properties={
            "default_workers_per_model": "1",
            "service_envelope": "kservev2",
            "grpc_inference_address": "127.0.0.3",
        },
        TS_OPEN_INFERENCE_PROTOCOL="oip",
    )  # fmt: skip
    with grpc.insecure_channel(target(home, 0)) as channel:
        yield Stub(channel)
    home.stop()


def oip(stub: Stub, package: str, method: str, **fields: Any) -> Any:
    ask, say = (message(f"inference.{method}{end}") for end in ("Request", "Response"))
    name = f"/{package}.GRPCInferenceService/{method}"
    call = stub.channel.unary_unary(name, ask.SerializeToString, say.FromString)
    return call(fields.pop("request", None) or ask(**fields), timeout=20)


@pytest.mark.parametrize("package", PACKAGES)
def test_both_names_of_the_open_inference_protocol(kserve: Stub, package: str) -> None:
    assert oip(kserve, package, "ServerLive").live
    poll(lambda: oip(kserve, package, "ServerReady").ready, "it is loaded")
    assert oip(kserve, package, "ModelReady", name="double").ready
    assert oip(kserve, package, "ModelMetadata", name="double").versions == ["1.0"]
    code, text = refused(lambda: oip(kserve, package, "ModelReady", name="nosuch"))
    assert code == "NOT_FOUND" and "nosuch" in text
    code, _ = refused(lambda: oip(kserve, package, "RepositoryModelUnload", model_name="double"))
    assert code == ("PERMISSION_DENIED" if package == "inference" else "UNIMPLEMENTED")


def test_tensors_reach_a_handler_behind_the_envelope_and_come_back(kserve: Stub) -> None:
    request = message("inference.ModelInferRequest")(model_name="double", id="7")
    numbers = request.inputs.add(name="n", datatype="FP32", shape=[2, 2])
    numbers.contents.fp32_contents.extend([1, 2, 3, 4.5])
    text = request.inputs.add(name="t", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"\xff\x00")
    typed = oip(kserve, PACKAGES[1], "ModelInfer", request=request)
    assert (typed.id, typed.model_name) == ("7", "double")
    first, second = typed.outputs
    assert (first.name, first.datatype, list(first.contents.fp64_contents)) == (
        "n", "FP64", [2, 4, 6, 9])  # fmt: skip
    assert list(second.contents.bytes_contents) == [b"t /wA="]

    del request.inputs[1]
    request.inputs[0].ClearField("contents")
    request.raw_input_contents.append(struct.pack("<4f", 1, 2, 3, 4.5))
    raw = oip(kserve, PACKAGES[0], "ModelInfer", request=request)
    assert struct.unpack("<4d", raw.raw_output_contents[0]) == (2, 4, 6, 9)

    request.raw_input_contents[0] = b"short"
    code, text = refused(lambda: oip(kserve, PACKAGES[0], "ModelInfer", request=request))
    assert code == "INVALID_ARGUMENT" and "5 bytes" in text
