"""Explanations of one request → an HTML page: complete in itself, with nothing from elsewhere.

The figures are of others (`bars`, `token_page`, `picture`); the page says the same of each: what is
explained, from where to where the output went, how far off the numbers are, and with what settings.
"""

import base64
import hashlib
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from modelyard.base import explain_words as words
from modelyard.handlers.explain.draw import TINY, Heat, panels

SHADES = 10
"""Classes of colour to each side; the tenth is full."""

_STYLE = (
    """
:root { color-scheme: light dark; --ink: #1c2026; --soft: #5d646c; --line: #d6d9dd;
  --page: #fff; --box: #f6f7f8; --red: 178, 24, 43; --blue: 33, 102, 172; --rest: #969ca4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #a3a9b0; --line: #3a4047; --page: #15181c; --box: #1e2227;
    --red: 214, 70, 77; --blue: 67, 147, 205; --rest: #767c84 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; margin: 0 auto;
  max-width: 76rem; padding: 1.5rem 1.2rem 3rem; color: var(--ink); background: var(--page);
  overflow-wrap: anywhere }
h1 { font-size: 1rem; font-weight: normal; color: var(--soft); margin: 0 0 1rem }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 .5rem }
h2 small { font-weight: normal; color: var(--soft); font-size: 1rem; white-space: nowrap;
  margin-left: .4rem }
main { display: grid; column-gap: 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
main.one { max-width: 46rem }
main.one.pictures { max-width: none }
section { min-width: 0; display: grid; grid-template-rows: subgrid; grid-row: span 3;
  align-items: start; margin-bottom: 1.6rem }
section > * { min-width: 0 }
p { margin: .3rem 0 }
p.made { color: var(--soft); font-size: .9rem }
p.note { background: var(--box); border-left: 3px solid var(--rest); padding: .5rem .8rem;
  font-size: .92rem; margin: .6rem 0 }
figure { margin: .8rem 0 }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .3rem }
.legend { display: flex; align-items: center; gap: .6rem; color: var(--soft); font-size: .85rem;
  margin: 1.6rem 0 0; flex-wrap: wrap }
.legend i { height: .7rem; width: 10rem; max-width: 40vw; border: 1px solid var(--line);
  background: linear-gradient(to right, rgb(var(--blue)), transparent, rgb(var(--red))) }
.legend i.sizes { background: linear-gradient(to right, transparent, rgb(var(--red))) }
.stack { position: relative; background: #fff; border: 1px solid var(--line); width: 100% }
.stack img { display: block; width: 100%; height: auto }
.stack img.over { position: absolute; inset: 0; height: 100% }
.stack img.tiny { image-rendering: pixelated }
.wipe { display: flex; gap: .6rem; align-items: center; font-size: .85rem; color: var(--soft);
  margin-top: .4rem }
.wipe input { flex: 1; min-width: 4rem; accent-color: rgb(var(--blue)); height: 1.6rem }
.row { display: grid; grid-template-columns: minmax(7rem, 14rem) 1fr 6rem; gap: .8rem;
  align-items: center; padding: .16rem 0 }
.row svg { width: 100%; height: 1.05rem; display: block }
.row .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.row .name { font-size: .95rem; line-height: 1.3 }
.row.end { color: var(--soft); border-top: 1px solid var(--line); margin-top: .2rem;
  padding-top: .35rem }
.row.end:first-child { border-top: 0; border-bottom: 1px solid var(--line); margin: 0 0 .2rem;
  padding: 0 0 .35rem }
rect.for { fill: rgb(var(--red)) } rect.against { fill: rgb(var(--blue)) }
rect.rest, rect.mark { fill: var(--rest) } rect.pale { fill-opacity: .35 }
.text { font-size: 1.1rem; line-height: 1.9; white-space: pre-wrap; margin: .6rem 0 }
.token { display: inline-block; text-align: center; vertical-align: top; min-height: 2.9rem;
  max-width: 100%; line-height: 1.5 }
.token sub { display: block; line-height: 1; font-size: .68rem; color: var(--soft);
  user-select: none; vertical-align: baseline; padding: .15rem .1rem 0;
  font-variant-numeric: tabular-nums }
.word { border-radius: .2rem; padding: .1rem .08rem }
.special { font: .72rem ui-monospace, monospace; border: 1px solid var(--line);
  padding: .1rem .25rem; margin: 0 .12rem }
.unread { color: var(--rest); text-decoration: line-through; text-decoration-thickness: 1px }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem }
details { margin-top: 1.6rem; border-top: 1px solid var(--line); padding-top: .8rem }
summary { cursor: pointer; color: var(--soft) }
table { border-collapse: collapse; font-size: .88rem; margin-top: .6rem; width: 100%;
  max-width: 60rem }
th, td { text-align: left; padding: .22rem .8rem .22rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); font-weight: normal }
th { color: var(--soft); width: 12rem }
@media (max-width: 40rem) {
  body { padding: 1rem .9rem 2rem }
  .row { grid-template-columns: 1fr 6rem; gap: .1rem .6rem; padding: .3rem 0 }
  .row svg { grid-column: 1 / 3; grid-row: 2; height: .8rem }
  th { width: 8rem } }
"""
    + "".join(
        f".{side}{at} {{ background: rgba(var(--{colour}), {at / SHADES:g}) }}\n"
        for side, colour in (("p", "red"), ("n", "blue"))
        for at in range(1, SHADES + 1)
    )
    + "".join(f".{side}{at} {{ color: #fff }}\n" for side in "pn" for at in range(7, SHADES + 1))
)

