"""When requests come: at random, in bursts, or as a file says that they came."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from modelyard.serve.errors import ServeError

MOST_RECORDS = 5_000_000
MOST_LINE = 1 << 16


class BadArrivals(ServeError):
    """They cannot be read, or are none."""


class Arrivals(Protocol):
    """Where the moments come from."""

    def between(
        self, rate: float, seconds: float, chance: random.Random
    ) -> Iterator[tuple[float, str | None]]:
        """Yield the moment of each request, ascending, and its model where that is known.

        Args:
            rate: requests per second, on average.
            seconds: from 0.
        """

    def __str__(self) -> str:
        """Return what a reader must know of them."""


@dataclass(frozen=True)
class Poisson:
    """Many clients that know nothing of each other."""

    def between(
        self, rate: float, seconds: float, chance: random.Random
    ) -> Iterator[tuple[float, str | None]]:
        """Yield them, `expovariate` from one to the next."""
        log, draw = math.log, chance.random
        now = -log(1.0 - draw()) / rate
        while now < seconds:
            yield now, None
            now -= log(1.0 - draw()) / rate

    def __str__(self) -> str:
        """Return the process's name."""
        return "Poisson"


@dataclass(frozen=True)
class Bursty:
    """A Poisson process whose rate switches between two values (MMPP of two states)."""

    factor: float = 2.0
    """Of the mean rate, while it is high."""
    share: float = 0.1
    """Of the time that it is high."""
    mean_s: float = 1.0
    """How long it stays high, on average; exponentially distributed, as is the time between."""

    def __post_init__(self) -> None:
        """Refuse what is no process.

        Raises:
            BadArrivals: there would be less than nothing between two bursts.
        """
        if not (self.factor >= 1 and 0 < self.share < 1 and self.factor * self.share <= 1):
            raise BadArrivals(
                f"bursts of {self.factor:g} times the rate in {self.share:g} of the time: expected "
                "a factor from 1 up whose product with the share is at most 1"
            )
        if not 0 < self.mean_s < math.inf:
            raise BadArrivals(f"bursts of {self.mean_s:g} s: expected a time above 0")

    def between(
        self, rate: float, seconds: float, chance: random.Random
    ) -> Iterator[tuple[float, str | None]]:
        """Yield them; the first state is drawn as likely as each is."""
        low = (1 - self.factor * self.share) / (1 - self.share)
        is_high = chance.random() < self.share
        began = 0.0
        while began < seconds:
            mean_s = self.mean_s if is_high else self.mean_s * (1 - self.share) / self.share
            ends = min(seconds, began + chance.expovariate(1 / mean_s))
            of_state = rate * (self.factor if is_high else low)
            if of_state:
                now = began + chance.expovariate(of_state)
                while now < ends:
                    yield now, None
                    now += chance.expovariate(of_state)
            began, is_high = ends, not is_high

    def __str__(self) -> str:
        """Return its parameters in words."""
        return (
            f"bursts of {self.factor:g} times the rate, {self.mean_s:g} s each, in "
            f"{self.share:.0%} of the time"
        )


@dataclass(frozen=True)
class Recorded:
    """What a log says, again and again, faster or slower so that its mean rate is the given one."""

    moments: tuple[float, ...]
    """Seconds from the first, ascending."""
    models: tuple[str | None, ...]
    file: str

    @property
    def rate(self) -> float:
        """Return their own mean rate; the last is as far from the first of the next round."""
        return len(self.moments) / self._round_s

    @property
    def _round_s(self) -> float:
        return self.moments[-1] * len(self.moments) / max(1, len(self.moments) - 1)

    def between(
        self, rate: float, seconds: float, chance: random.Random
    ) -> Iterator[tuple[float, str | None]]:
        """Yield them."""
        scale, start = self.rate / rate, 0.0
        while True:
            for moment, model in zip(self.moments, self.models, strict=True):
                now = start + moment * scale
                if now >= seconds:
                    return
                yield now, model
            start += self._round_s * scale

    def __str__(self) -> str:
        """Return where they are from."""
        return f"{len(self.moments)} recorded in {self.file}, at {self.rate:.4g}/s there"


def read_recorded(file: Path) -> Recorded:
    """Read an access log in JSON, or any file of lines with a time each.

    A line is an object with `@timestamp` and, where it is of a log, `event.duration` and
    `labels.model`, as `access_log` with `log_format: json` writes it; or a number of seconds. A
    request came when it was answered less how long that took.

    Raises:
        BadArrivals: there are fewer than two, or a line is something else.
    """
    found: list[tuple[float, str | None]] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE), ""), 1):
                if number > MOST_RECORDS:
                    raise BadArrivals(f"{file}: more than {MOST_RECORDS} lines; give a part of it")
                if line.strip():
                    found.append(_read_line(line, f"{file}: line {number}"))
    except OSError as error:
        raise BadArrivals(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadArrivals(f"{file}: not UTF-8; expected an access log in JSON") from error
    found.sort(key=lambda each: each[0])
    if len(found) < 2 or found[0][0] == found[-1][0]:
        raise BadArrivals(f"{file}: expected at least two requests at different times")
    first = found[0][0]
    return Recorded(
        tuple(at - first for at, _ in found), tuple(model for _, model in found), file.name
    )


def _read_line(line: str, where: str) -> tuple[float, str | None]:
    try:
        value = json.loads(line)
        if isinstance(value, dict):
            at = datetime.fromisoformat(value["@timestamp"]).timestamp()
            took_s = float(value.get("event.duration", 0)) / 1e9
            model = value.get("labels.model")
            return _finite(at - took_s), model if isinstance(model, str) else None
        if type(value) in (int, float):
            return _finite(float(value)), None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise BadArrivals(
        f"{where}: expected a line of the access log in JSON (log_format: json), with @timestamp, "
        "or a number of seconds"
    )


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError
    return value


KINDS: dict[str, Callable[[], Arrivals]] = {"poisson": Poisson, "bursty": Bursty}
