"""The clock by which workers are judged, without any waiting."""

from __future__ import annotations

from time import monotonic

import pytest

from modelyard.serve.dataplane.clock import STOOD_STILL_S, Clock


def test_it_runs_while_it_ticks_and_stops_half_a_second_after_the_last_tick() -> None:
    clock, start = Clock(), monotonic()
    assert not clock.tick(start)
    assert clock.read(start + 0.3) == start + 0.3
    assert not clock.tick(start + 0.4)
    before = clock.read(start + 0.5)
    assert clock.read(start + 100) == pytest.approx(start + 0.4 + STOOD_STILL_S)
    assert clock.stood_still_since(before, start + 100)
    assert clock.tick(start + 100)
    after = clock.read(start + 100)
    assert after == pytest.approx(start + 0.4 + STOOD_STILL_S)
    assert clock.read(start + 100.2) == pytest.approx(after + 0.2)


def test_a_time_read_after_it_stood_still_is_not_one_before() -> None:
    clock, start = Clock(), monotonic()
    clock.tick(start)
    before = clock.read(start + 0.1)
    assert not clock.stood_still_since(before, start + 0.4)
    clock.tick(start + 9)
    later = clock.read(start + 9.1)
    assert clock.stood_still_since(before, start + 9.2)
    assert not clock.stood_still_since(later, start + 9.2)
    clock.tick(start + 9.2)
    assert not clock.tick(start + 9.4)


def test_it_tells_for_how_long_of_a_time_it_stood_still() -> None:
    clock, start = Clock(), monotonic()
    clock.tick(start)
    assert clock.stood_s(start, start + 0.3) == 0
    assert clock.stood_s(start, start + 10) == pytest.approx(10 - STOOD_STILL_S)
    clock.tick(start + 10)
    assert clock.stood_s(start, start + 10.1) == pytest.approx(10 - STOOD_STILL_S)
    assert clock.stood_s(start + 4, start + 10.1) == pytest.approx(6)
    assert clock.stood_s(start + 10.05, start + 10.1) == 0
