"""Artifacts of a lower precision: cast, or quantised."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import parse_inputs
from modelyard.base.plugins import registered
from modelyard.exporter import ConversionError, ParityError, UsageError, export
from modelyard.exporter.inputs.samples import Sample
from modelyard.exporter.prove.loss import MAX_LOSS, LossLearner, doubts
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


@pytest.mark.parametrize(
    "quantize", [pytest.param("int8-dynamic", marks=pytest.mark.nightly), "int8-static"]
)
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
        pytest.param({"exact_labels": True}, "give --quantize int8-static", id="not quantised"),
        pytest.param({"max_loss": 1.0}, "--max-loss 1.0 is not a share", id="all"),
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
        formats=["pt2"],  # the one that has a place for examples
    )
    report = _report(tmp_path / "out", "net.pt2")
    assert report["parity"]["samples"] == [{"file": "mine.pt", "rows": 2}]
    assert report["parity"]["kinds"] == ["large", "negative", "random", "sample", "tiny", "zeros"]
    assert report["parity"]["integers"] == {"ids": [0, 999]}
    assert row.numpy().tobytes() not in (tmp_path / "out" / "net.pt2").read_bytes()


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


@pytest.mark.nightly
def test_float64_of_float32_is_proven_as_that(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(THROUGH_FLOAT)
    inputs = ["x:float64[batch=1..8,4]"]
    (report,) = export(checkpoint, model, inputs, output_dir=tmp_path / "out", formats=["onnx"])
    assert [spec.dtype for spec in report.signature.outputs] == ["float64"]
    assert report.parity.tolerance == 1e-4


# -- what is lost, by an adversary -----------------------------------------------------------------


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda y: y.to(dtype).float()


def _noisy(share: float) -> Callable[[Tensor], Tensor]:
    return lambda y: y + share * y.std(0) * _normal(*y.shape)


def _column(place: int, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda y: torch.cat(
        [y[:, :place], change(y[:, place : place + 1]), y[:, place + 1 :]], 1
    )


ROWS = 96
KELVIN = 300 + 1.8 * _normal(ROWS, 1)
LOGITS = 4 * _normal(ROWS, 10)
SURE = LOGITS + 8 * nn.functional.one_hot(LOGITS.argmax(1), 10)
FLAT = torch.softmax(0.1 * _normal(ROWS, 50_000), -1)
SHARP = torch.softmax(8 * _normal(ROWS, 50_000), -1)
UNITS = torch.cat([1e5 + 2e4 * _normal(ROWS, 1), torch.sigmoid(_normal(ROWS, 1))], 1)
IMAGE = _normal(ROWS, 4, 6, 6) * torch.tensor([1, 10, 100, 1000.0]).reshape(1, 4, 1, 1)
DEAD = torch.cat([torch.full((ROWS, 1), 5.0), _normal(ROWS, 1)], 1)
LOSSES: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], bool]] = {
    "kelvin, bfloat16": (KELVIN, _as(torch.bfloat16), True),
    "kelvin, nothing but the offset": (KELVIN, lambda y: y.mean(0).expand_as(y), True),
    "kelvin, half a spread off": (KELVIN, lambda y: y + 0.9, True),
    "outputs of 1e-6, zeros": (LOGITS * 1e-6, torch.zeros_like, True),
    "flat softmax, zeros": (FLAT, torch.zeros_like, True),
    "flat softmax, bfloat16": (FLAT, _as(torch.bfloat16), True),
    "logits, two labels exchanged": (LOGITS, lambda y: y[:, [1, 0, *range(2, 10)]], True),
    "logits, a class is dead": (LOGITS, _column(3, torch.zeros_like), True),
    "logits, a fifth larger": (LOGITS, lambda y: 1.2 * y, True),
    "logits, rows moved": (LOGITS, lambda y: y.roll(1, 0), True),
    "logits, noise of a fifth": (LOGITS, _noisy(0.2), True),
    "price and chance, the chance is gone": (UNITS, _column(1, torch.zeros_like), True),
    "price and chance, the price rounded": (
        UNITS,
        _column(0, lambda y: y.div(5e4).round() * 5e4),
        True,
    ),
    "image, one channel is noise": (IMAGE, _column(0, lambda y: _normal(*y.shape)), True),
    "a row becomes NaN": (LOGITS, lambda y: torch.cat([y[:1] * torch.nan, y[1:]]), True),
    "kelvin, float16": (KELVIN, _as(torch.float16), False),
    "outputs of 1e-6, bfloat16": (KELVIN.sub(300) * 1e-6, _as(torch.bfloat16), False),
    "logits of a sure model, bfloat16": (SURE, _as(torch.bfloat16), False),
    "logits, a hundredth larger": (LOGITS, lambda y: 1.01 * y, False),
    "logits, noise of a thousandth": (LOGITS, _noisy(1e-3), False),
    "sharp softmax, bfloat16": (SHARP, _as(torch.bfloat16), False),
    "flat softmax, float32 of another order": (FLAT, lambda y: y * (1 + 1e-7), False),
    "price and chance, float16": (UNITS / 10, _as(torch.float16), False),
    "image, noise of a hundredth": (IMAGE, _noisy(0.01), False),
    "what does not vary, noise of float32": (DEAD, lambda y: y + 1e-6 * _normal(*y.shape), False),
    "one number a row": (KELVIN[:, 0], _noisy(1e-3), False),
    "labels": (LOGITS.argmax(1), torch.clone, False),
}


def test_what_a_precision_loses_is_measured_by_what_varies() -> None:
    misses: list[str] = []
    alarms: list[str] = []
    for name, (expected, change, is_wrong) in LOSSES.items():
        learner, found = LossLearner(), change(expected)
        for one, two in zip(torch.split(expected, 7), torch.split(found, 7), strict=True):
            learner.see(one, two)
        loss = learner.loss()
        assert (loss.loss > MAX_LOSS) is bool(loss.outside())
        sys.stdout.write(f"{'wrong' if is_wrong else 'right':6}{name:40}{loss.loss:9.4f}\n")
        if (loss.loss > MAX_LOSS) is not is_wrong:
            (misses if is_wrong else alarms).append(name)
    sys.stdout.write(f"misses: {misses}, false alarms: {alarms}\n")
    assert (misses, alarms) == ([], [])
    learner = LossLearner()
    learner.see(KELVIN, _as(torch.bfloat16)(KELVIN))
    loss = learner.loss()
    assert loss.spread == pytest.approx(float(KELVIN.max() - KELVIN.min()))
    apart = (KELVIN - _as(torch.bfloat16)(KELVIN)).double()
    assert loss.error == pytest.approx(float(apart.square().mean().sqrt()) / loss.spread)
    assert loss.r2 == pytest.approx(
        1 - float(apart.square().sum() / (KELVIN - KELVIN.mean()).double().square().sum())
    )


OFFSET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return 300 + 5 * self.layers(x)
"""


