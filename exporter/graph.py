"""An artifact's graph as values: nodes with operator, shape, source line and cost, by module."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in (\S+)\n?\s*([^\n]*)')


@dataclass(frozen=True)
class Source:
    """A line of the author's code."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Node:
    """One call of an operator."""

    name: str
    operator: str
    module: str
    """Dotted path of the module that it is in; empty for the model itself."""
    inputs: tuple[str, ...]
    shape: tuple[int | str, ...] | None = None
    """Of its output; None where it has several, or none that is a tensor."""
    dtype: str = ""
    source: Source | None = None
    flops: int | None = 0
    """None where they cannot be counted."""
    parameters: int = 0
    """In the parameters that it reads directly."""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the form that the page holds."""
        shape = None if self.shape is None else list(self.shape)
        source = None if self.source is None else vars(self.source)
        return {**vars(self), "inputs": list(self.inputs), "shape": shape, "source": source}


@dataclass(frozen=True)
class Value:
    """An input or output of the whole graph."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Return the form that the page holds."""
        shape = None if self.shape is None else list(self.shape)
        return {**vars(self), "shape": shape}


@dataclass(frozen=True)
class Graph:
    """What an artifact computes, as far as a reader needs to see it."""

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    classes: Mapping[str, str]
    """Class of each module, by its dotted path."""
    parameters: Mapping[str, int]
    """Elements of each parameter, by its dotted name; a shared one counts once."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes of dynamic dimensions that FLOPs are counted at."""
    producer: str = ""

    @property
    def flops(self) -> int | None:
        """The sum over all nodes; None where one of them cannot be counted."""
        counts = [node.flops for node in self.nodes]
        return None if None in counts else sum(count or 0 for count in counts)


def find_source(trace: str, model: str = "") -> Source | None:
    """Find the author's own line in a stack trace: the deepest one that is not torch's.

    Args:
        trace: as torch keeps it for a node; folders may have been cut off the file names.
        model: `--model` of the export, whose file is the author's for certain.
    """
    frames = [
        Source(PurePath(file).name, int(line), text.strip())
        for file, line, _, text in _FRAME.findall(trace)
        if not file.startswith("<")  # code that torch generated
    ]
    own_file = PurePath(model.rpartition(":")[0]).name
    for candidates in (
        [frame for frame in frames if frame.file == own_file],
        [frame for frame in frames if frame.file not in _torch_files()],
    ):
        if candidates:
            return candidates[-1]
    return None


def dim_sizes(report: Mapping[str, Any] | None) -> dict[str, int]:
    """Choose the sizes to count FLOPs at: one item, every other dim at its largest proven size."""
    if report is None:
        return {}
    signature = report["signature"]
    batch = signature["inputs"][0]["shape"][0]
    return {
        name: 1 if name == batch else int(dim["max"]) for name, dim in signature["dims"].items()
    }


@functools.cache
def _torch_files() -> set[str]:
    folder = Path(torch.__file__).parent
    own = [
        path for part in ("nn", "fx", "_higher_order_ops") for path in (folder / part).rglob("*.py")
    ]
    return {path.name for path in own} | {"_jit_internal.py", "functional.py"}


def parameters_of(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Add up the elements of the named parameters, each once."""
    return sum(sizes[name] for name in dict.fromkeys(names) if name in sizes)
