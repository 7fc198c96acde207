"""Texts over HTTP: at once, in chunks, as events; together, and not for clients that have left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from modelyard.archiver import write_archive
from modelyard.plugins.grpc.protos import message
from plugins.tasks.tests.decoder import decoder_folder
from tests.serve.live import SOURCES, LiveServer, make_notes_folder, poll

BODY: dict[str, Any] = {"prompt": "é", "max_new_tokens": 24}


@pytest.fixture(scope="module")
def folder() -> Path:
    return make_notes_folder()


@pytest.fixture(scope="module")
def server(
    shared_server: LiveServer, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> LiveServer:
    program = decoder_folder(tmp_path_factory)
    settings = "minWorkers: 1\nbatchSize: 2\n"
    for name, handler, config in (
        ("story", "generate", settings),
        (
            "gated_story",
            str(SOURCES / "gated_generate" / "handler.py"),
            f"{settings}handler: {{folder: {folder}}}\n",
        ),
    ):
        file = folder / f"{name}.yaml"
        file.write_text(config)
        write_archive(
            name,
            version="1.0",
            artifact=program / "model.pt2",
            handler=handler,
            output_dir=shared_server.store,
            extra_files=[program / "tokenizer.json"],
            config_file=file,
        )
    shared_server.register_all("story", "gated_story")
    return shared_server


@pytest.fixture
def rows(folder: Path) -> Iterator[Path]:
    """Close the gate, and return the file that says how many texts each step has."""
    file, gate = folder / "rows", folder / "gate"
    file.write_text("")
    file.chmod(0o666)  # workers may have a user of their own
    yield file
    gate.unlink(missing_ok=True)


def ask(server: LiveServer, body: dict[str, Any], **options: Any) -> httpx.Response:
    return server.client.post("/predictions/story", json=body, **options)


def test_a_prompt_is_answered_with_an_object(server: LiveServer) -> None:
    found = ask(server, BODY)
    assert found.status_code == 200, found.text
    assert found.json().keys() == {"text", "tokens", "prompt_tokens", "finish_reason"}
    assert (found.json()["tokens"], found.json()["finish_reason"]) == (24, "length")
    plain = server.predict("story", "é", headers={"content-type": "text/plain"})
    assert plain.json()["text"].startswith(found.json()["text"])


def test_a_text_comes_in_chunks(server: LiveServer) -> None:
    with server.client.stream("POST", "/predictions/story", json={**BODY, "stream": True}) as found:
        chunks = list(found.iter_raw())
    assert found.headers["content-type"] == "text/plain; charset=utf-8"
    assert found.headers["transfer-encoding"] == "chunked"
    assert len(chunks) > 1
    for chunk in chunks:
        chunk.decode()  # whole characters
    assert b"".join(chunks).decode() == ask(server, BODY).json()["text"]


def test_a_text_comes_as_events(server: LiveServer) -> None:
    expected = ask(server, BODY).json()
    found = ask(server, BODY, headers={"accept": "text/event-stream"})
    assert found.headers["content-type"] == "text/event-stream"
    *pieces, end = found.text.removesuffix("\n\n").split("\n\n")
    texts = [json.loads(piece.removeprefix("data: "))["text"] for piece in pieces]
    assert len(texts) > 1
    assert "".join(texts) == expected.pop("text")
    name, data = end.split("\n")
    assert name == "event: end"
    assert json.loads(data.removeprefix("data: ")) == expected


def test_a_text_by_tritons_routes(server: LiveServer) -> None:
    expected = ask(server, BODY).json()
    asked = {"text_input": BODY["prompt"], "parameters": {"max_new_tokens": 24}, "id": "7"}
    whole = server.client.post("/v2/models/story/generate", json=asked)
    assert whole.json() == {
        "model_name": "story", "model_version": "1.0", "text_output": expected["text"],
        **{name: expected[name] for name in ("tokens", "prompt_tokens", "finish_reason")},
    }  # fmt: skip
    found = server.client.post("/v2/models/story/versions/1.0/generate_stream", json=asked)
    assert found.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert found.headers["x-accel-buffering"] == "no"
    pieces = events(found.text)
    assert len(pieces) > 1
    assert "".join(each["text_output"] for each in pieces) == expected["text"]
    assert {each["model_name"] for each in pieces} == {"story"}
    for route in ("generate", "generate_stream"):
        wrong = server.client.post(f"/v2/models/story/{route}", json={"text_input": 7})
        assert (wrong.status_code, "prompt" in wrong.json()["error"]) == (400, True)


def test_a_text_as_tensors(server: LiveServer) -> None:
    expected = ask(server, BODY).json()["text"]
    given = [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [BODY["prompt"]]},
        {"name": "max_new_tokens", "shape": [1], "datatype": "INT32", "data": [24]},
    ]
    whole = server.client.post("/v2/models/story/infer", json={"inputs": given})
    (output,) = whole.json()["outputs"]
    assert json.loads(output["data"][0])["text_output"] == expected
    streamed = server.client.post("/v2/models/story/infer_stream", json={"inputs": given})
    pieces = [each["outputs"][0]["data"][0] for each in events(streamed.text)]
    assert len(pieces) > 1
    assert "".join(pieces) == expected

    request = message("inference.ModelInferRequest")(model_name="story", id="9")
    request.inputs.add(
        name="text_input", shape=[1], datatype="BYTES"
    ).contents.bytes_contents.append(BODY["prompt"].encode())
    request.inputs.add(
        name="max_new_tokens", shape=[1], datatype="INT32"
    ).contents.int_contents.append(24)
    with grpc.insecure_channel(server.grpc) as channel:
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer", lambda m: m.SerializeToString(),
            message("inference.ModelStreamInferResponse").FromString,
        )  # fmt: skip
        answers = list(method(iter([request, request]), timeout=60))
    assert not any(each.error_message for each in answers)
    assert {each.infer_response.id for each in answers} == {"9"}
    texts = [each.infer_response.outputs[0].contents.bytes_contents[0] for each in answers]
    assert len(texts) == 2 * len(pieces)
    assert b"".join(texts).decode() == 2 * expected


def events(text: str) -> list[dict[str, Any]]:
    parts = text.removesuffix("\n\n").split("\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_text_that_has_no_place_is_400(server: LiveServer) -> None:
    found = ask(server, {"prompt": "x" * 500, "max_new_tokens": 20}, headers={"accept": "*/*"})
    assert found.status_code == 400
    assert "expected 12 at most" in found.json()["message"]


def test_a_text_that_begins_later_is_written_beside_the_first(
    server: LiveServer, rows: Path
) -> None:
    before = server.handed_over("gated_story")
    expected = ask(server, BODY).json()
    with (
        ThreadPoolExecutor(1) as threads,
        server.client.stream(
            "POST", "/predictions/gated_story", json={**BODY, "max_new_tokens": 300, "stream": True}
        ) as first,
    ):
        chunks = first.iter_text()
        next(chunks)
        second = threads.submit(server.client.post, "/predictions/gated_story", json=BODY)
        poll(lambda: server.handed_over("gated_story") == before + 2, "the worker has the second")
        (rows.parent / "gate").touch()
        assert second.result().json() == expected
        rest = "".join(chunks)
    assert rest
    together = [int(line) for line in rows.read_text().split()].count(2)
    assert together == 23  # its first token came from the prompt


def test_a_text_is_not_written_on_for_a_client_that_has_left(
    server: LiveServer, rows: Path
) -> None:
    body = {**BODY, "max_new_tokens": 500, "stream": True}
    with server.client.stream("POST", "/predictions/gated_story", json=body) as found:
        next(found.iter_text())
    (rows.parent / "gate").touch()
    check_it_ends(server, rows)


def test_a_text_is_not_written_on_after_its_deadline(server: LiveServer, rows: Path) -> None:
    found = server.client.post(
        "/predictions/gated_story",
        json={**BODY, "max_new_tokens": 500},
        headers={"x-request-timeout": "1s"},
    )
    assert found.status_code == 504, found.text
    (rows.parent / "gate").touch()
    check_it_ends(server, rows)


def check_it_ends(server: LiveServer, rows: Path) -> None:
    """Check that the worker is soon alone with other requests, before the text's end."""

    def is_gone() -> bool:
        found = server.client.post("/predictions/gated_story", json={**BODY, "max_new_tokens": 2})
        assert found.status_code == 200, found.text
        return rows.read_text().endswith("\n1\n")

    poll(is_gone, "the text is given up")
    assert rows.read_text().count("\n") < 480
