"""Named values and their attributions → steps from f(baseline) to f(input), as HTML or as PNG."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from modelyard.base import explain_words as words
from modelyard.handlers.explain.draw import picture
from modelyard.handlers.explain.draw.page import figures

MOST_BARS = 20
"""What is smaller is one bar."""

LEAST_REST = 0.005
"""Share of the whole way from which on what the method leaves over is shown."""

_NAMES, _PLOT, _NUMBERS = 240, 380, 90
"""Widths of a picture's columns in pixels."""
_ROW = 26
_STRONG, _GREY, _LINE, _GRID = 0.8, (150, 156, 164), (214, 217, 221), (238, 240, 242)
MOST_TICKS = 5
"""Round values on an axis, at most."""


@dataclass(frozen=True)
class Bar:
    """A value of the input and its attribution."""

    name: str
    value: float
    shown: str = ""
    """The value itself, as it was sent."""
    error: float | None = None
    """How far off the attribution may be."""
    kind: str = ""
    """others: several values; rest: what the attributions leave over; else one value."""

    @property
    def is_unsure(self) -> bool:
        """Whether the attribution is below its own error."""
        return self.error is not None and 0 < abs(self.value) < self.error

    @property
    def title(self) -> str:
        """Return the name, with the value where there is one."""
        return f"{self.name} = {self.shown}" if self.shown else self.name


@dataclass(frozen=True)
class Step:
    """A bar and where it begins and ends, between 0 (left) and 1."""

    bar: Bar
    start: float
    end: float

    @property
    def left(self) -> float:
        """Where it is drawn from."""
        return min(self.start, self.end)

    @property
    def width(self) -> float:
        """How much of the whole it takes."""
        return abs(self.end - self.start)


@dataclass(frozen=True)
class Chart:
    """Steps from the baseline's output to the input's; or bars from one line, to both sides."""

    steps: Sequence[Step]
    zero: float
    """Value at which the first bar begins: f(baseline), or 0."""
    ends: tuple[tuple[str, float], tuple[str, float]] | None = None
    """Names and outputs of baseline and input, where each bar begins where the last one ended."""
    ticks: Sequence[tuple[float, float]] = ()
    """Places of round values on the axis, and these."""

    @property
    def is_way(self) -> bool:
        """Whether it leads from the one to the other."""
        return self.ends is not None

    @property
    def last(self) -> float:
        """Where the way ends."""
        return self.steps[-1].end if self.steps else self.zero


NamePlace = Callable[[str, tuple[int, ...]], str]
"""Input's name and a place in it → the name of the value there."""


def place_in(name: str, place: tuple[int, ...]) -> str:
    """Return the name of a value: image[0,3,7]."""
    return f"{name}[{','.join(map(str, place))}]" if place else name


@dataclass(frozen=True)
class Values:
    """Those of one input, in its shape."""

    attributions: Tensor
    errors: Tensor | None = None
    shown: Tensor | None = None
    """The values themselves, where they have the same places."""


def largest(inputs: Mapping[str, Values], name_place: NamePlace = place_in) -> list[Bar]:
    """Return bars of the largest values of all inputs, and of the others two, for and against."""
    found = [
        (name, at, value) for name, each in inputs.items() for at, value in _top(each.attributions)
    ]
    found.sort(key=lambda each: -abs(each[2]))
    bars = [_bar_at(name, at, inputs[name], name_place) for name, at, _ in found[:MOST_BARS]]
    for sign in (1, -1):
        sides = [(each.attributions.detach().double() * sign).clip(0) for each in inputs.values()]
        count = sum(int(side.count_nonzero()) for side in sides)
        count -= sum(bar.value * sign > 0 for bar in bars)
        total = sum(float(side.sum()) for side in sides)
        total -= sum(max(bar.value * sign, 0) for bar in bars)
        if count:
            bars.append(_others(count, sign * total))
    return bars


def gathered(bars: Sequence[Bar]) -> list[Bar]:
    """Sort bars by size; of more than are shown, make the small ones two, for and against."""
    ordered = sorted(bars, key=lambda bar: (bar.kind != "", -abs(bar.value)))
    if len(ordered) <= MOST_BARS + 2:
        return ordered
    shown, rest = ordered[:MOST_BARS], ordered[MOST_BARS:]
    for sign in (1, -1):
        side = [bar.value for bar in rest if bar.value * sign > 0]
        if side:
            shown.append(_others(len(side), sum(side)))
    return shown


def chart(bars: Sequence[Bar], answer: words.Answer | None) -> Chart:
    """Lay bars out: from f(baseline) to f(input) where the method promises that they add up.

    Without an answer to say so they begin at one line.
    """
    bars = gathered(bars)
    values = [bar.value for bar in bars]
    if answer is None or answer["convergence_delta"] is None:
        place, ticks = _scale(min([0.0, *values]), max([0.0, *values]))
        steps = [Step(bar, place(0.0), place(bar.value)) for bar in bars]
        return Chart(steps, place(0.0), ticks=ticks)
    way = answer["f_input"] - answer["f_baseline"]
    rest = way - sum(values)
    if abs(rest) > LEAST_REST * max(map(abs, [way, *values])):
        bars.append(Bar("left over", rest, kind="rest"))
    ends = np.cumsum([answer["f_baseline"], *(bar.value for bar in bars)]).tolist()
    place, ticks = _scale(min(ends), max(ends))
    steps = [Step(bar, place(ends[at]), place(ends[at + 1])) for at, bar in enumerate(bars)]
    name = answer.get("baseline_means") or f"baseline {answer['baseline']}"
    begin = (name, answer["f_baseline"])
    return Chart(steps, place(ends[0]), (begin, ("this input", answer["f_input"])), ticks)


