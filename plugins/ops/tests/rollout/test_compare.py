"""Whether two answers mean the same, whatever form they have and whoever wrote them."""

from __future__ import annotations

import copy
import gzip
import math
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from modelyard.base.answers import Scales
from modelyard.handlers.tensors import TensorRequest, Wanted, write_answer
from modelyard.plugins.ops.rollout import compare as module
from modelyard.plugins.ops.rollout import comparer
from modelyard.plugins.ops.rollout.compare import compare
from modelyard.plugins.ops.rollout.comparer import (
    Answer,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
)

JSON = {"content-type": "application/json"}
TOLERANCE = Tolerance(1e-4)
QUANTIZED = Tolerance(1e-4, is_quantized=True)


def said(value: Any, status: int = 200) -> Answer:
    return Answer(status, JSON, orjson.dumps(value))


def tensors(value: Any, *, version: str = "1.0", **options: Any) -> Answer:
    """Return an answer as a worker writes it."""
    is_binary = options.pop("is_binary", True)
    request = TensorRequest({}, {}, is_binary=is_binary, **options)
    body, headers = write_answer(request, {"logits": value}, "digits", version)
    return Answer(200, headers, body)


TOP = {"7": 0.9, "1": 0.05, "2": 0.03}
CASES: dict[str, tuple[Any, Any, Verdict, bool | None]] = {
    "the same": (TOP, TOP, Verdict.EQUAL, True),
    "the order of keys": ({"a": 1, "b": "x"}, {"b": "x", "a": 1}, Verdict.EQUAL, True),
    "probabilities": (TOP, TOP | {"7": 0.90005}, Verdict.WITHIN_TOLERANCE, True),
    "too far": (TOP, TOP | {"7": 0.91}, Verdict.DIFFERS, True),
    "another label": (TOP, {"1": 0.9, "7": 0.05, "2": 0.03}, Verdict.DIFFERS, False),
    "a tie": ({"a": 0.5, "b": 0.49999}, {"a": 0.49999, "b": 0.5}, Verdict.WITHIN_TOLERANCE, True),
    "the last of top-k ties": (
        {"7": 0.9, "1": 0.02, "2": 0.010001},
        {"7": 0.9, "1": 0.02, "3": 0.01},
        Verdict.EQUAL,
        True,
    ),
    "the last of top-k does not tie": (
        {"7": 0.9, "1": 0.05, "2": 0.03},
        {"7": 0.9, "1": 0.05, "3": 0.04},
        Verdict.DIFFERS,
        True,
    ),
    "two fields are not top-k": ({"mean": 0.0}, {"median": 0.0}, Verdict.DIFFERS, False),
    "a class index": ([3, 4], [3, 5], Verdict.DIFFERS, False),
    "1 is not true": ([1], [True], Verdict.DIFFERS, False),
    "1 is 1.0": ([1, 2.5], [1.0, 2.5], Verdict.EQUAL, True),
    "a number of no rank": (0.25, 0.25001, Verdict.WITHIN_TOLERANCE, None),
    "a text": ("cat", "dog", Verdict.DIFFERS, False),
    "boxes": (
        [{"label": "cat", "score": 0.9, "box": [1.0, 2.0, 30.0, 40.0]}],
        [{"label": "cat", "score": 0.90001, "box": [1.0, 2.0, 30.001, 40.0]}],
        Verdict.WITHIN_TOLERANCE,
        True,
    ),
    "a box fewer": (
        [{"label": "cat"}, {"label": "dog"}],
        [{"label": "cat"}],
        Verdict.DIFFERS,
        False,
    ),
    "another structure": ({"a": [0.1, 0.2]}, {"a": {"b": 0.1}}, Verdict.DIFFERS, False),
    "null": (None, None, Verdict.EQUAL, True),
    "large numbers scale": ([1e6, 0.0], [1e6 + 50, 0.0], Verdict.WITHIN_TOLERANCE, True),
    "KServe's predictions": (
        {"predictions": [[0.1, 0.9], [0.8, 0.2]]},
        {"predictions": [[0.1, 0.9], [0.2, 0.8]]},
        Verdict.DIFFERS,
        False,
    ),
}


