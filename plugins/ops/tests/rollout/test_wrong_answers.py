"""Answers changed in one leaf: what a roll-out makes of them, in whatever form they are written.

Every leaf of every answer is moved, multiplied, exchanged, replaced, made NaN and made another
type; each must be seen, whatever stands beside the leaf and however large it is.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from modelyard.base.answers import Scales
from modelyard.handlers.tensors import TensorRequest, write_answer
from modelyard.plugins.ops.rollout.compare import compare
from modelyard.plugins.ops.rollout.comparer import Answer, NotCompared, Tolerance
from tests.adversary.answers import MODELS, Draw, harmless, leaves, put, wrongs
from tests.adversary.gallery import Row, judge

GAINS = [10.0**power for power in range(-12, 13, 3)]


def as_json(value: Any, kind: str = "application/json") -> Answer:
    return Answer(200, {"content-type": kind}, json.dumps(value).encode())


def rolled(live: Answer, candidate: Answer, scales: Scales | None, error: float = 0.0) -> bool:
    """Return whether a roll-out sees a difference."""
    tolerance = Tolerance(1e-4, is_quantized=error > 0, error=error or 0.15)
    return not compare(live, candidate, tolerance, scales).agrees


def learnt(model: Callable[[Draw], Any], draw: Draw) -> Scales:
    """Return what a roll-out knows after some requests."""
    scales = Scales()
    for _ in range(30):
        scales.see(model(draw))
    return scales


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_leaf_is_seen(name: str) -> None:
    draw, model = random.Random(name), MODELS[name]
    scales = learnt(model, draw)
    rows = []
    for _ in range(3):
        answer, other = model(draw), model(draw)
        for is_wrong, changes in ((True, wrongs(answer, other)), (False, harmless(answer))):
            for change, changed in changes:
                is_caught = rolled(as_json(answer), as_json(changed), scales)
                rows.append(Row(name, change, is_wrong, is_caught))
    judge(rows)


def ndjson(value: Any) -> Answer:
    body = "\n".join(json.dumps(each) for each in (value, value))
    return Answer(200, {"content-type": "application/x-ndjson"}, body.encode())


def table(value: Any) -> Answer:
    text = io.StringIO()
    csv.writer(text).writerows([["name", "value"], *(("x", leaf) for _, leaf in leaves(value))])
    return Answer(200, {"content-type": "text/csv; charset=utf-8"}, text.getvalue().encode())


def npy(value: Any) -> Answer:
    data = io.BytesIO()
    np.save(data, np.array([leaf for _, leaf in leaves(value)]))
    return Answer(200, {"content-type": "application/x-npy"}, data.getvalue())


def oip(value: Any) -> Answer:
    request = TensorRequest({}, {}, is_binary=True)
    values = np.array([[leaf for _, leaf in leaves(value)]], np.float64)
    body, headers = write_answer(request, {"y": values}, "m", "1.0")
    return Answer(200, headers, body)


FORMS: dict[str, Callable[[Any], Answer]] = {
    "vendor JSON": lambda value: as_json(value, "application/vnd.api+json"),
    "lines of JSON": ndjson,
    "CSV": table,
    "npy": npy,
    "OIP": oip,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_compared_by_what_it_means(form: str) -> None:
    """A last place is no difference, and one wrong number is, in whatever it is written."""
    draw, write = random.Random(form), FORMS[form]
    rows: list[Row] = []

    def add(change: str, is_wrong: bool, live: Any, other: Any) -> None:
        is_caught = rolled(write(live), write(other), scales)
        rows.append(Row(f"{name} as {form}", change, is_wrong, is_caught))

    for name in ("table", "embedding"):
        model = MODELS[name]
        scales = Scales()
        for _ in range(12):
            with_noise = [leaf * (1 + 1e-9) for leaf in model(draw)]
            try:
                compare(write(with_noise), write(model(draw)), Tolerance(), scales)
            except NotCompared:  # its scale is learnt by that
                continue
        answer = model(draw)
        near = [leaf * (1 + 1e-9) for leaf in answer]
        add("a last place", False, answer, near)
        nans = [math.nan, *answer[1:]]
        near = [math.nan, *(leaf * (1 + 1e-9) for leaf in answer[1:])]
        add("NaN at the same place", False, nans, near)
        for at, leaf in enumerate(answer):
            for change, value in (("x 10", leaf * 10), ("turned", -leaf), ("NaN", math.nan)):
                add(f"{at} {change}", True, answer, put(answer, (at,), value))
    judge(rows)


@pytest.mark.parametrize("gain", GAINS)
def test_no_gain_hides_a_wrong_answer_or_makes_an_honest_one_wrong(gain: float) -> None:
    draw = random.Random(str(gain))

    def model() -> list[float]:
        return [gain * draw.gauss(0, 1) for _ in range(6)]

    scales = Scales()
    for _ in range(30):
        scales.see(model())
    rows = []
    for number in range(20):
        answer = model()
        honest = [leaf + gain * 1e-6 * draw.gauss(0, 1) for leaf in answer]
        planted = {
            "zeros": [0.0] * 6,
            "1 % of a spread": put(answer, (number % 6,), answer[number % 6] + 0.01 * gain),
            "reversed": answer[::-1],
            "x 1.01": [leaf * 1.01 for leaf in answer],
        }
        rows.append(
            Row(
                f"gain {gain:g}",
                "rounding",
                False,
                rolled(as_json(answer), as_json(honest), scales),
            )
        )
        for change, other in planted.items():
            is_caught = rolled(as_json(answer), as_json(other), scales)
            rows.append(Row(f"gain {gain:g}", change, change != "rounding", is_caught))
    judge(rows)


QUANTIZED: list[tuple[str, Any, Any, bool]] = [
    ("a number x 10", 250.0, 2500.0, True),
    ("a list of one x 10", [250.0], [2500.0], True),
    ("a price x 10", {"price": 250.0}, {"price": 2500.0}, True),
    ("a forecast x 10", [1.0, 2.0, 3.0], [10.0, 20.0, 30.0], True),
    ("a vector x 3", [0.1, -0.2, 0.3], [0.3, -0.6, 0.9], True),
    (
        "a box elsewhere",
        {"label": "cat", "box": [10.0, 20.0, 30.0, 40.0]},
        {"label": "cat", "box": [310.0, 220.0, 330.0, 240.0]},
        True,
    ),
    ("a score", {"label": "cat", "score": 0.9}, {"label": "cat", "score": 0.2}, True),
    ("labels of several", {"a": 0.8, "b": 0.7}, {"a": 0.8, "b": 0.1}, True),
    ("another label", {"label": "cat", "score": 0.9}, {"label": "dog", "score": 0.9}, True),
    ("a small error", [1.0, 2.0, 3.0], [1.02, 1.97, 3.05], False),
    (
        "a small error of a score",
        {"label": "cat", "score": 0.9},
        {"label": "cat", "score": 0.88},
        False,
    ),
]


def test_a_quantised_artifact_is_held_to_sizes() -> None:
    judge(
        Row("quantised", change, is_wrong, rolled(as_json(live), as_json(other), None, error=0.06))
        for change, live, other, is_wrong in QUANTIZED
    )


def said(body: str | bytes, kind: str = "application/json", **headers: str) -> Answer:
    spelled = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else body.encode()
    return Answer(200, {"content-type": kind, **spelled}, data)


def zipped(data: bytes) -> Answer:
    return said(data, content_encoding="gzip")


def tensors(data: Any = (1.5, 2.5), shape: tuple[int, ...] = (1, 2), **beside: Any) -> Answer:
    output = {"name": "y", "datatype": "FP32", "shape": shape, "data": data}
    output |= beside.pop("output", {})
    return said(json.dumps({"id": "1", "model_version": "1.0", "outputs": [output], **beside}))


ZIPPED = gzip.compress(b"[1.5]")
WRITTEN: list[tuple[str, Answer, Answer, bool]] = [
    ("an id as a fraction, off by one", said("[1234567]"), said("[1234568.0]"), True),
    ("an id beyond 2**53 as a fraction", said("[9007199254740993]"), said("[9007199254740992.0]"),
     True),
    ("an id beyond 2**53", said("[9007199254740993]"), said("[9007199254740992]"), True),
    ("a number that no float holds", said("[1.5, NaN]"), said(f"[1{'0' * 400}, NaN]"), True),
    ("1e400", said("[1.5]"), said("[1e400]"), True),
    ("a key twice", said('{"a": 1.5}'), said('{"a": 9.5, "a": 1.5}'), True),
    ("two gzip members", zipped(ZIPPED), zipped(gzip.compress(b"[1.5 ]") + ZIPPED), True),
    ("half a gzip member", zipped(ZIPPED), zipped(gzip.compress(b"[1.5 ]")[:-8]), True),
    ("a wrong sum of gzip", zipped(ZIPPED), zipped(gzip.compress(b"[1.5 ]")[:-8] + bytes(8)), True),
    ("another compression level", zipped(ZIPPED), zipped(gzip.compress(b"[1.5]", 1)), False),
    ("text for JSON", said("[1.5]"), said("[1.5]", "text/plain"), True),
    ("a page for JSON", said("[1.5]"), said("[1.5 ]", "text/html"), True),
    ("a charset", said("[1.5]"), said("[1.5 ]", "application/json; charset=utf-8"), False),
    ("201 for 200", said("[1.5]"), said("[1.5]")._replace(status=201), True),
    ("CSV without leading zeros", said("007,1.5\n", "text/csv"), said("7,1.5\n", "text/csv"), True),
    ("CSV without underscore", said("1_0,1.5\n", "text/csv"), said("10,1.5\n", "text/csv"), True),
    ("CSV of 1.50", said("7,1.5\n", "text/csv"), said("7,1.50\n", "text/csv"), False),
    ("labels beside tensors", tensors(labels=["cat"]), tensors(labels=["dog"]), True),
    ("a label of a tensor", tensors(output={"parameters": {"label": "cat"}}),
     tensors(output={"parameters": {"label": "dog"}}), True),
    ("no labels beside tensors", tensors(labels=["cat"]), tensors(), True),
    ("version and id of tensors", tensors(), tensors(model_version="2.0", id="2"), False),
    ("rows of several lengths", tensors([[1, 2], [3, 4]], (2, 2)),
     tensors([[1, 2, 3], [4]], (2, 2)), True),
    ("nested and flat", tensors([[1.0, 2], [3, 4]], (2, 2)),
     tensors([1.0, 2, 3, 4], (2, 2)), False),
    ("a whole number as a fraction", said("[3]"), said("[3.0]"), False),
    ("negative zero", said("[0.0]"), said("[-0.0]"), False),
    ("a text for a number", said("[0.5]"), said('["0.5"]'), True),
    ("null for NaN", said("[NaN]"), said("[null]"), True),
    ("a byte order mark", said("[1.5]"), said(b"\xef\xbb\xbf[1.5]"), True),
    ("lines for one list", said("[1.5]\n", "application/x-ndjson"), said("[1.5]\n"), True),
]  # fmt: skip


def test_what_is_written_otherwise_is_compared_by_what_clients_read() -> None:
    judge(
        Row("roll-out", change, is_wrong, rolled(live, other, None))
        for change, live, other, is_wrong in WRITTEN
    )


@pytest.mark.parametrize(("odd", "known"), [(15, False), (0, True)])
def test_one_odd_answer_of_the_live_version_hides_no_other(odd: int, known: bool) -> None:
    """Among the first answers, from which the scale is learnt, it does: docs/rollout.md says so."""
    draw, scales = random.Random(0), Scales()
    for number in range(30):
        scales.see([1e12 if number == odd else draw.gauss(0, 1)])
    rows = [
        Row("one in 30", f"{change:g} more", change > 1e-5, rolled(live, other, scales))
        for change in (1e-6, 0.01, 0.1, 1.0)
        for live, other in [(as_json([0.5]), as_json([0.5 + change]))]
    ]
    judge(rows, frozenset(f"{row.check}: {row.change}" for row in rows if known and row.is_wrong))


@pytest.mark.parametrize("empty", [None, math.nan])
def test_a_missing_number_mixes_no_places_up(empty: float | None) -> None:
    """A price that is missing once would else be the scale of the chance beside it."""
    draw, scales = random.Random(0), Scales()
    for number in range(30):
        price, chance = draw.uniform(1e5, 1e6), draw.random()
        scales.see([empty if number == 15 else price, empty if number == 16 else chance])
    judge(
        Row("one missing", f"{chance}", chance != 0.5,
            rolled(as_json([2e5, 0.5]), as_json([2e5, chance]), scales))
        for chance in (0.5, 0.51, 0.9, 0.1)
    )  # fmt: skip


def test_there_are_as_many_wrongs_as_were_asked_for() -> None:
    draw = random.Random(0)
    changes = [list(wrongs(model(draw), model(draw))) for model in MODELS.values()]
    assert 3 * sum(map(len, changes)) >= 300  # three answers of each are changed
