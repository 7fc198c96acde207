"""gRPC beside HTTP on one server: what core does for a call, it does for one that came by gRPC."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from modelyard.archiver import write_archive
from modelyard.plugins.grpc import health, oip
from modelyard.plugins.grpc.protos import message
from modelyard.serve.http.tokens import make_grant
from tests.serve.live import LiveServer, build_archive, make_notes_folder, poll, running
from tests.serve.test_let_in import WRONG
from tests.serve.test_operating import HOST, TOKENS, lines_of, operating
from tests.serve.test_server import attach, server_file
from tests.serve.test_tracing import SPAN, Collector, sending_spans, traced, values

SERVICE = "/inference.GRPCInferenceService/"
SETTINGS = {
    "allow_load": True, "answer_cache_bytes": 8192,
    "model_settings": {"numbers": {"cacheAnswers": True, "minWorkers": 1}},
}  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def server(
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
    digits_artifacts: dict[str, Path],
) -> Iterator[LiveServer]:
    """Start a server that traces, keeps answers, and loads and unloads by name."""
    folder = tmp_path_factory.mktemp("beside")
    with sending_spans(collector, folder, "tensors", "streamer", settings=SETTINGS) as server:
        write_archive(
            "numbers", version="1.0", artifact=digits_artifacts["onnx"], handler="base_handler",
            output_dir=server.store,
        )  # fmt: skip
        server.register_all("numbers.mar")
        yield server


def call(server: LiveServer, name: str, token: str = "", **fields: Any) -> Any:
    """Call a method of the Open Inference Protocol."""
    request, answer = (message(f"inference.{name}{end}") for end in ("Request", "Response"))
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(server.grpc) as channel:
        method = channel.unary_unary(
            SERVICE + name, lambda m: m.SerializeToString(), answer.FromString
        )
        return method(request(**fields), timeout=60, metadata=metadata)


def test_an_answer_is_kept_for_the_next_call(server: LiveServer) -> None:
    request = message("inference.ModelInferRequest")(model_name="numbers")
    request.inputs.add(name="image", datatype="FP32", shape=[1, 1, 8, 8])
    request.raw_input_contents.append(b"\0\0\0\x3f" * 64)
    answer = message("inference.ModelInferResponse")
    found = []
    with grpc.insecure_channel(server.grpc) as channel:
        method = channel.unary_unary(
            f"{SERVICE}ModelInfer", lambda m: m.SerializeToString(), answer.FromString
        )
        for id in ("a", "b"):
            request.id = id
            said, call = method.with_call(request, timeout=20)
            assert said.id == id
            found.append((dict(call.trailing_metadata())["x-cache"], said.raw_output_contents[0]))
        bypass = method.with_call(request, metadata=(("cache-control", "no-cache"),))[1]
    assert [outcome for outcome, _ in found] == ["miss", "hit"] and found[0][1] == found[1][1]
    assert dict(bypass.trailing_metadata())["x-cache"] == "bypass"


def test_a_call_is_traced(server: LiveServer, collector: Collector) -> None:
    id, headers = traced(8)
    request = message("inference.ModelInferRequest")(model_name="tensors")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1])
    tensor.contents.fp32_contents.append(1.0)
    with grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(
            f"{SERVICE}ModelInfer",
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=message("inference.ModelInferResponse").FromString,
        )
        infer(request, timeout=20, metadata=(("traceparent", headers["traceparent"]),))
    span: Span = collector.of(id)["inference.GRPCInferenceService/ModelInfer"]
    assert span.parent_span_id.hex() == SPAN
    about = values(span.attributes)
    assert (about["rpc.system"], about["rpc.grpc.status_code"]) == ("grpc", 0)


def test_each_piece_of_a_stream_is_a_message(server: LiveServer) -> None:
    request = message("inference.ModelInferRequest")(model_name="streamer")
    request.inputs.add(name="body", shape=[1], datatype="BYTES")
    asked = []
    for text in (b"count 2", b"fail 1", b"count 1"):
        one = message("inference.ModelInferRequest")()
        one.CopyFrom(request)
        one.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        asked.append(one)
    with grpc.insecure_channel(server.grpc) as channel:
        method = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer", lambda m: m.SerializeToString(),
            message("inference.ModelStreamInferResponse").FromString,
        )  # fmt: skip
        answers = list(method(iter(asked), timeout=60))
    said = [
        each.error_message or each.infer_response.raw_output_contents[0][4:].decode()
        for each in answers
    ]
    assert said == ["2.0 ", "2.1 ", "2", "part ", "ValueError: no more", "1.0 ", "1"]


def test_models_are_loaded_and_unloaded_by_name_with_the_token_of_operators(
    server: LiveServer,
) -> None:
    def ready() -> set[str]:
        return {each.name for each in call(server, "RepositoryIndex", ready=True).models}

    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        with pytest.raises(grpc.RpcError) as raised:
            call(server, name, model_name="tensors")
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert ready() == {"numbers", "streamer", "tensors"}
    # As KServe's client sends it, whose messages have the model's name first.
    kserve = call(server, "RepositoryModelUnload", server.token, repository_name="streamer")
    assert kserve.isUnloaded and ready() == {"numbers", "tensors"}
    assert call(server, "RepositoryModelLoad", server.token, model_name="streamer").isLoaded
    assert ready() == {"numbers", "streamer", "tensors"}


def test_tokens_are_the_same_over_tls_and_each_call_has_a_line(tmp_path: Path) -> None:
    with operating(tmp_path) as server:
        trust = grpc.ssl_channel_credentials((tmp_path / "cert.pem").read_bytes())
        options = [("grpc.ssl_target_name_override", HOST), ("grpc.default_authority", HOST)]
        with grpc.secure_channel(server.grpc, trust, options) as channel:

            def call(method: str, token: str | None, id: str = "other") -> grpc.StatusCode:
                metadata = [("authorization", f"Bearer {TOKENS[token]}")] if token else []
                metadata.append(("x-request-id", id))
                try:
                    channel.unary_unary(SERVICE + method)(b"", metadata=metadata, timeout=20)
                except grpc.RpcError as error:
                    code: grpc.StatusCode = error.code()
                    return code
                return grpc.StatusCode.OK

            assert call("ServerLive", None, "by-grpc") == grpc.StatusCode.OK
            assert call("ServerMetadata", None) == grpc.StatusCode.UNAUTHENTICATED
            assert call("ServerMetadata", "graphs") == grpc.StatusCode.OK
            assert call("ModelInfer", "graphs") == grpc.StatusCode.PERMISSION_DENIED
            assert call("ModelInfer", "app") == grpc.StatusCode.NOT_FOUND  # it names no model

        def line() -> dict[str, Any] | None:
            lines = {each["http.request.id"]: each for each in lines_of(server, "access.log")}
            return lines.get("by-grpc")

        found: dict[str, Any] = poll(line, "the line is written")
        assert found["rpc.method"] == "inference.GRPCInferenceService/ServerLive"
        assert found["rpc.grpc.status_code"] == 0
        assert not any(token in json.dumps(found) for token in TOKENS.values())


def test_while_models_load_a_client_is_asked_to_come_again(tmp_path: Path) -> None:
    build_archive(tmp_path / "store", "gated", config="handler: {gate: /nowhere}\n")
    attached = attach(tmp_path / "state", tmp_path / "store", "gated")
    try:
        about: Any = poll(lambda: server_file(tmp_path / "state"), "its ports are open")
        with grpc.insecure_channel(about["faces"]["grpc"].removeprefix("grpc://")) as channel:
            for method in ("ModelInfer", "ModelReady", "ModelMetadata"):
                with pytest.raises(grpc.RpcError) as refused:
                    # Field 1, the model's name.
                    channel.unary_unary(SERVICE + method)(b"\x0a\x05gated", timeout=20)
                assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        attached.send_signal(signal.SIGTERM)
        attached.communicate(timeout=20)


STREAMS = ("ModelStreamInfer", "Watch", "ServerReflectionInfo")
METHODS = {
    **dict.fromkeys((*oip.OPEN, *health.OPEN), "anybody"),
    **dict.fromkeys(oip.INFERS, "predict"),
    **dict.fromkeys(oip.CHANGES, "manage"),
    **{f"{SERVICE}{name}": "any" for name in (
        "ModelReady", "ServerMetadata", "ModelMetadata", "RepositoryIndex", "Nothing"
    )},
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": "any",
    "/a.B/C": "any",
}  # fmt: skip
"""Each method, and who may call it."""


def outcome(channel: grpc.Channel, method: str, metadata: dict[str, str]) -> str:
    """Return the status of a call with an empty message."""
    pairs = tuple(metadata.items())
    try:
        if method.endswith(STREAMS):
            next(channel.stream_stream(method)(iter([b""]), timeout=20, metadata=pairs))
        else:
            channel.unary_unary(method)(b"", timeout=20, metadata=pairs)
    except grpc.RpcError as error:
        return str(error.code().name)
    except StopIteration:
        pass
    return "OK"


def test_every_method_takes_its_tokens_alone_and_a_proxy_is_not_this_machine(
    server: LiveServer,
) -> None:
    refusals = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
    tokens = {"inference": server.inference_token, "management": server.token}
    shown: list[tuple[str, dict[str, str]]] = [("nobody", {})]
    shown += [(whose, {"authorization": f"Bearer {key}"}) for whose, key in tokens.items()]
    shown += [("unknown", {"authorization": value}) for value in WRONG]
    with grpc.insecure_channel(server.grpc) as channel:
        for method, right in METHODS.items():
            for whose, metadata in shown:
                for proxy in ({}, {"x-forwarded-for": "203.0.113.9"}, {"via": "1.1 a"}):
                    is_free = whose == "nobody" and not proxy and right != "manage"
                    if right == "anybody" or is_free:
                        wanted = ""
                    elif whose in ("nobody", "unknown"):
                        wanted = "UNAUTHENTICATED"
                    else:
                        own = {"predict": "inference", "manage": "management", "any": whose}
                        wanted = "" if own[right] == whose else "PERMISSION_DENIED"
                    code = outcome(channel, method, {**metadata, **proxy})
                    assert (code if code in refusals else "") == wanted, (method, metadata, proxy)


def test_a_token_has_one_quota_for_both(tmp_path: Path) -> None:
    for behaviour in ("slow", "streamer"):
        build_archive(tmp_path, behaviour)
    tokens, key = tmp_path / "tokens.txt", TOKENS["app"]
    tokens.write_text(f"{make_grant('app', 'predict', key, ['concurrent=1'])}\n")
    arguments = ("--models=ALL", f"--token-file={tokens}")
    with running(tmp_path / "state", tmp_path, *arguments) as server:
        request = message("inference.ModelInferRequest")(model_name="streamer")
        request.inputs.add(name="body", shape=[1], datatype="BYTES")
        request.raw_input_contents.append(b"\7\0\0\0count 1")
        go, auth = make_notes_folder() / "go", {"authorization": f"Bearer {key}"}

        def ask() -> Any:
            """Return the messages of a stream in which the request comes three times."""
            with grpc.insecure_channel(server.grpc) as channel:
                method = channel.stream_stream(
                    f"{SERVICE}ModelStreamInfer", lambda m: m.SerializeToString(),
                    message("inference.ModelStreamInferResponse").FromString,
                )  # fmt: skip
                metadata = list(auth.items())
                return list(method(iter([request] * 3), timeout=60, metadata=metadata))

        def post(model: str, body: str) -> int:
            url = f"{server.about['inference']}/predictions/{model}"
            return httpx.post(url, content=body, headers=auth, timeout=60).status_code

        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(post, "slow", str(go))
            used = tmp_path / "state" / "quotas"
            poll(lambda: any(f.read_bytes()[8] for f in used.glob("*")), "one is under way")
            assert post("streamer", "count 1") == 429
            assert [each.error_message for each in ask()] == [
                "the token app may have 1 at once"
            ] * 3
            go.touch()
            assert slow.result() == 200
        assert not any(each.error_message for each in ask())
        assert post("streamer", "count 1") == 202


def test_who_ends_workers_by_one_is_refused_by_both(server: LiveServer) -> None:
    build_archive(server.store, "mortal", config="minWorkers: 1\n")
    server.register_all("mortal")

    def ask(body: str) -> str:
        poll(lambda: server.worker_pids("mortal"), "a worker is ready")
        request = message("inference.ModelInferRequest")(model_name="mortal")
        request.inputs.add(name="body", shape=[1], datatype="BYTES")
        request.raw_input_contents.append(len(body).to_bytes(4, "little") + body.encode())
        try:
            call(server, "ModelInfer", model_name="mortal", inputs=request.inputs,
                 raw_input_contents=request.raw_input_contents)  # fmt: skip
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "OK"

    ended = "INTERNAL: the worker that held the request ended by SIGSEGV"
    for number in range(3):
        assert ask(f"signal 11 {number}") == ended
    told = "requests of 127.0.0.1 have just ended 6 workers of the model, the last one ended by"
    assert ask("harmless").startswith(f"RESOURCE_EXHAUSTED: {told} SIGSEGV;")
    answer = server.predict("mortal", "harmless")
    assert answer.status_code == 429 and answer.json()["message"].startswith(told)
