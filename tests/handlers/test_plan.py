import pytest

from modelyard.archiver.signature import parse_inputs
from modelyard.handlers.proof.plan import (
    BUDGET_GFLOP,
    CASE_BYTES,
    Growth,
    Plan,
    choose_probes,
    end_sizes,
    fit_growth,
    plan,
)
from modelyard.handlers.proof.probes import example_sizes

FREE = Growth(0.0)
IMAGES = parse_inputs(["x:float32[batch=1..64,3,side=32..64]"])
TOKENS = parse_inputs(["ids:int64[batch,length=2..512]"])


def _plan(text: str, gflop: Growth = FREE) -> Plan:
    return plan(parse_inputs([text]), gflop, FREE)


def test_every_batch_size_meets_both_ends_of_every_other_dim_in_every_kind() -> None:
    signature = parse_inputs(["tokens:int64[batch,length=2..16]"])
    tried = {
        (probe.sizes["batch"], probe.sizes["length"], probe.kind)
        for probe in plan(signature, FREE, FREE).probes
    }
    assert tried == {
        (batch, length, kind)
        for batch in range(1, 9)
        for length in (2, 16)
        for kind in ("random", "zeros", "large")
    } | {(2, length, "random") for length in (8, 12, 14, 15)}


def test_a_fixed_shape_is_tried_as_it_is() -> None:
    assert [probe.sizes for probe in _plan("x:float32[4,3]").probes] == [{}] * 5


def test_a_wide_batch_range_is_tried_at_its_start_at_doublings_and_at_its_end() -> None:
    tried = sorted({probe.sizes["batch"] for probe in _plan("x:float32[batch=1..300]").probes})
    assert tried == [*range(1, 17), 32, 64, 128, 256, 293, 300]


def test_a_slow_model_is_tried_at_every_batch_size_in_random_values() -> None:
    """A model of 181 GFLOP in all kinds: ResNet-18 between 64 and 160 pixels."""
    signature = parse_inputs(["x:float32[batch=1..4,3,h=64..160,w=64..160]"])
    chosen = plan(signature, Growth(0.3, {"batch": 1.0, "h": 1.0, "w": 1.0}), FREE)
    assert chosen.extent == "random"
    assert chosen.gflop <= BUDGET_GFLOP
    assert len([probe for probe in chosen.probes if probe.kind == "random"]) == 4 * 4 + 2 * 5
    edges = [probe for probe in chosen.probes if probe.kind != "random"]
    assert {probe.kind for probe in edges} == {"zeros", "large", "tiny", "negative"}
    assert all(probe.sizes == {"batch": 2, "h": 64, "w": 64} for probe in edges)


def test_a_slower_model_keeps_batch_1_2_a_prime_and_the_largest_and_both_ends() -> None:
    chosen = plan(IMAGES, Growth(BUDGET_GFLOP), FREE)
    assert chosen.extent == "few"
    random = {
        (probe.sizes["batch"], probe.sizes["side"])
        for probe in chosen.probes
        if probe.kind == "random"
    }
    between = {(2, side) for side in (33, 34, 36, 40, 48)}
    assert random == {(batch, side) for batch in (1, 2, 61, 64) for side in (32, 64)} | between
    edges = [probe for probe in chosen.probes if probe.kind != "random"]
    assert {probe.kind for probe in edges} == {"zeros", "large", "tiny", "negative"}
    assert all(probe.sizes == {"batch": 2, "side": 32} for probe in edges)


def test_a_quick_plan_tries_the_ends_and_every_kind_once() -> None:
    chosen = plan(IMAGES, FREE, FREE, quick=True)
    assert [(probe.kind, *probe.sizes.values()) for probe in chosen.probes] == [
        ("random", 1, 32),
        ("random", 64, 64),
        *((kind, 1, 32) for kind in ("zeros", "large", "tiny", "negative")),
    ]
    fixed = plan(parse_inputs(["x:float32[2,3]"]), FREE, FREE, quick=True)
    assert [probe.kind for probe in fixed.probes][:2] == ["random", "zeros"]


def test_the_plan_depends_on_arithmetic_and_not_on_the_clock() -> None:
    rows_in_every_kind = 5 * sum(range(1, 9))
    for share, extent in ((0.99, "every"), (1.01, "random")):
        gflop = Growth(share * BUDGET_GFLOP / rows_in_every_kind, {"batch": 1.0})
        assert _plan("x:float32[batch,3]", gflop).extent == extent


def test_many_runs_of_a_small_model_cost_too() -> None:
    few_dims = "x:float32[batch,a=1..2,b=1..2,c=1..2]"
    assert _plan(few_dims, Growth(0.1)).extent == "every"
    assert _plan(few_dims.replace("batch", "batch=1..900"), Growth(0.1)).extent == "random"


def test_costs_grow_as_they_were_measured_at_the_ends_of_each_dim() -> None:
    assert list(end_sizes(TOKENS)) == [
        {"batch": 1, "length": 2},
        {"batch": 8, "length": 2},
        {"batch": 1, "length": 512},
    ]
    growth = fit_growth([10.0, 80.0, 10.0 * 256**2], TOKENS)
    assert growth.at({"batch": 3, "length": 2}, TOKENS) == pytest.approx(30)
    assert growth.at({"batch": 2, "length": 8}, TOKENS) == pytest.approx(2 * 160)
    constant = fit_growth([7.0, 7.0, 7.0], TOKENS)
    assert constant.at({"batch": 8, "length": 512}, TOKENS) == pytest.approx(7)


def test_sizes_whose_case_is_too_large_are_left_out_and_repeated_so() -> None:
    """A vocabulary of 128k: 262 MB for one row at length 512, and 2.1 GB for eight."""
    size_bytes = Growth(2 * 128_000 * 4.0, {"batch": 1.0, "length": 1.0})
    chosen = plan(TOKENS, FREE, size_bytes)
    tried = {tuple(probe.sizes.values()) for probe in chosen.probes}
    between = {(2, 64), (2, 152), (2, 260)}
    assert tried == {*((batch, 2) for batch in range(1, 9)), (1, 512), *between}
    left_out = {f"batch={batch}, length=512" for batch in range(2, 9)}
    assert {*chosen.left_out} == left_out | {"batch=2, length=358", "batch=2, length=461"}
    stated = chosen.to_json()
    assert (stated["extent"], stated["reduced"], stated["case_bytes"]) == ("every", True, 266240000)
    assert choose_probes(TOKENS, "every", left_out=chosen.left_out) == chosen.probes


def test_both_ends_of_every_dim_are_tried_however_large() -> None:
    chosen = plan(TOKENS, FREE, Growth(2.0 * CASE_BYTES))
    assert {tuple(probe.sizes.values()) for probe in chosen.probes} == {(1, 2), (8, 2), (1, 512)}


def test_only_sizes_of_the_step_are_tried() -> None:
    signature = parse_inputs(["x:float32[batch=2..64/2,3,side=64..160/32]"])
    for gflop in (FREE, Growth(BUDGET_GFLOP)):
        probes = plan(signature, gflop, FREE).probes
        assert {probe.sizes["batch"] % 2 for probe in probes} == {0}
        assert {probe.sizes["side"] for probe in probes} <= {64, 96, 128, 160}
    assert example_sizes(signature) == {"batch": 2, "side": 64}
