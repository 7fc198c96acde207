"""Artifacts of a lower precision: cast, or quantised."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelyard.base.plugins import registered
from modelyard.exporter import ParityError, UsageError, export
from modelyard.handlers.models.backends import open_artifact

Author = Callable[[str], tuple[Path, str]]

CLASSES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x, ids):
        return self.layers(x) + 0 * ids.unsqueeze(1)
"""
INPUTS = ["x:float32[batch=1..3,16]", "ids:int64[batch]"]
# Its answer hangs on differences that eight bits do not hold.
FINE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 8)
        with torch.no_grad():
            self.layer.weight.copy_(1 + torch.randn(8, 16) * 1e-3)
            self.layer.weight[:, 0] = 1000.0

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(1, keepdim=True)
"""


def _report(folder: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"{name}.report.json").read_text("utf-8"))
    return report


@pytest.mark.parametrize(
    ("dtype", "format", "file", "tolerance"),
    [
        pytest.param("bf16", "pt2", "net.pt2", 3e-2, marks=pytest.mark.nightly),
        pytest.param("fp16", "pt2", "net.pt2", 1e-2, marks=pytest.mark.nightly),
        ("fp16", "onnx", "net.onnx", 1e-2),
        ("bf16", "torchscript", "net.pt", 3e-2),
        ("fp32", "pt2", "net.pt2", 1e-4),
    ],
)
def test_weights_and_float_inputs_are_cast_and_compared_with_float32(
    dtype: str, format: str, file: str, tolerance: float, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(CLASSES)
    export(checkpoint, model, INPUTS, output_dir=tmp_path / "out", formats=[format], dtype=dtype)
    full = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    artifact = open_artifact(tmp_path / "out" / file, format)
    answer = artifact(torch.ones(2, 16, dtype=getattr(torch, full)), torch.tensor([1, 2]))
    assert str(torch.as_tensor(answer).dtype) == f"torch.{full}"
    report = _report(tmp_path / "out", file)
    assert [spec["dtype"] for spec in report["signature"]["inputs"]] == [full, "int64"]
    assert [spec["dtype"] for spec in report["signature"]["outputs"]] == [full]
    assert report["details"]["dtype"] == dtype
    parity = report["parity"]
    assert parity["tolerance"] == tolerance
    is_cast = dtype != "fp32"
    assert parity["compared_with"] == f"the checkpoint{' in float32' if is_cast else ''}"
    assert (parity["outputs"]["output"]["max_abs"] > 1e-5) == is_cast
    assert f"--dtype {dtype}" in report["command"]


def test_int8_has_a_verdict_of_its_own(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(CLASSES)
    (report,) = export(
        checkpoint, model, INPUTS, output_dir=tmp_path / "out", quantize="int8-dynamic"
    )
    assert report.format == "onnx"
    assert report.details["quantize"] == "int8-dynamic"
    assert report.details["quantized_operators"] == 2
    found = _report(tmp_path / "out", "net.onnx")["parity"]
    assert found["rule"].startswith("top-1 agreement >= 0.99")
    output = found["outputs"]["output"]
    assert output["max_abs"] > 1e-4
    assert (output["top1_agreement"] >= 0.99, output["error"] <= 0.15) == (True, True)


@pytest.mark.parametrize("quantize", ["int8-dynamic", "int8-static"])
def test_a_model_that_eight_bits_do_not_hold_is_refused(
    quantize: str, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(FINE)
    torch.save({"x": torch.randn(64, 16)}, tmp_path / "rows.pt")
    with pytest.raises(ParityError, match=r"top-1 agreement .* expected 0\.99 .*--quantize"):
        export(
            checkpoint,
            model,
            ["x:float32[batch,16]"],
            output_dir=tmp_path / "out",
            quantize=quantize,
            samples=[tmp_path / "rows.pt"] if quantize == "int8-static" else [],
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        pytest.param({"dtype": "fp8"}, '--dtype "fp8" is unknown', id="dtype"),
        pytest.param({"dtype": "bf16"}, "--dtype bf16 does not go with --format onnx", id="bf16"),
        pytest.param({"quantize": "int4"}, '--quantize "int4" is unknown', id="quantise"),
        pytest.param(
            {"quantize": "int8-dynamic", "formats": ["onnx", "pt2"]},
            "--quantize int8-dynamic does not go with --format pt2",
            id="quantised pt2",
        ),
        pytest.param(
            {"quantize": "int8-dynamic", "dtype": "fp16"}, "leave --dtype fp16 out", id="both"
        ),
        pytest.param({"quantize": "int8-static"}, "give --sample FILE", id="no samples"),
        pytest.param(
            {"quantize": "int8-static", "generate": True},
            "does not go with --generate",
            id="text",
            marks=pytest.mark.skipif(
                "generate" not in registered("exports"), reason="it needs a plug-in"
            ),
        ),
    ],
)
def test_a_precision_without_a_form_is_wrong_usage(
    arguments: dict[str, Any], seen: str, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(CLASSES)
    with pytest.raises(UsageError) as caught:
        export(checkpoint, model, INPUTS, output_dir=tmp_path / "out", **arguments)
    assert seen in str(caught.value)


def test_samples_are_compared_and_forgotten(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(CLASSES)
    row = torch.full((16,), 0.123456789)
    torch.save({"x": row.repeat(2, 1), "ids": torch.tensor([1, 0])}, tmp_path / "mine.pt")
    export(
        checkpoint,
        model,
        INPUTS,
        output_dir=tmp_path / "out",
        samples=[tmp_path / "mine.pt"],
        formats=["onnx"],
    )
    report = _report(tmp_path / "out", "net.onnx")
    assert report["parity"]["samples"] == [{"file": "mine.pt", "rows": 2}]
    assert report["parity"]["kinds"] == ["large", "negative", "random", "sample", "tiny", "zeros"]
    assert report["parity"]["integers"] == {"ids": [0, 999]}
    assert row.numpy().tobytes() not in (tmp_path / "out" / "net.onnx").read_bytes()


# Numbers that float32 does not hold, beside tensors, as fills, limits and factors.
DOUBLE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, x):
        a = torch.relu(x - 0.97) * 0.1 + 1.1
        b = torch.where(a > 1.13, a / 3.3, a ** 2.2).clamp(0.123, 7.77)
        c = b.masked_fill(b < 0.4, 0.31) + torch.full_like(b, 0.77)
        return torch.add(c * self.scale, x, alpha=0.13)
"""
THROUGH_FLOAT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, x):
        return ((x * self.scale).float() - 0.97).sin().double() + 0.97
"""


def test_float64_is_proven_as_float64(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(DOUBLE)
    inputs = ["x:float64[batch=1..8,4]"]
    (report,) = export(checkpoint, model, inputs, output_dir=tmp_path / "out", formats=["onnx"])
    assert report.parity.tolerance == 1e-8
    assert report.parity.max_abs < 1e-13
    x = torch.rand(3, 4, dtype=torch.float64)
    net = runpy.run_path(model.rpartition(":")[0])["Net"]()
    net.load_state_dict(torch.load(checkpoint))
    found = open_artifact(tmp_path / "out" / "net.onnx", "onnx")(x)
    assert torch.allclose(torch.as_tensor(found), net(x), rtol=0, atol=1e-14)


def test_float64_of_float32_is_proven_as_that(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(THROUGH_FLOAT)
    inputs = ["x:float64[batch=1..8,4]"]
    (report,) = export(checkpoint, model, inputs, output_dir=tmp_path / "out", formats=["onnx"])
    assert [spec.dtype for spec in report.signature.outputs] == ["float64"]
    assert report.parity.tolerance == 1e-4