_SCRIPT = """
for (const one of document.querySelectorAll(".wipe input")) one.addEventListener("input", () => {
  for (const each of document.querySelectorAll(".wipe input")) each.value = one.value;
  for (const each of document.querySelectorAll(".over"))
    each.style.clipPath = "inset(0 0 0 " + one.value + "%)";
});
"""


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


POLICY = (
    f"default-src 'none'; img-src data:; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)
"""Nothing is loaded, and nothing runs but the one script: a browser holds the page to that."""

_NOT_SETTINGS = frozenset({"warnings", "tokens", "features", "values", "attributions", "errors"})


@dataclass(frozen=True)
class Part:
    """One explanation of a page."""

    answer: Mapping[str, Any]
    """Its fields as JSON has them; what is not a list of attributions is shown."""
    figure: str
    """HTML that draws it."""
    account: str
    """Where the output came from, and what spoke for and against it."""
    has_any: bool
    """Whether anything has an attribution."""
    notes: Sequence[str]
    """What a reader has to know, a sentence each."""
    has_signs: bool = True


def render(parts: Sequence[Part], input_figure: str = "") -> bytes:
    """Draw explanations beside one another.

    Args:
        parts: of one request.
        input_figure: HTML that shows the input alone, before them.
    """
    first = parts[0].answer
    title = html.escape(f"{words.question(first)} – {words.model(first)}")
    sections = "".join(map(_section, parts))
    if input_figure:
        sections = _input(first, input_figure) + sections
    kinds = ["one"] * (len(parts) == 1) + ["pictures"] * bool(input_figure)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">'
        f"<title>{title}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(words.model(first))}</h1>"
        f'<main class="{" ".join(kinds)}">{sections}</main>{_legend(parts)}{_settings(parts)}'
        f"<script>{_SCRIPT}</script></body></html>\n"
    ).encode()


def picture(image: Image.Image, heat: Heat, label: str) -> tuple[str, str]:
    """Return figures: the input alone, and it below its attributions, with a slider."""
    before, over = (_data(panel, max(image.size) <= TINY) for panel in panels(image, heat))
    plain = f'<figure><div class="stack"><img src="{before}" alt="the input"></div></figure>'
    alt = html.escape(f"attributions for {label}")
    return plain, (
        f'<figure><div class="stack"><img src="{before}" alt="the input">'
        f'<img class="over" src="{over}" alt="{alt}"></div>'
        '<label class="wipe">attributions<input type="range" min="0" max="100" value="0" '
        'step="1" aria-label="how much of the input is uncovered">input</label></figure>'
    )


def _section(part: Part) -> str:
    answer = part.answer
    chance = answer.get("probability")
    small = (
        "" if chance is None else f" <small>probability {html.escape(words.chance(chance))}</small>"
    )
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in part.notes)
    return (
        f"<section><header><h2>{html.escape(words.question(answer))}{small}</h2>"
        f"<p>{html.escape(part.account)}</p></header><div>{part.figure}</div>"
        f'<div>{notes}<p class="made">{html.escape(words.made(answer))}</p></div></section>'
    )


def _input(answer: Mapping[str, Any], figure: str) -> str:
    said = ""
    if size := answer.get("picture"):
        left, top, right, bottom = size["crop"]
        said = f"<p>{size['width']} × {size['height']} pixels"
        if (left, top, right, bottom) != (0, 0, size["width"], size["height"]):
            said += (
                f"; the model sees {right - left:.0f} × {bottom - top:.0f} of them, from "
                f"{left:.0f} on across and {top:.0f} on down"
            )
        said += "</p>"
    return f"<section><header><h2>Input</h2>{said}</header>{figure}<div></div></section>"


def _legend(parts: Sequence[Part]) -> str:
    if not any(part.has_any for part in parts):
        return ""
    if all(not part.has_signs for part in parts):
        return '<div class="legend">no influence<i class="sizes"></i>most</div>'
    return '<div class="legend">lowers the output<i></i>raises it</div>'


def _settings(parts: Sequence[Part]) -> str:
    """Return a table of all other fields; where explanations differ, each has a column."""
    rows = [dict(_fields(part.answer)) for part in parts]
    names = dict.fromkeys(name for row in rows for name in row)
    lines = []
    for name in names:
        values = [row.get(name, "") for row in rows]
        shown = values[:1] if len(set(values)) == 1 else values
        span = f' colspan="{len(parts)}"' if len(shown) < len(parts) else ""
        cells = "".join(f"<td{span}>{html.escape(value)}</td>" for value in shown)
        lines.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return (
        f"<details><summary>Settings and figures</summary><table>{''.join(lines)}</table></details>"
    )


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
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_spell, value))
    return str(value)


def _data(image: Image.Image, is_tiny: bool) -> str:
    """Return a picture as an address: without loss where every pixel is seen, else smaller."""
    file = io.BytesIO()
    if is_tiny:
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=90, subsampling=0)
    kind = "png" if is_tiny else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
