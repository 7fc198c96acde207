"""A bench's figures → one HTML page that needs nothing else: it opens from disk."""

import json
import os
from importlib.resources import files
from pathlib import Path

from modelyard.exporter.bench.report import BenchReport


def write_bench_page(report: BenchReport, html: Path) -> None:
    """Write the page: sortable table, bars, latency against items per second, the machine.

    In one step: a reader finds the old page or the new one.
    """
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    html.parent.mkdir(parents=True, exist_ok=True)
    draft = html.with_name(f".{html.name}.{os.getpid()}")
    try:
        draft.write_text(template.replace("/*DATA*/", script_data(report)), encoding="utf-8")
        draft.replace(html)
    finally:
        draft.unlink(missing_ok=True)


def script_data(report: BenchReport) -> str:
    """Return the report as JSON that cannot end the script element around it."""
    text = json.dumps(report.to_json(), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
