"""ONNX file → proof that a runtime finds in it what it says, and nothing outside of its folder.

A runtime opens the files that a tensor names, makes as much memory as a tensor's sizes say, and
goes as deep as graphs lie in graphs. Here the file is read before, field by field as protobuf lays
it out (https://protobuf.dev/programming-guides/encoding/): weights are stepped over, so that a
file of a gigabyte takes no memory. What two readers of protobuf would understand in two ways is
refused.

Not covered: what operators do with the numbers that they are given; the runtime checks these.
"""

import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelyard.archiver.untrusted.container import OpenFile

MAX_DEPTH = 16
"""Graphs inside of each other, at most."""
MAX_NODES = 1 << 20
"""Nodes at most, those of a function as often as it is called."""
MAX_DENSE_BYTES = 1 << 31
"""What a tensor that is stored sparsely may take in memory."""
_MAX_ELEMENTS = 1 << 48

Finding = tuple[str, str]
Inside = Callable[[Path, str], Path]
_Span = tuple[int, int]
_Parts = defaultdict[int, list[Any]]
_Operator = tuple[str, str]

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
# What optimised and quantised files call. Others read files or hand over code, as EPContext does.
_OF_ONNXRUNTIME = re.compile(
    r"\w*(Attention|Bias|Conv|Embed|Gelu|Gemm|Integer|MatMul|MoE|Norm|Padding|Pool|QLinear|QOrdered"
    r"|Quantize|Softmax)\w*|CDist|ComplexMul(Conj)?|CropAndResize|ExpandDims|GatherND|GridSample"
    r"|I?[Rr]fft|Inverse|NGramRepeatBlock|Pad|Trilu|Unique"
)
_STRING = 8
_EXTERNAL = 1
# Bits of an element, by the number of its type in TensorProto.DataType.
_BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    **{15: 128, 21: 4, 22: 4, 23: 4, 25: 2, 26: 2},
}
_WIDTHS = {1: 8, 5: 4}  # in bytes, of kinds of fields

# What is read of each message, by the numbers of onnx.proto: a star where it may be there more than
# once. All else is stepped over.
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function*"},
    "graph": {1: "node*", 5: "tensor*", 15: "sparse*"},
    "function": {1: "text", 7: "node*", 10: "text", 11: "attribute*"},
    "node": {4: "text", 5: "attribute*", 7: "text"},
    "attribute": {
        5: "tensor",
        6: "graph",
        10: "tensor*",
        11: "graph*",
        22: "sparse",
        23: "sparse*",
    },
    "sparse": {1: "tensor", 2: "tensor", 3: "numbers*"},
    "tensor": {1: "numbers*", 2: "numbers", 8: "text", 9: "text", 13: "entry*", 14: "numbers"},
    "entry": {1: "text", 2: "text"},
}


def check_onnx(path: Path, inside: Inside | None = None) -> tuple[list[Finding], list[Path]]:
    """Find what a runtime must not be given; nothing of the file is run.

    Args:
        path: the file.
        inside: returns the path of a file of the model's folder; raises ValueError where it is none
            of it. By default no link may lead out of the folder.

    Returns:
        The parts that are refused, each with what is wrong with it; the files that hold weights.
    """
    with contextlib.closing(OpenFile(os.open(path, os.O_RDONLY))) as file:
        reader = _Reader(file.map(range(file.size)), path.parent, inside or inside_folder)
        try:
            reader.read()
        except (ValueError, IndexError, RecursionError) as error:
            reader.findings["the file"] = f"it is not an ONNX model ({error})"
    return list(reader.findings.items()), sorted(reader.files)


def inside_folder(folder: Path, place: str) -> Path:
    """Return the path of a file in a folder.

    Raises:
        ValueError: it lies elsewhere, or is not there.
    """
    if not place or "\0" in place or Path(place).is_absolute() or ".." in re.split(r"[/\\]", place):
        raise ValueError(f'its values would lie outside of its folder, in "{place}"')
    real = (folder / place).resolve()
    if not real.is_relative_to(folder.resolve()):
        raise ValueError(f'its values lie behind "{place}", a link that leaves the folder')
    if not real.is_file():
        raise ValueError(f'its values lie in "{place}", which is not beside it; copy that file too')
    return real


