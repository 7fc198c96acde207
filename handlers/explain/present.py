"""An explanation and what draws it → the texts around a picture, or its part of a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelyard.base import explain_words as words
from modelyard.handlers.explain import page
from modelyard.handlers.explain.bars import Bar
from modelyard.handlers.explain.bars import sums as sums_of
from modelyard.handlers.explain.draw import Heat, Texts
from modelyard.handlers.explain.explanation import Explanation
from modelyard.handlers.explain.methods import METHODS


@dataclass(frozen=True)
class Drawn:
    """What a picture shows, in numbers."""

    sums: tuple[float, float]
    """What speaks for the target and what speaks against it, each added up."""
    unsure: float
    """Share of all sizes that is below its own error."""
    thing: str
    """What has an attribution: a pixel, a feature."""


def of_heat(heat: Heat) -> Drawn:
    """Return what a picture with colours over it shows."""
    return Drawn(heat.sums, heat.unsure, "pixel")


def of_bars(found: Sequence[Bar], thing: str, sides: tuple[float, float] | None = None) -> Drawn:
    """Return what bars show; `sides` as in `Explanation`."""
    sizes = sum(abs(bar.value) for bar in found)
    unsure = sum(abs(bar.value) for bar in found if bar.is_unsure)
    return Drawn(sides or sums_of(found), unsure / sizes if sizes else 0.0, thing)


def account(explanation: Explanation, answer: Mapping[str, Any], drawn: Drawn) -> str:
    """Return where the output came from, and what spoke for and against it; slopes do not say."""
    method = METHODS[explanation.options.method]
    if not any(drawn.sums) or not method.has_signs or not method.multiplies:
        return words.way(answer)
    return words.shares(answer, drawn.sums)


def has_signs(explanation: Explanation) -> bool:
    """Return whether a negative attribution speaks against the target."""
    return METHODS[explanation.options.method].has_signs


def legend(explanation: Explanation) -> str:
    """Return what the colours mean."""
    if has_signs(explanation):
        return "red raises the output, blue lowers it"
    return "the redder, the more the output depends on it"


def texts(explanation: Explanation, answer: Mapping[str, Any], drawn: Drawn) -> Texts:
    """Return what is written around a picture.

    Args:
        explanation: that is drawn.
        answer: its fields, as JSON has them.
        drawn: what the picture shows.
    """
    chance = answer["probability"]
    return Texts(
        words.question(answer),
        "" if chance is None else f"probability {words.chance(chance)}",
        " · ".join(filter(None, (words.model(answer), words.made(answer)))),
        [
            account(explanation, answer, drawn),
            *words.notes(answer, drawn.sums, drawn.thing, drawn.unsure),
        ],
    )


def part(
    explanation: Explanation, answer: Mapping[str, Any], figure: str, drawn: Drawn
) -> page.Part:
    """Return an explanation's part of a page; see `texts`."""
    notes = words.notes(answer, drawn.sums, drawn.thing, drawn.unsure)
    said = account(explanation, answer, drawn)
    return page.Part(answer, figure, said, any(drawn.sums), notes, has_signs(explanation))
