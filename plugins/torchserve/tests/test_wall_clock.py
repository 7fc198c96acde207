"""Who asks what time it is: only what people read, and tokens; the rest is monotonic."""

from tests.serve.test_kills import REPO, wall_clock_users

WALL_CLOCK = {
    "plugins/torchserve/layout.py": "the time and the day in a line",
    "plugins/torchserve/logs.py": "the time of a record, the day in the name of a file",
    "plugins/torchserve/policy.py": "when a worker began to be started again, as a line says it",
    "plugins/torchserve/snapshot.py": "the name of a file",
    "plugins/torchserve/tokens.py": "tokens expire by the calendar",
}


def test_only_what_people_read_and_tokens_go_by_the_wall_clock() -> None:
    assert wall_clock_users(REPO / "plugins" / "torchserve") == set(WALL_CLOCK)
