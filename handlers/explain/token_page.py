"""Tokens and their attributions → an HTML page that shows them in the text, complete in itself."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelyard.handlers.explain.draw import colours_of

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2026; max-width: 46rem; margin: 2rem auto;
  padding: 0 1rem; background: #fff }
h1 { font-size: 1.4rem; margin: 2rem 0 .8rem }
h1 small { font-weight: normal; color: #6e747c; font-size: 1rem; margin-left: .6rem }
p.text { font-size: 1.15rem; line-height: 2.1; margin: 0; white-space: pre-wrap }
span.token { padding: .15rem .1rem; border-radius: .2rem }
span.special { font: .75rem ui-monospace, monospace; border: 1px solid #d6d9dd;
  padding: .1rem .3rem; margin: 0 .15rem }
div.bar { height: .7rem; border: 1px solid #d6d9dd; margin-top: 1.2rem }
div.ends { display: flex; justify-content: space-between; font-size: .8rem; color: #6e747c }
footer { font-size: .85rem; color: #6e747c; margin-top: .4rem }
"""


@dataclass(frozen=True)
class Section:
    """One explanation on the page."""

    label: str
    probability: float | None
    text: str
    tokens: Sequence[Mapping[str, Any]]
    """As in an answer: token, start and end in the text, is_special, attribution."""
    footer: str


def render(sections: Sequence[Section]) -> bytes:
    """Draw explanations below one another: positive values red, negative ones blue."""
    body = "".join(map(_section, sections))
    title = html.escape(", ".join(section.label for section in sections))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    ).encode()


def _section(section: Section) -> str:
    limit = max((abs(token["attribution"]) for token in section.tokens), default=0.0)
    chance = "" if section.probability is None else f"<small>p = {section.probability:.3f}</small>"
    stops = ", ".join(_css(step / 5) for step in range(-5, 6))
    ends = "".join(f"<span>{end}</span>" for end in (f"-{limit:.2g}", "0", f"+{limit:.2g}"))
    return (
        f"<h1>{html.escape(section.label)}{chance}</h1>"
        f'<p class="text">{_text(section, limit)}</p>'
        f'<div class="bar" style="background: linear-gradient(to right, {stops})"></div>'
        f'<div class="ends">{ends}</div>'
        f"<footer>{html.escape(section.footer)}</footer>"
    )


def _text(section: Section, limit: float) -> str:
    """Return the text with its tokens marked, and what lies between them as it is."""
    parts = []
    at = 0
    for token in section.tokens:
        share = token["attribution"] / limit if limit else 0.0
        kind, shown = "special", token["token"]
        if not token["is_special"]:
            kind, shown = "token", section.text[token["start"] : token["end"]]
            parts.append(html.escape(section.text[at : token["start"]]))
            at = max(at, token["end"])
        ink = "#fff" if abs(share) > 0.6 else "inherit"
        parts.append(
            f'<span class="{kind}" title="{token["attribution"]:+.4g}" '
            f'style="background: {_css(share)}; color: {ink}">{html.escape(shown)}</span>'
        )
    return "".join(parts) + html.escape(section.text[at:])


def _css(share: float) -> str:
    red, green, blue = colours_of(share)
    return f"rgb({red}, {green}, {blue})"
