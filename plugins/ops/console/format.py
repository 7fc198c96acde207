"""How numbers and times are written in pages."""

from __future__ import annotations

import time
from collections.abc import Callable

from modelyard.plugins.ops.console.readings import Percentile
from modelyard.serve.log import escape_controls

NOTHING = "–"
"""Where there is no number yet."""
THIN = "\u202f"
"""Between thousands: a space that does not break."""


def count(value: int) -> str:
    """Write a whole number, thousands apart."""
    return f"{value:,}".replace(",", THIN)


def number(value: float | None) -> str:
    """Write a mean."""
    return NOTHING if value is None else f"{value:.1f}"


def rate(value: float) -> str:
    """Write how many there are in a second."""
    if value >= 100:
        return count(round(value))
    return "0" if value == 0 else f"{value:.1f}"


def duration(seconds: float | None) -> str:
    """Write a time of microseconds to hours, to three digits."""
    if seconds is None:
        return NOTHING
    if seconds == float("inf"):
        return "without end"
    for below, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s")):
        if seconds < below:
            return f"{seconds * factor:.3g}{THIN}{unit}"
    return f"{seconds / 60:.3g}{THIN}min"


def bounds(of: Percentile) -> str:
    """Write between what a percentile lies; a histogram knows no more."""
    if of.high == float("inf"):
        return f"above {duration(of.low)}"
    return f"between {duration(of.low)} and {duration(of.high)}"


def size(bytes: int | None) -> str:
    """Write an amount of memory."""
    if bytes is None:
        return NOTHING
    for unit in ("B", "KB", "MB"):
        if bytes < 1000:
            return f"{bytes:.3g}{THIN}{unit}"
        bytes = bytes / 1000  # type: ignore[assignment]
    return f"{bytes:.3g}{THIN}GB"


def percent(share: float) -> str:
    """Write a share."""
    return f"{share * 100:.0f}{THIN}%"


def clock(at: float) -> str:
    """Write a time of now, to the millisecond, in UTC."""
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    return f"{whole}.{int(at % 1 * 1000):03d}"


FILTERS: dict[str, Callable[..., str]] = {
    "bounds": bounds,
    "bytes": size,
    "clock": clock,
    "count": count,
    "duration": duration,
    "number": number,
    "percent": percent,
    "rate": rate,
    "visible": escape_controls,
}
