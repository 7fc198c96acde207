"""What an operator says of a roll-out when it starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from modelyard.serve.errors import BadRequest

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%?")
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
MOST_STEPS = 20
LONGEST_S = 366 * 86_400.0
MOST_TEXT = 1000
"""Characters of a rule, and of what is expected."""


@dataclass(frozen=True)
class Plan:
    """How a candidate becomes the default."""

    file: str
    """Of the candidate: a location, as `models register` takes it."""
    shadow: float = 0.05
    """Share of the predictions that are copied to the candidate; 0 copies none."""
    for_s: float | None = None
    """How long a state lasts at least before the next one begins by itself; None: none does."""
    steps: tuple[float, ...] = (0.01, 0.1, 0.5)
    """Shares that the candidate answers, before it answers all."""
    rule: str = ""
    """What must hold; empty for the usual."""
    expect: str = ""
    """Which differences are meant; empty for none."""
    keeps_inputs: bool = False
    """Whether the requests of the worst differences are shown."""
    header: str = ""
    """The request header whose value decides the side; empty for the request's id."""


def parse_plan(
    file: str,
    shadow: str | None = None,
    for_: str | None = None,
    canary: str | None = None,
    rule: str | None = None,
    expect: str | None = None,
    keep_inputs: bool = False,
    header: str | None = None,
) -> Plan:
    """Return the plan that parameters write.

    Raises:
        BadRequest: says which of them is wrong, and what is expected.
    """
    usual = Plan(file)
    if header is not None and not _HEADER.fullmatch(header):
        raise BadRequest(f"header: expected the name of a header, got {header[:60]!r}")
    for name, text in (("rule", rule), ("expect", expect)):
        if text is not None and len(text) > MOST_TEXT:
            raise BadRequest(f"{name}: expected at most {MOST_TEXT} characters, got {len(text)}")
    return Plan(
        file,
        usual.shadow if shadow is None else parse_share("shadow", shadow),
        None if for_ is None else parse_time("for", for_),
        usual.steps if canary is None else parse_steps(canary),
        rule or "",
        expect or "",
        keep_inputs,
        (header or "").lower(),
    )


def parse_share(name: str, text: str) -> float:
    """Return the share that a number of percent is, with or without its sign.

    Raises:
        BadRequest: it is not one, or not one from 0 to 100.
    """
    match = _SHARE.fullmatch(text.strip())
    if match is None or float(match[1]) > 100:
        raise BadRequest(f"{name}: expected a percentage from 0 to 100 such as 5%, got {text!r}")
    return round(float(match[1]) / 100, 9)


def parse_steps(text: str) -> tuple[float, ...]:
    """Return ever larger shares, of percentages between commas.

    Raises:
        BadRequest: one is wrong, or not above the one before it.
    """
    steps = tuple(parse_share("canary", part) for part in text.split(",") if part.strip())
    if len(steps) > MOST_STEPS:
        raise BadRequest(f"canary: expected at most {MOST_STEPS} steps, got {len(steps)}")
    if any(after <= before for before, after in zip((0.0, *steps), steps, strict=False)):
        raise BadRequest(f"canary: expected ever larger percentages such as 1,10,50, got {text!r}")
    return tuple(step for step in steps if step < 1)  # all of them is the default


def parse_time(name: str, text: str) -> float:
    """Return the seconds that `90`, `90s`, `10m`, `2h` or `1d` says.

    Raises:
        BadRequest: it is not a time, or too long a one.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise BadRequest(f"{name}: expected a time such as 90s, 10m or 2h, got {text!r}")
    return seconds


def format_share(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share * 100:.6g} %"
