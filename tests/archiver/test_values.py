import json
import random
from typing import Any

import pytest

from modelyard.archiver.signature import Dim, Signature, parse_inputs, parse_signature

EDGES = "edge_index:int64[2,edges=5..90]<nodes"
NODES = "x:float32[nodes=10..40,8]"


def _as_stored(signature: Signature) -> Any:
    return json.loads(json.dumps(signature.to_json()))


def _draw_inputs(draw: random.Random) -> list[str]:
    """Make a model's inputs at random: dims with ranges and steps, values of every kind."""
    dims: dict[str, str] = {}
    for name in draw.sample(["batch", "length", "nodes", "edges"], draw.randint(1, 4)):
        low, step = draw.randint(1, 40), draw.choice([1, 1, 2, 32])
        high = low + step * draw.randint(1, 9)
        dims[name] = f"{name}={low}..{high}" + (f"/{step}" if step > 1 else "")
    texts = []
    for place in range(draw.randint(1, 4)):
        shape = [
            draw.choice([*dims.values(), str(draw.randint(1, 64))])
            for _ in range(draw.randint(1, 3))
        ]
        dtype = draw.choice(["int64", "int32", "float32", "float64", "bool", "complex64"])
        values = ""
        if "int" in dtype:
            values = draw.choice(
                ["", "<7", "=-3..9", "=0,3,7", "=5", *(f"<{name}" for name in dims)]
                + [f"=0..{name}" for name in dims]
                + [f"=-2..{name}+{draw.randint(1, 9)}" for name in dims]
                + [f"={name}..{name}+1,falling" for name in dims]
            )
        elif "float" in dtype:
            values = draw.choice(["", "=0..1", "=-1.5..2.25e3,rising", "=1e-06,0.5,1"])
        texts.append(f"in_{place}:{dtype}[{','.join(shape)}]{values}")
    # A dim that only a range of values names would be unknown.
    return [*texts, f"every:float32[{','.join(dims.values())}]"]


@pytest.mark.parametrize("seed", range(300))
def test_text_and_json_hold_all_of_a_signature(seed: int) -> None:
    texts = _draw_inputs(random.Random(seed))
    signature = parse_inputs(texts)
    assert parse_signature(_as_stored(signature)) == signature
    assert parse_inputs([str(spec) for spec in signature.inputs]) == signature


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        pytest.param("<nodes", {"min": 0, "max": "nodes-1"}, id="below a dim"),
        pytest.param("<100", {"min": 0, "max": 99}, id="below a number"),
        pytest.param("=1..nodes", {"min": 1, "max": "nodes"}, id="up to a dim"),
        pytest.param(
            "=nodes..nodes+3", {"min": "nodes", "max": "nodes+3"}, id="from a dim to more"
        ),
        pytest.param("=7,0,3,3", {"among": [0, 3, 7]}, id="a set"),
        pytest.param("=4", {"among": [4]}, id="one value"),
        pytest.param("= 0 .. 9 , falling", {"min": 0, "max": 9, "order": "falling"}, id="in order"),
        pytest.param("<nodes,rising", {"min": 0, "max": "nodes-1", "order": "rising"}, id="rising"),
    ],
)
def test_a_signature_states_the_values(text: str, stored: dict[str, object]) -> None:
    signature = parse_inputs([NODES, f"i:int64[5]{text}"])
    assert _as_stored(signature)["inputs"][1]["values"] == stored


def test_signatures_without_values_are_stored_as_they_were() -> None:
    assert _as_stored(parse_inputs(["x:int64[batch,3]"])) == {
        "inputs": [{"name": "x", "dtype": "int64", "shape": ["batch", 3]}],
        "outputs": [],
        "dims": {"batch": {"min": 1, "max": 8}},
    }


def test_a_complex_input_is_its_real_view() -> None:
    (spec,) = parse_inputs(["wave:complex64[batch,8]"]).inputs
    assert (spec.dtype, spec.view, spec.shape) == (
        "float32",
        "complex64",
        (Dim("batch", 1, 8), 8, 2),
    )
    assert spec.to_json() == {
        "name": "wave",
        "dtype": "float32",
        "shape": ["batch", 8, 2],
        "view": "complex64",
    }
    assert str(spec) == "wave:complex64[batch=1..8,8]"


def test_a_complex_input_keeps_its_precision() -> None:
    signature = parse_inputs(["a:complex64[2]", "b:float32[2]"]).in_precision("bfloat16")
    assert [spec.dtype for spec in signature.inputs] == ["float32", "bfloat16"]


def test_a_dim_has_the_sizes_of_its_step() -> None:
    side = parse_inputs(["x:float32[1,side=64..160/32]"]).dims["side"]
    assert str(side) == "side=64..160/32"
    assert [size for size in range(200) if size in side] == [64, 96, 128, 160]
    assert list(side.sizes()) == [64, 96, 128, 160]
    assert list(side.sizes(65)) == [96, 128, 160]
    assert (side.at_least(1), side.at_least(97), side.at_least(500)) == (64, 128, 160)


