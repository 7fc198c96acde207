"""A worker's answers in TorchServe's dialect, and to archives that were made for TorchServe."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from modelyard.handlers import BadInput, Context, PredictionException
from modelyard.plugins.torchserve.seam import DIALECT
from modelyard.plugins.torchserve.worker import choose_rules
from modelyard.serve.dataplane import wire
from modelyard.serve.worker.codec import OURS, Answer, Rules
from modelyard.serve.worker.dialect import Dialect, find_dialect
from modelyard.serve.worker.loop import answer_batch
from tests.serve.test_worker_loop import (
    JSON,
    LONG,
    Unprintable,
    asked_with,
    bodies,
    echo,
    error_of,
    item,
    service,
)


def test_it_is_what_workers_find() -> None:
    ours: Dialect = DIALECT
    assert find_dialect() is ours


def test_a_long_explanation_is_not_compressed() -> None:
    running = service(lambda data, context: [LONG], rules=THEIRS)
    (answer,) = answer_batch(running, [asked_with(b"gzip", wire.EXPLAIN)])
    assert (json.loads(answer.body), "content-encoding" in answer.headers) == (LONG, False)


THEIRS = choose_rules({"manifest": None, "dialect": "torchserve"})


@pytest.mark.parametrize(
    ("output", "headers", "body"),
    [
        ("gr\u00fcn", {}, "gr\u00fcn".encode()),
        (b"\x01\x02", {}, b"\x01\x02"),
        (bytearray(b"\x01"), {}, b"\x01"),
        ({"a": 1, "\u00e9": "\u00fc"}, JSON, b'{\n  "a": 1,\n  "\\u00e9": "\\u00fc"\n}'),
        ([1, 2], JSON, b"[\n  1,\n  2\n]"),
        (3, JSON, b"3"),
        (None, JSON, b"null"),
        ([math.nan, math.inf], JSON, b"[\n  NaN,\n  Infinity\n]"),
    ],
    ids=repr,
)
def test_torchserves_answers_are_indented_and_without_guessed_types(
    output: Any, headers: dict[str, str], body: bytes
) -> None:
    (answer,) = answer_batch(service(lambda data, context: [output], rules=THEIRS), [item(1)])
    assert answer == Answer(200, headers, body)


def test_a_tensor_is_saved_and_can_be_loaded() -> None:
    value = torch.arange(3)
    (answer,) = answer_batch(service(lambda data, context: [value], rules=THEIRS), [item(1)])
    assert torch.equal(torch.load(io.BytesIO(answer.body), weights_only=True), value)


def test_an_archive_that_is_not_ours_answers_so_in_a_server_of_ours_too() -> None:
    rules = choose_rules({"manifest": {"model": {}}})
    answers = service(lambda data, context: [[1]] if bodies(data) == ["list"] else [math.nan],
                      rules=rules)  # fmt: skip
    (good,) = answer_batch(answers, [item(1, b"list")])
    assert good.body == b"[\n  1\n]"
    (bad,) = answer_batch(answers, [item(2, b"nan")])
    assert (bad.status, error_of(bad)["request_id"]) == (500, "request-2")


def test_a_sealed_archive_has_our_rules_in_a_server_of_ours_only() -> None:
    sealed: dict[str, Any] = {"manifest": {"modelyard": {}}}
    assert choose_rules(sealed) == OURS
    assert choose_rules({**sealed, "decode_input": False}) == Rules(read_json=None)
    rules = choose_rules({**sealed, "dialect": "torchserve", "max_response_bytes": 9})
    assert (rules.read_json, rules.max_answer_bytes) == (json.loads, 9)
    assert rules.encode([1]) == (b"[\n  1\n]", "application/json")


class Failure(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Failure("why"), 503, "Prediction failed"),
        (MemoryError(), 507, "Out of resources"),
        (RuntimeError("CUDA out of memory"), 507, "Out of resources"),
        (PredictionException("mine", 418), 418, "mine"),
        (PredictionException("mine", 599), 599, "mine"),
        (PredictionException("too large", 413), 507, "too large"),
        (PredictionException("mine"), 500, "mine"),
        (BadInput("no image"), 400, "no image"),
        (Unprintable(), 503, "Prediction failed"),
    ],
    ids=repr,
)
def test_torchserves_errors_have_its_status_and_words(
    error: Exception, status: int, message: str
) -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        raise error

    (answer,) = answer_batch(service(handle, rules=THEIRS), [item(1)])
    kind = "BadRequestException" if status == 400 else "InternalServerException"
    assert answer.body.decode() == (
        f'{{\n  "code": {status},\n  "type": "{kind}",\n  "message": "{message}"\n}}\n'
    )
    assert answer.status == status


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"a": 1}, "Invalid model predict output"),
        (None, "Invalid model predict output"),
        (("a",), "Invalid model predict output"),
        ([1, 2], "number of batch response mismatched"),
        ([{1, 2}], "Unsupported model output data type."),
        ([np.zeros(2)], "Unsupported model output data type."),
    ],
    ids=repr,
)
def test_a_wrong_answer_is_503_in_torchserves_words(output: Any, message: str) -> None:
    (answer,) = answer_batch(service(lambda data, context: output, rules=THEIRS), [item(1)])
    assert (answer.status, json.loads(answer.body)["message"]) == (503, message)


def test_a_wrong_number_of_answers_fails_the_batch_as_a_whole_in_the_dialect() -> None:
    calls: list[int] = []

    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        calls.append(len(data))
        return ["one"]

    answers = answer_batch(service(handle, rules=THEIRS), [item(1), item(2)])
    assert [answer.status for answer in answers] == [503, 503]
    assert calls == [2]
    assert [a.status for a in answer_batch(service(handle), [item(1), item(2)])] == [200, 200]


def test_a_form_that_cannot_be_read_is_500_in_the_dialect() -> None:
    broken = item(1, b"broken", content_type=b"multipart/form-data")
    (answer,) = answer_batch(service(echo, rules=THEIRS), [broken])
    assert (answer.status, json.loads(answer.body)["type"]) == (500, "InternalServerException")


def test_a_handler_that_exits_ends_the_worker_in_the_dialect() -> None:
    def handle(data: list[dict[str, Any]], context: Context) -> list[str]:
        raise SystemExit(4)

    with pytest.raises(SystemExit):
        answer_batch(service(handle, rules=THEIRS), [item(1)])
