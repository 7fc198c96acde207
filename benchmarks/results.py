"""Raw figures of each run → medians and ratios; the file that keeps them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
BARE, SERVED = "bare", "served"
BUSY_NEIGHBOUR = 0.25
"""Cores used by others above which a row is marked: its rates then say little."""


@dataclass(frozen=True)
class Cell:
    """What is measured, once in every round."""

    subject: str
    """Name of the archive."""
    kind: str
    """BARE or SERVED."""
    workers: int
    """Processes that run the handler, one thread each."""
    connections: int = 0
    """Of the load generator; 0 for the bare loop."""
    batch: int = 0
    """Requests in one call of the bare loop; 0 where the server chooses."""


@dataclass(frozen=True)
class Sample:
    """One run of one cell."""

    cell: Cell
    round: int
    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failures: int
    server_cpu_s: float
    workers_cpu_s: float
    other_cores: float
    """Cores that were busy with what does not belong to the benchmark."""
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Well answered requests per second."""
        return (self.requests - self.failures) / self.seconds

    @property
    def server_us(self) -> float:
        """CPU of the server process per request, in microseconds."""
        return 1e6 * self.server_cpu_s / self.requests if self.requests else 0.0

    @property
    def workers_us(self) -> float:
        """CPU of the workers, or of the bare loop, per request, in microseconds."""
        return 1e6 * self.workers_cpu_s / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class Footprint:
    """What one started server takes before and after its load."""

    subject: str
    workers: int
    round: int
    start_s: float
    server_rss_mb: float
    server_pss_mb: float
    worker_rss_mb: float
    worker_pss_mb: float


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One cell over all rounds."""

    cell: Cell
    rate: Spread
    p50_ms: Spread
    p99_ms: Spread
    server_us: Spread
    workers_us: Spread
    ratio: Spread | None
    """Served rate over the bare rate of the same round; None for the bare loop and without one."""
    failures: int
    other_cores: float


def spread(values: Iterable[float]) -> Spread:
    """Return median, lowest and highest."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def summarise(samples: Sequence[Sample]) -> list[Row]:
    """Return one row per cell, in the order of its first run."""
    cells = sorted(dict.fromkeys(sample.cell for sample in samples), key=_order)
    return [_row(cell, samples) for cell in cells]


def bare_rate(cell: Cell, samples: Sequence[Sample], round: int) -> float | None:
    """Return the rate of the bare loop that a served cell is held against, in one round.

    As many processes as can be busy; at one connection one request at a time, else the batch that
    is fastest.
    """
    rates = [
        sample.rate
        for sample in samples
        if sample.round == round
        and sample.cell.kind == BARE
        and sample.cell.subject == cell.subject
        and sample.cell.workers == min(cell.workers, cell.connections)
        and (cell.connections > 1 or sample.cell.batch == 1)
    ]
    return max(rates, default=None)


def _order(cell: Cell) -> tuple[Any, ...]:
    return cell.subject, cell.kind, cell.workers, cell.connections, cell.batch


def _row(cell: Cell, samples: Sequence[Sample]) -> Row:
    own = [sample for sample in samples if sample.cell == cell]
    ratios = [
        sample.rate / bare
        for sample in own
        if cell.kind == SERVED and (bare := bare_rate(cell, samples, sample.round))
    ]
    return Row(
        cell=cell,
        rate=spread(sample.rate for sample in own),
        p50_ms=spread(sample.p50_ms for sample in own),
        p99_ms=spread(sample.p99_ms for sample in own),
        server_us=spread(sample.server_us for sample in own),
        workers_us=spread(sample.workers_us for sample in own),
        ratio=spread(ratios) if ratios else None,
        failures=sum(sample.failures for sample in own),
        other_cores=statistics.median(sample.other_cores for sample in own),
    )


@dataclass(frozen=True)
class Results:
    """Everything that one run of the benchmark found."""

    about: dict[str, Any]
    """Machine, versions, command, date, settings."""
    samples: list[Sample]
    footprints: list[Footprint]

    def write(self, file: Path) -> None:
        """Keep the raw figures and their summary as JSON."""
        content = {
            "schema": SCHEMA,
            **self.about,
            "summary": [asdict(row) for row in summarise(self.samples)],
            "samples": [asdict(sample) for sample in self.samples],
            "footprints": [asdict(footprint) for footprint in self.footprints],
        }
        file.write_text(json.dumps(content, indent=1) + "\n")


def read_results(file: Path) -> Results:
    """Read what `Results.write` wrote."""
    content = json.loads(file.read_text())
    samples = [
        Sample(**{**sample, "cell": Cell(**sample["cell"])}) for sample in content.pop("samples")
    ]
    footprints = [Footprint(**footprint) for footprint in content.pop("footprints")]
    about = {key: value for key, value in content.items() if key not in ("schema", "summary")}
    return Results(about, samples, footprints)
