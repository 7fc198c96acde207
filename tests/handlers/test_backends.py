import shutil
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.handlers.errors import InputMismatch, LoadError
from modelyard.handlers.models.backends import (
    _CUDA,
    FORMATS,
    _check_provider,
    _onnx_providers,
    detect_format,
    open_artifact,
    set_precision,
)

ARTIFACTS = {"pt2": "digits.pt2", "onnx": "digits.onnx", "torchscript": "digits.pt"}

each_format = pytest.mark.parametrize("format", list(ARTIFACTS))


class TwoInputs(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": left + right, "product": left * right}


def test_every_format_is_tried_here() -> None:
    # An AOTInductor package needs a compiler; the exporter's tests make and open one.
    assert set(FORMATS) == {*ARTIFACTS, "aoti"}


@each_format
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_artifact_agrees_with_the_checkpoint(
    digits_net: nn.Module, digits_folder: Path, format: str, batch: int
) -> None:
    artifact = open_artifact(digits_folder / ARTIFACTS[format], format)
    image = torch.rand(batch, 1, 8, 8)
    with torch.inference_mode():
        found, expected = artifact(image), digits_net(image)
    assert isinstance(found, Tensor)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)


@each_format
def test_artifact_takes_tensors_that_are_not_contiguous(digits_folder: Path, format: str) -> None:
    artifact = open_artifact(digits_folder / ARTIFACTS[format], format)
    image = torch.rand(2, 1, 8, 8)
    with torch.inference_mode():
        turned, straight = artifact(image.mT), artifact(image.mT.contiguous())
    assert isinstance(turned, Tensor) and isinstance(straight, Tensor)
    assert torch.allclose(turned, straight, rtol=0, atol=1e-5)


@each_format
def test_format_is_told_by_content_not_by_name(
    digits_folder: Path, tmp_path: Path, format: str
) -> None:
    disguised = Path(shutil.copy(digits_folder / ARTIFACTS[format], tmp_path / "model.bin"))
    assert detect_format(disguised) == format
    assert open_artifact(disguised, format).format == format


@each_format
def test_parameters_are_frozen_and_gradients_flow_to_inputs_where_they_can(
    digits_folder: Path, format: str
) -> None:
    artifact = open_artifact(digits_folder / ARTIFACTS[format], format)
    output = artifact(torch.rand(1, 1, 8, 8, requires_grad=True))
    assert isinstance(output, Tensor)
    assert output.requires_grad == artifact.is_differentiable == (format != "onnx")
    if artifact.module is not None:
        assert not any(parameter.requires_grad for parameter in artifact.module.parameters())


@each_format
def test_wrong_number_of_inputs_is_refused(digits_folder: Path, format: str) -> None:
    artifact = open_artifact(digits_folder / ARTIFACTS[format], format)
    with pytest.raises(InputMismatch, match="0 inputs given, the artifact takes 1: image:"):
        artifact()


@pytest.mark.parametrize("format", ["pt2", "onnx"])
@pytest.mark.parametrize(
    ("tensor", "seen"),
    [
        (torch.zeros(2, 1, 8, 8, dtype=torch.float64), r"float64\[2,1,8,8\]"),
        (torch.zeros(2, 1, 8, 9), r"float32\[2,1,8,9\]"),
        (torch.zeros(1, 8, 8), r"float32\[1,8,8\]"),
    ],
    ids=["dtype", "size", "rank"],
)
def test_tensor_that_does_not_fit_is_refused(
    digits_folder: Path, format: str, tensor: Tensor, seen: str
) -> None:
    artifact = open_artifact(digits_folder / ARTIFACTS[format], format)
    with pytest.raises(
        InputMismatch, match=rf'"image" is {seen}, the artifact takes image:float32'
    ):
        artifact(tensor)


def test_pt2_batch_outside_its_range_is_refused(digits_folder: Path) -> None:
    artifact = open_artifact(digits_folder / "digits.pt2", "pt2")
    with pytest.raises(InputMismatch, match=r"is float32\[9,1,8,8\], .*=0\.\.8,1,8,8\]"):
        artifact(torch.zeros(9, 1, 8, 8))


def test_several_outputs_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(
        TwoInputs(), (torch.rand(3, 2), torch.rand(3, 2)), dynamic_shapes=({0: batch}, {0: batch})
    )
    torch.export.save(program, tmp_path / "two.pt2")
    artifact = open_artifact(tmp_path / "two.pt2", "pt2")
    assert artifact.input_names == ("left", "right")
    left, right = torch.rand(4, 2), torch.rand(4, 2)
    total, product = artifact(left, right)
    assert torch.equal(total, left + right)
    assert torch.equal(product, left * right)


