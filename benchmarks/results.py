"""Raw figures of each run → medians and ratios; the file that keeps them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 2
BARE, OURS, DROP_IN = "bare", "modelyard", "drop-in"
"""Servers: the bare loop, `modelyard serve`, and the `torchserve` that comes with it."""
BUSY_NEIGHBOUR = 0.25
"""Cores used by others above which a row is marked: its rates then say little."""
MANY = 64
"""Connections at which the goals of rate and CPU are set."""
CEILING_GOAL = 15_000
"""Requests/s of a handler that answers at once, at MANY connections."""
COMPUTE_GOAL = 0.97
"""Share of the bare loop's rate, where the model's work is most of it."""


@dataclass(frozen=True)
class Cell:
    """What is measured, once in every round."""

    subject: str
    """What is served: the name of the archive."""
    server: str
    """BARE, OURS, or another's name and setting."""
    workers: int
    """Processes that run the model, one thread each."""
    connections: int
    """Connections of the load generator. The bare loop has those of the runs beside it."""


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
    """Processor time of the server; of a peer, of all its processes."""
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
    """What one started server took: time until its first right answer, memory after its load."""

    subject: str
    server: str
    workers: int
    round: int
    ready_s: float
    pss_mb: float
    """All its processes together."""
    server_rss_mb: float | None = None
    """Memory of the server process; None where a peer has no such process of its own."""
    server_pss_mb: float | None = None
    worker_rss_mb: float | None = None
    """Memory of one worker, the mean of them."""
    worker_pss_mb: float | None = None
    has_torch: bool | None = None
    """Whether the server process has loaded torch's library."""


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
    rate_ratio: Spread | None
    """Served rate over the rate of the bare loops run just before and just after; None without."""
    p50_ratio: Spread | None
    """The same of p50."""
    failures: int
    other_cores: float


def family(server: str) -> str:
    """Return a server's name without its setting: `mosec b=8` is mosec."""
    return server.partition(" b=")[0]


def is_ours(server: str) -> bool:
    """Return whether a row is one of ours."""
    return family(server) in (OURS, DROP_IN)


def best(rows: Iterable[Row]) -> dict[str, Row]:
    """Return of each server the row of its fastest setting; all rows are of one load."""
    found: dict[str, Row] = {}
    for row in rows:
        known = found.get(family(row.cell.server))
        if known is None or row.rate.median > known.rate.median:
            found[family(row.cell.server)] = row
    return found


def spread(values: Iterable[float]) -> Spread:
    """Return median, lowest and highest."""
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


def summarise(samples: Sequence[Sample]) -> list[Row]:
    """Return one row per cell, by subject, server, workers and connections."""
    cells = sorted(dict.fromkeys(sample.cell for sample in samples), key=_order)
    return [_row(cell, samples) for cell in cells]


def neighbours(sample: Sample, samples: Sequence[Sample]) -> list[Sample]:
    """Return the runs of the bare loop just before and just after a served one.

    They take turns: bare 0, served 0, bare 1, served 1, …, bare n.
    """
    return [
        other
        for other in samples
        if other.cell.server == BARE != sample.cell.server
        and other.cell.subject == sample.cell.subject
        and other.cell.connections == sample.cell.connections
        and other.round in (sample.round, sample.round + 1)
    ]


def _order(cell: Cell) -> tuple[Any, ...]:
    return cell.subject, cell.server, cell.workers, cell.connections


def _row(cell: Cell, samples: Sequence[Sample]) -> Row:
    own = [sample for sample in samples if sample.cell == cell]
    pairs = [(sample, bare) for sample in own for bare in neighbours(sample, samples)]
    return Row(
        cell=cell,
        rate=spread(sample.rate for sample in own),
        p50_ms=spread(sample.p50_ms for sample in own),
        p99_ms=spread(sample.p99_ms for sample in own),
        server_us=spread(sample.server_us for sample in own),
        workers_us=spread(sample.workers_us for sample in own),
        rate_ratio=spread(one.rate / bare.rate for one, bare in pairs) if pairs else None,
        p50_ratio=spread(one.p50_ms / bare.p50_ms for one, bare in pairs) if pairs else None,
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
