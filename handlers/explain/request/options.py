"""What one request asks of an explanation: from its query, its JSON part and its Accept header."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from modelyard.base.explain_options import WrongOption, read_option
from modelyard.handlers.body import parse_strictly, weights_of
from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import DEFAULT_TOLERANCE, MAX_STEPS
from modelyard.handlers.explain.attribute.methods import MEASURES, METHODS
from modelyard.handlers.tasks.pictures import MAX_PIXELS

_EXPECTED = (
    "expected predicted, a span START,END, a box LEFT,TOP,RIGHT,BOTTOM, or a mask "
    '{"size": [HEIGHT, WIDTH], "counts": […]} as a segmentation answers'
)


@dataclass(frozen=True)
class Region:
    """What one request means by `region`; ends lie outside."""

    text: str
    """Text of the option, as it was sent."""
    box: tuple[int, ...] = ()
    """(start, end) or (left, top, right, bottom)."""
    size: tuple[int, int] = (0, 0)
    """(height, width) of the mask, which `counts` is of."""
    counts: tuple[int, ...] = ()
    """Run lengths, column by column, outside first."""

    @property
    def is_predicted(self) -> bool:
        """Whether it is wherever the class itself is predicted."""
        return not self.box and not self.counts

    def inside(self, sizes: tuple[int, ...], extent: tuple[int, ...] | None = None) -> Tensor:
        """Return which places of an output are inside: bool of `sizes`.

        A place is where its centre is.

        Args:
            sizes: (L,) or (h, w) of the output.
            extent: what the box is measured in, the sizes themselves without it.

        Raises:
            BadInput: it is a region of something else, or none of the places is inside.
        """
        extent = extent or sizes
        if self.counts:
            found = self._sampled(sizes)
        else:
            if len(self.box) != 2 * len(sizes):
                raise BadInput(
                    f"region is {self.text}; expected "
                    + ("START,END" if len(sizes) == 1 else "LEFT,TOP,RIGHT,BOTTOM")
                    + f" or predicted, as the output has the sizes {list(sizes)}"
                )
            half = len(sizes)  # the box has the last dimension first
            starts, ends = self.box[:half][::-1], self.box[half:][::-1]
            found = torch.ones(sizes, dtype=torch.bool)
            for dim, (size, whole, start, end) in enumerate(
                zip(sizes, extent, starts, ends, strict=True)
            ):
                centres = (torch.arange(size) + 0.5) * whole / size
                is_in = (centres >= start) & (centres < end)
                found &= is_in.view(-1, *[1] * (len(sizes) - dim - 1))
        if not found.any():
            raise BadInput(
                f"region is {self.text}; no place of the output has its centre there: expected one "
                f"within {list(extent)}"
            )
        return found

    def _sampled(self, sizes: tuple[int, ...]) -> Tensor:
        if len(sizes) != 2:
            raise BadInput(f"region is a mask; expected a span: the output has {list(sizes)}")
        height, width = self.size
        runs = np.arange(len(self.counts)) % 2 == 1
        columns = np.repeat(runs, self.counts).reshape(width, height)
        rows, cols = (
            ((np.arange(size) + 0.5) * whole / size).astype(int)
            for size, whole in zip(sizes, self.size, strict=True)
        )
        return torch.from_numpy(columns.T[np.ix_(rows, cols)].copy())


def parse_region(name: str, text: str) -> Region:
    """Read `region` of a request.

    Raises:
        BadInput: it is none, or its box is empty.
    """
    if text == "predicted":
        return Region(text)
    if text.lstrip()[:1] == "{":
        return _mask(name, text)
    parts = text.split(",")
    if len(parts) not in (2, 4) or not all(
        part.isascii() and part.isdigit() and len(part) <= 9 for part in parts
    ):
        raise BadInput(f'{name} is "{text}"; {_EXPECTED}')
    box = tuple(map(int, parts))
    half = len(box) // 2
    if any(start >= end for start, end in zip(box[:half], box[half:], strict=True)):
        raise BadInput(f'{name} is "{text}"; expected each end after its start')
    return Region(text, box)


def _mask(name: str, text: str) -> Region:
    try:
        value = parse_strictly(text, name)
    except ValueError as error:
        raise BadInput(f"{name} is not JSON: {error}") from error
    size, counts = (
        (value["size"], value["counts"])
        if isinstance(value, dict) and set(value) == {"size", "counts"}
        else ([], [])
    )
    is_mask = all(
        isinstance(each, list) and each and all(type(n) is int and n >= 0 for n in each)
        for each in (size, counts)
    )
    if not is_mask or len(size) != 2:
        raise BadInput(f"{name} is {json.dumps(value)[:100]}; {_EXPECTED}")
    if sum(counts) != size[0] * size[1] or sum(counts) > MAX_PIXELS:
        raise BadInput(
            f"{name}: counts add up to {sum(counts)}; expected {size[0]} × {size[1]}, "
            f"{MAX_PIXELS} at most"
        )
    return Region(f"a mask of {size[0]} × {size[1]}", size=(size[0], size[1]), counts=tuple(counts))


Row = Mapping[str, Any]

MOST_TARGETS = 20
MOST_OUTPUTS = 20
PART = "explain"
"""A part of a multipart body, or an entry of a JSON body beside `data`."""

MEDIA_TYPES = {
    "json": "application/json",
    "png": "image/png",
    "html": "text/html",
    "overlay": "image/png",
    "npy": "application/x-npy",
}
"""Format → what it is sent as; of two that are sent alike, Accept means the first."""

_EVERYWHERE = (
    *("method", "output_name", "target", "against", "region", "output", "seed"),
    *("internal_batch_size", "aggregate", "format", "regions", *MEASURES),
)


@dataclass(frozen=True)
class ExplainOptions:
    """What one request asks for; `archiver.explain_options` says what each value means.

    None leaves the choice to the method, to the handler or, for `n_steps` and `n_samples`, to
    `tolerance`.
    """

    method: str = "integrated_gradients"
    output_name: tuple[str, ...] = ("",)
    """One or several; an empty one is the output that predictions are made of."""
    target: str = "predicted"
    against: str | None = None
    region: Region | None = None
    output: Literal["logit", "probability"] = "logit"
    baseline: str | None = None
    n_steps: int | None = None
    tolerance: float = DEFAULT_TOLERANCE
    max_steps: int = MAX_STEPS
    budget_ms: int | None = None
    n_samples: int | None = None
    max_samples: int | None = None
    noise: float | None = None
    window: int | None = None
    stride: int | None = None
    layer: str | None = None
    seed: int = 0
    internal_batch_size: int | None = None
    regions: bool | None = None
    errors: bool = False
    aggregate: Literal["none", "sum"] | None = None
    format: Literal["json", "png", "html", "overlay", "npy"] = "json"
    check: bool = False
    quality: bool = False
    change: bool = False
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The names that the request gave a value."""

    @property
    def has_several(self) -> bool:
        """Whether it asks for more than one explanation."""
        return self.target.startswith("top-") or len(self.output_name) > 1

    @property
    def shows_runner_up(self) -> bool:
        """Whether the second class is shown beside the first: on a page, where none is named."""
        return self.format == "html" and not self.given & {"target", "against", "region"}

    def settings(self) -> dict[str, Any]:
        """Return what the method is to be called with, by the names that it takes."""
        wanted = METHODS[self.method].options
        values = {name: getattr(self, name) for name in wanted if name not in _FOR_OTHERS}
        return {name: value for name, value in values.items() if value is not None}


