"""Who asks what time it is: only what people read; the rest is monotonic."""

from tests.serve.test_kills import REPO, wall_clock_users

WALL_CLOCK = {
    "plugins/ops/console/format.py": "the time of a page",
    "plugins/ops/console/readings.py": "the time under a plot",
    "plugins/ops/rollout/record.py": "when a roll-out came into its state, as it is shown",
    "plugins/ops/rollout/worst.py": "when a request was answered otherwise, as it is shown",
}


def test_only_what_people_read_goes_by_the_wall_clock() -> None:
    assert wall_clock_users(REPO / "plugins" / "ops") == set(WALL_CLOCK)
