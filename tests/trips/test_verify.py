"""What `export` certified, `verify` confirms on the same machine; another artifact it refuses."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.verify import Check, verify_archive
from modelyard.exporter import export
from tests.shared import DIGITS

NETS = """
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, scale, dtype="float32"):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
        ).to(getattr(torch, dtype))
        self.scale = scale

    def forward(self, x):
        return self.layers(x) * self.scale


class Attention(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.weigh = nn.Linear(8, 1)
        self.scale = scale

    def forward(self, ids, attention_mask):
        values = self.table(ids) * self.scale
        weights = self.weigh(self.table(ids)).squeeze(-1)
        weights = weights.masked_fill(attention_mask == 0, float("-inf")).softmax(-1)
        return (weights.unsqueeze(-1) * values).sum(1), ids.sum(1)


class Segments(nn.Module):
    # Normalises each picture: of zeros, what is left is rounding.
    def __init__(self):
        super().__init__()
        sizes = (3, 6, 6, 6)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.InstanceNorm2d(b), nn.PReLU())
                for a, b in zip(sizes, sizes[1:])
            )
        )

    def forward(self, x):
        return self.layers(x)
"""
ROWS = "x:{dtype}[batch=1..3,8]"
TOKENS = ("ids:int64[batch=1..3,length=2..5]", "attention_mask:int64[batch,length]")


def archived(
    folder: Path,
    net: str,
    inputs: Sequence[str],
    formats: tuple[str, str],
    model_args: dict[str, Any],
    dtype: str | None = None,
    quantize: str | None = None,
) -> Path:
    """Export a net of `NETS` in two formats, and archive the first with the second as its twin.

    Args:
        folder: empty.
        net: a class of `NETS`.
        inputs: as `export` takes them.
        formats: of the artifact and of its twin.
        model_args: of the class.
        dtype: of both.
        quantize: of the first.
    """
    file, checkpoint = folder / "nets.py", folder / "net.ckpt"
    file.write_text(NETS)
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    torch.manual_seed(0)
    torch.save(namespace[net](**model_args).state_dict(), checkpoint)
    # What is quantised is an export of its own.
    chosen = [[formats[0]], [formats[1]]] if quantize else [formats]
    artifact, twin = (
        report.artifact
        for place, each in enumerate(chosen)
        for report in export(
            checkpoint,
            f"{file}:{net}",
            inputs,
            formats=each,
            output_dir=folder / "out",
            model_args=model_args,
            dtype=dtype,
            quantize=quantize if place == 0 else None,
        )
    )
    return archive(artifact, twin, folder)


def archive(artifact: Path, twin: Path, folder: Path) -> Path:
    return write_archive(
        "net",
        version="1.0",
        artifact=artifact,
        explain_artifact=twin,
        handler="base_handler",
        output_dir=folder / "store",
        dry_run=False,
    )


def verified(path: Path) -> Check:
    """Return what came of comparing artifact and twin; every other check has passed."""
    with open_archive(path) as opened:
        *others, parity = verify_archive(opened, device="cpu")
    assert [check.problem for check in others] == [None, None]
    assert parity.subject == "parity"
    return parity


@pytest.mark.nightly
def test_outputs_in_the_thousands_are_compared_by_their_size(tmp_path: Path) -> None:
    path = archived(
        tmp_path, "Scaled", [ROWS.format(dtype="float32")], ("onnx", "pt2"), {"scale": 1e4}
    )

    check = verified(path)

    assert check.problem is None
    assert "net.onnx and net.pt2 agree in 15 cases: max_abs " in check.result


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the digits model of eight bits, and its twin."""
    folder = tmp_path_factory.mktemp("int8")
    arguments = (DIGITS / "digits.pt", f"{DIGITS}/net.py:DigitsNet", ["image:float32[batch,1,8,8]"])
    (artifact,) = export(*arguments, output_dir=folder / "int8", quantize="int8-dynamic")
    (twin,) = export(*arguments, output_dir=folder / "full", formats=["pt2"])
    return artifact.artifact, twin.artifact


