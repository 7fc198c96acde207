from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.plot import draw
from benchmarks.results import BARE, SERVED, Cell, Footprint, Results, Sample
from benchmarks.table import tables

MACHINE = {"cpu": "Some CPU", "cores": 2, "memory_gb": 8.0, "kernel": "6"}
ABOUT = {
    "date": "2026-01-01T00:00:00Z",
    "machine": MACHINE,
    "settings": {"rounds": 1, "seconds": 4},
}


def results(failures: int = 0, others: float = 0.0) -> Results:
    """Return one round of a model and of the server's ceiling."""
    cells = [
        *(Cell("digits-onnx", BARE, 1, batch=batch) for batch in (1, 8)),
        *(Cell("digits-onnx", SERVED, 1, connections) for connections in (1, 8, 64)),
        *(Cell("echo", SERVED, 1, connections) for connections in (1, 8, 64)),
    ]
    samples = [
        Sample(cell, 0, 12_345, 1.0, 0.512, 4.25, failures, 0.5, 1.0, others) for cell in cells
    ]
    return Results(dict(ABOUT), samples, [Footprint("digits-onnx", 1, 0, 2.5, 57, 45, 367, 282)])


def printed(found: Results) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(tables(found))
    return capture.get()


@pytest.mark.parametrize(
    "text", ["served, 1 worker, c=64", "bare, 1 process, batch 8", "12,345", "0.51", "4.25", "2.5"]
)
def test_every_figure_fits_on_80_columns(text: str) -> None:
    shown = printed(results())
    assert text in shown
    assert "…" not in shown


def test_a_row_with_failures_shows_them_instead_of_a_rate() -> None:
    assert "served, 1 worker, c=64: 7 requests failed" in printed(results(failures=7)).replace(
        "\n", " "
    )


def test_rows_beside_a_busy_neighbour_are_marked() -> None:
    assert "12,345*" in printed(results(others=0.5))
    assert "*" not in printed(results())


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    draw(results(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
