"""Each format's writer, without the process that checks it."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.errors import ConversionError
from modelyard.exporter.formats import to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.prove.reference import Reference, observe
from modelyard.handlers.models.backends import open_artifact

Write = Callable[[nn.Module, Reference, Path], dict[str, object]]


def _write_pt2(model: nn.Module, reference: Reference, path: Path) -> dict[str, object]:
    program = to_exported_program.capture(model, reference.signature, reference.example)
    return to_exported_program.write(program, path)


def _write_onnx(model: nn.Module, reference: Reference, path: Path) -> dict[str, object]:
    program = to_exported_program.capture(model, reference.signature, reference.example)
    return to_onnx.write(program, reference.signature, path)


def _write_torchscript(model: nn.Module, reference: Reference, path: Path) -> dict[str, object]:
    return to_torchscript.write(model, reference.signature, reference.example, path)


WRITERS: dict[str, Write] = {
    "pt2": _write_pt2,
    "onnx": _write_onnx,
    "torchscript": _write_torchscript,
}


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Gather(nn.Module):
    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.cat(inputs).sum(0) + inputs[0]


class Apart(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(1), y.sum(1)


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sum((x + row for row in range(x.shape[0])), x)


class Unknown(nn.Module):
    """Uses an operator that has no ONNX form."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.special.bessel_j0(x)
        return out


def _linear() -> nn.Linear:
    model = nn.Linear(3, 2)
    model.load_state_dict(
        {
            "weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
            "bias": torch.tensor([10.0, 20.0]),
        }
    )
    return model


def _observe(model: nn.Module, *inputs: str) -> Reference:
    return observe(model.eval(), parse_inputs(inputs), (), torch.device("cpu"))


@pytest.mark.parametrize("format", WRITERS)
def test_a_linear_model_gives_the_known_answers(format: str, tmp_path: Path) -> None:
    model = _linear()
    WRITERS[format](model, _observe(model, "x:float32[batch,3]"), tmp_path / "net.pt2")
    answer = open_artifact(tmp_path / "net.pt2", format)(
        torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0]])
    )
    assert isinstance(answer, Tensor)
    assert answer.tolist() == [[16.0, 35.0], [8.0, 18.0]]


