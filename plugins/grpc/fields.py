"""Fields of protobuf's messages by their bytes, where making a message would copy its tensors.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from modelyard.serve.dataplane.wire import Buffer

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Kinds of fields; groups, the two others, are in no message of ours."""
MOST_FIELDS = 4096
"""Of a message that is cut: each costs 3 µs, in which nobody else is answered."""
_WIDTHS = {FIXED64: 8, FIXED32: 4}
_MORE = "a number of more than ten bytes"


def encode_number(value: int) -> bytes:
    """Return a number of 0 or more as a varint."""
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def begin_bytes(number: int, size: int) -> bytes:
    """Return what stands before a field of so many bytes."""
    return encode_number(number << 3 | BYTES) + encode_number(size)


def cut_out(
    pieces: Sequence[Buffer], numbers: Collection[int]
) -> tuple[bytes, list[tuple[int, list[memoryview]]]]:
    """Return a message without some of its fields of bytes, and those, in their order.

    Args:
        pieces: of the message, as they came.
        numbers: of the fields; each value is returned in pieces, too, and not copied.

    Raises:
        ValueError: it is not a message.
    """
    if len(pieces) > 1:
        try:
            return _cut_out(pieces, numbers)
        except IndexError:  # something else than a value lies across two pieces
            pieces = [b"".join(pieces)]
    try:
        return _cut_out(pieces, numbers)
    except IndexError as error:
        raise ValueError("a field ends behind its message") from error


def _cut_out(
    pieces: Sequence[Buffer], numbers: Collection[int]
) -> tuple[bytes, list[tuple[int, list[memoryview]]]]:
    count = 0
    waiting = deque(memoryview(piece) for piece in pieces)
    rest: list[memoryview] = []
    found: list[tuple[int, list[memoryview]]] = []
    while waiting:
        data = waiting.popleft()
        at, kept, end = 0, 0, len(data)
        while at < end:
            start = at
            count += 1
            if count > MOST_FIELDS:
                raise ValueError(f"more than {MOST_FIELDS} fields")
            tag, at = (data[at], at + 1) if data[at] < 0x80 else _number(data, at)
            kind = tag & 7
            if kind == BYTES:
                size, at = (data[at], at + 1) if data[at] < 0x80 else _number(data, at)
                if tag >> 3 in numbers:
                    value = [data[at : at + size]]
                    missing = at + size - end
                    rest.append(data[kept:start])
                    while missing > 0:  # it goes on in the next piece
                        data = waiting.popleft()
                        end = len(data)
                        value.append(data[:missing])
                        at, size, missing = 0, missing, missing - end
                    found.append((tag >> 3, value))
                    kept = at = at + size
                    continue
                at += size
            elif kind == VARINT:
                _, at = _number(data, at)
            elif kind in _WIDTHS:
                at += _WIDTHS[kind]
            else:
                raise ValueError(f"a field of kind {kind}")
            if at > end:
                raise IndexError
        rest.append(data[kept:])
    return b"".join(rest), found


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return a varint, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        digit = data[at]
        at += 1
        value |= (digit & 0x7F) << shift
        if digit < 0x80:
            return value, at
    raise ValueError(_MORE)
