import pytest
import torch

from modelyard.archiver.signature import parse_inputs
from modelyard.handlers.proof.plan import choose_probes
from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        pytest.param("x:float32[batch,1,8,8]", {"batch": 5}, id="usual"),
        pytest.param("x:float32[batch,5]", {"batch": 3}, id="five is taken"),
        pytest.param("x:int64[batch,length]", {"batch": 5, "length": 3}, id="two dims"),
        pytest.param("x:float32[batch=1..2]", {"batch": 2}, id="never one"),
        pytest.param("x:float32[batch,height=224..512]", {"batch": 5, "height": 224}, id="range"),
        pytest.param("x:float32[batch=1..2,2]", {"batch": 2}, id="nothing else left"),
    ],
)
def test_the_example_is_never_of_size_one_and_equals_no_other_size(
    text: str, sizes: dict[str, int]
) -> None:
    assert example_sizes(parse_inputs([text])) == sizes


def test_equal_seeds_give_equal_values_and_others_do_not() -> None:
    signature = parse_inputs(["x:float32[batch,3]", "flag:bool[batch]", "n:int64[batch,9]<100"])
    probe = Probe("random", {"batch": 8})
    first, again = (make_inputs(signature, probe, seed=1) for _ in range(2))
    other = make_inputs(signature, probe, seed=2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_making_inputs_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    make_inputs(parse_inputs(["x:float32[4]"]), Probe("random", {}))
    assert torch.equal(torch.get_rng_state(), before)


def test_integers_stay_below_the_bound_and_reach_it_when_large() -> None:
    signature = parse_inputs(["n:int64[batch,50]<10"])
    random, zeros, large = (
        make_inputs(signature, Probe(kind, {"batch": 8}))[0]
        for kind in ("random", "zeros", "large")
    )
    assert (int(random.min()), int(random.max())) == (0, 9)
    assert (int(zeros.max()), int(large.min())) == (0, 9)


def test_floats_are_also_tried_next_to_zero_and_below_it() -> None:
    signature = parse_inputs(["x:float32[batch,200]"])
    tiny, negative = (
        make_inputs(signature, Probe(kind, {"batch": 2}))[0] for kind in ("tiny", "negative")
    )
    smallest = torch.finfo(torch.float32).tiny
    assert 0 < tiny.abs().max() < 10 * smallest
    assert ((tiny != 0) & (tiny.abs() < smallest)).any()
    assert negative.max() <= 0


VALUES = [
    pytest.param("int64", "<nodes", id="below a dim"),
    pytest.param("int32", "=1..nodes", id="up to a dim"),
    pytest.param("int8", "=-5..-2", id="negative"),
    pytest.param("int64", "=nodes..nodes+3,falling", id="from a dim, falling"),
    pytest.param("int64", "=0..edges,rising", id="offsets"),
    pytest.param("uint8", "=0,3,7", id="set"),
    pytest.param("int64", "=7", id="one value"),
    pytest.param("float32", "=0..1", id="unit"),
    pytest.param("float16", "=1..1000", id="positive"),
    pytest.param("float64", "=-3..-1", id="below zero"),
    pytest.param("float32", "=0.5,2,4.25", id="set of floats"),
    pytest.param("float32", "=0..nodes", id="float up to a dim"),
]


@pytest.mark.parametrize(("dtype", "stated"), VALUES)
def test_made_up_values_are_stated_ones_in_every_kind_and_at_every_size(
    dtype: str, stated: str
) -> None:
    signature = parse_inputs(["x:float32[nodes=2..9,3]", f"v:{dtype}[3,edges=4..40/4]{stated}"])
    values = signature.inputs[1].values
    assert values is not None
    for seed, probe in enumerate(choose_probes(signature, "every")):
        _, made = make_inputs(signature, probe, seed=seed)
        low, high = values.ends(probe.sizes)
        assert made.shape == (3, probe.sizes["edges"])
        assert low <= made.min() <= made.max() <= high
        if values.among:
            assert set(made.flatten().tolist()) <= set(values.among)
        steps = made.double().diff(dim=-1)
        if values.order:
            assert (steps >= 0).all() if values.order == "rising" else (steps <= 0).all()
        if values.order == "rising":
            assert (made[:, 0] == low).all()
        elif probe.kind == "large":
            assert (made == high).all()
        if probe.kind == "zeros":
            integer = "int" in dtype or bool(values.among)
            assert (made == (low if integer else min(max(0.0, low), high))).all()
        if probe.kind == "random" and low < high and not values.order:
            assert made.min() < made.max()


def test_a_stated_mask_still_lets_its_first_position_through() -> None:
    signature = parse_inputs(["mask:int64[batch,6]=0..1", "kind_mask:int64[batch,6]=3,4"])
    mask, other = make_inputs(signature, Probe("zeros", {"batch": 2}))
    assert mask.tolist() == [[1, 0, 0, 0, 0, 0]] * 2
    assert other.tolist() == [[3] * 6] * 2
