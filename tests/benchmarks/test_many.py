"""What is said of starts, and of many models."""

from dataclasses import replace

import pytest

from benchmarks.many import Taken, tabulate

pytestmark = pytest.mark.nightly

ONE = Taken(1, 1.5, 2.5, 50, 300, 200, 0.3, 0.2, 0.5)
MANY = Taken(20, 9.0, 8, 60, 300 + 19 * 60, 200 + 19 * 25, 0.3, 0.3, 0.5)


@pytest.mark.parametrize(
    ("one", "many", "missed"),
    [
        pytest.param(ONE, MANY, [], id="all met"),
        pytest.param(replace(ONE, ready_s=1.6), MANY, ["first"], id="first"),
        pytest.param(replace(ONE, import_s=0.6), MANY, ["import"], id="import"),
        pytest.param(ONE, replace(MANY, cpu_s=8.1), ["of a core"], id="of a core"),
        pytest.param(ONE, replace(MANY, all_mb=300 + 19 * 61), ["further"], id="further"),
        pytest.param(replace(ONE, added_s=0.4), MANY, ["one more"], id="one more"),
        pytest.param(ONE, replace(MANY, again_s=0.4), ["again"], id="again"),
    ],
)
def test_each_goal_is_held_against_its_figure(one: Taken, many: Taken, missed: list[str]) -> None:
    lines = tabulate([one, many, one, many]).splitlines()
    wrong = [line for line in lines if line.endswith("not met")]
    assert len(wrong) == len(missed) and all(map(str.__contains__, wrong, missed))


def test_a_line_has_every_figure() -> None:
    shown = tabulate([ONE, MANY]).splitlines()
    assert shown[1].split() == ["1", "1.50", "2.5", "50", "300", "0.30", "0.20", "0.50"]
    assert shown[5].split() == [
        "20",
        "9.00",
        "8.0",
        "60",
        "1440",
        "60",
        "25",
        "0.30",
        "0.30",
        "0.50",
    ]
