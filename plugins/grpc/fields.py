"""Fields of protobuf's messages by their bytes, where making a message would copy its tensors.

https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Collection

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Kinds of fields; groups, the two others, are in no message of ours."""
MOST_FIELDS = 4096
"""Most fields of a message that is cut: each costs 3 µs, in which nobody else is answered."""
_WIDTHS = {FIXED64: 8, FIXED32: 4}


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
    message: bytes | memoryview, numbers: Collection[int], most: int = MOST_FIELDS
) -> tuple[bytes, list[tuple[int, memoryview]]]:
    """Return a message without some of its fields of bytes, and those, in their order.

    Args:
        message: message as it came.
        numbers: numbers of the fields; their values are not copied.
        most: most fields that it may have.

    Raises:
        ValueError: it is not a message.
    """
    data = memoryview(message)
    rest: list[memoryview] = []
    found: list[tuple[int, memoryview]] = []
    at, kept, end, count = 0, 0, len(data), 0
    try:
        while at < end:
            start = at
            count += 1
            if count > most:
                raise ValueError(f"more than {most} fields")
            tag, at = (data[at], at + 1) if data[at] < 0x80 else _number(data, at)
            kind = tag & 7
            if kind == BYTES:
                size, at = (data[at], at + 1) if data[at] < 0x80 else _number(data, at)
                if tag >> 3 in numbers:
                    found.append((tag >> 3, data[at : at + size]))
                    rest.append(data[kept:start])
                    kept = at + size
                at += size
            elif kind == VARINT:
                _, at = _number(data, at)
            elif kind in _WIDTHS:
                at += _WIDTHS[kind]
            else:
                raise ValueError(f"a field of kind {kind}")
        if at > end:
            raise IndexError
    except IndexError as error:
        raise ValueError("a field ends behind its message") from error
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
    raise ValueError("a number of more than ten bytes")
