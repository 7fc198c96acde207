import re
from typing import Any

import numpy as np
import pytest
import torch

from modelyard.archiver.signature import Dim, TensorSpec, parse_inputs
from modelyard.handlers.body import body_of, parse_json
from modelyard.handlers.errors import BadInput, InputMismatch, LoadError
from modelyard.handlers.limits import check_stated
from modelyard.handlers.models.rows import (
    OUTPUT_KINDS,
    TopLabels,
    probabilities_of,
    read_numbers,
    stack,
    wrong_kind,
)

ROW = TensorSpec("x", "float32", (Dim("batch", 1, 8), 2, Dim("length", 1, 3)))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"body": b"a"}, b"a"),
        ({"data": b"d", "body": b"a"}, b"d"),
        ({"data": b"", "body": b"a"}, b"a"),
        ({"body": 0}, 0),
        ({"body": []}, []),
    ],
    ids=["body", "data first", "empty data", "zero", "empty list"],
)
def test_content_is_the_data_part_or_the_body(row: dict[str, Any], expected: object) -> None:
    assert body_of(row) == expected


@pytest.mark.parametrize("function", [None, "softmax", "sigmoid", "none"])
@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_the_probabilities_that_explanations_have(
    function: str | None, count: int
) -> None:
    logits = torch.tensor([[-90.0, 1.5, 2.0], [3.0, 2.0, 90.0]])[:, :count]
    top = TopLabels({"function": function} if function else {}, str)
    answers, found = top(logits), probabilities_of(top.kind, logits)
    if found is None:
        assert function == "none"
        if count == 1:
            assert answers == [-90.0, 3.0], "numbers, not labels"
        else:
            assert answers[0] == {"2": 2.0, "1": 1.5, "0": -90.0}
    else:
        rows = [[each[str(at)] for at in range(count)] for each in answers]
        assert found.numpy() == pytest.approx(np.array(rows), abs=1e-7)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", OUTPUT_KINDS)
def test_what_the_outputs_are_decides_over_answers_and_probabilities(kind: str, count: int) -> None:
    outputs = torch.tensor([[0.2, 0.3, 0.5]])[:, :count]
    top = TopLabels({"output_kind": kind}, str, {"problem_type": "regression"})
    (answer,), found = top(outputs), probabilities_of(top.kind, outputs)
    assert top.kind == kind
    if kind == "values":
        expected = outputs
        assert found is None
    else:
        is_classes = kind == "logits" and count > 1
        expected = outputs if kind == "probabilities" else outputs.sigmoid()
        expected = outputs.softmax(1) if is_classes else expected
        assert found is not None
        assert torch.allclose(found, expected)
    if kind == "values" and count == 1:
        assert answer == pytest.approx(0.2)
    else:
        numbers = [answer[str(at)] for at in range(count)]
        assert numbers == pytest.approx(expected[0].tolist())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"output_kind": "softmax"}, "output_kind is 'softmax'; expected one of logits, prob"),
        ({"output_kind": "logits", "function": "sigmoid"}, "'logits' and handler.function 'sigm"),
    ],
)
def test_kind_of_output_that_cannot_be_meant_is_refused(
    section: dict[str, str], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        TopLabels(section, str)
    assert TopLabels({"output_kind": "probabilities", "function": "none"}, str)


SUMS_TO_ONE = torch.tensor([[0.2, 0.8], [1.0, 0.0]])


@pytest.mark.parametrize(
    ("kind", "is_stated", "outputs", "said"),
    [
        ("logits", False, SUMS_TO_ONE, "add up to 1 already, .* probabilities.* or output_kind: l"),
        ("logits", True, SUMS_TO_ONE, None),
        ("probabilities", True, SUMS_TO_ONE, None),
        ("values", False, SUMS_TO_ONE, None),
        ("multilabel", False, SUMS_TO_ONE, None),
        ("logits", False, SUMS_TO_ONE[:, :1], None),
        ("logits", False, SUMS_TO_ONE.half() * 1.01, None),
        ("logits", False, torch.tensor([[2.0, -1.0]]), None),
        ("logits", False, torch.tensor([[torch.nan, 1.0]]), None),
        ("probabilities", True, torch.tensor([[0.5, -0.2]]), "model gives -0.2 to 0.5; say logits"),
        ("probabilities", True, torch.tensor([[0.9, 0.8]]), None),
    ],
)
def test_outputs_of_another_kind_are_seen(
    kind: str, is_stated: bool, outputs: torch.Tensor, said: str | None
) -> None:
    found = wrong_kind(kind, is_stated, outputs)
    assert (found is None) == (said is None)
    if said and found:
        assert re.search(said, found)


@pytest.mark.parametrize(
    "row", [{"body": bytearray()}, {"body": ""}, {"body": None}, {"data": b"", "body": b""}]
)
def test_empty_body_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="the body is empty"):
        body_of(row)