def test_sizes_that_depend_on_each_other_are_still_checked(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(
        TwoInputs(), (torch.rand(3, 2), torch.rand(3, 2)), dynamic_shapes=({0: batch}, {0: batch})
    )
    torch.export.save(program, tmp_path / "two.pt2")
    with pytest.raises(InputMismatch, match=r"\[4, 2\], \[1, 2\] do not go together"):
        open_artifact(tmp_path / "two.pt2", "pt2")(torch.rand(4, 2), torch.rand(1, 2))


def test_unknown_format_names_the_known_ones(digits_folder: Path) -> None:
    with pytest.raises(LoadError, match=r'"h5" of digits\.pt2; known are pt2, onnx, torchscript'):
        open_artifact(digits_folder / "digits.pt2", "h5")


def test_other_format_than_said_is_named(digits_folder: Path) -> None:
    with pytest.raises(LoadError, match=r"digits\.pt2 holds pt2, not onnx"):
        open_artifact(digits_folder / "digits.pt2", "onnx")


def test_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "net.pt")
    with pytest.raises(LoadError, match="is a checkpoint, not an artifact"):
        detect_format(tmp_path / "net.pt")


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"\x08"], ids=["empty", "image", "short"])
def test_other_file_is_no_artifact(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(LoadError, match=r"x\.onnx is not an artifact"):
        detect_format(tmp_path / "x.onnx")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"artifact gone\.pt2 is not there"):
        open_artifact(tmp_path / "gone.pt2", "pt2")


def test_damaged_artifact_says_how_to_go_on(digits_folder: Path, tmp_path: Path) -> None:
    whole = (digits_folder / "digits.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError, match=r"cut\.onnx is refused.* not an ONNX model .*export it"):
        open_artifact(tmp_path / "cut.onnx", "onnx")


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:99", "is not on this machine"), ("mps", "is not served; expected cpu or cuda")],
)
def test_device_that_is_not_here_is_refused(digits_folder: Path, device: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        open_artifact(digits_folder / "digits.pt2", "pt2", device)


def test_onnx_on_a_device_that_onnxruntime_does_not_use_is_refused(digits_folder: Path) -> None:
    if _CUDA in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA support")
    file = digits_folder / "digits.onnx"
    _check_provider(file, torch.device("cpu"))
    told = r"digits\.onnx would run on the CPU.*install onnxruntime-gpu.*deviceType: cpu"
    with pytest.raises(LoadError, match=told):
        _check_provider(file, torch.device("cuda", 0))


@pytest.mark.parametrize("tf32", [False, True])
def test_what_is_proven_and_what_is_served_compute_alike(tf32: bool) -> None:
    def rounds() -> list[bool]:
        return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]

    before = rounds()
    with set_precision(torch.device("cuda", 0), tf32):
        assert rounds() == [tf32, tf32]
        with set_precision(torch.device("cpu"), not tf32):
            assert rounds() == [tf32, tf32]
    assert rounds() == before
    (provider, options), rest = _onnx_providers([_CUDA], torch.device("cuda", 1), tf32)
    assert (provider, options) == (_CUDA, {"device_id": 1, "use_tf32": int(tf32)})
    assert rest == "CPUExecutionProvider"


@pytest.mark.gpu
def test_opening_an_artifact_says_what_the_device_rounds(digits_folder: Path, device: str) -> None:
    with set_precision(torch.device(device)):
        for tf32 in (True, False):
            open_artifact(digits_folder / "digits.pt2", "pt2", device, tf32=tf32)
            rounds = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
            assert device == "cpu" or rounds == (tf32, tf32)


@pytest.mark.gpu
@each_format
def test_artifact_made_on_the_cpu_runs_on_cuda(
    digits_net: nn.Module, digits_folder: Path, format: str, device: str
) -> None:
    artifact = open_artifact(digits_folder / ARTIFACTS[format], format, device)
    image = torch.rand(3, 1, 8, 8)
    with torch.inference_mode():
        found, expected = artifact(image.to(artifact.device)), digits_net(image)
    assert isinstance(found, Tensor)
    assert torch.allclose(found.cpu(), expected, rtol=0, atol=1e-4)


def test_spec_reads_like_the_command_line_writes_it() -> None:
    spec = TensorSpec("image", "float32", (Dim("batch", 1, 8), 1, 28, 28))
    assert str(spec) == "image:float32[batch=1..8,1,28,28]"
