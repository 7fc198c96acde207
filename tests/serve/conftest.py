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
def gate(notes: Path) -> Path:
    """Return a file that is not there yet: `until FILE` waits for it."""
    return notes / "gate"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Yield as many threads as a test has clients at once."""
    with ThreadPoolExecutor(20) as threads:
        yield threads