_FOR_OTHERS = ("window", "layer", "errors")
"""Options of a method that its function does not take: they decide over request or answer."""


def gather_options(query: Mapping[str, str], row: Row) -> tuple[dict[str, str], Row]:
    """Take the options out of a request: give them by name, and the request without them.

    They are query parameters, a part "explain" of a multipart body, or the entry "explain" of a
    JSON body {"data": input, "explain": {…}}; several of these may be given, for different options.

    Raises:
        BadInput: a part that is not a JSON object, or an option that is given twice.
    """
    rest = {name: value for name, value in row.items() if name != PART}
    part = _read_part(row[PART]) if PART in row else {}
    body = row.get("body")
    if isinstance(body, dict) and PART in body:
        if set(body) != {PART, "data"}:
            raise BadInput(
                f'the body holds {", ".join(sorted(body))}; beside "explain", expected one entry '
                '"data" with the input'
            )
        part = _read_part(body[PART])
        rest["body"] = body["data"]
    if twice := sorted(set(query) & set(part)):
        raise BadInput(f"{twice[0]} is given in the query and in the body; expected one of them")
    return {**query, **{name: _as_text(name, value) for name, value in part.items()}}, rest


def parse_options(
    given: Mapping[str, str],
    accept: str | None = None,
    formats: Sequence[str] = ("json", "png"),
    method: str | None = None,
) -> ExplainOptions:
    """Read one request's options.

    Args:
        given: name → value, as a query has them.
        accept: the Accept header, which chooses the format where `given` does not.
        formats: those of `MEDIA_TYPES` that the handler can answer in.
        method: the method where `given` does not say it.

    Raises:
        BadInput: an unknown option, one that does not apply, or a value outside its limits, which
            the message states.
    """
    values = {name: _read(name, text) for name, text in given.items()}
    values.setdefault("format", preferred_format(accept or "", formats))
    if values["format"] not in formats:
        raise BadInput(f'format is "{values["format"]}"; expected one of {", ".join(formats)}')
    values.setdefault("method", method or ExplainOptions.method)
    options = ExplainOptions(**values, given=frozenset(given))
    _check_applies(options)
    return options


