"""A network that chooses by a size inside the proven range is certified where it is right only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from modelyard.exporter import export
from modelyard.exporter.errors import ExportError
from modelyard.handlers.errors import InputMismatch
from modelyard.handlers.models.backends import open_artifact

Step = Callable[[Tensor], Tensor]
LENGTHS = "x:float32[batch=1..3,length=3..40,4]"


def padded(x: Tensor, to: int, value: float = 1.0) -> Tensor:
    left = x.shape[1] % to
    return pad(x, (0, 0, 0, to - left), value=value) if left else x


# What a size chooses: each is right along the way that the example, of length 3, 5 or 7, goes.
WRONG: dict[str, Step] = {
    "odd or even": lambda x: x * 2 if x.shape[1] % 2 else x,
    "odd is padded": lambda x: padded(x, 2),
    "a window of 8": lambda x: padded(x, 8).view(len(x), -1, 8, 4).mean(2),
    "a window of 3": lambda x: padded(x, 3).view(len(x), -1, 3, 4).amax(2),
    "one length": lambda x: x + 1 if x.shape[1] == 16 else x,
    "one of some": lambda x: x + 1 if x.shape[1] in (11, 23, 37) else x,
    "all but one": lambda x: x + 1 if x.shape[1] != 31 else x,
    "a remainder": lambda x: x * 3 if x.shape[1] % 5 == 4 else x,
    "a half": lambda x: x[:, : x.shape[1] // 2] if x.shape[1] // 2 % 2 == 0 else x,
    "a table": lambda x: x * [1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 1.0, 3.0][x.shape[1] % 8],
    "a square": lambda x: x - 1 if x.shape[1] ** 2 % 9 == 0 else x,
    "a bit": lambda x: x + 1 if x.shape[1] // 4 % 2 else x,
    "both sizes": lambda x: x + 1 if (x.shape[0] + x.shape[1]) % 6 == 0 else x,
    "a product": lambda x: x + 1 if x.shape[0] * x.shape[1] == 66 else x,
    "more rows than steps": lambda x: x + 1 if x.shape[0] * 12 > x.shape[1] else x,
    "rows": lambda x: x + 1 if x.shape[0] == 3 else x,
    "the end": lambda x: x + 1 if x.shape[1] == 40 else x,
    "a middle": lambda x: x + 1 if 20 < x.shape[1] < 23 else x,
    "rounded": lambda x: x + 1 if round(x.shape[1] / 10) == 3 else x,
    "a multiple of 16": lambda x: x.cumsum(1) if x.shape[1] % 16 == 0 else x,
}
RIGHT: dict[str, Step] = {
    "both ways alike": lambda x: x[:, :] if x.shape[1] % 2 else x + 0,
    "always padded": lambda x: pad(x, (0, 0, 0, 8 - x.shape[1] % 8)).view(len(x), -1, 8, 4).sum(2),
    "padded by nothing": lambda x: pad(x, (0, 0, 0, -x.shape[1] % 3)) if x.shape[1] % 3 else x,
    "halves": lambda x: x[:, : x.shape[1] // 2].sum(1, keepdim=True) + x,
    "outside of the range": lambda x: x + 1 if x.shape[1] > 40 else x,
    "strided": lambda x: x[:, ::2].transpose(1, 2).contiguous().transpose(1, 2),
    "by its length": lambda x: x / x.shape[1],
}


class Net(nn.Module):
    """A step that a size chooses, between two layers."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = {**WRONG, **RIGHT}[step]
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.step(self.first(x)).mean(1))


def exported(step: str, folder: Path, formats: tuple[str, ...] = ("pt2",)) -> None:
    torch.manual_seed(0)
    torch.save(Net(step).state_dict(), folder / "net.pt")
    export(
        folder / "net.pt",
        f"{__file__}:Net",
        [LENGTHS],
        output_dir=folder,
        model_args={"step": step},
        formats=formats,
    )


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[pytest.mark.nightly] * (at % 4)) for at, step in enumerate(WRONG)],
)
def test_what_a_size_chooses_is_not_certified(step: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"test_guards\.py|the model (fixes|cannot)|holds for"):
        exported(step, tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["net.pt"]


class Rare(nn.Module):
    """Two of 3,249 pictures are another way's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 2, 3)

    def forward(self, x: Tensor) -> Any:
        found = self.layer(x).mean((2, 3))
        return found + 1 if x.shape[2] * x.shape[3] == 37 * 41 else found


def test_a_guard_of_two_sizes_is_evaluated_at_all_of_them(tmp_path: Path) -> None:
    torch.save(Rare().state_dict(), tmp_path / "net.pt")
    picture = "x:float32[batch=1..2,1,height=8..64,width=8..64]"
    with pytest.raises(ExportError, match=r"== 1517|!= 1517"):
        export(
            tmp_path / "net.pt",
            f"{__file__}:Rare",
            [picture],
            output_dir=tmp_path,
            formats=("pt2",),
        )


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[pytest.mark.nightly] * (at % 3)) for at, step in enumerate(RIGHT)],
)
def test_a_guard_that_chooses_nothing_is_no_obstacle(step: str, tmp_path: Path) -> None:
    exported(step, tmp_path)
    assert (tmp_path / "net.pt2").exists()


def test_a_program_of_somebody_else_keeps_what_it_takes_for_granted(tmp_path: Path) -> None:
    """Its file says where it does not hold; whoever writes it in another format is told."""
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Net("one length"), (torch.rand(5, 11, 4),), dynamic_shapes=dims)
    torch.export.save(program, tmp_path / "net.pt2")
    with pytest.raises(ExportError, match=r"Guard failed: x\.size\(\)\[1\] != 16"):
        export(tmp_path / "net.pt2", None, [LENGTHS], output_dir=tmp_path / "out", formats=["onnx"])
    short = "x:float32[batch=1..3,length=3..15,4]"
    export(tmp_path / "net.pt2", None, [short], output_dir=tmp_path / "out", formats=["onnx"])
    artifact = open_artifact(tmp_path / "net.pt2", "pt2")
    with pytest.raises(InputMismatch, match="do not go together"):
        artifact(torch.rand(2, 16, 4))