@pytest.mark.parametrize("format", WRITERS)
def test_the_same_model_gives_the_same_bytes(format: str, tmp_path: Path) -> None:
    contents = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        model = _linear()
        WRITERS[format](model, _observe(model, "x:float32[batch,3]"), folder / "net.pt2")
        contents.append((folder / "net.pt2").read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.parametrize("format", WRITERS)
def test_no_row_of_the_example_and_no_folder_of_this_machine_is_inside(
    format: str, tmp_path: Path
) -> None:
    model = _linear()
    reference = _observe(model, "x:float32[batch,3]")
    path = tmp_path / "net.pt2"
    WRITERS[format](model, reference, path)
    contents = {path.name: path.read_bytes()}
    if format != "onnx":
        with zipfile.ZipFile(path) as container:
            contents = {name: container.read(name) for name in container.namelist()}
    row = reference.example[0][0].numpy().astype(np.float32).tobytes()
    here = str(Path(__file__).parent).encode()
    torch_folder = str(Path(torch.__file__).parent).encode()
    for name, content in contents.items():
        assert not [found for found in (row, here, torch_folder) if found in content], name
    assert not any(content for name, content in contents.items() if "sample_inputs" in name)


def test_the_example_would_be_found_if_it_were_inside(tmp_path: Path) -> None:
    model = _linear()
    reference = _observe(model, "x:float32[batch,3]")
    program = to_exported_program.capture(model, reference.signature, reference.example)
    torch.export.save(program, tmp_path / "net.pt2")
    assert reference.example[0][0].numpy().tobytes() in (tmp_path / "net.pt2").read_bytes()


def test_a_dim_that_the_model_fixes_is_named() -> None:
    model = Fixed()
    reference = _observe(model, "x:float32[batch,3]")
    fixed = r'fixes dim "batch" of input "x" to 5 at test_formats\.py:\d+ ".*"; expected'
    with pytest.raises(ConversionError, match=fixed):
        to_exported_program.capture(model, reference.signature, reference.example)


def test_a_branch_on_values_is_refused_by_the_tracer_and_kept_by_torchscript(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Branch()
    reference = _observe(model, "x:float32[batch,3]")
    with pytest.raises(
        ConversionError, match=r"at test_formats\.py:\d+ \"return x if x\.sum.*--format torchscript"
    ):
        to_exported_program.capture(model, reference.signature, reference.example)
    assert capfd.readouterr() == ("", "")
    details = to_torchscript.write(
        model, reference.signature, reference.example, tmp_path / "net.pt"
    )
    artifact = open_artifact(tmp_path / "net.pt", "torchscript")
    assert details == {"torchscript": "script", "deprecated": to_torchscript.DEPRECATION}
    for sign in (1.0, -1.0):
        assert torch.equal(torch.as_tensor(artifact(torch.full((2, 3), sign))), torch.ones(2, 3))


def test_what_cannot_be_scripted_is_traced_and_says_so(tmp_path: Path) -> None:
    model = Gather()
    reference = _observe(model, "x:float32[batch,3]", "y:float32[batch,3]")
    details = to_torchscript.write(
        model, reference.signature, reference.example, tmp_path / "net.pt"
    )
    assert details["torchscript"] == "trace"
    assert "not_scripted" in details
    assert details["warnings"] == []


def test_what_a_trace_froze_is_in_the_details(tmp_path: Path) -> None:
    class Traced(Gather):
        def forward(self, *inputs: Tensor) -> Tensor:
            return inputs[0] if inputs[0].sum() > 0 else -inputs[0]

    model = Traced()
    reference = _observe(model, "x:float32[batch,3]")
    details = to_torchscript.write(
        model, reference.signature, reference.example, tmp_path / "net.pt"
    )
    assert "test_formats.py:" in str(details["warnings"])
    assert "Python boolean" in str(details["warnings"])


def test_inputs_gathered_by_a_star_stay_dynamic() -> None:
    model = Gather()
    reference = _observe(model, "x:float32[batch,3]", "y:float32[batch,3]")
    program = to_exported_program.capture(model, reference.signature, reference.example)
    assert program.module()(torch.ones(7, 3), torch.ones(7, 3)).shape == (7, 3)


def test_two_dims_of_equal_size_stay_apart() -> None:
    model = Apart()
    reference = _observe(model, "x:float32[n=1..2,2]", "y:float32[m=1..2,2]")
    assert reference.example[0].shape == reference.example[1].shape
    program = to_exported_program.capture(model, reference.signature, reference.example)
    first, second = program.module()(torch.ones(7, 2), torch.ones(4, 2))
    assert (first.tolist(), second.tolist()) == ([2.0] * 7, [2.0] * 4)


def test_an_operator_without_onnx_form_is_named(tmp_path: Path) -> None:
    model = Unknown()
    with pytest.raises(
        ConversionError, match=r"by ONNX at test_formats\.py:\d+.*bessel_j0.*; export --format pt2"
    ):
        _write_onnx(model, _observe(model, "x:float32[batch]"), tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_a_saved_program_keeps_its_example_for_the_formats_after_it(tmp_path: Path) -> None:
    reference = observe(
        nn.Linear(2, 2).eval(), parse_inputs(["x:float32[batch,2]"]), (), torch.device("cpu")
    )
    program = to_exported_program.capture(reference.model, reference.signature, reference.example)
    to_exported_program.write(program, tmp_path / "m.pt2")
    assert program.example_inputs is not None
    assert torch.export.load(tmp_path / "m.pt2").example_inputs is None
