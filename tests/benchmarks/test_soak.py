import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import procfs
from benchmarks.soak_load import is_same
from benchmarks.soak_report import Sample, Soak, draw, slope, table, trends

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parent.parent.parent
STILL = Sample(0, 60, 50, 30, 5, 400, 300, 20, 3, 4, 1000, 1.0, 5.0)
NONE_LOST = {"sent": 10, "answered": 10, "failed": 0, "lost": 0}


def soak(samples: list[Sample], **counts: int) -> Soak:
    about = {"machine": procfs.describe_machine(), "date": "2026-01-01T00:00:00Z"}
    events = [(30.0, "reload"), (70.0, "kill")]
    return Soak(about, 120.0, samples, events, {"predictions": {**NONE_LOST, **counts}})


def flat(minutes: float = 40) -> list[Sample]:
    """Return samples every five seconds, with the noise and the spikes of a real server."""
    chosen = random.Random(0)
    return [
        replace(
            STILL,
            at_s=5.0 * at,
            server_rss_mb=60 + chosen.random() / 10,
            server_descriptors=30 + chosen.randrange(4),
            processes=4 + (at % 6 == 0),
            p99_ms=None if at == 50 else 5 + (at % 15 == 0) * 3000,
        )
        for at in range(int(12 * minutes) + 1)
    ]


def test_a_slope_is_that_of_the_line_whatever_a_spike_does() -> None:
    points = [(float(at), 3.0 + 0.5 * at) for at in range(1000)]
    points[500] = (500.0, 1e9)
    assert slope(points) == pytest.approx(0.5)
    assert slope([]) == slope([(1.0, 1.0)]) == 0.0


def test_noise_and_spikes_are_no_fault() -> None:
    assert soak(flat()).is_judged
    assert soak(flat()).faults() == []


def test_a_traceback_of_the_server_is_a_fault() -> None:
    (fault,) = replace(soak(flat()), tracebacks=2).faults()
    assert fault.startswith("2 tracebacks")


@pytest.mark.parametrize(
    ("figure", "per_s"),
    [
        ("server_rss_mb", 2 / 3600),
        ("worker_rss_mb", 2 / 3600),
        ("server_descriptors", 3 / 600),
        ("worker_threads", 1 / 600),
        ("processes", 1 / 600),
        ("p99_ms", 9 / 600),
    ],
)
def test_what_grows_is_a_fault_and_is_named(figure: str, per_s: float) -> None:
    def grow(sample: Sample) -> Sample:
        value: Any = (getattr(sample, figure) or 5) + per_s * sample.at_s
        return replace(sample, **{figure: value})

    grown = [grow(sample) for sample in flat()]
    (fault,) = soak(grown).faults()
    assert fault.startswith(f"{figure} went from ")
    assert soak(grown[:100]).faults() == []  # too short to be judged


def test_growth_in_the_warm_up_does_not_count() -> None:
    grown = [
        replace(sample, server_rss_mb=sample.server_rss_mb - max(0.0, 120 - sample.at_s))
        for sample in flat()
    ]
    assert soak(grown).faults() == []


@pytest.mark.parametrize("counts", [{"lost": 1}, {"failed": 2}])
def test_a_request_that_is_lost_is_a_fault_however_short_the_soak(counts: dict[str, int]) -> None:
    (fault,) = soak(flat(1), **counts).faults()
    assert fault.startswith("predictions: ")


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ({"seven": 0.9, "one": 0.1}, True),
        ({"seven": 0.90001, "one": 0.1}, True),
        ({"seven": 0.9, "one": 0.2}, False),
        ({"seven": 0.9}, False),
        ({"seven": 0.9, "two": 0.1}, False),
        ([0.9, 0.1], False),
        ({"seven": float("nan"), "one": 0.1}, False),
    ],
)
def test_an_answer_of_another_value_is_no_answer(answer: Any, is_right: bool) -> None:
    first = json.dumps({"seven": 0.9, "one": 0.1}).encode()
    assert is_same(json.dumps(answer).encode(), first) is is_right
    assert is_same(b"raw", b"raw")
    assert not is_same(b"raw", b"war")


def test_the_table_fits_and_the_picture_is_one(tmp_path: Path) -> None:
    found = soak(flat())
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(found))
    for trend in trends(found.settled):
        assert trend.name.replace("_", " ") in capture.get()
    assert "1 × reload, 1 × kill" in capture.get()
    assert "…" not in capture.get()
    json.dumps(found.content())
    draw(found, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_soak_loses_nothing_and_keeps_its_files(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--quick", "-o", tmp_path, "--name", "quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    content = json.loads((tmp_path / "quick.json").read_text())
    assert content["faults"] == []
    for kind in content["outcomes"].values():
        assert kind["sent"] == kind["answered"] > 0
    assert content["disconnects"] > 0
    assert {"reload", "kill", "guest", "roll-out"} <= {event for _, event in content["events"]}
    assert content["floods"] > 0
    assert (tmp_path / "quick.png").read_bytes().startswith(b"\x89PNG")
    assert "predictions" in (tmp_path / "quick.txt").read_text()