@pytest.mark.nightly
def test_a_quantised_artifact_is_compared_as_its_export_compared_it(
    int8: tuple[Path, Path], tmp_path: Path
) -> None:
    check = verified(archive(*int8, tmp_path))

    assert check.problem is None
    assert re.search(r"agree in 40 cases: top-1 agreement (1|0\.99\d*), ", check.result)


@pytest.mark.nightly
def test_a_quantised_artifact_without_its_weights_is_refused(
    int8: tuple[Path, Path], tmp_path: Path
) -> None:
    import hashlib

    import onnx
    from onnx import numpy_helper

    (tmp_path / "in").mkdir()
    artifact, report = tmp_path / "in" / "digits.onnx", tmp_path / "in" / "digits.onnx.report.json"
    model = onnx.load(int8[0])
    weights = next(each for each in model.graph.initializer if "quantized" in each.name)
    values = numpy_helper.to_array(weights)
    weights.CopyFrom(numpy_helper.from_array(values[::-1].copy(), weights.name))
    onnx.save(model, artifact)
    stated = json.loads(int8[0].with_name(report.name).read_text())
    stated["artifact_sha256"] = hashlib.sha256(artifact.read_bytes()).hexdigest()
    report.write_text(json.dumps(stated))

    problem = verified(archive(artifact, int8[1], tmp_path)).problem

    assert problem is not None
    assert "top-1 agreement 0." in problem


@pytest.mark.nightly
def test_integers_masks_and_the_size_of_outputs_are_those_of_the_export(tmp_path: Path) -> None:
    path = archived(tmp_path, "Attention", TOKENS, ("onnx", "pt2"), {"scale": 1e3})

    assert verified(path).problem is None


GRID = {
    **{
        f"{dtype}-{scale:g}": (dtype, None, ("onnx", "pt2"), scale)
        for dtype in ("float32", "float64")
        for scale in (1e-6, 1e-3, 1.0, 1e3, 1e6)
    },
    **{
        f"fp16-{scale:g}": ("float32", "fp16", ("onnx", "pt2"), scale) for scale in (1e-6, 1.0, 1e3)
    },
    **{
        f"int8-{scale:g}": ("float32", "int8-dynamic", ("onnx", "pt2"), scale)
        for scale in (1e-6, 1e-3, 1.0, 1e3, 1e6)
    },
    **{
        f"bf16-{scale:g}": ("float32", "bf16", ("torchscript", "pt2"), scale)
        for scale in (1e-6, 1.0, 1e6)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cast", "formats", "scale"), GRID.values(), ids=GRID)
def test_what_was_certified_is_confirmed(
    tmp_path: Path, dtype: str, cast: str | None, formats: tuple[str, str], scale: float
) -> None:
    path = archived(
        tmp_path,
        "Scaled",
        [ROWS.format(dtype=dtype)],
        formats,
        {"scale": scale, "dtype": dtype},
        dtype=None if cast == "int8-dynamic" else cast,
        quantize="int8-dynamic" if cast == "int8-dynamic" else None,
    )

    assert verified(path).problem is None


@pytest.mark.nightly
def test_cases_in_which_the_checkpoint_is_ill_conditioned_are_those_of_the_export(
    tmp_path: Path,
) -> None:
    """ONNX Runtime and torch differ by whole numbers at zeros, and so would torch and torch."""
    path = archived(tmp_path, "Segments", ["x:float32[batch=1..2,3,8,8]"], ("onnx", "pt2"), {})
    artifact, twin = (tmp_path / "out" / f"net.{suffix}" for suffix in ("onnx", "pt2"))
    report = artifact.with_name("net.onnx.report.json")
    stated = json.loads(report.read_text())
    cases = {each["case"] for each in stated["parity"]["ill_conditioned"]["cases"]}
    assert cases <= {f"batch={n} ({kind} values)" for n in (1, 2) for kind in ("zeros", "tiny")}

    check = verified(path)

    assert check.problem is None
    assert f"without {len(cases)} in which the checkpoint is ill-conditioned" in check.result
    del stated["parity"]["ill_conditioned"]
    report.write_text(json.dumps(stated))
    path.unlink()
    problem = verified(archive(artifact, twin, tmp_path)).problem
    assert problem is not None
    assert "(zeros values)" in problem or "(tiny values)" in problem
