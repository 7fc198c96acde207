"""The Open Inference Protocol's tensors in answers, compared number by number, without numpy.

The server's process has no numpy; large answers are compared in a process beside it (`comparer`).
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

_SLICE = 4096
"""Numbers that are taken out of a tensor at a time."""

_CODES = {
    **{"BOOL": "B", "UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "BF16": "H"},
    **{"UINT32": "I", "INT32": "i", "UINT64": "Q", "INT64": "q", "FP32": "f", "FP64": "d"},
    "FP16": "e",
}
"""A datatype → its code in `struct`; BF16 is the upper half of a float."""
_FLOATS = ("FP16", "BF16", "FP32", "FP64")
_MOST_DIMS = 32
BYTES = "BYTES"


class Tensor(NamedTuple):
    """One output of an answer."""

    datatype: str
    shape: tuple[int, ...]
    data: list[Any] | memoryview
    """A value for each place, or the bytes of them all."""

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def is_ranked(self) -> bool:
        """Whether its rows along the last dimension have a largest value that means something."""
        return self.datatype in _FLOATS and len(self.shape) > 1 and self.shape[-1] > 1

    def values(self, start: int, stop: int) -> list[Any]:
        """Return some of its values."""
        if isinstance(self.data, list):
            return self.data[start:stop]
        code = _CODES[self.datatype]
        width = struct.calcsize(code)
        found = list(
            struct.unpack(f"<{stop - start}{code}", self.data[start * width : stop * width])
        )
        if self.datatype == "BF16":
            halves = struct.pack(f"<{len(found)}I", *[half << 16 for half in found])
            found = list(struct.unpack(f"<{len(found)}f", halves))
        return found

    def is_same(self, other: Tensor, start: int, stop: int) -> bool:
        """Return whether both hold the very same between two places."""
        if isinstance(self.data, list) or isinstance(other.data, list):
            return self.values(start, stop) == other.values(start, stop)
        width = struct.calcsize(_CODES[self.datatype])
        part = slice(start * width, stop * width)
        return bytes(self.data[part]) == bytes(other.data[part])  # views compare item by item


class Apart(NamedTuple):
    """How far two tensors are from each other."""

    scaled: float
    """Largest difference of a row over its largest value, where that is above 1."""
    place: str
    """Where, and what stands there; empty where they are the same."""
    labels_agree: bool | None
    """Whether the largest value of each row is at the same place; None where rows have no ranks."""
    cosine: float
    """Between the two as vectors."""


def read_tensors(document: Any, tail: memoryview) -> dict[str, Tensor] | None:
    """Return the outputs of an answer by name; None where it is not one of the protocol.

    Args:
        document: the JSON of the answer.
        tail: the bytes behind it.
    """
    outputs = document.get("outputs") if isinstance(document, dict) else None
    if not isinstance(outputs, list) or not outputs:
        return None
    found: dict[str, Tensor] = {}
    at = 0
    for each in outputs:
        match each:
            case {"name": str(name), "datatype": str(datatype), "shape": list(shape)}:
                pass
            case _:
                return None
        are_sizes = all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
        if name in found or not are_sizes or len(shape) > _MOST_DIMS:
            return None
        data: list[Any] | memoryview | None = each.get("data")
        if "data" not in each:
            parameters = each.get("parameters")
            size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
            if type(size) is not int or not 0 <= size <= len(tail) - at:
                return None
            data, at = tail[at : at + size], at + size
        tensor = _read(datatype, tuple(shape), data)
        if tensor is None:
            return None
        found[name] = tensor
    return found if at == len(tail) else None


def _read(datatype: str, shape: tuple[int, ...], data: Any) -> Tensor | None:
    """Return a tensor; None where its data are not as many or as large as it says."""
    count = math.prod(shape)
    if isinstance(data, memoryview):
        if datatype == BYTES:
            texts = _split(data, count)
            return None if texts is None else Tensor(BYTES, shape, texts)
        code = _CODES.get(datatype)
        if code is None or len(data) != count * struct.calcsize(code):
            return None
        return Tensor(datatype, shape, data)
    if not isinstance(data, list):
        return None
    while data and all(isinstance(each, list) for each in data):  # as deep as JSON is nested
        data = [value for each in data for value in each]
    if len(data) != count:
        return None
    if datatype == BYTES:
        return Tensor(BYTES, shape, data)
    is_known = datatype in _CODES and set(map(type, data)) <= {int, float, bool}
    return Tensor(datatype, shape, data) if is_known else None


def _split(data: memoryview, count: int) -> list[bytes] | None:
    """Return elements of BYTES: each behind its length, of four bytes."""
    texts = []
    at = 0
    for _ in range(count):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            return None
        texts.append(bytes(data[at - size : at]))
    return texts if at == len(data) else None


def tensors_apart(
    live: Mapping[str, Tensor], candidate: Mapping[str, Tensor], tolerance: float
) -> Apart:
    """Compare all outputs; both answers have the same names, datatypes and shapes."""
    found = []
    for name, tensor in live.items():
        if tensor.datatype == BYTES:
            found.append(_texts_apart(name, tensor, candidate[name]))
        else:
            found.append(_numbers_apart(name, tensor, candidate[name], tolerance))
    labels = [each.labels_agree for each in found if each.labels_agree is not None]
    worst = max(found, key=lambda each: each.scaled)
    return Apart(
        worst.scaled,
        worst.place,
        all(labels) if labels else None,
        min(each.cosine for each in found),
    )


def _texts_apart(name: str, live: Tensor, candidate: Tensor) -> Apart:
    """Compare texts: equal, or `value:index:label` of a classification, whose values may differ."""
    largest, place = 0.0, ""
    labels_agree = True
    for at, (expected, got) in enumerate(zip(live.data, candidate.data, strict=True)):
        if expected == got:
            continue
        before, after = _class(expected), _class(got)
        if before is None or after is None or before[1] != after[1]:
            labels_agree = False
            scaled = math.inf
        else:
            scaled = abs(before[0] - after[0]) / max(1.0, abs(before[0]))
            scaled = scaled if math.isfinite(scaled) else math.inf
        if scaled > largest:
            largest, place = scaled, f"output {name}[{at}]: expected {expected!r}, got {got!r}"
    return Apart(largest, place, labels_agree, 1.0 if labels_agree else 0.0)


def _class(text: str | bytes) -> tuple[float, str] | None:
    """Return value and class of one entry of a classification, which is `value:index[:label]`."""
    if not isinstance(text, str | bytes) or len(text) > 1000:
        return None
    said = text if isinstance(text, str) else text.decode("utf-8", "replace")
    value, colon, of_class = said.partition(":")
    try:
        return (float(value), of_class) if colon and of_class.partition(":")[0].isdigit() else None
    except ValueError:
        return None


class _Row:
    """What is gathered of one request's part of a tensor, slice by slice."""

    def __init__(self) -> None:
        self.size = 1.0
        self.apart = 0.0
        self.place = -1
        self.pair: tuple[Any, Any] = (0, 0)

    def add(self, at: int, expected: list[Any], got: list[Any], is_whole: bool) -> None:
        """Add a slice."""
        if math.isfinite(sum(expected)) and math.isfinite(sum(got)):
            self.size = max(self.size, max(map(abs, expected)))
            apart = list(map(abs, map(operator.sub, got, expected)))
        else:
            self.size = max([self.size, *(abs(each) for each in expected if math.isfinite(each))])
            pairs = zip(expected, got, strict=True)
            apart = [_apart(*pair) for pair in pairs]
        largest = max(apart)
        if largest > self.apart:
            place = apart.index(largest)
            self.apart = math.inf if is_whole else largest
            self.place, self.pair = at + place, (expected[place], got[place])

    @property
    def scaled(self) -> float:
        """The largest difference over the largest value."""
        return self.apart / self.size