def sums(bars: Sequence[Bar]) -> tuple[float, float]:
    """Return what speaks for the target and what speaks against it, each added up."""
    values = [bar.value for bar in bars]
    return sum(each for each in values if each > 0), sum(each for each in values if each < 0)


def figure(bars: Sequence[Bar], answer: words.Answer | None, strength: float = 1.0) -> str:
    """Return the chart as HTML, to which `page` has the style."""
    return str(figures().bars(chart(bars, answer), strength))


def drawn_of(
    bars: Sequence[Bar], thing: str, sides: tuple[float, float] | None = None
) -> picture.Drawn:
    """Return what bars show; `sides` as in `Explanation`."""
    sizes = sum(abs(bar.value) for bar in bars)
    unsure = sum(abs(bar.value) for bar in bars if bar.is_unsure)
    return picture.Drawn(sides or sums(bars), unsure / sizes if sizes else 0.0, thing)


def render(
    bars: Sequence[Bar], answer: words.Answer, texts: picture.Texts, strength: float = 1.0
) -> bytes:
    """Draw the chart as a PNG file."""
    drawn = chart(bars, answer)
    first, last = ([end] for end in drawn.ends) if drawn.ends else ([], [])
    rows = len(drawn.steps) + len(first) + len(last)
    sheet = picture.Sheet(_NAMES + _PLOT + _NUMBERS, _ROW * (rows + 1), texts)
    left, top = picture.MARGIN + _NAMES, sheet.top
    for place, value in drawn.ticks:
        x, bottom = left + _PLOT * place, top + _ROW * rows
        sheet.draw.line((x, top, x, bottom + 4), fill=_GRID)
        text = picture.printable(words.number(value))
        sheet.draw.text((x, bottom + 6), text, fill=picture.SOFT, font=sheet.text, anchor="mt")
    for name, value in first:
        _write(sheet, top, name, value, picture.SOFT)
        top += _ROW
    if not drawn.is_way:
        at = left + _PLOT * drawn.zero
        sheet.draw.line((at, top, at, top + _ROW * rows), fill=_LINE)
    for step in drawn.steps:
        if step.bar.value:
            begin, size = left + _PLOT * step.left, max(_PLOT * step.width, 1)
            colour = _colour(step.bar, strength)
            sheet.draw.rectangle((begin, top + 5, begin + size, top + _ROW - 6), fill=colour)
        if drawn.is_way:
            way = left + _PLOT * step.start
            sheet.draw.line((way, top - 6, way, top + 5), fill=_LINE)
        _write(sheet, top, step.bar.name, step.bar.value, picture.INK, step.bar.shown, words.signed)
        top += _ROW
    for name, value in last:
        way = left + _PLOT * drawn.last
        sheet.draw.line((way, top - 6, way, top + _ROW - 8), fill=_LINE)
        _write(sheet, top, name, value, picture.SOFT)
    return sheet.png()


def _write(
    sheet: picture.Sheet,
    top: int,
    name: str,
    value: float,
    colour: tuple[int, int, int],
    shown: str = "",
    spell: Callable[[float], str] = words.number,
) -> None:
    text = picture.shorten(name, sheet.text, _NAMES - 16, f" = {shown}" if shown else "")
    sheet.draw.text((picture.MARGIN, top + 4), text, fill=colour, font=sheet.text)
    place = (picture.MARGIN + _NAMES + _PLOT + _NUMBERS, top + 4)
    sheet.draw.text(
        place, picture.printable(spell(value)), fill=colour, font=sheet.text, anchor="ra"
    )


def _colour(bar: Bar, strength: float) -> tuple[int, int, int]:
    if bar.kind == "rest":
        return _GREY
    share = _STRONG * strength * (picture.PALE if bar.is_unsure else 1)
    return picture.colours_of(share if bar.value > 0 else -share)


def _scale(low: float, high: float) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Return what gives a value its place, and the round values that have one."""
    size = high - low
    if not size:
        return lambda value: 0.0, []
    unit = 10.0 ** np.floor(np.log10(size / MOST_TICKS))
    step = next(unit * each for each in (1, 2, 5, 10) if size / (unit * each) < MOST_TICKS)
    round_values = (np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step).tolist()
    return lambda value: (value - low) / size, [((at - low) / size, at) for at in round_values]


def _top(attributions: Tensor) -> Iterator[tuple[int, float]]:
    flat = attributions.detach().flatten().double().cpu()
    for at in flat.abs().topk(min(MOST_BARS, len(flat))).indices.tolist():
        yield at, float(flat[at])


def _bar_at(name: str, at: int, values: Values, name_place: NamePlace) -> Bar:
    shape = tuple(values.attributions.shape)
    place = tuple(map(int, np.unravel_index(at, shape))) if shape else ()
    return Bar(
        name_place(name, place),
        float(values.attributions.flatten()[at]),
        "" if values.shown is None else f"{float(values.shown.flatten()[at]):.4g}",
        None if values.errors is None else float(values.errors.flatten()[at]),
    )


def _others(count: int, total: float) -> Bar:
    return Bar(f"{count} other{'s' * (count > 1)}", total, kind="others")