def test_an_offset_does_not_hide_what_bfloat16_loses(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(OFFSET)
    torch.save({"x": torch.randn(8, 16)}, tmp_path / "held.pt")
    (report,) = export(
        checkpoint,
        model,
        ["x:float32[batch,16]"],
        output_dir=tmp_path / "out",
        formats=["torchscript"],
        dtype="bf16",
        quick=True,
        samples=[tmp_path / "held.pt"],
    )
    (warning,) = [line for line in report.warnings if "loses more than 1.00%" in line]
    assert "on 8 rows of the samples: R2 0." in warning
    stated = _report(tmp_path / "out", "net.pt")["parity"]["outputs"]["output"]["loss"]
    assert (stated["rows"], stated["on"]) == (8, "rows of the samples")
    assert stated["loss"] > 0.01
    assert stated["top1_agreement"] is None


# -- samples that are not what the model is for, by an adversary ---


def _trained(data: Any, norm: bool, width: int = 32) -> tuple[nn.Module, Tensor]:
    """Train on rows as they are usually prepared: standardised, pixels from 0 to 1."""
    x = torch.tensor(data.data, dtype=torch.float32)
    x = x / 16 if x.shape[1] == 64 else (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target)
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(width)] if norm else []
    net = nn.Sequential(nn.Linear(x.shape[1], width), *norms, nn.ReLU(), nn.Linear(width, 10))
    steps = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        steps.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
        steps.step()
    return net.eval(), x[torch.randperm(len(x))]


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "ten times too dark": lambda x: x / 10,
    "ten times too bright": lambda x: x * 10,
    "255 times too bright": lambda x: x * 255,
    "constant": lambda x: torch.full_like(x, 0.5),
    "one row": lambda x: x[:1].repeat(len(x), 1),
}
LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x,
    "few": lambda x: x[:32],
    "others": lambda x: x[len(x) // 2 :],
    "noisy": lambda x: x + 0.1 * x.std() * _normal(*x.shape),
    "a little darker": lambda x: x * 0.7,
}