def _apart(expected: float, got: float) -> float:
    if expected == got or (expected != expected and got != got):
        return 0.0
    apart = abs(got - expected)
    return apart if math.isfinite(apart) else math.inf


class _Top:
    """The largest value of one row along the last dimension, of both answers."""

    def __init__(self) -> None:
        self.expected = self.got = -math.inf
        self.at = self.got_at = -1
        self.moved = -math.inf
        """What the live answer has where the candidate's largest value is."""

    def add(self, at: int, expected: list[float], got: list[float]) -> None:
        """Add a slice."""
        expected, got = _ranks(expected), _ranks(got)
        best, got_best = max(expected), max(got)
        if best > self.expected:
            self.expected, self.at = best, at + expected.index(best)
        if got_best > self.got:
            place = got.index(got_best)
            self.got, self.got_at, self.moved = got_best, at + place, expected[place]

    @property
    def lead(self) -> float:
        """By how much the live answer had another one in front; 0 where the largest is the same."""
        lead = self.expected - self.moved
        return 0.0 if self.at == self.got_at or lead != lead else lead


def _ranks(values: list[float]) -> list[float]:
    """Return values to find the largest of: NaN is, as torch and numpy have it."""
    has_nan = math.isnan(sum(values))
    return [math.inf if each != each else each for each in values] if has_nan else values


