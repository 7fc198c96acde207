"""What archives and handlers read of a report."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import Parity, parse_report
from modelyard.archiver.values import End, Values

REPORT: dict[str, Any] = {
    "format": "onnx",
    "artifact_sha256": "0" * 64,
    "checkpoint": {"sha256": "0" * 64},
    "signature": {
        "inputs": [{"name": "ids", "dtype": "int64", "shape": ["batch"]}],
        "outputs": [
            {"name": "logits", "dtype": "float16", "shape": ["batch", 2]},
            {"name": "place", "dtype": "int64", "shape": ["batch"]},
        ],
        "dims": {"batch": {"min": 1, "max": 8}},
    },
}


def parity(stated: dict[str, Any], **others: Any) -> Parity | None:
    document = {**REPORT, "parity": stated, **others}
    return parse_report(json.dumps(document).encode(), Path("x.report.json")).parity


def test_the_rule_and_the_inputs_of_an_export_are_read() -> None:
    stated = {
        "tolerance": 1e-2,
        "outputs": {"logits": {"tolerance": 1e-2}, "place": {"tolerance": 0.0}},
        "integers": {"ids": [0, 49]},
        "kinds": ["random", "zeros"],
        "plan": {"extent": "random", "left_out": ["batch=8"]},
    }
    assert parity(stated, details={"quantize": "int8-dynamic"}) == Parity(
        {"logits": 1e-2, "place": 0.0},
        True,
        {"ids": Values(End(0), End(49))},
        ("random", "zeros"),
        "random",
        ("batch=8",),
    )


def test_integers_may_end_at_the_size_of_a_dim() -> None:
    stated = {"tolerance": 1e-4, "integers": {"ids": [1, "batch"]}}
    report = parse_report(json.dumps({**REPORT, "parity": stated}).encode(), Path("x.report.json"))
    (spec,) = report.tried.inputs
    assert str(spec) == "ids:int64[batch=1..8]=1..batch"


def test_integers_that_were_tried_do_not_replace_those_that_are_stated() -> None:
    signature = json.loads(json.dumps(REPORT["signature"]))
    signature["inputs"][0]["values"] = {"among": [1, 2]}
    stated = {"tolerance": 1e-4, "integers": {"ids": [0, 49]}}
    document = {**REPORT, "signature": signature, "parity": stated}
    report = parse_report(json.dumps(document).encode(), Path("x.report.json"))
    assert str(report.tried.inputs[0]) == "ids:int64[batch=1..8]=1,2"


def test_an_older_report_states_one_tolerance_and_nothing_of_its_inputs() -> None:
    assert parity({"tolerance": 1e-4}) == Parity({"logits": 1e-4, "place": 1e-4}, extent="few")
    full = parity({"tolerance": 1e-4, "plan": {"reduced": False}})
    assert full == Parity({"logits": 1e-4, "place": 1e-4}, extent="every")


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({}, "parity.tolerance: expected a number"),
        ({"tolerance": 1e-4, "integers": {"ids": 3}}, "parity.integers.ids: expected a list"),
        ({"tolerance": 1e-4, "integers": {"ids": [0]}}, "the smallest and the largest value"),
        (
            {"tolerance": 1e-4, "integers": {"ids": [0, "rows"]}},
            'parity.integers.ids: "rows" is not a dim of an input; expected batch',
        ),
        ({"tolerance": 1e-4, "plan": {"reduced": 1}}, "plan.reduced: expected true or false"),
        ({"tolerance": 1e-4, "plan": {"extent": "all"}}, "plan.extent: expected one of every, ran"),
    ],
    ids=["tolerance", "integers", "one end", "unknown dim", "plan", "extent"],
)
def test_what_cannot_be_read_is_named(stated: dict[str, Any], problem: str) -> None:
    with pytest.raises(CannotArchive, match=problem):
        parity(stated)