def test_a_form_without_fields_is_told_from_an_empty_body() -> None:
    with pytest.raises(BadInput, match=r"as `curl -d` sends one.*text/plain"):
        body_of({})


@pytest.mark.parametrize("body", [b"[1, 2]", bytearray(b"[1, 2]"), "[1, 2]", [1, 2]])
def test_json_is_parsed_unless_it_is_already(body: object) -> None:
    assert parse_json(body) == [1, 2]


@pytest.mark.parametrize("body", [b"\x89PNG", b"[1,", "x"], ids=["png", "cut", "word"])
def test_body_that_is_not_json_is_refused(body: object) -> None:
    with pytest.raises(BadInput, match="the body is not JSON"):
        parse_json(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"[" * 100_000, "nested"), ("[NaN]", "NaN"), (b"[1e400]", "1e400 is too large")],
)
def test_nothing_in_json_is_guessed_at(body: object, why: str) -> None:
    with pytest.raises(BadInput, match=f"the JSON of the body .*{why}"):
        parse_json(body)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", 1e308), ("float16", 65520.0), ("", 1e39), ("int8", 200)]
)
def test_numbers_that_the_inputs_dtype_does_not_hold_are_refused(dtype: str, value: float) -> None:
    spec = TensorSpec("x", dtype, (Dim("batch", 1, 8), 1) if dtype else ())
    with pytest.raises(BadInput, match=f"numbers beyond {dtype or 'float32'}"):
        read_numbers(spec, [value])


def test_numbers_take_the_inputs_dtype() -> None:
    numbers = read_numbers(ROW, [[1, 2.5, 3], [4, 5, True]])
    assert numbers.dtype == np.float32
    assert numbers.tolist() == [[1.0, 2.5, 3.0], [4.0, 5.0, 1.0]]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ([[1, 2, 3]], r"numbers of shape \[1, 3\]"),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], r"numbers of shape \[2, 4\]"),
        (7, r"numbers of shape \[\]"),
        ([[1, 2], [3]], "lists of unequal length"),
        ([["1"], ["2"]], "something else than numbers"),
        ([[None], [1]], "something else than numbers"),
        ({"a": 1}, "something else than numbers"),
        ([[float("nan")], [1]], "NaN or Infinity"),
        ([[10**400], [1]], "something else than numbers"),
    ],
    ids=["rows", "too long", "scalar", "ragged", "text", "null", "object", "nan", "huge"],
)
def test_unusable_numbers_are_refused_with_what_is_expected(value: object, seen: str) -> None:
    expected = r'input "x" holds {}; expected float32 numbers of shape \[2, length=1\.\.3\]'
    with pytest.raises(BadInput, match=expected.format(seen)):
        read_numbers(ROW, value)


def test_fractions_are_refused_where_whole_numbers_are_expected() -> None:
    spec = TensorSpec("ids", "int64", (Dim("batch"), 2))
    assert read_numbers(spec, [1, 2]).dtype == np.int64
    with pytest.raises(BadInput, match='"ids" holds fractional numbers; expected int64'):
        read_numbers(spec, [1.0, 2.5])