VALUES = "; expected <nodes, =1..length, =0..1 or =0,3,7, and ,rising or ,falling behind it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "i:int64[5]<edges",
            'the values <edges: "edges" is not a dim of an input; expected nodes',
            id="unknown dim",
        ),
        pytest.param("i:int64[5]=", f'"=" is not a range of values{VALUES}', id="nothing"),
        pytest.param(
            "i:int64[5]<", f'"" is neither a number nor the name of a dim{VALUES}', id="<"
        ),
        pytest.param(
            "i:int64[5]=1..", f'"" is neither a number nor the name of a dim{VALUES}', id="no end"
        ),
        pytest.param(
            "i:int64[5]=0..1..2",
            f'"1..2" is neither a number nor the name of a dim{VALUES}',
            id="two ranges",
        ),
        pytest.param(
            "i:int64[5]=a,b", f'"=a,b" is not a range of values{VALUES}', id="names in a set"
        ),
        pytest.param(
            "i:int64[5]=0..9,up",
            f'"=0..9,up" is not a range of values{VALUES}',
            id="order",
        ),
        pytest.param(
            "i:int64[5]=9..0",
            "the values =9..0: 9 is not below 0 at every size of the dims",
            id="backwards",
        ),
        pytest.param(
            "i:int64[5]=12..nodes",
            "the values =12..nodes: 12 is not below nodes at every size of the dims",
            id="empty at the smallest size",
        ),
        pytest.param(
            "i:int8[5]<200",
            "the values =0..199: they go from 0 to 199, and int8 from -128 to 127",
            id="beyond the dtype",
        ),
        pytest.param(
            "i:uint8[5]=-1..3",
            "the values =-1..3: they go from -1 to 3, and uint8 from 0 to 255",
            id="below the dtype",
        ),
        pytest.param(
            "i:int64[5]=0..0.5",
            "the values =0..0.5: 0.5 is not a whole number, and int64 holds no other",
            id="fraction",
        ),
        pytest.param(
            "i:bool[5]=0..1",
            "the values =0..1: bool takes no range of values; expected integers or floats",
            id="bool",
        ),
        pytest.param(
            "i:complex64[5]=0..1",
            "the values =0..1: complex64 takes no range of values; expected integers or floats",
            id="complex",
        ),
        pytest.param(
            "i:float32[5]<1",
            '"<1" is for integers; expected a range such as =0..1',
            id="below a float",
        ),
        pytest.param(
            "i:float32[n=64..160/30]",
            "dim 1 has the range 64..160 in steps of 30; expected whole steps from one end to the "
            "other, as in 64..160/32",
            id="step",
        ),
        pytest.param(
            "i:float32[n=1..2/0]",
            "dim 1 has the range 1..2 in steps of 0; expected whole steps from one end to the "
            "other, as in 64..160/32",
            id="step of nothing",
        ),
    ],
)
def test_values_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_inputs([NODES, text])
    assert str(caught.value) == f'--input "{text}": {message}'


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        pytest.param(
            {"min": 0, "max": "edgse-1"},
            'signature.inputs[1].values: "edgse" is not a dim of an input; expected nodes or edges',
            id="unknown dim",
        ),
        pytest.param(
            {"min": 0, "max": 10**301},
            "signature.inputs[1].values.max: expected a number, or a dim's name such as nodes-1, "
            f"found {json.dumps(10**301)[:80]}",
            id="huge",
        ),
        pytest.param(
            {"min": 0, "max": 2**63},
            f"they go from 0 to {2**63}, and int64 from {-(2**53)} to {2**53}",
            id="beyond what JSON holds",
        ),
        pytest.param(
            {"among": []},
            "signature.inputs[1].values.among: expected 1 to 1024 numbers, found a list",
            id="empty set",
        ),
        pytest.param(
            {"among": list(range(1025))},
            "signature.inputs[1].values.among: expected 1 to 1024 numbers, found a list",
            id="endless set",
        ),
        pytest.param(
            {"min": 0, "max": 1, "order": "up"},
            'signature.inputs[1].values.order: expected rising or falling, found "up"',
            id="order",
        ),
        pytest.param({"min": 3, "max": 2}, "is not below", id="backwards"),
        pytest.param([0, 1], "signature.inputs[1].values: expected an object", id="list"),
    ],
)
def test_a_strangers_values_are_checked_again(values: object, problem: str) -> None:
    document = _as_stored(parse_inputs([NODES, EDGES]))
    document["inputs"][1]["values"] = values
    with pytest.raises(ValueError) as caught:
        parse_signature(document)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"view": "complex64"}, "a complex dtype whose real view this is", id="view"),
        pytest.param({"view": "quaternion"}, "a complex dtype whose real view this is", id="name"),
    ],
)
def test_a_strangers_view_is_checked_again(change: dict[str, object], problem: str) -> None:
    document = _as_stored(parse_inputs([NODES]))
    document["inputs"][0] |= change
    with pytest.raises(ValueError, match=problem):
        parse_signature(document)


@pytest.mark.parametrize("step", [0, -1, 7, 2**70])
def test_a_strangers_step_is_checked_again(step: int) -> None:
    document = _as_stored(parse_inputs([NODES]))
    document["dims"]["nodes"]["step"] = step
    with pytest.raises(ValueError, match=r"dims\.nodes\.step: expected a whole part of the range"):
        parse_signature(document)
