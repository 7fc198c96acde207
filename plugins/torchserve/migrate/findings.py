"""What is said of an installation, and the readers' warnings as such findings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WORKS, CHANGES, FAILS = "works", "changes", "fails"


@dataclass(frozen=True)
class Finding:
    """One thing that works, changes, or will not work."""

    status: str
    subject: str
    """A key of the configuration, or a model and its version."""
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Model:
    """A version that the start serves."""

    name: str
    version: str
    file: str
    workers: int
    batch_size: int
    memory_bytes: int
    """Of all its workers; an estimate, or what one took in a trial, times the workers."""
    is_measured: bool = False


@dataclass
class Report:
    """Everything that was found."""

    findings: list[Finding] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)

    @property
    def fails(self) -> bool:
        """Whether anything will not work."""
        return any(each.status == FAILS for each in self.findings)

    def count(self, status: str) -> int:
        """Return how many findings have this status."""
        return sum(each.status == status for each in self.findings)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def warnings_of_readers() -> Iterator[list[str]]:
    """Collect what the server's readers would write to its log."""
    logger, collector = logging.getLogger("modelyard"), _Collector()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield collector.said
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates
