"""The simulator beside what is known of queues, and what routers, failures and hot models do."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from modelyard.serve.simulation.arrivals import BadArrivals, Bursty, Poisson, read_recorded
from modelyard.serve.simulation.cell import MIGRATION_S, Cores, ModelShape
from modelyard.serve.simulation.loop import virtual_loop
from modelyard.serve.simulation.router import LeastInFlight, LesserOfTwo, Router
from modelyard.serve.simulation.run import Failure, Hot, Outcome, Scenario, simulate

S = 0.1
"""Mean time of a batch, in seconds; long beside the 4 ms of work that a worker may hold ahead."""
EXPONENTIAL = [-math.log(1 - (at + 0.5) / 2000) * S for at in range(2000)]
CONSTANT = [S]


def model(times: Sequence[float], **changes: Any) -> ModelShape:
    shape = ModelShape("m", lambda size: times, 1, 1, 1, 0.0, 0.0, 0.0, 10**9, 1e9)
    return replace(shape, **changes)


def run(shape: ModelShape, load: float, jobs: int = 4000, **changes: Any) -> Outcome:
    """Simulate one cell whose workers are asked for `load` of what they can do."""
    rate = load * shape.workers / S
    scenario = Scenario(
        [(1, [shape])], 64, rate, {"m": 1.0}, Poisson(), jobs / rate, 0.1 * jobs / rate, seed=3
    )
    return simulate(replace(scenario, **changes))


def waiting_s(outcome: Outcome) -> float:
    return fmean(outcome.all.latencies_s) - S


def erlang_c(servers: int, load: float) -> float:
    """Return the chance to wait in M/M/c, where `load` is of one server."""
    a = servers * load
    busy = a**servers / math.factorial(servers) / (1 - load)
    return busy / (sum(a**k / math.factorial(k) for k in range(servers)) + busy)


def erlang_b(servers: int, a: float) -> float:
    terms = [a**k / math.factorial(k) for k in range(servers + 1)]
    return terms[-1] / sum(terms)


@pytest.mark.parametrize(
    ("times", "factor"), [(EXPONENTIAL, 1.0), (CONSTANT, 0.5)], ids=["M/M/1", "M/D/1"]
)
def test_one_worker_waits_as_pollaczek_and_khinchine_say(times: list[float], factor: float) -> None:
    load = 0.6
    outcome = run(model(times), load)
    expected = factor * load / (1 - load) * S
    assert waiting_s(outcome) == pytest.approx(expected, rel=0.12)
    if times is EXPONENTIAL:  # the time in an M/M/1 is exponential
        assert outcome.all.quantile_s(0.9) == pytest.approx(math.log(10) * S / 0.4, rel=0.15)


def test_without_a_queue_as_many_are_refused_as_erlang_says() -> None:
    outcome = run(model(EXPONENTIAL, workers=4, needs_ticket=True), 0.8)
    assert outcome.all.refused / outcome.all.offered == pytest.approx(erlang_b(4, 3.2), rel=0.1)
    assert outcome.all.offered == outcome.all.good + outcome.all.refused


def test_several_workers_wait_more_than_one_queue_and_less_than_their_own() -> None:
    """A worker holds the batch that it runs next, so that M/M/c is the lower bound."""
    load = 0.8
    waited = waiting_s(run(model(EXPONENTIAL, workers=3), load, 8000))
    together = erlang_c(3, load) / (3 * (1 - load)) * S
    apart = load / (1 - load) * S
    assert 0.95 * together < waited < 0.6 * apart


def test_batches_carry_more_than_one_at_a_time() -> None:
    outcome = run(model(CONSTANT, batch_size=4), 2.0)
    assert outcome.all.good == outcome.all.offered
    assert 2.0 < outcome.mean_batch < 3.5


def test_beyond_capacity_a_deadline_is_kept_and_the_rest_is_refused() -> None:
    """The server's own admission decides: what it takes it answers in time, nearly all of it."""
    outcome = run(model(CONSTANT), 1.5, 3000, timeout_s=2.0, limit_s=2.0)
    found = outcome.all
    assert found.good / outcome.seconds == pytest.approx(1 / S, rel=0.03)
    assert found.refused == pytest.approx(found.offered / 3, rel=0.1)
    assert found.late + found.expired < 0.01 * found.offered
    assert 1.0 < found.quantile_s(0.99) <= 2.0


def test_the_same_seed_is_the_same_run() -> None:
    first, second = (run(model(EXPONENTIAL), 0.7, 500) for _ in range(2))
    assert first.all.latencies_s == second.all.latencies_s
    other = run(model(EXPONENTIAL), 0.7, 500, seed=4)
    assert other.all.latencies_s != first.all.latencies_s


def test_a_server_without_time_for_more_is_what_limits() -> None:
    """100 workers would do 1000 a second; the server has 2 ms of its core for each request."""
    outcome = run(model(CONSTANT, workers=100, server_s=0.002), 0.8, 3000, limit_s=1.0, cores=200)
    assert outcome.server_busy > 0.95
    assert outcome.all.late > 0.3 * outcome.all.offered


def test_threads_beyond_the_cores_slow_each_other_down() -> None:
    free = run(model(CONSTANT, workers=2), 0.5, 2000, cores=4)
    shared = run(model(CONSTANT, workers=2), 0.5, 2000, cores=1)
    assert min(free.all.latencies_s) == pytest.approx(S)
    # Both on one core are an M/D/1-PS of load 1: never idle, and much slower.
    assert shared.cores_busy > 0.95
    assert fmean(shared.all.latencies_s) > 4 * fmean(free.all.latencies_s)


def test_who_waits_on_a_core_is_taken_by_one_that_has_been_idle_for_a_while() -> None:
    ended: dict[str, float] = {}

    def note(name: str) -> None:
        ended[name] = loop.now

    with virtual_loop() as loop:
        cores = Cores(loop, 2, 3)
        for name, seconds in (("a", 10.0), ("b", 1.0), ("c", 2.0)):
            cores.run(name, seconds, 1, partial(note, name))
        loop.run_until(20.0)
    # c is beside a until b's core has been idle for that time; then a, with most before it, moves.
    shared = 1.0 + MIGRATION_S
    assert ended == pytest.approx({"a": shared / 2 + 10, "b": 1.0, "c": shared / 2 + 2})


def test_a_batch_on_several_threads_ends_with_the_last() -> None:
    ended: list[float] = []
    with virtual_loop() as loop:
        cores = Cores(loop, 2, 4)
        cores.run("two", 1.0, 2, lambda: ended.append(loop.now))
        cores.run("one", 0.5, 1, lambda: ended.append(loop.now))
        loop.run_until(5.0)
    assert ended == pytest.approx([1.0, 1.5], abs=2 * MIGRATION_S)


def test_a_client_on_the_same_cores_takes_its_part() -> None:
    alone = run(model(CONSTANT), 0.05, 300, cores=2, client_s=S / 2)
    assert min(alone.all.latencies_s) == pytest.approx(1.5 * S)
    free, shared = (
        run(model(CONSTANT), 0.5, 2000, cores=cores, client_s=S / 2).all for cores in (2, 1)
    )
    # One core is busy for 0.75 of the time: one queue of such work would wait 1.5 times as long.
    assert fmean(shared.latencies_s) > 1.5 * fmean(free.latencies_s)
    assert fmean(shared.latencies_s) == pytest.approx(1.5 * S + 1.5 * 1.5 * S, rel=0.4)


def test_the_client_is_a_queue_of_its_own() -> None:
    """It sends in S / 4 and reads in S / 4, each request twice: M/D/1 twice at half the load."""
    outcome = run(model([S / 1e6]), 0.8, 4000, cores=64, client_s=S)
    alone_s = S
    expected_s = 0.8 / (1 - 0.8) / 2 * S  # as one queue of deterministic work, from above
    waited_s = fmean(outcome.all.latencies_s) - alone_s
    assert 0.4 * expected_s < waited_s < 1.3 * expected_s


def test_who_was_idle_is_slow_at_first() -> None:
    shape = model(CONSTANT, idle_s=lambda pause_s: (0.01, 0.02) if pause_s > S else (0.0, 0.0))
    quiet = run(shape, 0.02, 100, warm_s=0.0)
    assert quiet.all.quantile_s(0.5) == pytest.approx(S + 0.03)
    busy = run(shape, 0.95, 3000)
    assert waiting_s(busy) == pytest.approx(waiting_s(run(model(CONSTANT), 0.95, 3000)), rel=0.1)


def test_requests_that_come_together_share_a_turn_of_the_server() -> None:
    """Alone each has one turn and its answer another; of many in a millisecond a part of one."""
    shape = model([1e-6], workers=1, batch_size=64, server_s=1e-5, turn_s=1e-3)

    def per_request_s(rate: float) -> float:
        outcome = run(shape, rate * S, 2000)
        return outcome.server_busy * outcome.seconds * 10 / 9 / outcome.requests

    assert per_request_s(10) == pytest.approx(2.01e-3, rel=0.05)
    assert per_request_s(5000) < 0.5e-3


def cells(rule: str, **changes: Any) -> Outcome:
    shape = model(EXPONENTIAL)
    number = 20
    scenario = Scenario(
        [(number, [shape])], 4, 0.8 * number / S, {"m": 1.0}, Poisson(), 30, 3, rule=rule, seed=5
    )
    return simulate(replace(scenario, **changes))


@pytest.mark.nightly
def test_routers_that_look_wait_less() -> None:
    least, two, any = (cells(rule).all.quantile_s(0.99) for rule in ("least", "two", "random"))
    assert least < two < any
    assert any == pytest.approx(math.log(100) * S / 0.2, rel=0.3)


@pytest.mark.nightly
def test_many_routers_that_each_see_their_own_part_are_worse_than_one() -> None:
    assert cells("least", routers=10).all.quantile_s(0.99) > cells("least").all.quantile_s(0.99)


def test_what_a_dying_cell_held_is_answered_by_another() -> None:
    """Nothing is lost where routers repeat, and what came until they noticed waits a second."""
    failure = Failure(cell=0, at=10.0, back_at=20.0)
    repeated = cells("least", failures=[failure]).all
    assert repeated.lost == 0 and repeated.repeated > 0
    assert repeated.offered == repeated.good
    lost = cells("least", failures=[failure], repeats=False).all
    assert 0 < lost.lost <= repeated.repeated + 5
    assert lost.offered == lost.good + lost.lost


@pytest.mark.nightly
def test_one_slow_cell_is_seen_by_its_share_only_where_routers_look() -> None:
    slow = {0: 4.0}
    blind, looking = (cells(rule, slow=slow, limit_s=10.0).all for rule in ("random", "least"))
    assert blind.late > 0  # a cell at 3.2 of what it can do: its queue grows to the end
    assert looking.late == 0


def test_a_hot_model_with_cells_of_its_own_waits_and_in_shared_ones_does_not() -> None:
    shapes = [replace(model(EXPONENTIAL), name=name) for name in ("a", "b")]
    mix = {"a": 0.5, "b": 0.5}
    base = Scenario(
        [(4, [shapes[0]]), (4, [shapes[1]])], 4, 0.6 * 8 / S, mix, Poisson(), 30, 3,
        hot=Hot("a", 0.9, 10.0, 20.0), limit_s=2.0, rule="archive",
    )  # fmt: skip
    apart = simulate(base).models
    assert apart["a"].late > 20
    assert apart["b"].late == 0
    both = [replace(each, workers=1) for each in shapes]
    shared = simulate(replace(base, groups=[(8, both)], rule="least")).models
    assert shared["a"].late == 0


# -- what comes in --------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", [Poisson(), Bursty(3.0, 0.2, 0.5)], ids=str)
def test_the_mean_rate_is_the_one_that_was_asked_for(arrivals: Poisson | Bursty) -> None:
    moments = [at for at, _ in arrivals.between(50, 400, Random(1))]
    assert moments == sorted(moments)
    assert len(moments) == pytest.approx(20000, rel=0.05)


def test_bursts_vary_more_than_chance() -> None:
    def variation(arrivals: Poisson | Bursty) -> float:
        counts = [0] * 400
        for at, _ in arrivals.between(50, 400, Random(2)):
            counts[int(at)] += 1
        mean = fmean(counts)
        return fmean((each - mean) ** 2 for each in counts) / mean

    assert variation(Poisson()) == pytest.approx(1, abs=0.3)
    assert variation(Bursty(3.0, 0.2, 0.5)) > 3


@pytest.mark.parametrize(
    ("factor", "share", "mean_s"), [(20, 0.1, 1), (0.5, 0.1, 1), (2, 0, 1), (2, 0.1, 0)]
)
def test_bursts_that_cannot_be_are_refused(factor: float, share: float, mean_s: float) -> None:
    with pytest.raises(BadArrivals, match="expected a"):
        Bursty(factor, share, mean_s)


def test_an_access_log_is_played_again_at_another_rate(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    lines = [
        {"@timestamp": f"2026-11-23T01:09:0{at}.500Z", "event.duration": 500_000_000,
         "labels.model": name}
        for at, name in enumerate("aab")
    ]  # fmt: skip
    log.write_text("\n".join(map(json.dumps, lines)))
    recorded = read_recorded(log)
    assert recorded.moments == (0, 1, 2) and recorded.rate == 1
    played = list(recorded.between(2, 3, Random()))
    assert played == [(0, "a"), (0.5, "a"), (1, "b"), (1.5, "a"), (2, "a"), (2.5, "b")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least two"),
        ("1\n1\n", "different times"),
        ("1\nNaN\n", "line 2"),
        ('{"time": 1}\n', "log_format: json"),
        ("127.0.0.1 GET / 200\n", "line 1"),
        ("[" * 5000 + "\n", "line 1"),
        ("true\n", "line 1"),
    ],
)
def test_a_file_that_says_no_times_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "odd"
    file.write_text(text)
    with pytest.raises(BadArrivals, match=said):
        read_recorded(file)


# -- parts ----------------------------------------------------------------------------------------


def test_what_is_due_together_is_called_in_turn_and_what_is_cancelled_is_not() -> None:
    with virtual_loop() as loop:
        assert asyncio.get_running_loop() is loop
        called: list[tuple[str, float]] = []
        for name in "ab":
            loop.call_later(1.0, called.append, (name, 1.0))
        loop.call_later(1.0, called.append, ("never", 0.0)).cancel()
        loop.call_later(1.0, loop.call_soon, lambda: called.append(("soon", loop.time())))
        loop.call_later(2.5, called.append, ("later", 0.0))
        loop.run_until(2.0)
        assert called == [("a", 1.0), ("b", 1.0), ("soon", 1.0)]
        assert loop.time() == 2.0
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


@pytest.mark.parametrize("kind", [LeastInFlight, LesserOfTwo])
def test_a_router_counts_as_a_list_would(kind: type[LeastInFlight | LesserOfTwo]) -> None:
    """Against counts kept the simple way, with cells that go and come back."""
    chance = Random(7)
    group = kind(range(6), Random(1))
    counts = dict.fromkeys(range(6), 0)
    for _ in range(3000):
        cell = chance.randrange(6)
        if chance.random() < 0.05:
            if cell in counts:
                group.remove(cell)
                del counts[cell]
            else:
                group.put_back(cell)
                counts[cell] = 0
        elif counts and chance.random() < 0.55:
            picked = group.pick()
            assert picked in counts
            if kind is LeastInFlight:
                assert counts[picked] == min(counts.values())
            group.add(picked, 1)
            counts[picked] += 1
        elif counts.get(cell):
            group.add(cell, -1)
            counts[cell] -= 1


def test_no_cell_is_up() -> None:
    router = Router("least", {"m": [0, 1]}, Random(1))
    router.down(0)
    assert {router.pick("m") for _ in range(5)} == {1}
    router.down(1)
    assert router.pick("m") is None
    router.up(0)
    assert router.pick("m") == 0
