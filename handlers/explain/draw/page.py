"""Explanations of one request → an HTML page: complete in itself, with nothing from elsewhere.

`figures.html` draws each; the page says the same of all: what is explained, from where to where the
output went, how far off the numbers are, and with what settings.
"""

import base64
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from modelyard.base import explain_words as words
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.draw.picture import Drawn, Heat, Texts, panels
from modelyard.handlers.explain.explanation import Explanation
from modelyard.handlers.explain.regions import TINY

_FOLDER = Path(__file__).parent


@cache
def _template(name: str) -> Any:
    """Return a template; a worker that never draws a page does not wait for what reads them."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(_FOLDER)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name, globals={"words": words})


def figures() -> Any:
    """Return the figures by name, which return HTML that `page.css` has the style of."""
    return _template("figures.html").module


_STYLE, _SCRIPT = ((_FOLDER / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


POLICY = (
    f"default-src 'none'; img-src data:; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)
"""Nothing is loaded, and nothing runs but the one script: a browser holds the page to that."""

_NOT_SETTINGS = frozenset(
    {
        *("warnings", "change", "tokens", "words", "features", "feature_errors", "values"),
        *("attributions", "errors", "strongest"),
    }
)


@dataclass(frozen=True)
class Part:
    """One explanation of a page."""

    answer: Mapping[str, Any]
    """Its fields as JSON has them; what is not a list of attributions is shown."""
    figure: str
    """HTML that draws it."""
    account: str
    """Account of where the output came from, and what spoke for and against it."""
    has_any: bool
    """Whether anything has an attribution."""
    notes: Sequence[str]
    """What a reader has to know, a sentence each."""
    has_signs: bool = True

    @property
    def texts(self) -> Texts:
        """Return what is written around a picture that shows the same."""
        answer, chance = self.answer, self.answer["probability"]
        return Texts(
            words.question(answer),
            "" if chance is None else f"probability {words.chance(chance)}",
            " · ".join(filter(None, (words.model(answer), words.made(answer)))),
            [self.account, *self.notes],
        )


def part_of(
    explanation: Explanation, answer: Mapping[str, Any], drawn: Drawn, figure: str = ""
) -> Part:
    """Return an explanation's part of a page.

    Args:
        explanation: explanation that is drawn.
        answer: its fields, as JSON has them.
        drawn: what the figure shows.
        figure: HTML.
    """
    method = METHODS[explanation.options.method]
    # Slopes do not say where the output came from.
    is_way = not any(drawn.sums) or not method.has_signs or not method.multiplies
    account = words.way(answer) if is_way else words.shares(answer, drawn.sums)
    notes = words.notes(answer, drawn.sums, drawn.thing, drawn.unsure)
    return Part(answer, figure, account, any(drawn.sums), notes, method.has_signs)


def render(parts: Sequence[Part], input_figure: str = "") -> bytes:
    """Draw explanations beside one another.

    Args:
        parts: parts of one request.
        input_figure: HTML that shows the input alone, before them.
    """
    kinds = ["one"] * (len(parts) == 1) + ["pictures"] * bool(input_figure)
    legend = "signs" if any(part.has_signs for part in parts) else "sizes"
    page = _template("page.html").render(
        parts=parts,
        first=parts[0].answer,
        input_figure=input_figure,
        kinds=" ".join(kinds),
        legend=legend if any(part.has_any for part in parts) else "",
        settings=list(_settings(parts)),
        policy=POLICY,
        style=_STYLE,
        script=_SCRIPT,
    )
    return f"{page}\n".encode()


def picture(image: Image.Image, heat: Heat, label: str) -> tuple[str, str]:
    """Return figures: the input alone, and it below its attributions, with a slider."""
    before, over = (_data(panel, max(image.size) <= TINY) for panel in panels(image, heat))
    return str(figures().plain(before)), str(figures().covered(before, over, label))


def _settings(parts: Sequence[Part]) -> Iterator[tuple[str, list[str]]]:
    """Yield all other fields, with one value, or that of each explanation where they differ."""
    rows = [dict(_fields(part.answer)) for part in parts]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, "") for row in rows]
        yield name, values[:1] if len(set(values)) == 1 else values


def _fields(answer: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in answer.items():
        if name in _NOT_SETTINGS:
            continue
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}".replace("_", " "), _spell(value)


def _spell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_spell, value))
    return "–" if value is None else str(value)


def _data(image: Image.Image, is_tiny: bool) -> str:
    """Return a picture as an address: without loss where every pixel is seen, else smaller."""
    file = io.BytesIO()
    kind = "png" if is_tiny else "jpeg"
    image.save(file, kind, **({} if is_tiny else {"quality": 90, "subsampling": 0}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
