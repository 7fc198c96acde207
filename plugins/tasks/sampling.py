"""How a text is continued: what a request asks for, the choice of tokens, the text they make."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput

MAX_CHARACTERS = 1_000_000
MAX_STOPS = 16
_TAIL = 6
"""Tokens of the prompt that are decoded beside the first new ones: some decoders join words by
what stands before them."""
_HALF = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for a part of a character."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    prompt: str
    max_new_tokens: int | None = None
    """None for the archive's own limit."""
    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False


def read_request(content: Any) -> Asked:
    """Read a request: a text, or an object with `prompt` and options.

    Raises:
        BadInput: names the field, what it is and what was expected.
    """
    if isinstance(content, str):
        content = {"prompt": content}
    if not isinstance(content, Mapping):
        raise BadInput(
            f"the body is a {type(content).__name__}; expected text, or an object such as "
            '{"prompt": "…", "max_new_tokens": 20}'
        )
    if unknown := sorted(set(map(str, content)) - set(_FIELDS)):
        raise BadInput(f"{unknown[0]} is unknown; expected some of {', '.join(_FIELDS)}")
    if "prompt" not in content:
        raise BadInput('the body holds no "prompt"; expected {"prompt": "…"} with a text')
    read: dict[str, Any] = {}
    for name, value in content.items():
        expected, read_field = _FIELDS[name]
        try:
            read[name] = read_field(value)
        except ValueError as error:
            shown = repr(value)
            seen = shown if len(shown) <= 60 else f"{shown[:60]}…"
            raise BadInput(f"{name} is {seen}; expected {expected}") from error
    asked = Asked(**read)
    if not asked.temperature and (without := {"top_k", "top_p", "seed"} & set(read)):
        raise BadInput(
            f"{min(without)} has no effect at temperature 0, which takes the likeliest token; give "
            "a temperature such as 0.8, or leave it out"
        )
    return asked


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_CHARACTERS:
        raise ValueError
    return value


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError
        return value

    return read


def _number(takes: Callable[[float], bool]) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not takes(value):
            raise ValueError
        return float(value)

    return read


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 1 <= len(texts) <= MAX_STOPS:
        raise ValueError
    return tuple(map(_text, texts))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "prompt": (f"a text of 1 to {MAX_CHARACTERS} characters", _text),
    "max_new_tokens": ("a whole number from 1", _whole(1, 1 << 31)),
    "temperature": ("a number from 0 to 100", _number(lambda value: 0 <= value <= 100)),
    "top_k": ("a whole number from 1", _whole(1, 1 << 31)),
    "top_p": ("a number above 0, at most 1", _number(lambda value: 0 < value <= 1)),
    "seed": ("a whole number from 0 to 2^63 - 1", _whole(0, (1 << 63) - 1)),
    "stop": (f"a text, or a list of 1 to {MAX_STOPS} texts", _stops),
    "stream": ("true or false", _flag),
}


def choose(logits: Tensor, asked: Asked, generator: torch.Generator) -> int:
    """Draw a token by its logits (V,): of the `top_k` likeliest, and of those that sum to `top_p`.

    The likeliest is always among them. At temperature 0 it is taken.
    """
    if not asked.temperature:
        return int(logits.argmax())
    scores = logits.detach().to("cpu", torch.float32)
    scores = (scores - scores.max()) / asked.temperature
    if asked.top_k is not None and asked.top_k < len(scores):
        scores[scores < scores.topk(asked.top_k).values[-1]] = -math.inf
    if asked.top_p < 1:
        ordered, places = scores.sort(descending=True)
        shares = ordered.softmax(dim=0)
        before = shares.cumsum(dim=0) - shares
        scores[places[before >= asked.top_p]] = -math.inf
    return int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator))


class Continuation:
    """New tokens → what they add to a prompt's text, in pieces of whole characters.

    Args:
        decode: returns the text of some tokens.
        prompt: its tokens.
        stops: texts at which it ends; they are left out.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]
    ) -> None:
        self._decode = decode
        self._tokens = list(prompt[-_TAIL:])
        self._begin = 0
        self._end = len(self._tokens)
        """Up to here the tokens' text has been taken, beginning with those from `_begin` on."""
        self._stops = stops
        self._held = ""
        """Text that may be the beginning of a stop."""
        self.has_stopped = False

    def add(self, token: int) -> str:
        """Return the text that is certain with one more token."""
        self._tokens.append(token)
        known, text = self._texts()
        if len(text) <= len(known) or text.endswith(_HALF):
            return ""
        self._begin, self._end = self._end, len(self._tokens)
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """Return the rest of the text, without a character of which a part is missing."""
        if self.has_stopped:
            return ""
        known, text = self._texts()
        released = self._release(text[len(known) :].rstrip(_HALF))
        return released if self.has_stopped else released + self._held

    def _texts(self) -> tuple[str, str]:
        known = self._decode(self._tokens[self._begin : self._end])
        return known, self._decode(self._tokens[self._begin :])

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Return how much of the text's end is the beginning of a stop."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