@pytest.mark.parametrize(("live", "candidate", "verdict", "labels"), CASES.values(), ids=CASES)
def test_json_is_compared_by_what_it_means(
    live: Any, candidate: Any, verdict: Verdict, labels: bool | None
) -> None:
    found = compare(said(live), said(candidate), TOLERANCE)
    assert (found.verdict, found.labels_agree) == (verdict, labels)
    assert (found.difference is None) == (verdict is Verdict.EQUAL)


def test_a_difference_names_the_place_and_both_values() -> None:
    found = compare(said({"a": [1.0, 2.0]}), said({"a": [1.0, 3.0]}), TOLERANCE)
    assert found.difference == "answer.a[1]: expected 2.0, got 3.0"
    assert found.scaled == 0.5


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "JSON"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_tensors_agree_as_an_exports_parity_would_have_it(dtype: str, is_binary: bool) -> None:
    """The numbers of the rule that exports are judged by, without torch."""
    scales = Scales()
    import torch

    from modelyard.handlers.proof import agree

    rng = np.random.default_rng(0)
    for nudge in (0.0, 1e-3, 1e-2, 0.2):
        live = (rng.standard_normal((50, 10)) * 3).astype(dtype)
        other = (live + nudge * rng.standard_normal(live.shape)).astype(dtype)
        for _ in range(10):
            scales.learn("logits", (rng.standard_normal((50, 10)) * 3).astype("f8"))
        scales.answers += 10
        before = tensors(live, is_binary=is_binary)
        scale = copy.deepcopy(scales)
        scale.see(None)
        scale.learn("logits", live.astype("f8"))
        after = tensors(other, version="2.0", is_binary=is_binary)
        found = compare(before, after, Tolerance(1e-2), scales)
        wanted = agree.compare(
            torch.from_numpy(live).double(),
            torch.from_numpy(other).double(),
            1e-2,
            scale.of("logits", live),
        )
        few_digits = {"float16": 1e-3, "float32": 1e-4}.get(dtype, 1e-5)
        assert found.scaled == pytest.approx(wanted["scaled"], rel=few_digits)
        assert found.agrees == (wanted["scaled"] <= 1e-2)
        assert found.labels_agree == (wanted["same"] == wanted["rows"])


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "uint64"])
def test_whole_numbers_are_equal_or_differ(dtype: str) -> None:
    live = np.array([[0, 1, 1]], dtype)
    other = np.array([[0, 1, 0]], dtype)
    for is_binary in (True, False):
        found = compare(
            tensors(live, is_binary=is_binary), tensors(other, is_binary=is_binary), Tolerance(10)
        )
        assert found.verdict is Verdict.DIFFERS
        assert found.difference is not None and found.difference.startswith("output logits[2]: ")
        again = compare(
            tensors(live, is_binary=is_binary),
            tensors(live, version="2", is_binary=is_binary),
            TOLERANCE,
        )
        assert again.verdict is Verdict.EQUAL


def test_bfloat16_is_read() -> None:
    import torch

    live = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    for is_binary in (True, False):
        found = compare(
            tensors(live, is_binary=is_binary), tensors(live * 2, is_binary=is_binary), TOLERANCE
        )
        assert found.difference == "output logits[0]: expected 1.0, got 2.0"
        assert found.labels_agree


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("live", "candidate", "agrees", "labels"),
    [
        ([NAN, 1.0], [NAN, 1.0], True, True),
        ([NAN, 1.0], [NAN, 1.00001], True, True),
        ([0.0, 1.0], [NAN, 1.0], False, False),
        ([NAN, 1.0], [0.0, 1.0], False, False),
        ([INF, 1.0], [INF, 1.00001], True, True),
        ([INF, 1.0], [-INF, 1.0], False, False),
        ([NAN, NAN], [NAN, NAN], True, True),
        ([1.0, 2.0], [NAN, NAN], False, False),
    ],
)
def test_what_is_not_finite_is_at_the_same_place(
    live: list[float], candidate: list[float], agrees: bool, labels: bool
) -> None:
    one, other = (np.array([values], "float32") for values in (live, candidate))
    found = compare(tensors(one), tensors(other, version="2"), TOLERANCE)
    assert (found.agrees, found.labels_agree) == (agrees, labels)