def test_bfloat16_rows_become_a_bfloat16_tensor() -> None:
    spec = TensorSpec("x", "bfloat16", (Dim("batch"), 2))
    tensor = stack(spec, [read_numbers(spec, [1, 2]), read_numbers(spec, [3, 4])])
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [[1, 2], [3, 4]]


def test_rows_of_unequal_shape_cannot_share_a_batch() -> None:
    rows = [np.zeros((2, 1), np.float32), np.zeros((2, 3), np.float32)]
    with pytest.raises(InputMismatch, match=r"shapes \[\[2, 1\], \[2, 3\]\] in one batch; pad"):
        stack(ROW, rows)


@pytest.mark.parametrize("number", [300, -1, 2**40])
def test_integers_that_the_dtype_does_not_hold_are_refused(number: int) -> None:
    with pytest.raises(BadInput, match='input "x" holds numbers beyond uint8; expected uint8'):
        read_numbers(TensorSpec("x", "uint8", (1, 2)), [0, number])


@pytest.mark.parametrize(
    ("ids", "length", "problem"),
    [
        ([0, 4, 9], 3, None),
        (
            [0, 4, 9],
            0,
            'input "lengths" holds 0; expected values =1..length, which are 1 to 3 here',
        ),
        (
            [0, 4, 9],
            4,
            'input "lengths" holds 4; expected values =1..length, which are 1 to 3 here',
        ),
        ([0, 10], 2, 'input "ids" holds 10; expected values =0..9'),
    ],
)
def test_a_row_holds_only_values_that_are_stated(
    ids: list[int], length: int, problem: str | None
) -> None:
    texts = ["ids:int64[batch,length]<10", "lengths:int64[batch]=1..length"]
    specs = parse_inputs(texts).inputs
    rows = [
        torch.from_numpy(read_numbers(spec, value))
        for spec, value in zip(specs, (ids, length), strict=True)
    ]
    if problem is None:
        check_stated(specs, rows, 1)
    else:
        with pytest.raises(BadInput) as caught:
            check_stated(specs, rows, 1)
        assert str(caught.value) == problem


@pytest.mark.parametrize(
    "value", [[0.5] * 4, [[0.5, 1]] * 3, ["0.5+1j"] * 4], ids=["real", "too few", "text"]
)
def test_a_complex_row_is_pairs_of_numbers(value: Any) -> None:
    (spec,) = parse_inputs(["wave:complex64[batch,4]"]).inputs
    assert read_numbers(spec, [[0.5, 1]] * 4).shape == (4, 2)
    with pytest.raises(BadInput, match=r"of shape \[4, 2\]: complex64 as \[real, imaginary\]"):
        read_numbers(spec, value)


def test_a_dim_has_one_size_in_a_request() -> None:
    specs = parse_inputs(["a:float32[batch,n]", "b:float32[batch,n]"]).inputs
    with pytest.raises(BadInput, match='input "b" has n=3, another 2; expected one size'):
        check_stated(specs, [torch.zeros(2), torch.zeros(3)], 1)


def test_the_end_of_a_range_that_only_the_batch_knows_is_not_checked() -> None:
    specs = parse_inputs(["place:int64[batch]<batch"]).inputs
    check_stated(specs, [torch.tensor(7)], 1)


def test_probabilities_that_an_export_found_are_answered_as_they_are() -> None:
    chances = torch.tensor([[0.25, 0.75]])
    assert TopLabels({}, str, {}, "probabilities")(chances) == [{"1": 0.75, "0": 0.25}]
    # What the archive itself says comes first.
    assert TopLabels({"output_kind": "logits"}, str, {}, "probabilities").kind == "logits"
    assert TopLabels({"function": "sigmoid"}, str, {}, "probabilities").kind == "multilabel"
