"""Tokens and their attributions → the text with its words coloured, and the strongest words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelyard.base import explain_words as words
from modelyard.handlers.explain.draw.bars import Bar
from modelyard.handlers.explain.draw.page import figures
from modelyard.handlers.explain.draw.picture import PALE

SHADES = 10
"""Classes of colour to each side; the tenth is full."""

NUMBERED = 0.2
"""Share of the largest from which on a word's number stands below it."""

MOST_WORDS = 10
"""Most words in the list of the strongest."""


@dataclass(frozen=True)
class Word:
    """A word of the text, or a special token, which stands for none of it."""

    text: str
    start: int
    end: int
    value: float
    error: float | None
    is_special: bool

    @property
    def as_bar(self) -> Bar:
        """The word among others, by size."""
        return Bar(self.text.strip() or self.text, self.value, error=self.error)


def words_of(text: str, tokens: Sequence[Mapping[str, Any]]) -> list[Word]:
    """Put the pieces of a word together: its attribution is the sum of theirs.

    Args:
        text: text that the places of the tokens are in.
        tokens: tokens as in an answer; `word` is the same for the pieces of one.
    """
    found: list[Word] = []
    last: Any = None
    for token in tokens:
        key = None if token["is_special"] else (token.get("part"), token.get("word"))
        value, error = token["attribution"], token.get("error")
        if key is not None and key[1] is not None and key == last:
            word = found[-1]
            end = max(word.end, token["end"])
            both = None if word.error is None or error is None else word.error + error
            found[-1] = Word(
                text[word.start : end], word.start, end, word.value + value, both, False
            )
        else:
            start, end = token["start"], token["end"]
            shown = token["token"] if token["is_special"] else text[start:end]
            found.append(Word(shown, start, end, value, error, token["is_special"]))
        last = key
    return found


def figure(text: str, found: Sequence[Word], strength: float = 1.0) -> str:
    """Return the text as HTML, to which `page` has the style; what no token stands for is grey."""
    limit = max((abs(word.value) for word in found), default=0.0)
    pieces: list[dict[str, Any]] = []
    at = 0
    for word in found:
        shown = word.text
        if not word.is_special:
            pieces.append(_between(text[at : word.start]))
            shown = text[max(at, word.start) : word.end]
            at = max(at, word.end)
        share = word.value / limit if limit else 0.0
        shade = round(SHADES * abs(share) * strength * (PALE if word.as_bar.is_unsure else 1))
        number = words.signed(float(f"{word.value:.2g}")) if abs(share) >= NUMBERED else ""
        colour = f" {'p' if share > 0 else 'n'}{shade}" if shade else ""
        pieces.append({"word": word, "text": shown, "shade": colour, "number": number})
    return str(figures().text([*pieces, _between(text[at:])]))


def strongest(found: Sequence[Word]) -> list[Bar]:
    """Return the words that weigh most, the largest first."""
    bars = [word.as_bar for word in found if word.value]
    return sorted(bars, key=lambda bar: -abs(bar.value))[:MOST_WORDS]


def _between(text: str) -> dict[str, Any]:
    return {"text": text, "is_unread": any(character.isalnum() for character in text)}
