"""Artifact → its graph as values: nodes with operator, shape, source line and cost, by module.

`read_graph` reads an exported program or an ONNX model; `write_graph_page` shows it as one HTML
page that needs nothing else.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch

from exporter.errors import UsageError
from exporter.pages import fill, write_page
from exporter.report import report_path
from handlers.backends import detect_format

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
        """Give the form that the page holds."""
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
        """Give the form that the page holds."""
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


def read_graph(artifact: Path, report: Mapping[str, Any] | None = None) -> Graph:
    """Read the graph of an exported program or of an ONNX model; nothing in it is run.

    Args:
        artifact: a .pt2 or .onnx file.
        report: its export report, which names the dynamic dimensions and their sizes.

    Raises:
        UsageError: another format, which holds no graph that can be shown.
        LoadError: the file is damaged, or an exported program holds more than a program.
    """
    # Each reader imports the half of the world that its format needs.
    try:
        format = detect_format(artifact)
    except OSError as error:
        raise UsageError(f'"{artifact}" cannot be read ({error}); expected an artifact') from error
    if format == "pt2":
        from exporter.graph_program import read_program

        return read_program(artifact, report)
    if format == "onnx":
        from exporter.graph_onnx import read_onnx

        return read_onnx(artifact, report)
    raise UsageError(
        f"{artifact.name} is {format}, which keeps no graph of operators with shapes; "
        "export --format pt2 or onnx, and look at that"
    )


def write_graph_page(artifact: Path, html: Path) -> None:
    """Write one HTML page of an artifact's graph, with parity where a report lies beside it.

    Raises:
        UsageError: the format holds no graph that can be shown.
        LoadError: the file is damaged, or an exported program holds more than a program.
        OSError: the page cannot be written.
    """
    report = read_report(artifact)
    write_page(html, fill("graph.html", _page_data(artifact, read_graph(artifact, report), report)))


def read_report(artifact: Path) -> Mapping[str, Any] | None:
    """Read the export report beside an artifact; None without one, or with one of another file."""
    try:
        report = json.loads(report_path(artifact).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_its_own = isinstance(report, dict) and report.get("artifact_bytes") == (
        artifact.stat().st_size
    )
    return report if is_its_own else None


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


def _page_data(artifact: Path, graph: Graph, report: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "artifact": artifact.name,
        "format": detect_format(artifact),
        "bytes": artifact.stat().st_size,
        "producer": graph.producer,
        "model": (report or {}).get("model", ""),
        "nodes": [node.to_json() for node in graph.nodes],
        "inputs": [value.to_json() for value in graph.inputs],
        "outputs": [value.to_json() for value in graph.outputs],
        "classes": dict(graph.classes),
        "parameters": dict(graph.parameters),
        "sizes": dict(graph.sizes),
        "parity": _parity(report),
    }


def _parity(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if report is None or not isinstance(report.get("parity"), dict):
        return None
    parity = report["parity"]
    outputs = {
        name: {key: number for key, number in found.items() if _is_number(number)}
        for name, found in parity.get("outputs", {}).items()
    }
    plain = ("verdict", "tolerance", "cases")
    return {"outputs": outputs, **{key: parity[key] for key in plain if key in parity}}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def parameters_of(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Add up the elements of the named parameters, each once."""
    return sum(sizes[name] for name in dict.fromkeys(names) if name in sizes)
