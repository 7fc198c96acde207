"""Artifacts that another tool wrote are exported as they are: no class, no --input."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from modelyard.exporter import ExportReport, ModelError, UsageError, export
from modelyard.handlers.backends import open_artifact


class Net(nn.Module):
    """Takes a dict, which an artifact does not, and gives one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return scores (N, L, 3) and their sum (N, L)."""
        scores = self.drop(self.layer(batch["x"])) * batch["weight"][:, None, None]
        return {"scores": scores + torch.tensor([1.0, 2.0, 3.0]), "total": scores.sum(2)}


def _program(path: Path, net: nn.Module) -> Path:
    batch, length = Dim("batch", min=2, max=6), Dim("length", min=1, max=9)
    given = {"x": torch.randn(3, 5, 4), "weight": torch.randn(3)}
    shapes = {"x": {0: batch, 1: length}, "weight": {0: batch}}
    torch.export.save(torch.export.export(net, (given,), dynamic_shapes=(shapes,)), path)
    return path


@pytest.fixture(scope="module")
def from_program(tmp_path_factory: pytest.TempPathFactory) -> list[ExportReport]:
    """The reports of an exported program's export to both formats."""
    folder = tmp_path_factory.mktemp("program")
    return export(_program(folder / "net.pt2", Net().eval()), None, (), output_dir=folder / "out")


def test_a_program_from_elsewhere_says_what_it_takes(from_program: list[ExportReport]) -> None:
    for report in from_program:
        assert [str(spec) for spec in report.signature.inputs] == [
            "batch_x:float32[batch=1..6,batch_x_1=1..9,4]",
            "batch_weight:float32[batch=1..6]",
        ]
        assert [spec.name for spec in report.signature.outputs] == ["scores", "total"]
        assert report.signature.batching is not None
        assert report.signature.batching.batchable
        assert report.warnings == ()


def test_its_artifacts_give_what_the_network_gives(from_program: list[ExportReport]) -> None:
    inputs = {"x": torch.randn(1, 7, 4), "weight": torch.randn(1)}
    expected = Net().eval()(inputs)["scores"]
    for report in from_program:
        artifact = open_artifact(report.artifact, report.format, "cpu")
        scores = artifact(inputs["x"], inputs["weight"])[0]
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_its_report_says_where_the_weights_are_from(from_program: list[ExportReport]) -> None:
    content = from_program[0].to_json()
    assert content["model"] == "net.pt2"
    assert content["checkpoint"]["kind"] == "exported program"
    assert content["checkpoint"]["writer"] == f"torch.export {torch.__version__}"


def test_a_program_traced_in_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"differs by .* between two runs"):
        export(_program(tmp_path / "net.pt2", Net().train()), None, (), output_dir=tmp_path / "out")


def test_a_program_takes_no_arguments_of_a_class(tmp_path: Path) -> None:
    source = _program(tmp_path / "net.pt2", Net().eval())
    with pytest.raises(UsageError, match="takes no arguments"):
        export(source, None, (), output_dir=tmp_path / "out", model_args={"classes": 3})
