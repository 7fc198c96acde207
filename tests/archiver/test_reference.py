import json
from pathlib import Path

import pytest

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.reference import (
    MOST_PARTS,
    Reference,
    format_reference,
    make_reference,
    parse_reference,
)
from modelyard.archiver.write import write_archive


def test_shares_are_averaged_over_the_rows_that_have_any() -> None:
    reference = make_reference([{"a": 0.2, "b": 0.8}, {}, {"a": 0.6, "b": 0.4}])
    assert reference == Reference(2, {"b": 0.6, "a": 0.4})
    assert parse_reference(format_reference(reference)) == reference


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
    assert reference.distance(folded) == pytest.approx(0, abs=1e-5)
    assert parse_reference(format_reference(reference)) == reference


def test_the_distance_is_what_has_moved() -> None:
    reference = Reference(1, {"a": 0.5, "b": 0.3, "c": 0.2})
    assert reference.distance({"a": 0.4, "b": 0.3, "c": 0.3}) == pytest.approx(0.1)
    assert Reference(1, {"a": 1.0, "b": 0.0}).distance({"a": 0.0, "b": 1.0}) == 1


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
        ({"rows": 1, "shares": {"a" * 70_000: 1}}, "at most 65536 are read"),
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
