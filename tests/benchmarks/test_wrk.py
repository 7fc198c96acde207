import json

import pytest

from benchmarks.wrk import MARK, WrkFailed, parse_figures

FIGURES = {
    "requests": 1200,
    "seconds": 4.0,
    "p50_ms": 0.5,
    "p90_ms": 0.9,
    "p99_ms": 2.5,
    "max_ms": 8.0,
    "errors": {"status": 3, "connect": 0, "read": 1, "write": 0, "timeout": 0},
}
LINE = MARK + json.dumps(FIGURES)


def test_figures_are_found_among_what_wrk_prints_itself() -> None:
    load = parse_figures(f"Running 4s test @ http://127.0.0.1/\nRequests/sec: 300\n{LINE}\n", 0.25)
    assert (load.requests, load.seconds, load.p99_ms, load.cpu_s) == (1200, 4.0, 2.5, 0.25)


def test_bad_answers_and_broken_connections_are_failures() -> None:
    assert parse_figures(LINE, 0.0).failures == 4


@pytest.mark.parametrize(
    "output",
    [
        pytest.param("unable to connect to 127.0.0.1:1", id="no figures"),
        pytest.param(f"{LINE}\n{LINE}", id="twice"),
        pytest.param(MARK + '{"requests": -nan}', id="not JSON"),
        pytest.param(MARK + '{"requests": 1}', id="incomplete"),
    ],
)
def test_output_without_figures_is_refused_and_shown(output: str) -> None:
    with pytest.raises(WrkFailed, match="wrk printed"):
        parse_figures(output, 0.0)
