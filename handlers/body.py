"""A request's body → its content: the part that is meant, and strict JSON."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from modelyard.archiver.untrusted import json as strict
from modelyard.handlers.errors import BadInput

_MAX_DEPTH = 1024  # orjson's own


def parse_strictly(text: bytes | bytearray | str, what: str = "the JSON of the body") -> Any:
    """Parse a request's JSON; whole numbers of more than 64 bits become floats.

    orjson reads it in a thirteenth of the time that Python's own reader takes: of an image of 784
    numbers, in 18 µs in place of 240.

    Raises:
        ValueError: it is not JSON.
        BadInput: it is, and no number, character or key that it holds is to be guessed.
    """
    if not isinstance(text, str) and (text[:1] > b"\x7f" or b"\0" in text[:4]):
        text = text.decode(json.detect_encoding(text))  # a byte order mark, UTF-16 or UTF-32
    try:
        return strict.parse_json(text, max_depth=_MAX_DEPTH, fast=orjson.loads)
    except strict.RefusedJson as error:
        raise BadInput(f"{what} is refused: {error}") from error


def body_of(row: Mapping[str, Any]) -> Any:
    """Return a request's content: the part named "data", else the body.

    Raises:
        BadInput: both are empty.
    """
    value = row.get("data")
    if value is None or _is_empty(value):
        value = row.get("body")
        if not row:
            raise BadInput(
                "the request is a form without fields, as `curl -d` sends one; send the input as "
                "the body: `curl -T FILE`, or with `-H 'Content-Type: application/json'`"
            )
        if value is None or _is_empty(value):
            raise BadInput("the body is empty; send the input as the body, as `curl -T FILE` does")
    return value


def parse_json(body: Any) -> Any:
    """Parse a body, unless its content type had it parsed already."""
    if not isinstance(body, bytes | bytearray | str):
        return body
    try:
        return parse_strictly(body)
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}; this model takes JSON numbers") from error


def _is_empty(value: Any) -> bool:
    return isinstance(value, bytes | bytearray | str) and not value
