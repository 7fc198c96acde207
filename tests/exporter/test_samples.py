import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from modelyard.archiver.signature import Signature, parse_inputs
from modelyard.exporter.errors import UsageError
from modelyard.exporter.inputs.samples import read_sample, signature_of_samples

ROW = parse_inputs(["x:float32[batch,2]"])
TWO = parse_inputs(["batch.x:float32[n,2]", "tokens:int64[n,length=1..4]"])
PICTURE = parse_inputs(["image:float32[batch,1,2,3]"])


class Evil:
    """Opens a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.marker), "w"))


def _save(path: Path, value: object) -> Path:
    if path.suffix == ".npz":
        assert isinstance(value, dict)
        np.savez(path, **value)
    elif path.suffix == ".npy":
        np.save(path, np.asarray(value))
    elif path.suffix == ".pt":
        torch.save(value, path)
    else:
        path.write_text(json.dumps(value), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("file", "value"),
    [
        pytest.param("a.npy", [[1.0, 2.0]], id="npy"),
        pytest.param("a.npz", {"x": [[1.0, 2.0]]}, id="npz"),
        pytest.param("a.pt", torch.tensor([[1.0, 2.0]]), id="pt"),
        pytest.param("a.pt", torch.tensor([1.0, 2.0]), id="one row without its batch dim"),
        pytest.param("a.pt", (torch.tensor([[1.0, 2.0]]),), id="tuple"),
        pytest.param("a.json", [[1, 2]], id="json"),
        pytest.param("a.json", {"x": [[1.0, 2.0]]}, id="json by name"),
    ],
)
def test_every_kind_of_file_gives_the_same_tensor(file: str, value: object, tmp_path: Path) -> None:
    sample = read_sample(_save(tmp_path / file, value), ROW)
    assert (sample.inputs[0].dtype, sample.inputs[0].tolist()) == (torch.float32, [[1.0, 2.0]])
    assert (sample.file, sample.sizes, sample.rows) == (file, {"batch": 1}, 1)


def test_several_inputs_are_read_by_name_or_in_order(tmp_path: Path) -> None:
    x, tokens = torch.ones(3, 2), torch.ones(3, 4, dtype=torch.int32)
    by_name = _save(tmp_path / "a.pt", {"tokens": tokens, "batch.x": x})
    in_order = _save(tmp_path / "b.pt", [x, tokens])
    for sample in (read_sample(by_name, TWO), read_sample(in_order, TWO)):
        assert [value.dtype for value in sample.inputs] == [torch.float32, torch.int64]
        assert sample.sizes == {"n": 3, "length": 4}


def test_a_picture_gives_its_pixels(tmp_path: Path) -> None:
    pixels = np.array([[0, 51, 102], [153, 204, 255]], dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    scaled = read_sample(tmp_path / "a.png", PICTURE)
    torch.testing.assert_close(
        scaled.inputs[0], torch.tensor([[[[0.0, 0.2, 0.4], [0.6, 0.8, 1.0]]]])
    )
    as_bytes = parse_inputs(["image:uint8[batch,1,height,width]"])
    exact = read_sample(tmp_path / "a.png", as_bytes)
    assert exact.inputs[0].tolist() == [[pixels.tolist()]]


@pytest.mark.parametrize(
    ("file", "value", "signature", "seen"),
    [
        pytest.param("a.csv", [1], ROW, '".csv" is not a known suffix', id="suffix"),
        pytest.param("a.json", [[1, 2, 3]], ROW, "has the shape [1, 3]", id="shape"),
        pytest.param(
            "a.json", [[1, 2]] * 9, ROW, "expected x:float32[batch=1..8,2]", id="out of the range"
        ),
        pytest.param("a.json", {"y": [[1, 2]]}, ROW, "holds y; expected exactly", id="name"),
        pytest.param("a.json", [[1, 2]], TWO, "expected them by name", id="too few"),
        pytest.param(
            "a.pt",
            (torch.ones(1, 2), torch.ones(1, 4)),
            TWO,
            '"tokens" is float32; expected int64',
            id="float for an index",
        ),
        pytest.param(
            "a.pt",
            torch.ones(1, 2, dtype=torch.int64),
            ROW,
            '"x" is int64; expected float32',
            id="index for a float",
        ),
        pytest.param(
            "a.pt",
            (torch.ones(2, 2), torch.ones(3, 4, dtype=torch.int64)),
            TWO,
            '"tokens" has the shape [3, 4]',
            id="two sizes of one dim",
        ),
        pytest.param("a.pt", "text", ROW, "cannot be read", id="no tensor"),
    ],
)
def test_what_is_not_the_models_input_is_refused(
    file: str, value: object, signature: Signature, seen: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        read_sample(_save(tmp_path / file, value), signature)
    assert seen in str(caught.value)
    assert file in str(caught.value)


def test_a_zip_that_unpacks_to_far_more_than_it_is_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((4_000_000, 2), np.float32))
    with pytest.raises(UsageError, match=r'"x\.npy".*from numpy\.savez'):
        read_sample(tmp_path / "a.npz", ROW)


@pytest.mark.parametrize("file", ["a.pt", "a.npy", "a.npz"])
def test_no_pickle_runs(file: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    if file == "a.pt":
        torch.save(Evil(marker), tmp_path / file)
    elif file == "a.npy":
        np.save(tmp_path / file, np.array([Evil(marker)], dtype=object), allow_pickle=True)
    else:
        np.savez(tmp_path / file, x=np.array([Evil(marker)], dtype=object))
    with pytest.raises(UsageError, match="cannot be read"):
        read_sample(tmp_path / file, ROW)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("mode", "size", "signature", "seen"),
    [
        pytest.param("RGB", (3, 2), PICTURE, "has the mode RGB", id="mode"),
        pytest.param("L", (4, 2), PICTURE, "has the shape [1, 1, 2, 4]", id="size"),
        pytest.param("L", (3, 2), ROW, "a picture says nothing of", id="no picture"),
        pytest.param("L", (3, 2), TWO, "a picture says nothing of", id="two inputs"),
    ],
)
def test_a_picture_with_more_than_one_reading_is_refused(
    mode: str, size: tuple[int, int], signature: Signature, seen: str, tmp_path: Path
) -> None:
    Image.new(mode, size).save(tmp_path / "a.png")
    with pytest.raises(UsageError) as caught:
        read_sample(tmp_path / "a.png", signature)
    assert seen in str(caught.value)


def test_complex_numbers_are_read_as_their_real_view(tmp_path: Path) -> None:
    signature = parse_inputs(["wave:complex64[batch,2]"])
    wave = torch.tensor([[1 + 2j, 3 - 4j]])
    pairs = [[[1.0, 2.0], [3.0, -4.0]]]
    for file, value in (("a.pt", wave), ("b.json", pairs), ("c.npy", wave.numpy())):
        assert read_sample(_save(tmp_path / file, value), signature).inputs[0].tolist() == pairs


@pytest.mark.parametrize(
    ("text", "value", "seen"),
    [
        pytest.param(
            "i:int64[2,edges]<nodes",
            [[0, 3], [2, 1]],
            '"i" holds 3; expected values <nodes, which are 0 to 2 here',
            id="dim",
        ),
        pytest.param(
            "i:uint8[edges]=0,3,7", [3, 4], '"i" holds 4; expected values =0,3,7', id="set"
        ),
        pytest.param(
            "i:float32[edges]=0..1",
            [0.5, -0.1],
            '"i" holds -0.1; expected values =0..1',
            id="float",
        ),
        pytest.param(
            "i:uint8[edges]=0..9,falling",
            [3, 5],
            '"i" is not falling along its last dim; expected values =0..9,falling',
            id="order",
        ),
    ],
)
def test_values_that_are_not_those_stated_are_refused(
    text: str, value: object, seen: str, tmp_path: Path
) -> None:
    signature = parse_inputs(["x:float32[nodes,1]", text])
    path = _save(tmp_path / "a.json", {"x": [[0.0]] * 3, "i": value})
    with pytest.raises(UsageError) as caught:
        read_sample(path, signature)
    assert str(caught.value) == f'--sample "{path}": {seen}'


GRAPH = {"x": np.ones((17, 8), np.float32), "edge_index": np.zeros((2, 40), np.int64)}


def test_one_file_says_what_a_model_takes(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.npz", {**GRAPH, "graph": np.zeros(17, np.int64)})
    assert [str(spec) for spec in signature_of_samples([path]).inputs] == [
        "x:float32[batch=1..17,8]",
        "edge_index:int64[2,40]",
        "graph:int64[batch=1..17]",
    ]


def test_what_differs_between_files_is_a_range(tmp_path: Path) -> None:
    first = _save(tmp_path / "a.npz", GRAPH)
    other = _save(
        tmp_path / "b.npz",
        {"x": np.ones((5, 8), np.float32), "edge_index": np.zeros((2, 9), np.int64)},
    )
    signature = signature_of_samples([first, other])
    assert [str(spec) for spec in signature.inputs] == [
        "x:float32[batch=1..17,8]",
        "edge_index:int64[2,edge_index_1=9..40]",
    ]
    assert read_sample(first, signature).sizes == {"batch": 17, "edge_index_1": 40}


@pytest.mark.parametrize(
    ("file", "value", "inputs"),
    [
        pytest.param("a.npy", np.ones((2, 3)), ["input:float32[batch=1..8,3]"], id="numpy"),
        pytest.param("a.json", [[1.5, 2], [3, 4]], ["input:float32[batch=1..8,2]"], id="json"),
        pytest.param(
            "a.pt",
            (torch.ones(2, 3), torch.ones(2, dtype=torch.int32)),
            ["input_0:float32[batch=1..8,3]", "input_1:int32[batch=1..8]"],
            id="in order",
        ),
        pytest.param(
            "a.pt",
            {"net.x": torch.ones(9, 2, dtype=torch.complex128)},
            ["net.x:complex64[batch=1..9,2]"],
            id="inside an argument, complex",
        ),
    ],
)
def test_every_kind_of_file_says_what_a_model_takes(
    file: str, value: object, inputs: list[str], tmp_path: Path
) -> None:
    path = _save(tmp_path / file, value)
    assert [str(spec) for spec in signature_of_samples([path]).inputs] == inputs


@pytest.mark.parametrize(
    ("file", "value", "seen"),
    [
        pytest.param("a.json", 3.5, "input float32 of 0 dims; expected tensors with", id="number"),
        pytest.param("a.json", {}, "holds nothing; expected tensors with", id="nothing"),
        pytest.param("a.json", {"x": "text"}, "cannot be read", id="text"),
        pytest.param("a.json", {"a b": [1]}, '"a b" is not a name of letters', id="name"),
        pytest.param("a.npy", np.ones(2, np.uint16), '"uint16" is not a dtype', id="dtype"),
        pytest.param("a.npy", np.ones((0, 2)), "a first dimension of one or more rows", id="empty"),
    ],
)
def test_a_file_that_says_too_little_is_refused(
    file: str, value: object, seen: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        signature_of_samples([_save(tmp_path / file, value)])
    assert seen in str(caught.value)


def test_files_of_different_inputs_and_pictures_are_refused(tmp_path: Path) -> None:
    first = _save(tmp_path / "a.npz", GRAPH)
    other = _save(tmp_path / "b.npz", {"x": np.ones((17, 8), np.float32)})
    with pytest.raises(UsageError, match="expected the same inputs in every file"):
        signature_of_samples([first, other])
    Image.new("L", (3, 2)).save(tmp_path / "a.png")
    with pytest.raises(UsageError, match="a picture says nothing of an input; give --input"):
        signature_of_samples([tmp_path / "a.png"])


def test_a_file_that_is_not_there_is_refused_in_a_few_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_sample(tmp_path / "a.npz", ROW)
    assert str(caught.value) == f'--sample "{tmp_path / "a.npz"}": there is no such file'
