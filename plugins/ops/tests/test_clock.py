"""Whatever is measured or limited goes by the monotonic clock."""

from __future__ import annotations

from tests.serve.test_kills import REPO, wall_clock_users

WALL_CLOCK = {
    "plugins/ops/rollout/record.py": "when a roll-out came into its state, as it is shown",
    "plugins/ops/rollout/trial.py": "when a request was answered otherwise, as it is shown",
    "plugins/ops/console/events.py": "when an event was, as it is shown",
    "plugins/ops/console/render.py": "the time of a page",
    "plugins/ops/console/readings.py": "the time under a plot",
}
"""Who may ask what time it is, and what for."""


def test_only_what_people_read_goes_by_the_wall_clock() -> None:
    assert wall_clock_users(REPO / "plugins" / "ops") == set(WALL_CLOCK)
