"""`modelyard plan`: what is read, what is refused, the queueing model, a cell that is tried."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from modelyard.plugins.tune.costs import KEY, LEVELS, BadCosts, Costs, parse_costs, summarise
from modelyard.plugins.tune.plan import (
    CannotPlan,
    KnownModel,
    best_cell,
    expect,
    make_plan,
    share_out,
)
from modelyard.plugins.tune.plan_cli import plan_app
from tests.serve.live import build_archive

COSTS = Costs(
    batch_ms={1: [10.0] * 11 + [14.0], 2: [12.0] * 12, 4: [16.0] * 12},
    server_ms=0.1,
    turn_ms=0.02,
    wait_ms=0.1,
    worker_mb=100.0,
    server_mb=50.0,
    load_s=1.0,
    threads=1,
    batch_size=4,
    cores=2,
)
TIMES_S = {size: list(COSTS.times_s(size)) for size in (1, 2, 3, 4)}
ANSWER = tuple[int, str, str]
Run = Callable[..., ANSWER]


def known(name: str = "a", share: float = 1.0, **changes: Any) -> KnownModel:
    costs = replace(COSTS, **changes)
    return KnownModel(name, share, costs, costs.batch_size, costs.threads)


# -- costs ----------------------------------------------------------------------------------------


def test_what_tune_writes_is_read_again() -> None:
    line = f"{KEY}: {COSTS.as_dict()}"
    assert "\n" not in line  # as merge_config wants it
    read = parse_costs(yaml.safe_load(line)[KEY], "here")
    assert read.as_dict() == COSTS.as_dict()


def test_times_of_sizes_between_lie_between_and_beyond_go_on() -> None:
    def mean_s(costs: Costs, size: int) -> float:
        return float(costs.times_s(size).mean())

    assert mean_s(COSTS, 3) == pytest.approx(0.014)
    assert mean_s(COSTS, 8) == pytest.approx(0.016 + 4 * (0.016 - mean_s(COSTS, 1)) / 3, rel=0.01)
    one = replace(COSTS, batch_ms={1: [10.0] * 12})
    assert mean_s(one, 3) == pytest.approx(0.030)


def test_costs_of_an_earlier_version_say_to_measure_again() -> None:
    earlier = {**COSTS.as_dict(), "wake_ms": 0.02}
    del earlier["turn_ms"]
    with pytest.raises(BadCosts, match="turn_ms, wake_ms; run modelyard tune again"):
        parse_costs(earlier, "here")


def test_a_summary_draws_what_was_measured() -> None:
    times = [at / 1000 for at in range(1, 1001)]
    drawn = list(replace(COSTS, batch_ms={1: summarise(times)}).times_s(1))
    assert drawn == sorted(drawn)
    for share in (0.05, 0.5, 0.95, 0.99):
        assert drawn[int(share * len(drawn))] == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"server_ms": -1}, "server_ms: expected 0 or more, got -1"),
        ({"server_ms": True}, "server_ms"),
        ({"wait_ms": float("inf")}, "wait_ms"),
        ({"threads": 0}, "threads: expected 1 or more, got 0"),
        ({"odd": 1}, "missing or unknown: odd; run modelyard tune again"),
        ({"batch_ms": {}}, "batch_ms: expected"),
        ({"batch_ms": {0: [1.0] * 12}}, "batch_ms: 0.*expected 1 or more, got 0"),
        ({"batch_ms": {1: [1.0] * 3}}, f"expected {len(LEVELS)} times"),
        ({"batch_ms": {1: [2.0] * 11 + [1.0]}}, "none below the one before it"),
        ({"batch_ms": {1: [0.0] * 12}}, "expected more than 0, got 0.0"),
        ({"batch_ms": {1: [float("nan")] * 12}}, "batch_ms: 1: 0: expected"),
    ],
)
def test_costs_that_tune_does_not_write_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadCosts, match=said):
        parse_costs({**COSTS.as_dict(), **changes}, "here")


# -- the queueing model ---------------------------------------------------------------------------


def run_queue(rate: float, workers: int, jobs: int, random: Random) -> list[float]:
    """Return latencies of jobs at random moments, where an idle worker takes all that waits."""
    arrivals = list(accumulate(random.expovariate(rate) for _ in range(jobs)))
    free, latencies, at = [0.0] * workers, [], 0
    while at < jobs:
        began = max(heappop(free), arrivals[at])
        size = max(1, bisect_right(arrivals, began, at, min(jobs, at + COSTS.batch_size)) - at)
        ended = began + float(random.choice(TIMES_S[size]))
        heappush(free, ended)
        latencies += [ended - arrival for arrival in arrivals[at : at + size]]
        at += size
    return sorted(latencies)


@pytest.mark.parametrize(("workers", "rate"), [(1, 40), (1, 90), (1, 180), (3, 240)], ids=str)
def test_the_queueing_model_is_near_a_queue_that_is_run(workers: int, rate: float) -> None:
    """It is within a fifth at p50 and p99, where the server itself costs nothing."""
    model = known(server_ms=1e-6, turn_ms=0.0, wait_ms=0.0)
    expected = expect([model], rate, [workers], 8).models[0]
    latencies = run_queue(rate, workers, 20_000, Random(1))
    for share in (0.5, 0.99):
        measured = latencies[int(share * len(latencies))]
        assert expected.quantile_s(share) == pytest.approx(measured, rel=0.2)


def test_more_is_asked_than_batches_can_do() -> None:
    """A worker does 250 a second in batches of four, and no more."""
    assert expect([known()], 240, [1], 4).keeps_up
    assert not expect([known()], 251, [1], 4).keeps_up


def test_the_fewest_cells_keep_the_limit() -> None:
    models = [known("a", 0.8), known("b", 0.2, batch_ms={1: [40.0] * 12})]
    planned = make_plan(models, 3000, 0.1, 0.99, 4)
    assert planned.cell.worst_s(0.99) <= 0.1
    assert sum(each.rate for each in planned.cell.models) * planned.cells == pytest.approx(3000)
    assert best_cell(models, 3000 / (planned.cells - 1), 0.99, 4).worst_s(0.99) > 0.1
    assert planned.cell.cores == 4


def test_memory_is_of_the_server_and_its_workers() -> None:
    cell = expect([known("a", 0.5), known("b", 0.5, server_mb=70.0)], 10, [2, 1], 4)
    assert cell.memory_mb == 70 + 3 * 100


def test_workers_go_where_the_work_is_and_each_model_has_one() -> None:
    models = [known("a", 0.9), known("b", 0.1), known("c", 0.0)]
    assert share_out(models, 8) == [6, 1, 1]
    assert share_out(models, 2) == [1, 1, 1]


def test_a_limit_below_one_request_alone_is_of_no_size() -> None:
    with pytest.raises(CannotPlan, match=r"cannot be met with any number of cells.*10 of them in"):
        make_plan([known()], 10, 0.005, 0.5, 4)


def test_the_server_process_limits_a_cell_of_many_workers() -> None:
    """0.1 ms of one core for each request: 10,000 a second, however many workers."""
    assert expect([known()], 8000, [64], 80).keeps_up
    assert not expect([known()], 10_500, [64], 80).keeps_up


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in a folder with the costs of `a` and `b`, and a store with `a` alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name, share in (("a", 1.0), ("b", 3.0)):
        times = {1: [10.0 * share] * 12, 2: [16.0 * share] * 12}
        costs = replace(COSTS, batch_ms=times, batch_size=2).as_dict()
        (tmp_path / f"{name}.yaml").write_text(f"batchSize: 2\n{KEY}: {costs}\n")

    def call(*arguments: str) -> ANSWER:
        done = CliRunner().invoke(plan_app, arguments)
        return done.exit_code, done.stdout, " ".join(done.stderr.split())

    return call


BASE = ("--rps", "500", "--slo", "p99=100ms", "--mix", "a")
BOTH = (*BASE[:-1], "a=0.7,b=0.3", "--costs", "a=a.yaml", "--costs", "b=b.yaml", "--cores", "4")


def test_a_plan_names_cells_cores_and_times(run: Run) -> None:
    code, text, _ = run(*BOTH, "--json")
    found = json.loads(text)
    assert (code, found["kept"]) == (0, True)
    assert found["cores"] == 4 * found["cells"]
    assert [each["name"] for each in found["models"]] == ["a", "b"]
    assert all(each["p99_ms"] <= 100 and each["tried"] is None for each in found["models"])


@pytest.mark.nightly
def test_a_cell_is_tried_under_its_part_of_the_load(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hello.bin").write_text("hello")
    examples = [f'{tmp_path}/hello.bin="fine: hello"']
    build_archive(tmp_path / "store", "picky", name="a", examples=examples)
    arguments = ("--rps", "80", "--slo", "p99=5s", "--mix", "a", "--costs", "a=a.yaml")
    tried = ("--cells", "2", "--cores", "1", "--model-store", "store", "--try", "2")
    code, text, error = run(*arguments, *tried, "--json")
    assert code == 0, error
    (model,) = json.loads(text)["models"]
    assert model["tried"]["failed"] == 0
    assert model["tried"]["answered"] == pytest.approx(80, rel=0.5)  # 40 a second for 2 s
    assert 0 < model["tried"]["p50_ms"] <= model["tried"]["p99_ms"]
    code, text, _ = run(*arguments[:3], "p99=0.2ms", *arguments[4:], *tried)
    assert code == 1


def test_a_plan_is_a_table_whose_lines_fit(run: Run) -> None:
    code, text, _ = run(*BOTH)
    assert code == 0
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["model", "a", "b"]
    ends = {len(line.rstrip()) for line in lines[:3]}
    assert len(ends) == 1  # the last column is right-aligned
    assert " cells of 4 cores: " in text and "with one cell less" in text


def test_too_few_cells_end_with_1(run: Run) -> None:
    code, text, _ = run(*BOTH, "--cells", "1")
    assert code == 1 and "never" in text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (BASE, 1, "Model not found at: a"),
        ((*BASE, "--costs", "a=nope.yaml"), 1, "--costs a=nope.yaml: No such file"),
        ((*BASE, "--costs", "c=a.yaml"), 2, "expected NAME=FILE with a name of the mix: a"),
        (("--rps", "0", *BASE[2:]), 2, "--rps 0: expected a number above 0"),
        (("--rps", "nan", *BASE[2:]), 2, "expected a number above 0"),
        ((*BASE[:-1], "a=0.7,b=0.4"), 2, "the shares add up to 1.1; they are parts of 1"),
        ((*BASE[:-1], "a=0.5,a=0.5"), 2, "a is named twice"),
        ((*BASE[:-1], "a,b"), 2, "expected NAME=SHARE"),
        ((*BOTH, "--slo", "p99=5ms"), 1, "a: p99=5ms cannot be met with any number of cells"),
        ((*BOTH, "--slo", "99=5ms"), 2, "expected such as p99=50ms"),
        ((*BOTH[:-1], "999", "--cells", "3", "--try", "1"), 2, "--try runs one of the planned"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(
    run: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found, _, text = run(*arguments)
    assert (found, said in text) == (code, True), text


def test_an_archive_without_measurements_says_which_command_makes_them(
    run: Run, tmp_path: Path
) -> None:
    build_archive(tmp_path / "store", "echo", name="a")
    code, _, text = run(*BASE, "--model-store", "store")
    assert code == 1
    assert "nothing was measured" in text and "has no tunedCosts" in text
    assert f"modelyard tune a --model-store {tmp_path / 'store'} --output a.yaml" in text


def test_costs_come_from_the_archive(run: Run, tmp_path: Path) -> None:
    text = (tmp_path / "a.yaml").read_text() + "jobQueueSize: 7\n"
    build_archive(tmp_path / "store", "echo", name="a", config=text)
    code, said, error = run(*BASE, "--model-store", "store", "--json")
    assert code == 0, error
    assert json.loads(said)["models"][0]["batch_size"] == 2
