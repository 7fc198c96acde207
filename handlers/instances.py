"""KServe's first protocol, which is TensorFlow Serving's: instances → predictions, both JSON.

Each instance is the body of a request of its own, and its answer stands at its place.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

from modelyard.handlers.body import parse_strictly
from modelyard.handlers.errors import BadInput

INSTANCES = "instances"
MOST_INSTANCES = 0xFFFF
"""Most instances of one request; each costs more memory than its text may have bytes."""


def read_instances(
    body: bytes | bytearray, read_json: Callable[[bytes | bytearray], Any] = parse_strictly
) -> list[Any]:
    """Return what a request holds, bytes where an instance is base64.

    Raises:
        BadInput: it is not such a request; the message names the field.
    """
    try:
        head = read_json(body)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {error}") from error
    given = head.get(INSTANCES) if isinstance(head, dict) else None
    if not isinstance(given, list) or not 0 < len(given) <= MOST_INSTANCES:
        seen = f"{len(given)} of them" if isinstance(given, list) else "none"
        raise BadInput(
            f'the body has {seen}; expected {{"instances": […]}} with a list of 1 to '
            f"{MOST_INSTANCES}"
        )
    try:
        return [decode_instance(each) for each in given]
    except (binascii.Error, TypeError, ValueError) as error:
        raise BadInput(f"an instance has b64 that is not base64: {error}") from error


def decode_instance(value: Any) -> Any:
    """Return an instance with bytes in place of {"b64": …}, itself or as one of its values.

    Raises:
        ValueError, TypeError: what stands there is not base64.
    """
    if not isinstance(value, dict):
        return value
    if _is_base64(value):
        return b64decode(value["b64"])
    return {
        name: b64decode(each["b64"]) if _is_base64(each) else each for name, each in value.items()
    }


def _is_base64(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"b64"}


def as_prediction(answer: Any) -> Any:
    """Return a handler's answer to one instance as JSON has it: bytes as base64."""
    if isinstance(answer, bytes | bytearray):
        return {"b64": b64encode(answer).decode()}
    return answer


def join_chunks(chunks: Sequence[Any]) -> Any:
    """Return what a handler streamed, last answer included, in one: as text, bytes, or a list."""
    for kind in (str, bytes):
        if all(isinstance(chunk, kind) for chunk in chunks):
            return kind().join(chunks)
    return list(chunks)
