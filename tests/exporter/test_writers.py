"""What one writer cannot do ends with a sentence, and takes no other format along."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.exporter import PartialExportError, export


class Square(torch.autograd.Function):
    """A function whose backward() its author wrote."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Own(nn.Module):
    """No TorchScript can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return Square.apply(x * self.scale).mean(1)  # type: ignore[no-untyped-call]


class Ceil(nn.Module):
    """No file of torch.export can hold how many windows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        whole = nn.functional.pad(x * self.scale, (0, 0, 0, math.ceil(n / 8) * 8 - n))
        return whole.view(x.shape[0], -1, 8, 4).mean((1, 2))


class Versioned(nn.Module):
    """A layer that reads its tensors by the version that wrote them, as torchvision's MNASNet."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.mean(1))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *others)


class Wrapped(nn.Module):
    """As DataParallel writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Versioned()


@pytest.mark.parametrize(
    ("net", "lost", "formats"),
    [(Own, "torchscript", ("pt2", "onnx")), (Ceil, "pt2", ("onnx",))],
)
def test_a_format_that_cannot_be_written_takes_no_other_along(
    net: type[nn.Module], lost: str, formats: tuple[str, ...], tmp_path: Path
) -> None:
    torch.save(net().state_dict(), tmp_path / "net.pt")
    out = tmp_path / "out"
    with pytest.raises(
        PartialExportError, match=f"without {lost}: the model cannot be written by (T|t)orch"
    ):
        export(
            tmp_path / "net.pt",
            f"{__file__}:{net.__name__}",
            ["x:float32[batch=1..3,length=3..20,4]"],
            output_dir=out,
            formats=(*formats, lost),
        )
    written = {f"net.{format}" for format in formats}
    assert {each.name for each in out.iterdir()} == written | {f"{x}.report.json" for x in written}


@pytest.mark.parametrize("saved", ["plain", "training", "wrapped"])
def test_modules_read_their_tensors_by_the_version_that_wrote_them(
    saved: str, tmp_path: Path
) -> None:
    state = Versioned().state_dict()
    what = {"plain": state, "training": {"model": state, "epoch": 3}}
    torch.save(what.get(saved, Wrapped().state_dict()), tmp_path / "net.pt")
    export(
        tmp_path / "net.pt",
        f"{__file__}:Versioned",
        ["x:float32[batch=1..3,length=3..20,4]"],
        output_dir=tmp_path,
        formats=("pt2",),
    )
    assert (tmp_path / "net.pt2").exists()


class Length(nn.Module):
    """Divides a weight by its length."""

    def forward(self, weight: Tensor) -> Any:
        return weight / torch.norm(weight, dim=None, keepdim=True)


class Parametrized(nn.Module):
    """Its script compiles and refuses to run; its ONNX states another rank than it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        nn.utils.parametrize.register_parametrization(self.layer, "weight", Length())

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_what_runs_is_written_though_a_first_form_does_not(tmp_path: Path) -> None:
    torch.save(Parametrized().state_dict(), tmp_path / "net.pt")
    formats = ("onnx", "torchscript")
    inputs = ["x:float32[batch=1..3,4]"]
    reports = export(
        tmp_path / "net.pt",
        f"{__file__}:Parametrized",
        inputs,
        output_dir=tmp_path / "out",
        formats=formats,
        quick=True,
    )
    assert [report.format for report in reports] == list(formats)