def _numbers_apart(name: str, live: Tensor, candidate: Tensor, tolerance: float) -> Apart:
    rows = live.shape[0] if len(live.shape) > 1 else 1
    length = live.size // rows if rows else 0
    width = live.shape[-1] if live.is_ranked else length
    is_whole = live.datatype not in _FLOATS
    largest, place, labels_agree = 0.0, "", True
    dot = expected_squares = got_squares = 0.0
    for first in range(0, live.size, length or 1):
        if live.is_same(candidate, first, first + length):
            continue
        row, lead = _Row(), 0.0
        for start in range(first, first + length, width):
            top = _Top()
            for at in range(start, start + width, _SLICE):
                stop = min(at + _SLICE, start + width)
                expected, got = live.values(at, stop), candidate.values(at, stop)
                row.add(at, expected, got, is_whole)
                dot += _sum(map(operator.mul, expected, got))
                expected_squares += _sum(map(operator.mul, expected, expected))
                got_squares += _sum(map(operator.mul, got, got))
                if live.is_ranked:
                    top.add(at, expected, got)
            lead = max(lead, top.lead)
        if row.scaled > largest:
            expected_value, got_value = row.pair
            largest = row.scaled
            place = f"output {name}[{row.place}]: expected {expected_value}, got {got_value}"
        labels_agree &= lead <= 2 * tolerance * row.size
    lengths = math.sqrt(expected_squares) * math.sqrt(got_squares)
    cosine = min(1.0, dot / lengths) if 0 < lengths < math.inf else float(largest == 0)
    return Apart(largest, place, labels_agree if live.is_ranked else None, cosine)


def _sum(values: Any) -> float:
    """Return a sum; nothing that is not finite makes the rest of it meaningless."""
    total = float(sum(values))
    return total if math.isfinite(total) else 0.0


def shapes_differ(live: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> str | None:
    """Return in which of name, datatype and shape two answers differ, or None."""
    if live.keys() != candidate.keys():
        return f"outputs: expected {_names(live)}, got {_names(candidate)}"
    for name, tensor in live.items():
        other = candidate[name]
        if (tensor.datatype, tensor.shape) != (other.datatype, other.shape):
            return (
                f"output {name}: expected {tensor.datatype} of shape {list(tensor.shape)}, "
                f"got {other.datatype} of shape {list(other.shape)}"
            )
    return None


def _names(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(list(tensors)[:10])
