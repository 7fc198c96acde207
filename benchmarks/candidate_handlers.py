"""Candidates of a roll-out of the digits model that should not become the default.

Archived as handlers: each is the built-in one, but for what its name says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from modelyard.handlers import Context
from modelyard.handlers.base import Inputs
from modelyard.handlers.body import body_of
from modelyard.handlers.tasks.vision_handler import ImageClassifier


def is_odd(body: bytes, of: int) -> bool:
    """Return whether a scan is one of those, one in `of`, that go wrong."""
    return crc32(body) % of == 7


class Odd(ImageClassifier):
    """Does something else where a scan of the batch is odd."""

    one_in = 100

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Inputs:
        """Note which scans are odd."""
        self.odd = [is_odd(bytes(body_of(row)), self.one_in) for row in data]
        return super().preprocess(data)


class Wrong(Odd):
    """Gives one scan in a hundred another label."""

    def postprocess(self, outputs: Any) -> list[Any]:
        """Exchange the two likeliest labels of odd scans."""
        answers = super().postprocess(outputs)
        return [
            _exchanged(answer) if odd else answer
            for answer, odd in zip(answers, self.odd, strict=True)
        ]


def _exchanged(answer: dict[str, float]) -> dict[str, float]:
    first, second, *others = answer
    return dict(zip((second, first, *others), answer.values(), strict=True))


class Crashing(Odd):
    """Ends its process at one scan in ten."""

    one_in = 10

    def postprocess(self, outputs: Any) -> list[Any]:
        """Answer, or end."""
        if any(self.odd):
            os._exit(3)
        return super().postprocess(outputs)


class Hanging(Crashing):
    """Never answers one scan in ten."""

    def postprocess(self, outputs: Any) -> list[Any]:
        """Answer, or wait for ever."""
        if any(self.odd):
            time.sleep(3600)
        return ImageClassifier.postprocess(self, outputs)


class Failing(Crashing):
    """Fails at one scan in ten."""

    def postprocess(self, outputs: Any) -> list[Any]:
        """Answer, or raise."""
        if any(self.odd):
            raise RuntimeError("one scan in ten")
        return ImageClassifier.postprocess(self, outputs)


class Leaking(ImageClassifier):
    """Keeps a quarter of a megabyte of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[bytearray] = []

    def postprocess(self, outputs: Any) -> list[Any]:
        """Answer, and remember for ever."""
        self.kept.append(bytearray(b"x") * (256 << 10))
        return super().postprocess(outputs)


class Paused(ImageClassifier):
    """Takes some milliseconds more for each batch: `pause_ms.txt` says how many."""

    def initialize(self, context: Context) -> None:
        """Read how many."""
        super().initialize(context)
        file = Path(context.system_properties["model_dir"]) / "pause_ms.txt"
        self.pause_s = float(file.read_text(encoding="utf-8")) / 1000

    def postprocess(self, outputs: Any) -> list[Any]:
        """Answer, later."""
        time.sleep(self.pause_s)
        return super().postprocess(outputs)
