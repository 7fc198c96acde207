"""A bench's figures → one HTML page that needs nothing else."""

from pathlib import Path

from modelyard.exporter.bench import BenchReport
from modelyard.exporter.pages import fill, write_page


def write_bench_page(report: BenchReport, html: Path) -> None:
    """Write the page: sortable table, bars, latency against items per second, the machine."""
    write_page(html, fill("bench.html", report.to_json()))
