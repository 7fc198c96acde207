"""Answers of ten kinds of models, with one leaf wrong, and as something that means the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import orjson

Draw = random.Random


def top(draw: Draw) -> Any:
    logits = [draw.gauss(0, 2) for _ in range(5)]
    total = sum(map(math.exp, logits))
    ranked = sorted(((math.exp(each) / total, f"c{at}") for at, each in enumerate(logits)))
    return {name: value for value, name in reversed(ranked)}


MODELS: dict[str, Callable[[Draw], Any]] = {
    "fraud": lambda draw: {"amount": draw.uniform(1e4, 1e6), "p_fraud": draw.random()},
    "time": lambda draw: {"at": 1763918941.12, "took_ms": 3, "score": draw.random()},
    "price": lambda draw: draw.uniform(1e3, 1e6),
    "classes": top,
    "boxes": lambda draw: [
        {"label": "cat", "score": draw.random(), "box": [draw.uniform(0, 640) for _ in range(4)]}
        for _ in range(2)
    ],
    "table": lambda draw: [draw.uniform(1e5, 1e6), draw.gauss(0, 1), draw.gauss(0, 1e-6)],
    "forecast": lambda draw: [[draw.uniform(1e5, 1e6)], [draw.random()]],
    "embedding": lambda draw: [draw.gauss(0, 0.05) for _ in range(6)],
    "ids": lambda draw: {"tokens": [draw.randrange(30522) for _ in range(3)], "p": draw.random()},
    "flags": lambda draw: {"is_spam": draw.random() < 0.5, "class": 3.0, "area": 123456.5},
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from leaves(each, (*path, at))
    else:
        yield path, value


def put(value: Any, path: tuple[Any, ...], leaf: Any) -> Any:
    if not path:
        return leaf
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = put(value[path[0]], path[1:], leaf)
    return copied


def wrongs(answer: Any, other: Any) -> Iterator[tuple[str, Any]]:
    """Yield an answer with one leaf wrong in each way that its type has."""
    places = list(leaves(answer))
    for at, (path, leaf) in enumerate(places):
        where = "/".join(map(str, path)) or "it"
        if isinstance(leaf, bool):
            yield f"{where} turned", put(answer, path, not leaf)
            yield f"{where} as a number", put(answer, path, int(leaf))
            continue
        if isinstance(leaf, str):
            yield f"{where} another text", put(answer, path, leaf + "s")
            yield f"{where} null", put(answer, path, None)
            continue
        if isinstance(leaf, int):
            yield f"{where} + 1", put(answer, path, leaf + 1)
            yield f"{where} as a text", put(answer, path, str(leaf))
            continue
        yield f"{where} 1 % more", put(answer, path, leaf * 1.01)
        yield f"{where} x 10", put(answer, path, leaf * 10)
        yield f"{where} turned", put(answer, path, -leaf)
        yield f"{where} zero", put(answer, path, 0.0)
        yield f"{where} NaN", put(answer, path, math.nan)
        yield f"{where} as a text", put(answer, path, str(leaf))
        replaced = dict(leaves(other)).get(path)
        if isinstance(replaced, float) and abs(replaced - leaf) > 1e-2 * abs(leaf):
            yield f"{where} another request's", put(answer, path, replaced)
        later = [each for each in places[at + 1 :] if isinstance(each[1], float)]
        if later:
            yield (
                f"{where} exchanged",
                put(put(answer, path, later[0][1]), later[0][0], leaf),
            )


def harmless(answer: Any) -> Iterator[tuple[str, Any]]:
    """Yield answers that mean the same."""
    yield "as it is", answer
    yield "without spaces", orjson.loads(orjson.dumps(answer)) if answer else answer
    for sign in (1, -1):
        nearer = answer
        for path, leaf in leaves(answer):
            if type(leaf) is float:
                nearer = put(nearer, path, leaf * (1 + sign * 2e-6))
        yield f"every fraction 2e-6 of itself {'more' if sign > 0 else 'less'}", nearer
    if isinstance(answer, dict):
        yield "keys in another order", dict(reversed(answer.items()))
