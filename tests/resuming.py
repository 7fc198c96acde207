"""A plug-in of pytest for scripts/matrix: what has passed in an earlier run is not run again."""

import json
import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", help="File of outcomes, a line of JSON each; it grows.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Results(Path(config.getoption("--results"))))


class _Results:
    """Reads the outcomes of earlier runs and writes those of this one as soon as they are known."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what has passed or was skipped; all processes read before any test runs."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        last = {line["test"]: line["outcome"] for line in map(json.loads, lines)}
        done = [item for item in items if last.get(item.nodeid, "failed") != "failed"]
        config.hook.pytest_deselected(items=done)
        left = {*items} - {*done}
        items[:] = [item for item in items if item in left]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write what came of a test once it is over: setting up and tearing down may fail too."""
        if "PYTEST_XDIST_WORKER" in os.environ:
            return  # the process that started this one hears of it
        if report.when == "call" or report.outcome != "passed":
            before = self._outcomes.get(report.nodeid)
            self._outcomes[report.nodeid] = before if before == "failed" else report.outcome
        if report.when == "teardown":
            outcome = self._outcomes.pop(report.nodeid, "failed")
            with self._file.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, "outcome": outcome}) + "\n")
