"""What is said of many models."""

import pytest

from benchmarks.many import Taken, tabulate


@pytest.mark.parametrize(
    ("many", "missed"),
    [
        pytest.param(Taken(20, 7.5, 20, 60, 300 + 19 * 90, 0.3), [], id="all met"),
        pytest.param(Taken(20, 8.1, 20, 60, 300 + 19 * 90, 0.3), ["ready"], id="ready"),
        pytest.param(Taken(20, 7.5, 20, 60, 300 + 19 * 91, 0.3), ["further"], id="further"),
        pytest.param(Taken(20, 7.5, 20, 60, 300 + 19 * 90, 0.4), ["again"], id="again"),
    ],
)
def test_each_goal_is_held_against_its_figure(many: Taken, missed: list[str]) -> None:
    one = Taken(1, 3.9, 4, 50, 300, 0.2)
    shown = tabulate([one, many, one, many])
    wrong = [line for line in shown.splitlines() if line.endswith("not met")]
    assert [word for line in wrong for word in ("ready", "further", "again") if word in line] == (
        missed
    )
    assert shown.splitlines()[1].split() == ["1", "3.9", "4.0", "50", "300", "0.20"]
