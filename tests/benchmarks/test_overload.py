"""How overload is judged, and one short run of it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.archives import ROOT
from benchmarks.open_loop import Figures, Percentiles, has_compiler
from benchmarks.overload import WIDTH, Cell, Run, lines, tabulate

pytestmark = pytest.mark.nightly

TIMEOUT_S = 240
NO_TIME, SHORT = Percentiles(0, 0, 0), Percentiles(1, 4, 6)


def figures(good: int = 1000, accepted: float = 40, refused: float = 4) -> Figures:
    return Figures(
        offered=3000, seconds=1, good=good, late=0, refused=3000 - good, expired=0, failed=0,
        unsent=0, refused_without_retry_after=0, good_after=0, answered_ms=SHORT,
        accepted_ms=Percentiles(20, accepted, accepted), last_not_good_s=1,
        refused_ms=Percentiles(1, refused, refused), lateness_ms=NO_TIME,
    )  # fmt: skip


OPEN = Run(
    Cell("echo", "deadline", None, 3.0), 50, 1000, figures(), 0.1, 0.5, 0.4, 0.2, 0.0, 256
)  # fmt: skip
CLOSED = replace(
    OPEN, cell=Cell("echo", "default", 4000, None), deadline_ms=None, recovered_s=None
)  # fmt: skip


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        pytest.param(OPEN, [], id="all met"),
        pytest.param(replace(OPEN, figures=figures(good=899)), ["rate"], id="goodput"),
        pytest.param(replace(OPEN, figures=figures(accepted=51)), ["time"], id="deadline"),
        pytest.param(replace(OPEN, recovered_s=2.4), ["recovery"], id="recovery"),
        pytest.param(replace(OPEN, figures=figures(refused=5.1)), ["refusals"], id="refusals"),
        pytest.param(
            replace(OPEN, cell=replace(OPEN.cell, times=10.0), figures=figures(refused=50)),
            [], id="refusals at 10 times",
        ),
        pytest.param(
            replace(OPEN, cell=replace(OPEN.cell, times=0.75), figures=figures(good=700)),
            [], id="a load below the capacity",
        ),
        pytest.param(
            replace(CLOSED, figures=figures(accepted=5000, refused=500)), [],
            id="a closed loop without a deadline",
        ),
        pytest.param(replace(CLOSED, figures=figures(good=30)), ["rate"], id="a closed loop"),
    ],
)  # fmt: skip
def test_each_goal_is_missed_by_its_own_figure(run: Run, missed: list[str]) -> None:
    (line,) = lines([run])
    assert line.missed == missed


def test_the_median_of_the_rounds_is_judged_and_no_figure_is_cut_off_in_the_table() -> None:
    bad = replace(OPEN, figures=figures(good=10, accepted=9999, refused=9999), recovered_s=2.5)
    runs = [bad, OPEN, CLOSED, OPEN]
    assert [(line.cell.load, len(line.runs), line.missed) for line in lines(runs)] == [
        ("3 ×", 3, []),
        ("4000 clients", 1, []),
    ]
    worst = [replace(bad, cell=replace(OPEN.cell, handler="digits"), capacity=123_456.7)]
    console = Console(width=WIDTH, file=(out := io.StringIO()))
    console.print(tabulate(runs + worst))
    text = out.getvalue()
    assert "…" not in text
    assert "123,457" in text and "rate time recovery refusals" in text


@pytest.mark.nightly
@pytest.mark.skipif(not has_compiler(), reason="there is no C compiler")
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_short_run_measures_what_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.overload", "--quick", "--handler", "sleep",
               "--setting", "deadline", "--clients", "70", "--times", "2", "--deadline", "2000",
               "--output", str(tmp_path), "--name", "found"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "found.txt").read_text().splitlines()[-1] in done.stdout
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    closed, opened = found["runs"]
    assert (closed["cell"]["clients"], closed["connections"]) == (70, 70)
    assert opened["cell"]["times"] == 2
    assert opened["recovered_s"] is not None and closed["recovered_s"] is None
    for run in found["runs"]:
        names = ("good", "late", "refused", "expired", "failed", "unsent")
        counts = [run["figures"][name] for name in names]
        assert sum(counts) == run["figures"]["offered"] > 0
        assert run["capacity"] > 0 and run["server_cores"] > 0 and run["generator_cores"] > 0