def test_samples_that_are_not_what_the_model_is_for_are_named() -> None:
    from sklearn import datasets  # takes a second, which every process that collects would spend

    misses: list[str] = []
    alarms: list[str] = []
    nets = {
        f"{name}{', batch-norm' if norm else ''}": _trained(data, norm)
        for name, data in (
            ("digits", datasets.load_digits()),
            ("wine", datasets.load_wine()),
            ("iris", datasets.load_iris()),
        )
        for norm in (False, True)
    }
    for name, (net, rows) in nets.items():
        signature = parse_inputs([f"x:float32[batch,{rows.shape[1]}]"])
        for changes, is_wrong in ((UNLIKE, True), (LIKE, False)):
            for kind, change in changes.items():
                samples = [
                    Sample("rows.npy", (part,), {"batch": len(part)})
                    for part in torch.split(change(rows), 8)
                ]
                found = doubts(net, samples, signature)
                sys.stdout.write(f"{name:22}{kind:24}{found}\n")
                if bool(found) is not is_wrong:
                    (misses if is_wrong else alarms).append(f"{name}: {kind}")
    sys.stdout.write(f"misses: {misses}, false alarms: {alarms}\n")
    assert (misses, alarms) == ([], [])
    net, rows = nets["digits"]
    one = rows[net(rows).argmax(1) == 3][:40]
    (text,) = doubts(net, [Sample("rows.npy", (one,), {})], parse_inputs(["x:float32[batch,64]"]))
    assert "gives 40 rows only 1 of 10 labels, 3;" in text


WIDE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, x):
        return self.layers(x)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("max_loss", "quantize"),
    [
        pytest.param(0.05, "int8-dynamic", id="within"),
        pytest.param(0.0, None, id="never"),
    ],
)
def test_the_smallest_within_the_loss_is_chosen_and_float32_else(
    max_loss: float, quantize: str | None, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(WIDE)
    # More rows than a batch has, and too few to calibrate with.
    torch.save({"x": torch.randn(20, 16)}, tmp_path / "rows.pt")
    lines: list[str] = []
    (report,) = export(
        checkpoint,
        model,
        ["x:float32[batch,16]"],
        output_dir=tmp_path / "out",
        quantize="auto",
        max_loss=max_loss,
        samples=[tmp_path / "rows.pt"],
        quick=True,
        tell=lines.append,
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "net.onnx",
        "net.onnx.report.json",
    ]
    stated = _report(tmp_path / "out", "net.onnx")
    assert stated["details"].get("quantize") == quantize
    assert f"--quantize {quantize}" in stated["command"] or quantize is None
    assert report.artifact.stat().st_size == stated["artifact_bytes"]
    table = [line for line in lines if line.startswith(("->", "  "))]
    heads, full, dynamic, static = table
    assert heads.split()[:3] == ["size", "batch", "1"]
    assert (full.split()[0] == "->") is (quantize is None)
    assert (dynamic.split()[0] == "->") is (quantize is not None)
    assert dynamic.split()[-1] == "20"
    assert static.split() == ["int8-static", "refused"]
    assert len(heads) == len(dynamic)
    assert any("--sample gives 20 rows; expected 32" in line for line in lines)
    assert lines[-1].startswith("fp32 stays" if quantize is None else "int8-dynamic is")


@pytest.mark.nightly
def test_undecided_rows_run_again_in_float32(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(WIDE)
    rows = _normal(1536, 16)
    torch.save({"x": rows[:512]}, tmp_path / "rows.pt")
    labels: dict[bool, Tensor] = {}
    for is_exact in (False, True):
        (report,) = export(
            checkpoint,
            model,
            ["x:float32[batch,16]"],
            output_dir=tmp_path / "out",
            quantize="int8-static",
            samples=[tmp_path / "rows.pt"],
            exact_labels=is_exact,
            max_loss=0.1,
        )
        artifact = open_artifact(report.artifact, "onnx")
        answers = [torch.as_tensor(artifact(part)) for part in torch.split(rows[512:], 8)]
        labels[is_exact] = torch.cat(answers).argmax(1)
        assert report.signature.batching is not None
        assert report.signature.batching.batchable
    net = runpy.run_path(model.rpartition(":")[0])["Net"]()
    net.load_state_dict(torch.load(checkpoint))
    right = net(rows[512:]).argmax(1)
    assert int((labels[False] != right).sum()) > 0
    assert int((labels[True] != right).sum()) == 0
    stated = report.details["exact_labels"]
    assert isinstance(stated, dict)
    assert stated["output"] == "output"
    assert 0 < stated["below"] < 1


def test_labels_of_what_has_none_cannot_be_exact(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(OFFSET)
    torch.save({"x": torch.randn(8, 16)}, tmp_path / "rows.pt")
    with pytest.raises(
        ConversionError, match=r'"output" is output:float32\[batch.*,1\]; expected a'
    ):
        export(
            checkpoint,
            model,
            ["x:float32[batch,16]"],
            output_dir=tmp_path / "out",
            quantize="int8-dynamic",
            samples=[tmp_path / "rows.pt"],
            exact_labels=True,
            quick=True,
        )