def test_values_of_a_classification_may_differ_within_the_tolerance_and_classes_may_not() -> None:
    wanted = [Wanted("logits", classes=2)]
    live, near, far, other = (
        np.array([values], "float32")
        for values in ([0.1, 0.9, 0.5], [0.1, 0.90001, 0.5], [0.1, 0.95, 0.5], [0.9, 0.1, 0.5])
    )
    for is_binary in (True, False):
        answers = [
            tensors(each, is_binary=is_binary, wanted=wanted) for each in (live, near, far, other)
        ]
        found = [compare(answers[0], each, TOLERANCE) for each in answers[1:]]
        assert [each.agrees for each in found] == [True, False, False]
        assert [each.labels_agree for each in found] == [True, True, False]


def test_a_quantised_artifact_agrees_when_its_labels_do() -> None:
    assert compare(said(TOP), said(TOP | {"7": 0.8}), QUANTIZED).agrees
    other = compare(said(TOP), said({"1": 0.9, "7": 0.1, "2": 0.0}), QUANTIZED)
    assert other.verdict is Verdict.DIFFERS
    scales = Scales()
    for high in range(60, 100, 3):
        scales.see({"7": high / 100, "1": (100 - high) / 200, "2": (100 - high) / 300})
    shortened = {"7": 0.88, "2": 0.04, "3": 0.03}  # int8 ranks what is small otherwise
    assert compare(said(TOP), said(shortened), QUANTIZED, scales).agrees


def test_a_quantised_answer_without_labels_agrees_by_its_error() -> None:
    live, near = np.array([1.0, 2.0, 3.0]), np.array([1.1, 2.0, 3.0])
    assert compare(tensors(live), tensors(near), QUANTIZED).agrees
    for other in (-near, live * 10, live * np.array([1.0, 1.0, 2.0])):
        assert not compare(tensors(live), tensors(other), QUANTIZED).agrees


@pytest.mark.parametrize(
    ("live", "candidate", "verdict"),
    [
        (200, 500, Verdict.CANDIDATE_FAILED),
        (200, 400, Verdict.CANDIDATE_FAILED),
        (400, 503, Verdict.CANDIDATE_FAILED),
        (500, 200, Verdict.LIVE_FAILED),
        (503, 503, Verdict.BOTH_FAILED),
        (400, 400, Verdict.EQUAL),
        (400, 413, Verdict.DIFFERS),
        (400, 200, Verdict.DIFFERS),
    ],
)
def test_statuses_say_who_failed(live: int, candidate: int, verdict: Verdict) -> None:
    assert compare(said(TOP, live), said("other", candidate), TOLERANCE).verdict is verdict


def test_other_bytes_are_equal_or_differ() -> None:
    picture = Answer(200, {"content-type": "image/png"}, b"\x89PNG" + bytes(100))
    assert compare(picture, picture, TOLERANCE).verdict is Verdict.EQUAL
    found = compare(picture, picture._replace(body=picture.body[:-1] + b"\x01"), TOLERANCE)
    assert found.verdict is Verdict.DIFFERS
    assert found.labels_agree is None
    assert found.difference is not None and "from byte 103" in found.difference


def test_gzip_is_taken_off() -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    near = Answer(200, headers, gzip.compress(orjson.dumps(TOP | {"7": 0.90001})))
    assert compare(said(TOP), near, TOLERANCE).verdict is Verdict.WITHIN_TOLERANCE
    bomb = Answer(200, headers, gzip.compress(bytes(module.MOST_JSON_BYTES + 1)))
    assert compare(said(TOP), bomb, TOLERANCE).verdict is Verdict.DIFFERS


def test_what_only_the_candidate_makes_too_large_is_a_difference() -> None:
    large = said("x" * module.MOST_JSON_BYTES)
    assert compare(said(TOP), large, TOLERANCE).verdict is Verdict.DIFFERS
    with pytest.raises(NotCompared, match="too large"):
        compare(large, said(TOP), TOLERANCE)


