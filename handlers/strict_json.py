"""JSON of a request's body, as RFC 8259 has it, and so that everybody reads the same in it.

Python's own reader takes NaN and Infinity, makes infinity of 1e400, keeps halves of characters,
and of a key that is there twice the last. It takes thirteen times as long, too: of an image of
784 numbers, 240 µs in place of 18.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NoReturn

import orjson

from modelyard.handlers.errors import BadInput


def parse_strictly(body: bytes | bytearray | str) -> Any:
    """Parse a body; whole numbers of more than 64 bits become floats.

    Raises:
        ValueError: it is not valid JSON.
        BadInput: it is, and no number, character or key that it holds is to be guessed.
    """
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(body)
        if not _may_repeat_keys(body, value):
            return value
    text = body if isinstance(body, str) else bytes(body).decode(json.detect_encoding(body))
    try:
        _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise BadInput("the JSON of the body is nested deeper than anybody reads") from error
    except ValueError as error:
        raise BadInput("the JSON of the body holds a number of thousands of digits") from error
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"the JSON of the body cannot be read: {error}") from error


def _may_repeat_keys(body: bytes | bytearray | str, value: Any) -> bool:
    """Return whether there are more colons than the keys that were kept account for."""
    colons = body.count(":") if isinstance(body, str) else body.count(b":")
    found = [value]
    for each in found:  # it grows meanwhile: what is outside comes before what is inside
        if not colons:
            break
        if isinstance(each, dict):
            colons -= len(each)
            found += each.values()
        elif isinstance(each, list):
            found += each
    return colons > 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise BadInput(f"the JSON of the body has the key {json.dumps(twice)} twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise BadInput(f"the JSON of the body holds {name}, which is not a number in JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_number)
