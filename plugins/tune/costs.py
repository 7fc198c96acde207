"""What a request of one model costs, as it was measured: times by batch size, the server, memory.

`tune` measures them and leaves them in model-config.yaml under `tunedCosts`; `plan` reads them from
there or from an archive that holds that file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from modelyard.base.quantile import nearest_rank
from modelyard.serve.errors import ServeError
from modelyard.serve.settings import what_is_wrong

if TYPE_CHECKING:
    import numpy as np

KEY = "tunedCosts"
"""Name of the costs in model-config.yaml."""
LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 1.0)
"""Shares of the batches that were no slower than the times which are kept of each size."""
DRAWS = 2000
"""Times that are drawn from, by batch size: evenly spread over what was measured."""
LONGEST_MS = 3_600_000.0


class BadCosts(ServeError):
    """They are missing, or are not what `tune` writes."""


def _rising(times: list[float]) -> list[float]:
    if len(times) != len(LEVELS) or times != sorted(times):
        raise ValueError(f"expected {len(LEVELS)} times, none below the one before it")
    return times


Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=1024)]
Time = Annotated[float, Field(gt=0, le=LONGEST_MS)]
Times = Annotated[list[Time], AfterValidator(_rising)]


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Costs:
    """What one model costs on one machine."""

    batch_ms: Annotated[dict[Size, Times], Field(min_length=1)]
    """Time that a worker is busy with a batch, at each of the levels, for each batch size."""
    server_ms: Number
    """The server process has of its core for one request, while it has many."""
    turn_ms: Number
    """And for each turn of its event loop: one for a request that comes alone, one for its answer;
    those that come together share them."""
    wait_ms: Number
    """Time that a request and its answer are on their way, with nobody busy."""
    worker_mb: Number
    """Memory of one worker that is its own."""
    server_mb: Number
    """Memory of the server process, and of what workers share."""
    load_s: Number
    """Time from the start of a server to its first answer."""
    threads: Whole
    """Threads of each worker."""
    batch_size: Whole
    """The largest batch of the setting that was measured."""
    cores: Whole
    """Cores of the machine."""

    def times_s(self, size: int) -> np.ndarray:
        """Return times of a batch, each as likely as the next, in seconds, sorted.

        Between two sizes that were measured they lie on a line; beyond the largest they grow as
        they do from one to the largest.
        """
        sizes = sorted(self.batch_ms)
        if size in self.batch_ms:
            return _spread(self.batch_ms[size]) / 1e3
        if len(sizes) == 1:
            return _spread(self.batch_ms[sizes[0]]) * size / sizes[0] / 1e3
        low = max((each for each in sizes[:-1] if each < size), default=sizes[0])
        high = min((each for each in sizes if each > max(low, size)), default=sizes[-1])
        low = sizes[0] if size > sizes[-1] else low
        few, many = _spread(self.batch_ms[low]), _spread(self.batch_ms[high])
        found: np.ndarray = few + (size - low) / (high - low) * (many - few)
        return found.clip(min=1e-6) / 1e3

    def as_dict(self) -> dict[str, Any]:
        """Return what is written down."""
        return asdict(self)


def _spread(at_levels: Sequence[float]) -> np.ndarray:
    """Return values, each as likely as the next, of a distribution that is known at `LEVELS`."""
    import numpy as np

    return np.interp((np.arange(DRAWS) + 0.5) / DRAWS, LEVELS, at_levels)


def summarise(times_s: Sequence[float]) -> list[float]:
    """Return these times at `LEVELS`, in milliseconds."""
    ordered = sorted(times_s)
    return [float(f"{nearest_rank(ordered, level) * 1e3:.4g}") for level in LEVELS]


def parse_costs(value: Any, where: str) -> Costs:
    """Read what stands under the key.

    Raises:
        BadCosts: it is not what `tune` writes; the message names the first thing that is wrong.
    """
    if not isinstance(value, dict):
        raise BadCosts(f"{where}: {KEY}: expected a mapping, got {type(value).__name__}")
    if odd := {*value} ^ {each.name for each in fields(Costs)}:
        text = ", ".join(sorted(map(str, odd)))
        raise BadCosts(f"{where}: {KEY}: missing or unknown: {text}; run modelyard tune again")
    try:
        return Costs(**value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ": ".join(str(each) for each in first["loc"])
        raise BadCosts(f"{where}: {KEY}: {place}: {what_is_wrong(first)}") from error
