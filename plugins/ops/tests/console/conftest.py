"""A browser for tests, skipped by name where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.archiver.conftest import fill
from tests.browser import find_missing, running_driver


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the browser's driver; yield its address."""
    if (missing := find_missing()) is not None:
        pytest.skip(missing)
    with running_driver(tmp_path_factory.mktemp("driver") / "driver.log") as address:
        yield address


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Return a folder of input files, as the archiver's tests have it."""
    return fill(tmp_path / "inputs")
