"""The options of an explanation: query parameters of the API, options of `modelyard explain`."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from modelyard.base.plugins import registered


class WrongOption(ValueError):
    """There is no such option, or it does not take the value; the message says what it takes."""


class Option(NamedTuple):
    """What a value is read as on a command line, what it means, and what it may be."""

    type: type[str | int | float | bool]
    text: str
    choices: tuple[str, ...] = ()
    """All that it may be; empty where that is not a list."""
    limits: tuple[int, int] | None = None
    """Lowest and highest value of a whole number."""
    examples: tuple[str, ...] = ()
    """Some of what it may be, where that is not a list."""


def _options() -> Iterator[tuple[str, Option]]:
    stated = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    stated["method"]["choices"] += registered("methods")
    types = {each.__name__: each for each in (str, int, float, bool)}
    for name, option in stated.items():
        lists = {key: tuple(value) for key, value in option.items() if isinstance(value, list)}
        yield name, Option(types[option["type"]], option["text"], **lists)


EXPLAIN_OPTIONS: Mapping[str, Option] = dict(_options())
"""`explain_options.toml`, and the methods of plug-ins."""


def read_option(name: str, text: str) -> str | int | float | bool:
    """Read a value as a query spells it.

    Raises:
        WrongOption: its message states what is allowed.
    """
    option = EXPLAIN_OPTIONS.get(name)
    if option is None:
        known = ", ".join(EXPLAIN_OPTIONS)
        raise WrongOption(f'unknown parameter "{name}"; expected some of {known}')
    if option.type is bool:
        return _one_of(name, text, ("true", "false")) == "true"
    if option.type is float:
        return _share(name, text)
    if option.limits is not None:
        return _whole(name, text, *option.limits)
    if name == "baseline":
        is_file = text.startswith("file:") and text != "file:"
        return text if is_file else _one_of(name, text, (*option.examples, "file:NAME"))
    return _one_of(name, text, option.choices) if option.choices else text


def check_query(pairs: Iterable[tuple[str, str]]) -> None:
    """Refuse what no explanation of ours takes, before anything is waited for.

    Args:
        pairs: pairs of a query, in its order.

    Raises:
        WrongOption: as `read_option`, or an option is there twice.
    """
    seen = set()
    for name, text in pairs:
        read_option(name, text)
        if name in seen:
            raise WrongOption(f"{name} is given twice; expected it once")
        seen.add(name)


def _one_of(name: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise WrongOption(f'{name} is "{text}"; expected one of {", ".join(allowed)}')
    return text


def _whole(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and low <= int(text) <= high):
        raise WrongOption(f'{name} is "{text}"; expected a whole number from {low} to {high}')
    return int(text)


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise WrongOption(f'{name} is "{text}"; expected a number above 0 and at most 1')
    return value