class _Reader:
    """Reads one file.

    Args:
        data: its bytes.
        folder: where the files lie that it names.
        inside: as `check_onnx`'s.
    """

    def __init__(self, data: memoryview, folder: Path, inside: Inside) -> None:
        self.findings: dict[str, str] = {}
        self.files: set[Path] = set()
        self._data, self._folder, self._inside = data, folder, inside
        self._calls: dict[_Operator | None, Counter[_Operator]] = {None: Counter()}
        """Function, or None for the graph → the operators that it calls, and how often."""

    def read(self) -> None:
        """Read all of it into `findings`.

        Raises:
            ValueError: it is not a model.
        """
        if not self._visit("model", (0, len(self._data)), None, 0)[7]:
            raise ValueError("it has no graph")
        for calls in self._calls.values():
            for domain, name in calls.keys() - self._calls.keys():
                is_known = domain in _DOMAINS or (
                    domain == "com.microsoft" and _OF_ONNXRUNTIME.fullmatch(name)
                )
                if not is_known:
                    own = f"the operator {domain}.{name}"
                    self.findings[own] = "it is of a library, or reaches outside of the file"
        if self._count(None, {}) > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} nodes")

    def _count(self, owner: _Operator | None, known: dict[_Operator | None, int]) -> int:
        if owner not in known:
            known[owner] = MAX_NODES + 1  # what calls itself has no end
            known[owner] = sum(
                times * (self._count(call, known) if call in self._calls else 1)
                for call, times in self._calls[owner].items()
            )
        return known[owner]

    def _visit(self, kind: str, place: _Span, owner: _Operator | None, depth: int) -> _Parts:
        """Judge a message and all inside of it; `owner` is the function that it lies in."""
        parts = self._parts(kind, place)
        problem = None
        if kind == "graph" and (depth := depth + 1) > MAX_DEPTH + 1:
            raise ValueError(f"its graphs lie more than {MAX_DEPTH} deep in each other")
        if kind == "function":
            owner = (self._text(parts[10]), self._text(parts[1]))
            self._calls.setdefault(owner, Counter())
        elif kind == "node":
            self._calls[owner][self._text(parts[7]), self._text(parts[4])] += 1
        elif kind == "tensor":
            problem = self._tensor_problem(parts, place)
        elif kind == "sparse" and math.prod(map(abs, parts[3])) * 8 > MAX_DENSE_BYTES:
            problem = f"it would have {math.prod(parts[3])} elements in memory"
        if problem:
            self.findings[f'the {kind} "{self._text(parts[8])}"'] = problem
        for number, inner in _MESSAGES[kind].items():
            if (name := inner.rstrip("*")) in _MESSAGES and name != "entry":
                for each in parts[number]:
                    self._visit(name, each, owner, depth)
        return parts

    def _tensor_problem(self, tensor: _Parts, place: _Span) -> str | None:
        """Return why a tensor's values cannot be there, as many as its sizes say."""
        kind, sizes = sum(tensor[2]), tensor[1]
        elements, bits = math.prod(sizes), _BITS.get(kind, 0)
        if min(sizes, default=0) < 0 or elements > _MAX_ELEMENTS or not (bits or kind == _STRING):
            return f"it has sizes {sizes} and a type of number {kind}"
        size = (elements * bits + 7) // 8
        if tensor[14] == [_EXTERNAL]:
            entries = [self._parts("entry", each) for each in tensor[13]]
            return self._outside_problem(
                {self._text(each[1]): self._text(each[2]) for each in entries}, size
            )
        for start, end in tensor[9]:
            return None if end - start == size else f"it has {end - start} bytes of {size}"
        # In other fields a number takes a byte or more, of which the smallest share one.
        held = place[1] - place[0]
        return f"it has {held} bytes for {elements} values" if elements > 4 * held else None

    def _outside_problem(self, entries: Mapping[str, str], size: int) -> str | None:
        """Return why the values of a tensor are not those of a file in the model's folder."""
        try:
            path = self._inside(self._folder, entries.get("location", ""))
            start, length = int(entries.get("offset", 0)), int(entries.get("length", size))
        except ValueError as error:
            return str(error)
        self.files.add(path)
        there = path.stat().st_size
        if length != size or not 0 <= start <= there - size:
            return f"it takes {length} bytes of {size}, at {start} of a file of {there}"
        return None

    def _text(self, places: list[_Span]) -> str:
        return "".join(bytes(self._data[start:end]).decode() for start, end in places)

    def _parts(self, kind: str, place: _Span) -> _Parts:
        """Read a message: number of a field → numbers, or places of messages and of text."""
        at, end = place
        rules, parts = _MESSAGES[kind], _Parts(list)
        while at < end:
            tag, at = self._varint(at)
            number, wire = tag >> 3, tag & 7
            values: list[Any] = []
            start = at
            if wire == 0:
                value, at = self._varint(at)
                values = [value]
            elif wire == 2:
                size, start = self._varint(at)
                at = start + size if size >= 0 else end + 1
                values = [(start, at)]
            else:
                at += _WIDTHS.get(wire, end)
            if not (rule := rules.get(number)):
                continue
            if not rule.endswith("*") and parts[number]:
                raise ValueError(f"field {number} of its {kind} is there twice")
            if rule.startswith("numbers"):
                values = list(self._numbers(start, at) if wire == 2 else values)
            elif wire != 2:
                raise ValueError(f"field {number} of its {kind} has the kind {wire}")
            parts[number] += values
        if at != end:
            raise ValueError("a field ends behind its message")
        return parts

    def _numbers(self, at: int, end: int) -> Iterator[int]:
        """Yield numbers that lie in one field."""
        while at < end:
            value, at = self._varint(at)
            yield value

    def _varint(self, at: int) -> tuple[int, int]:
        data = self._data
        digit = data[at]
        if digit < 0x80:
            return digit, at + 1
        value, shift = digit & 0x7F, 7
        while digit >= 0x80 and shift < 70:
            at += 1
            digit = data[at]
            value |= (digit & 0x7F) << shift
            shift += 7
        if digit >= 0x80 or value >> 64:
            raise ValueError("a number of more than 64 bits")
        return value - (value >> 63 << 64), at + 1
