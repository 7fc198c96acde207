"""Artifact → its graph, and one HTML page of it that needs nothing else."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.exporter.errors import UsageError
from modelyard.exporter.graph import Graph
from modelyard.exporter.graph_onnx import read_onnx
from modelyard.exporter.graph_program import read_program
from modelyard.exporter.pages import fill, write_page
from modelyard.exporter.report import report_path
from modelyard.handlers.backends import detect_format


def read_graph(artifact: Path, report: Mapping[str, Any] | None = None) -> Graph:
    """Read the graph of an exported program or of an ONNX model; nothing in it is run.

    Args:
        artifact: a .pt2 or .onnx file.
        report: its export report, which names the dynamic dimensions and their sizes.

    Raises:
        UsageError: another format, which holds no graph that can be shown.
        LoadError: the file is damaged, or an exported program holds more than a program.
    """
    try:
        format = detect_format(artifact)
    except OSError as error:
        raise UsageError(f'"{artifact}" cannot be read ({error}); expected an artifact') from error
    if format == "pt2":
        return read_program(artifact, report)
    if format == "onnx":
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
