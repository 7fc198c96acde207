import pytest

from modelyard.archiver.signature import Dim, Signature, TensorSpec, parse_inputs


def test_names_dtypes_sizes_and_ranges_are_read() -> None:
    signature = parse_inputs(["tokens:int64[batch, length=2..16]", "mask:bool[batch,length]"])
    assert signature == Signature(
        inputs=(
            TensorSpec("tokens", "int64", (Dim("batch", 1, 8), Dim("length", 2, 16))),
            TensorSpec("mask", "bool", (Dim("batch", 1, 8), Dim("length", 2, 16))),
        ),
    )


def test_a_spec_prints_as_it_is_written() -> None:
    (spec,) = parse_inputs(["image:float32[batch,1,8,8]"]).inputs
    assert str(spec) == "image:float32[batch=1..8,1,8,8]"
    assert parse_inputs([str(spec)]).inputs == (spec,)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        pytest.param("", '"" is not a name', id="empty"),
        pytest.param("image", 'nothing follows the name "image"', id="name alone"),
        pytest.param("1mage:float32[8]", '"1mage" is not a name', id="name"),
        pytest.param(":float32[8]", '"" is not a name', id="no name"),
        pytest.param(
            "image:float32(1,1,8,8)",
            "the dims stand in round brackets; expected square ones: image:float32[1,1,8,8]",
            id="round brackets",
        ),
        pytest.param("image:float33[8]", '"float33" is not a dtype', id="dtype"),
        pytest.param("image:[8]", '"" is not a dtype', id="no dtype"),
        pytest.param("image:float32", '"" after the dtype', id="no dims"),
        pytest.param("image:float32[8", '"[8" after the dtype', id="bracket left open"),
        pytest.param("image:float32[8]x", '"[8]x" after the dtype', id="text behind"),
        pytest.param("image:float32[]", 'dim 1 is ""', id="no dim"),
        pytest.param("image:float32[batch,,8]", 'dim 2 is ""', id="empty dim"),
        pytest.param("image:float32[batch,-1]", 'dim 2 is "-1"', id="negative"),
        pytest.param("image:float32[0]", 'dim 1 is "0"', id="zero"),
        pytest.param("image:float32[batch=]", 'dim 1 is "batch="', id="no range"),
        pytest.param("image:float32[batch=1-8]", 'dim 1 is "batch=1-8"', id="range with a dash"),
        pytest.param("image:float32[batch=8..1]", "range 8..1", id="range backwards"),
        pytest.param("image:float32[batch=4..4]", "range 4..4", id="range of one size"),
        pytest.param("image:float32[batch=0..4]", "range 0..4", id="range from zero"),
        pytest.param(
            "x:float32[n=1..2,n=1..3]", "dim n=1..3 here and n=1..2 elsewhere", id="two ranges"
        ),
    ],
)
def test_a_wrong_input_is_refused_by_the_part_that_is_wrong(text: str, seen: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_inputs([text])
    assert str(caught.value).startswith(f'--input "{text}": ')
    assert seen in str(caught.value)
    assert "; expected " in str(caught.value)


def test_no_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no --input given"):
        parse_inputs([])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match='"x" is given twice'):
        parse_inputs(["x:float32[2]", "x:float32[3]"])


def test_a_tensor_inside_an_argument_is_named_by_the_way_to_it() -> None:
    specs = parse_inputs(["batch.image:float32[n,3]", "pair.0:int64[n]"]).inputs
    assert [(spec.name, spec.path) for spec in specs] == [
        ("batch_image", "batch.image"),
        ("pair_0", "pair.0"),
    ]
    assert str(specs[0]) == "batch.image:float32[n=1..8,3]"


@pytest.mark.parametrize("text", ["batch.:float32[2]", ".x:float32[2]", "class:float32[2]"])
def test_a_way_that_leads_nowhere_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a name of letters"):
        parse_inputs([text])


def test_two_ways_to_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match='"a_b" is given twice'):
        parse_inputs(["a.b:float32[2]", "a_b:float32[3]"])
