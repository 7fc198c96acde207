"""What each `service_envelope` makes of requests and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ts.torch_handler.request_envelope.body import BodyEnvelope
from ts.torch_handler.request_envelope.json import JSONEnvelope
from ts.torch_handler.request_envelope.kserve import KServeEnvelope
from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope

from modelyard.handlers.context import Context

MakeContext = Callable[..., Context]


def doubled(data: list[Any], context: Context) -> list[Any]:
    return [2 * value for value in data]


def test_body_gives_the_bodies(make_context: MakeContext) -> None:
    rows = [{"data": 1, "body": 5}, {"body": 2}]
    assert BodyEnvelope(doubled).handle(rows, make_context(requests=2)) == [2, 4]


def test_json_gives_each_request_the_text_of_its_predictions(make_context: MakeContext) -> None:
    rows = [
        {"body": {"instances": [1]}},
        {"data": bytearray(b'{"instances": [2, 3]}')},
        {"instances": []},
    ]
    answers = JSONEnvelope(doubled).handle(rows, make_context(requests=3))
    assert answers == ['{"predictions": [2]}', '{"predictions": [4, 6]}', '{"predictions": []}']


def test_json_decodes_base64(make_context: MakeContext) -> None:
    rows = [{"instances": [{"b64": "YQ=="}, {"data": {"b64": "Yg=="}, "k": 1}]}]
    seen: list[Any] = []
    JSONEnvelope(lambda data, context: seen.extend(data)).handle(rows, make_context())
    assert seen == [b"a", {"data": b"b", "k": 1}]


def test_kserve_answers_predictions_or_explanations(make_context: MakeContext) -> None:
    rows = [{"body": bytearray(b'{"instances": [1, 2]}')}]
    assert KServeEnvelope(doubled).handle(rows, make_context()) == [{"predictions": [2, 4]}]
    context = make_context(headers={"explain": "True"})
    assert KServeEnvelope(doubled).handle(rows, context) == [{"explanations": [2, 4]}]


def test_kserve_takes_a_request_whose_answer_is_one_for_all_instances(
    make_context: MakeContext,
) -> None:
    envelope = KServeEnvelope(lambda data, context: [sum(data)])
    assert envelope.handle([{"body": {"instances": [1, 2]}}], make_context()) == [
        {"predictions": [3]}
    ]


def test_kserve_shares_a_batch_out(make_context: MakeContext) -> None:
    rows = [{"body": {"instances": [1]}}, {"body": {"instances": [2, 3]}}]
    assert KServeEnvelope(doubled).handle(rows, make_context(requests=2)) == [
        {"predictions": [2]},
        {"predictions": [4, 6]},
    ]
    with pytest.raises(ValueError, match="1 answers to 3 rows of 2 requests"):
        KServeEnvelope(lambda data, context: [0]).handle(rows, make_context(requests=2))


def v2(name: str, **more: Any) -> dict[str, Any]:
    one = {"name": name, "shape": [2, 2], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]}
    return {"inputs": [one], **more}


def last_row(data: list[dict[str, Any]], context: Any) -> list[Any]:
    assert context.input_names == [one["name"] for one in data]
    return [one["data"][-1] for one in data]


def test_kservev2_nests_inputs_and_flattens_outputs(make_context: MakeContext) -> None:
    rows = [{"body": bytearray(json.dumps(v2("a", id="mine")).encode())}]
    assert KServev2Envelope(last_row).handle(rows, make_context()) == [
        {
            "id": "mine",
            "model_name": "m",
            "model_version": "1.0",
            "outputs": [{"name": "a", "datatype": "FP64", "data": [3.0, 4.0], "shape": [2]}],
        }
    ]


def test_kservev2_shares_a_batch_out(make_context: MakeContext) -> None:
    rows = [{"body": v2("a")}, {"body": v2("b", id="mine")}]
    answers = KServev2Envelope(last_row).handle(rows, make_context(requests=2))
    assert [(one["id"], one["outputs"][0]["name"]) for one in answers] == [
        ("id0", "a"),
        ("mine", "b"),
    ]


def test_kservev2_takes_the_first_element_of_bytes(make_context: MakeContext) -> None:
    one = {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["hi"]}
    envelope = KServev2Envelope(lambda data, context: [data[0]["data"]])
    (answer,) = envelope.handle([{"body": {"inputs": [one]}}], make_context())
    assert answer["outputs"] == [{"name": "t", "datatype": "BYTES", "data": ["hi"], "shape": [1]}]


@pytest.mark.parametrize("kind", [BodyEnvelope, JSONEnvelope, KServeEnvelope, KServev2Envelope])
def test_a_call_without_data_passes_through(kind: Any, make_context: MakeContext) -> None:
    assert kind(lambda data, context: data).handle(None, make_context()) is None