def _tensor_head(**changes: Any) -> dict[str, Any]:
    output = {"name": "o", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    return {"outputs": [output | changes]}


def _hostile() -> list[tuple[dict[str, str], bytes]]:
    """Return answers as a candidate might send them that means harm."""
    found = [
        (JSON, body)
        for body in (
            b"[" * 100_000,
            b"[" * 900 + b"]" * 900,
            b'{"a":' * 900 + b"1" + b"}" * 900,
            b'{"7": NaN}',
            b'{"7": 1e999}',
            b'{"7": ' + b"9" * 5000 + b"}",
            b'{"7": 1, "7": 2}',
            b"\xff\xfe\x00",
            b'"\\ud800"',
            b"",
            b"1e308",
            b'{"7": -1e308, "1": 1e308, "2": 1.7e308}',
            b'{"outputs": [null]}',
            b'{"outputs": [{"name": "o", "shape": [1e9], "datatype": "FP32", "data": [1]}]}',
            b'{"outputs": {"name": 1}}',
        )
    ]
    changes: list[dict[str, Any]] = [
        {"shape": [2**62, 2**62]},
        {"shape": [-1]},
        {"shape": [0, 2**39]},
        {"shape": []},
        {"shape": "2"},
        {"datatype": "FP128"},
        {"datatype": "BYTES"},
        {"datatype": 7},
        {"parameters": {"binary_data_size": 2**63}},
        {"parameters": {"binary_data_size": "8"}},
        {"parameters": [8]},
        {"parameters": None},
        {"data": None},
        {"data": {"a": 1}},
        {"data": [[1.0], 2.0]},
        {"data": ["x", "y"]},
        {"name": None},
    ]
    for change in changes:
        head = orjson.dumps(_tensor_head(**change))
        found.append(
            ({"inference-header-content-length": str(len(head))}, head + struct.pack("<2f", 1, 2))
        )
    head = orjson.dumps(_tensor_head())
    found += [
        ({"inference-header-content-length": length}, head + bytes(8))
        for length in ("", "-1", "9" * 30, "1²", str(len(head) - 1), "0")
    ]
    return found


def test_nothing_that_a_candidate_answers_makes_it_raise() -> None:
    head = orjson.dumps(_tensor_head())
    lives = [
        said(TOP),
        Answer(
            200,
            {"inference-header-content-length": str(len(head))},
            head + struct.pack("<2f", 1, 2),
        ),
        said({"outputs": []}),
    ]
    for headers, body in _hostile():
        for live in lives:
            for tolerance in (TOLERANCE, QUANTIZED):
                found = compare(live, Answer(200, headers, body), tolerance)
                assert found.verdict in (Verdict.DIFFERS, Verdict.EQUAL)
                assert found.difference is None or len(found.difference) <= 200
        compare(Answer(200, headers, body), Answer(200, headers, body + b" "), TOLERANCE)


def test_answers_changed_at_random_are_compared_without_an_error() -> None:
    draw = random.Random(0)
    bodies = [
        (answer.headers, bytes(answer.body))
        for answer in (
            said(TOP),
            said([{"label": "cat", "box": [1.0, 2.0]}] * 3),
            tensors(np.arange(12, dtype="float32").reshape(3, 4)),
            tensors(np.array([[b"a", b"bc"]], object)),
        )
    ]
    for headers, body in bodies * 300:
        changed = bytearray(body)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        found = compare(Answer(200, headers, body), Answer(200, headers, changed), TOLERANCE)
        assert isinstance(found, Comparison)


def test_a_certificate_says_how_far_answers_may_be_apart(
    digits_artifacts: dict[str, Path],
) -> None:
    artifact = digits_artifacts["onnx"]
    manifest = {"modelyard": {"report": f"{artifact.name}.report.json"}}
    assert comparer.read_tolerance(artifact.parent, manifest) == Tolerance(1e-4)
    assert comparer.read_tolerance(artifact.parent, None) == Tolerance()
    both = comparer.both(Tolerance(1e-4), Tolerance(1e-3, is_quantized=True), "m 1.0")
    assert both.is_quantized
    assert both.scaled == pytest.approx(1.1e-3, rel=1e-2)


def test_a_spread_that_few_answers_have_taught_may_be_too_small_by_chance() -> None:
    """A twin whose sums were in another order was called different, one time in a hundred."""
    scales = Scales()

    def found(far: float) -> Verdict:
        live, other = (said([0.1, 0.5 + more]) for more in (0.0, far))
        return compare(live, other, Tolerance(1e-4), copy.deepcopy(scales)).verdict

    for number in range(40):
        scales.see([0.1, 0.5 + (0.06 if number % 2 else 0.0)])
        if 8 <= scales.answers < 31:
            assert found(3e-6) is Verdict.WITHIN_TOLERANCE
            assert found(1.2e-5) is Verdict.DIFFERS
            with pytest.raises(NotCompared, match="not learnt yet"):
                found(6e-6)
    assert found(6e-6) is Verdict.DIFFERS