def _check_applies(options: ExplainOptions) -> None:
    method = METHODS[options.method]
    takes = {*_EVERYWHERE, *method.options, *(["baseline"] if method.uses_baseline else [])}
    for name in sorted(options.given - takes):
        raise BadInput(
            f"{name} does not apply to {options.method}; it takes {', '.join(sorted(takes))}"
        )
    for exact, verb in (("n_steps", "used exactly"), ("n_samples", "drawn")):
        for most in ("max_" + exact[2:], "budget_ms"):
            if {exact, most} <= options.given:
                raise BadInput(f"{exact} and {most} are given; expected one: {exact} are {verb}")
    if options.format in ("overlay", "npy") and options.has_several:
        raise BadInput(
            f"format is {options.format}, which holds one explanation; expected one target of one "
            "output"
        )
    is_random = method.is_random or options.baseline == "noise"
    is_random |= any(getattr(options, name) for name in MEASURES)
    if "seed" in options.given and not is_random:
        raise BadInput(
            f"seed does not apply: nothing is random in {options.method} with this baseline"
        )


def _read_part(part: Any) -> Mapping[str, Any]:
    try:
        is_text = isinstance(part, bytes | bytearray | str)
        value = parse_strictly(part, 'the part "explain"') if is_text else part
    except ValueError as error:
        raise BadInput(f'the part "explain" is not JSON: {error}') from error
    if not isinstance(value, dict):
        raise BadInput('the part "explain" is not a JSON object; expected {"target": 3, …}')
    return value


def _as_text(name: str, value: Any) -> str:
    """Spell a JSON value as a query would: one reader serves both."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and {type(each) for each in value} in (set(), {int}, {str}):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return json.dumps(value)
    raise BadInput(f"{name} is {json.dumps(value)}; expected a text, a number or true or false")


def _read(name: str, text: str) -> Any:
    try:
        value = read_option(name, text)
    except WrongOption as error:
        raise BadInput(str(error)) from error
    further = _FURTHER.get(name)
    return value if further is None else further(name, text)


def _names(name: str, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names) or len(set(names)) < len(names) or len(names) > MOST_OUTPUTS:
        raise BadInput(
            f'{name} is "{text}"; expected the name of an output, or up to {MOST_OUTPUTS} '
            "different ones with commas between"
        )
    return names


_FURTHER: Mapping[str, Callable[[str, str], Any]] = {
    "output_name": _names,
    "region": parse_region,
}


def preferred_format(accept: str, formats: Sequence[str]) -> str:
    """Return the format with the most weight in an Accept header (RFC 9110, 12.5.1)."""
    weights = weights_of(accept)
    return max(formats, key=lambda name: _weight_of(weights, MEDIA_TYPES[name]))


def _weight_of(weights: Mapping[str, float], media_type: str) -> float:
    """Return the weight of a media type: that of the most specific range that holds it."""
    group = media_type.partition("/")[0]
    names = (media_type, f"{group}/*", "*/*")
    return next((weights[name] for name in names if name in weights), 0.0)
