import json
import random
from pathlib import Path

import pytest

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.reference import (
    CELLS,
    MAX_BYTES,
    MOST_CLASSES,
    MOST_PARTS,
    Reference,
    cell_of,
    distance,
    format_reference,
    make_reference,
    parse_reference,
)
from modelyard.archiver.write import write_archive


def test_shares_are_averaged_over_the_rows_that_have_any() -> None:
    reference = make_reference([{"a": 0.2, "b": 0.8}, {}, {"a": 0.6, "b": 0.4}])
    assert (reference.rows, reference.shares) == (2, {"b": 0.6, "a": 0.4})
    assert parse_reference(format_reference(reference)) == reference


def test_classes_are_averaged_apart_and_their_shares_counted_by_size() -> None:
    rows = [("no", 0.25), ("no", 0.75), ("no", 0.5), ("yes", 1.0)]
    reference = make_reference(
        [{"class": name, "shares": {"a": share, "b": 1 - share}} for name, share in rows]
    )
    assert list(reference.shares) == ["a", "b"]
    no, yes = reference.classes["no"], reference.classes["yes"]
    assert (no.rows, no.shares, yes.rows, yes.shares) == (3, [0.5, 0.5], 1, [1.0, 0.0])
    assert no.cells[0][cell_of(0.25)] == no.cells[0][cell_of(0.75)] == 1
    assert list(map(sum, no.cells)) == [3, 3]
    assert yes.cells == [[0] * cell_of(1.0) + [1], [1]]
    assert 0.05 < no.floor < 0.2  # √(2/3 · 0.0625 / 15) is one standard deviation
    assert yes.floor == 0
    assert 0 < (reference.floor or 0) < no.floor + 0.2
    assert reference.usual("yes") == [1.0, 0.0]
    assert reference.usual("neither") == (0.625, 0.375)
    assert parse_reference(format_reference(reference)) == reference


def test_the_largest_reference_is_read() -> None:
    """Of 20 classes and 40 parts with long names: 16 and 32 are told apart."""
    draw = random.Random(0)
    rows = []
    for at in range(2000):
        weights = {f"{part:0>128}": draw.expovariate(1) ** 3 for part in range(40)}
        total = sum(weights.values())
        shares = {part: weight / total for part, weight in weights.items()}
        rows.append({"class": f"{at % 20:0>128}", "shares": shares})
    reference = make_reference(rows)
    assert (len(reference.classes), len(reference.shares)) == (16, 32)
    written = format_reference(reference)
    assert parse_reference(written) == reference
    assert len(written) < 0.9 * MAX_BYTES


def test_a_reference_of_before_knows_no_classes() -> None:
    reference = parse_reference(b'{"rows": 2, "shares": {"a": 0.5, "b": 0.5}}')
    assert reference == Reference(2, {"a": 0.5, "b": 0.5})


def test_sizes_of_shares_are_told_apart_in_order() -> None:
    sizes = [0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0]
    places = list(map(cell_of, sizes))
    assert places == sorted(places)
    assert (places[0], places[1], places[-1]) == (0, 0, CELLS - 1)
    assert len(set(places)) == 7


def test_rows_without_reasons_are_no_reference() -> None:
    with pytest.raises(ValueError, match="no row gives a reason"):
        make_reference([{}, {}])


def test_parts_beyond_the_bound_are_one() -> None:
    """Of 100 parts the 31 with most are named; what is not among them is counted as `other`."""
    row = {f"f{at}": (at + 1) / 5050 for at in range(100)}
    reference = make_reference([row])
    assert len(reference.shares) == MOST_PARTS
    assert list(reference.shares)[:2] == ["f99", "f98"]
    assert reference.shares["other"] == pytest.approx(sum(range(1, 70)) / 5050, abs=1e-5)
    folded = reference.fold(row)
    assert folded.keys() == reference.shares.keys()
    assert folded == pytest.approx(reference.shares, abs=1e-5)
    assert parse_reference(format_reference(reference)) == reference


def test_the_distance_is_what_has_moved() -> None:
    assert distance([-0.1, 0.0, 0.1]) == pytest.approx(0.1)
    assert distance([-1.0, 1.0]) == 1


GROUP = {"rows": 1, "shares": [1], "cells": ["1"], "floor": 0}


def grouped(**wrong: object) -> dict[str, object]:
    """Return a reference with one class, of which something is wrong."""
    return {"rows": 1, "shares": {"a": 1}, "floor": 0, "classes": {"b": {**GROUP, **wrong}}}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"rows": 1, "shares": {"a": 0.5}}, "add up to 0.5; expected 1"),
        ({"rows": 1, "shares": {"a": 1.5, "b": -0.5}}, '"b" is -0.5'),
        ({"rows": 0, "shares": {"a": 1}}, "rows is 0"),
        ({"rows": 1, "shares": {}}, "0 parts"),
        ({"rows": 1, "shares": {f"f{at}": 1 / 40 for at in range(40)}}, "40 parts"),
        ({"rows": 1, "shares": {"a": "1"}}, "expected a number"),
        ({"rows": 1, "shares": {"a" * 129: 1}}, "is too long"),
        ([], "expected an object"),
        ({"rows": 1, "shares": {"a" * 140_000: 1}}, "at most 131072 are read"),
        (grouped(shares=[1, 0]), "classes.b.shares: expected 1 numbers from 0 to 1"),
        (grouped(shares=["1"]), "classes.b.shares: expected 1 numbers"),
        (grouped(cells=["2"]), "classes.b.cells: expected 1 texts of at most 30 counts of 1 rows"),
        (grouped(cells=["2 -1"]), "classes.b.cells"),
        (grouped(cells=["0 " * 30 + "1"]), "classes.b.cells"),
        (grouped(cells=[[1]]), "classes.b.cells"),
        (grouped(floor=None), "classes.b.floor: expected a number"),
        (
            {**grouped(), "classes": {f"c{at}": GROUP for at in range(MOST_CLASSES + 1)}},
            "17 classes; expected at most 16",
        ),
    ],
)
def test_what_is_no_reference_is_refused(content: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_reference(json.dumps(content).encode())


def test_a_reference_needs_requests_and_the_dry_run(tmp_path: Path) -> None:
    weights, rows = tmp_path / "weights.bin", tmp_path / "rows.json"
    weights.write_bytes(b"none")

    def write() -> None:
        write_archive("m", version="1.0", artifact=weights, handler="tabular",
                      output_dir=tmp_path, reference=rows)  # fmt: skip

    with pytest.raises(CannotArchive, match=r"reference .*rows\.json: there is no such file"):
        write()
    rows.write_text("[]")
    with pytest.raises(CannotArchive, match="leave out --no-dry-run"):
        write()
