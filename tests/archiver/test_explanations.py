"""The certificate of explanations as a file, and what two of them are apart."""

import json
from dataclasses import replace

import pytest

from modelyard.archiver.explanations import (
    Asked,
    Explanations,
    Finding,
    format_explanations,
    parse_explanations,
    spread,
    to_json,
)

REQUESTS = tuple(Asked(f"MAR-INF/golden/{at}.request", "image/png") for at in range(4))
ERROR = Finding("error", "4 of 4 are covered", 1.0, 0.75)
DELETION = Finding("deletion", "falls earlier", 0.2, 0.0, low=0.1, high=0.3)
STABILITY = Finding("stability", "change under noise", 0.1, 0.7, is_most=True)
STATED = Explanations(
    "integrated_gradients", (ERROR, DELETION, STABILITY), {"layer": "no gradients"}, REQUESTS
)


def test_it_is_read_as_it_was_written() -> None:
    assert parse_explanations(format_explanations(STATED)) == STATED
    assert STATED.problems == () and STATED.difference(STATED) is None


@pytest.mark.parametrize(
    ("finding", "passes"),
    [
        (replace(ERROR, value=0.74), False),
        (replace(ERROR, value=float("nan")), False),
        (replace(DELETION, low=-0.01), False),
        (replace(DELETION, value=-0.01), True),  # its lower end is what counts
        (replace(STABILITY, value=0.71), False),
        (replace(STABILITY, value=0.69), True),
    ],
)
def test_a_bound_is_kept_or_missed(finding: Finding, passes: bool) -> None:
    assert finding.passes is passes
    assert bool(replace(STATED, measured=(finding,)).problems) is not passes


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ((ERROR, replace(DELETION, value=0.25), STABILITY), None),
        ((ERROR, replace(DELETION, value=0.4), STABILITY), "deletion is stated as 0.20"),
        ((ERROR, DELETION), "stability is not measured any more"),
        ((*STATED.measured, replace(ERROR, name="target")), "target is not stated"),
        ((ERROR, DELETION, replace(STABILITY, limit=0.5)), "it needs at most 0.50"),
        ((ERROR, replace(DELETION, low=-0.1), STABILITY), "deletion is 0.20 (-0.10 to 0.30)"),
    ],
)
def test_what_is_measured_again_is_compared(again: tuple[Finding, ...], said: str | None) -> None:
    found = STATED.difference(replace(STATED, measured=again))
    assert found is None if said is None else found is not None and said in found


def test_another_method_is_a_difference() -> None:
    other = replace(STATED, method="occlusion")
    assert "answered by occlusion" in str(STATED.difference(other))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"requests": []}, "0 requests; expected 4 to 16"),
        ({"method": ""}, "method: expected a string"),
        ({"measured": [{}]}, r"measured\[0\].name: expected"),
        ({"not_measured": {"a": 1}}, "not_measured.a: expected a string"),
        ({"measured": [{**vars(ERROR), "low": "0"}]}, "low: expected a number"),
        ({"method": "m" * 70_000}, "at most 65536 are read"),
    ],
)
def test_what_is_no_certificate_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_explanations(json.dumps({**to_json(STATED), **change}).encode())


def test_rows_are_spread_evenly() -> None:
    assert list(spread(200, 4)) == [0, 50, 100, 150]
    assert list(spread(3, 16)) == [0, 1, 2]
    assert list(spread(0, 16)) == list(spread(9, 0)) == []
