"""What one writer cannot do ends with a sentence, and takes no other format along."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.exporter import PartialExportError, export
from modelyard.exporter.errors import ExportError
from tests.exporter import odd_modules
from tests.exporter.odd_modules import ODD, build


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


MISSED = {
    "cond": ("pt2", "onnx"),  # of functions that torch.compile refuses where calls are watched
    "compiled": ("pt2", "onnx"),  # a part's `_orig_mod` is taken from the file's names alone
}
BY_DAY = ("autograd.Function", "names of GraphModule")
FILE = Path(odd_modules.__file__)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.slow) for name in ODD],
)
def test_a_module_of_unusual_make_gets_each_format_that_a_bare_call_gets(
    name: str, tmp_path: Path
) -> None:
    torch.save(build(name).state_dict(), tmp_path / "net.pt")
    failures: dict[str, ExportError] = {}
    try:
        reports = export(
            tmp_path / "net.pt",
            f"{FILE}:build",
            ["x:float32[batch=2..6,4]"],
            model_args={"name": name},
            output_dir=tmp_path / "out",
            formats=("pt2", "onnx", "torchscript"),
            quick=True,
        )
    except PartialExportError as error:
        reports, failures = error.reports, dict(error.failures)
    except ExportError as error:  # and nothing else, which would be a traceback
        reports, failures = [], {"all": error}
    expected = set(ODD[name][1]) - set(MISSED.get(name, ()))
    assert expected <= {report.format for report in reports}
    for failure in failures.values():
        assert len(str(failure).splitlines()) == 1


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
