"""What a bench found, as values and as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from modelyard.archiver.signature import Signature
from modelyard.exporter.bench.machine import Machine


@dataclass(frozen=True)
class Cell:
    """One subject at one batch size and thread count; `error` says why there is no figure."""

    subject: str
    threads: int
    batch: int
    calls: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    items_per_s: float | None = None
    round_p50_ms: tuple[float, ...] = ()
    """The median of each round: how far they spread is how quiet the machine was."""
    max_abs: float | None = None
    """Largest difference of an output value to the reference; None for the reference itself."""
    max_rel: float | None = None
    """max_abs over the largest value of the reference."""
    to_device_ms: float | None = None
    """Time to move the inputs there; None on the CPU, where nothing is moved."""
    from_device_ms: float | None = None
    before_bytes: int | None = None
    """Memory in use before the first timed call: of the device, else of the process."""
    after_bytes: int | None = None
    """The same after the last."""
    joules_per_item: float | None = None
    """Energy of the whole CPU or GPU during the calls; None where no counter can be read."""
    error: str | None = None


@dataclass(frozen=True)
class Footprint:
    """What one subject costs before and beside its calls, at one thread count."""

    subject: str
    threads: int
    kind: str
    file: str
    file_bytes: int
    load_s: float | None = None
    peak_bytes: int | None = None
    """Most memory of its process, with Python and torch."""
    own_bytes: int | None = None
    """Of these, what came after torch was imported: the model and its work space."""
    cuda_peak_bytes: int | None = None
    parameters: int | None = None
    flops_per_item: int | None = None
    flops_note: str = ""
    compile_s: float | None = None
    """Time of the first calls, all batch sizes together, where they compile."""
    operators: tuple[Mapping[str, Any], ...] = ()
    """A profile's rows: name, calls, milliseconds alone and in all, bytes; the longest first."""
    error: str | None = None


@dataclass(frozen=True)
class BenchReport:
    """Everything that a bench found."""

    machine: Machine
    signature: Signature
    reference: str
    """The subject that the others' outputs are compared with."""
    footprints: tuple[Footprint, ...]
    cells: tuple[Cell, ...]
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the form that `--json` prints; no number in it is NaN or infinite."""
        found = {"schema": 1, **asdict(self), "signature": self.signature.to_json()}
        plain: dict[str, Any] = _finite(found)
        return plain


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for by null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
