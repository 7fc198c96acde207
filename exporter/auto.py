"""`--quantize auto`: the smallest artifact that loses no more than is allowed, measured here.

Every kind of quantisation is exported beside float32 into a folder of its own, proven as it would
be alone, and timed. What they lose is measured on the samples; int8-static on those that it was
not calibrated on.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from modelyard.base.terminal import format_bytes, plain_table
from modelyard.exporter.bench.measure import Plan, Subject, bench, choose_batches, read_signature
from modelyard.exporter.errors import ExportError, UsageError
from modelyard.exporter.prove.loss import DOUBTFUL, MAX_LOSS
from modelyard.exporter.prove.parity import ExportReport, publish
from modelyard.exporter.refusals import check_request
from modelyard.exporter.request import STATIC, ExportRequest, command_of
from modelyard.exporter.trip import run

# An artifact that is this much larger than the smallest may be chosen, if it is faster.
_AS_SMALL = 1.1
_ROUNDS, _CELL_S = 3, 0.6
_WIDTH = 200


@dataclass(frozen=True)
class _Candidate:
    """One kind of artifact, and what was measured of it."""

    name: str
    report: ExportReport | None = None
    problem: str = ""
    """Why there is none."""
    latencies_ms: Mapping[int, float | None] = field(default_factory=dict)
    """Batch size → median of a call, with one thread."""


def choose(request: ExportRequest) -> list[ExportReport]:
    """Export every kind, choose one, and publish it alone.

    Raises:
        ExportError: float32 cannot be exported either.
    """
    check_request(request)
    most = MAX_LOSS if request.max_loss is None else request.max_loss
    kinds = [None, "int8-dynamic", *([STATIC] if request.samples else [])]
    request.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=request.output_dir, prefix=".export-") as folder:
        tried = _timed([_export(request, kind, Path(folder)) for kind in kinds])
        chosen = _choose(tried, most)
        assert chosen.report is not None
        for line in _table(tried, chosen, most):
            request.report_line(line)
        kind = None if chosen.name == "fp32" else chosen.name
        report = replace(
            chosen.report,
            artifact=request.target("onnx"),
            command=command_of(replace(request, quantize=kind), ["onnx"]),
        )
        publish(report, chosen.report.artifact)
        for example in chosen.report.artifact.parent.glob("*.example.json"):
            example.replace(request.output_dir / example.name)
    return [report]


def _export(request: ExportRequest, kind: str | None, folder: Path) -> _Candidate:
    name = kind or "fp32"
    try:
        (report,) = run(
            replace(
                request,
                quantize=kind,
                formats=["onnx"],
                output_dir=folder / name,
                name=request.stem,
                tell=request.tell if kind is None else None,
            )
        )
    except ExportError as error:
        if kind is None:
            raise
        return _Candidate(name, problem=str(error))
    return _Candidate(name, report)


def _timed(tried: list[_Candidate]) -> list[_Candidate]:
    """Return the candidates with the latency of each, measured in turns."""
    reports = [each.report for each in tried if each.report is not None]
    try:
        signature = read_signature(reports[0].artifact)
    except UsageError:  # nothing made up is a valid input
        return tried
    subjects = [Subject(each.artifact.parent.name, "onnx", each.artifact) for each in reports]
    batches = choose_batches(signature, ())
    found = bench(
        Plan(tuple(subjects), signature, batches, threads=(1,), rounds=_ROUNDS, cell_s=_CELL_S)
    )
    by_name: dict[str, dict[int, float | None]] = {}
    for cell in found.cells:
        by_name.setdefault(cell.subject, {})[cell.batch] = cell.p50_ms
    return [replace(each, latencies_ms=by_name.get(each.name, {})) for each in tried]


def _choose(tried: list[_Candidate], most: float) -> _Candidate:
    """Return the smallest of those within the loss, or the fastest of those as small."""
    within = [
        (each.report.artifact_bytes, sum(ms or 0.0 for ms in each.latencies_ms.values()), each)
        for each in tried
        if each.report is not None and each.report.parity.loss <= most
    ]
    smallest = min(size for size, _, _ in within)
    return min(
        (each for each in within if each[0] <= _AS_SMALL * smallest), key=lambda each: each[1]
    )[2]


def _table(tried: list[_Candidate], chosen: _Candidate, most: float) -> list[str]:
    """Return the lines of a table, aligned, and a last one that says why."""
    batches = tried[0].latencies_ms
    heads = ["size", *(f"batch {size}" for size in batches)]
    heads += ["R2", "worst error", "equal labels", "loss", "rows"]
    table = plain_table(("", "left"), ("", "left"), *((head, "right") for head in heads))
    for each in tried:
        mark = "->" if each is chosen else ""
        if each.report is None:
            table.add_row(mark, each.name, "refused")
            continue
        times = ["" if ms is None else f"{ms:.3g} ms" for ms in map(each.latencies_ms.get, batches)]
        losses = each.report.parity.losses.values()
        figures = ["", "", "", "0", ""]
        if losses:
            worst = max(losses, key=lambda one: one.loss)
            figures = [
                "" if worst.r2 is None else f"{worst.r2:.4f}",
                f"{worst.worst:.2%}",
                "" if worst.top1_agreement is None else f"{worst.top1_agreement:.2%}",
                f"{worst.loss:.2%}",
                str(worst.rows),
            ]
        table.add_row(mark, each.name, format_bytes(each.report.artifact_bytes), *times, *figures)
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as drawn:
        console.print(table)
    lines = [line.rstrip() for line in drawn.get().splitlines()]
    lines += [f"{each.name}: {each.problem}" for each in tried if each.problem]
    for each in tried:
        if each.report is not None and each is not chosen:
            lines += [line for line in each.report.warnings if line.startswith(DOUBTFUL)]
    kept = [each for each in tried[1:] if each.report and each.report.parity.loss <= most]
    if not kept:
        return [*lines, f"fp32 stays: nothing quantised loses {most:.2%} or less"]
    return [
        *lines,
        f"{chosen.name} is the smallest that loses {most:.2%} or less, or within "
        f"{_AS_SMALL - 1:.0%} of that and faster",
    ]
