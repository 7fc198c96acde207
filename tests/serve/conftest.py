"""What tests with many clients need."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.live import make_notes_folder


@pytest.fixture
def notes() -> Path:
    """Return a folder in which handlers may write."""
    return make_notes_folder()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Yield as many threads as a test has clients at once."""
    with ThreadPoolExecutor(20) as threads:
        yield threads


@pytest.fixture
def gate(notes: Path, threads: ThreadPoolExecutor) -> Iterator[Path]:
    """Yield a file that is not there yet: `until FILE` waits for it, to the test's end at most.

    The end of the threads waits for their requests, so the file comes before that.
    """
    file = notes / "gate"
    yield file
    file.touch()
