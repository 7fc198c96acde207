"""How fast and how equal are eight bits, and with undecided rows run again in float32?

Digits: a CNN, trained here, on rows that it has not seen, moved, noisy, brighter and darker.
ResNet-50 (`--resnet`): trained here on digits of 32 × 32 pixels for 100 steps. Printed are speed
beside float32 in onnxruntime, the share of labels that equal float32's, and of rows that run again.

    python benchmarks/exact_labels.py [--resnet] [--pixels 32] [--rows 5579]
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from modelyard import export
from modelyard.base.terminal import out, plain_table
from modelyard.exporter import ParityError

TRAINED_AT = 32
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "int8-dynamic": {"quantize": "int8-dynamic"},
    "int8-static": {"quantize": "int8-static"},
    "int8-static, exact labels": {"quantize": "int8-static", "exact_labels": True},
}


class DigitsCnn(nn.Sequential):
    """Two convolutions with batch-norm, for 8 × 8 pixels."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
        )


class ResNet50(nn.Module):
    """The network of transformers in its default sizes, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        self.net = ResNetForImageClassification(ResNetConfig(num_labels=10))

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(pixels).logits
        return logits


def digits() -> tuple[Tensor, Tensor]:
    """Return pixels from 0 to 1 and labels, in an order of their own."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    return pixels[order], torch.tensor(data.target)[order]


def varied(pixels: Tensor, times: int) -> Tensor:
    """Return rows moved by a pixel, noisy, brighter and darker, so many times as many."""
    draw = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(times):
        moved = torch.stack(
            [
                row.roll(tuple(torch.randint(-1, 2, (2,), generator=draw).tolist()), (1, 2))
                for row in pixels
            ]
        )
        light = 0.75 + 0.5 * torch.rand(len(moved), 1, 1, 1, generator=draw)
        noise = 0.1 * torch.randn(moved.shape, generator=draw)
        parts.append((moved * light + noise).clamp(0, 1.25))
    return torch.cat(parts)


def train(net: nn.Module, pixels: Tensor, labels: Tensor, size: int, steps: int) -> nn.Module:
    """Train on varied rows, grown to a size."""
    optimizer = torch.optim.Adam(net.parameters(), 2e-3 if size == 8 else 1e-3)
    for _ in range(steps):
        some = torch.randint(len(pixels), (64,))
        optimizer.zero_grad()
        rows = grown(varied(pixels[some], 1), size)
        torch.autograd.backward(nn.functional.cross_entropy(net(rows), labels[some]))
        optimizer.step()
    return net.eval()


def grown(pixels: Tensor, size: int) -> Tensor:
    """Return digits as they are, or of another size in three channels."""
    if size == 8:
        return pixels
    large = nn.functional.interpolate(pixels, (size, size), mode="bilinear")
    return (large.expand(-1, 3, -1, -1) - 0.3) / 0.4


def session(path: Path, more: tuple[str, ...] = ()) -> onnxruntime.InferenceSession:
    """Open an artifact with one thread, and with more of its values as outputs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not more:
        return onnxruntime.InferenceSession(path, options)
    model = onnx.load(path)
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None) for name in more
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def main() -> None:
    """Print the table."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--resnet", action="store_true")
    given.add_argument("--pixels", type=int, default=32, help="of ResNet-50's inputs, as measured")
    given.add_argument("--rows", type=int, default=5579)
    given.add_argument("--batch", type=int, default=8)
    options = given.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, labels = digits()
    if options.resnet:
        size = options.pixels
        net = train(ResNet50(), pixels[:1000], labels[:1000], TRAINED_AT, steps=100)
        model, inputs = f"{__file__}:ResNet50", f"pixels:float32[batch,3,{size},{size}]"
    else:
        size = 8
        net = train(DigitsCnn(), pixels[:1000], labels[:1000], size, steps=400)
        model, inputs = f"{__file__}:DigitsCnn", "input:float32[batch,1,8,8]"
    rows = grown(varied(pixels[1000:], 7)[: options.rows], size)
    known = grown(varied(pixels[:1000], 1)[: 512 if size <= TRAINED_AT else 48], size)
    with torch.no_grad():
        found = net(rows[:797]).argmax(1)
    right = float((found == labels[1000 : 1000 + len(found)]).float().mean())
    out.print(f"accuracy on {len(found)} rows that were not trained on: {right:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(net.state_dict(), f"{folder}/net.pt")
        np.save(f"{folder}/known.npy", known.numpy())
        compare(Path(folder), model, inputs, rows, options.batch)


def compare(folder: Path, model: str, inputs: str, rows: Tensor, batch: int) -> None:
    """Export every kind, and measure each on the same rows."""
    table = plain_table(
        *(("artifact", "left"), ("MB", "right"), ("ms a row", "right"), ("speed", "right")),
        *(("equal labels", "right"), ("run again", "right"), ("max error", "right")),
    )
    batches = [part.numpy() for part in torch.split(rows, batch)]
    full_ms, wanted = 0.0, np.zeros(0)
    for name, arguments in KINDS.items():
        is_quantised = "quantize" in arguments
        try:
            (report,) = export(
                f"{folder}/net.pt",
                model,
                inputs,
                output_dir=folder,
                formats="onnx",
                quick=True,
                samples=[f"{folder}/known.npy"] if is_quantised else [],
                max_loss=0.5,
                **arguments,
            )
        except ParityError:
            table.add_row(name, "refused")
            continue
        running = session(report.artifact)
        (argument,) = (each.name for each in running.get_inputs())
        for part in batches[:2]:
            running.run(None, {argument: part})
        found, begun = [], time.process_time()
        for part in batches:
            found.append(running.run(None, {argument: part})[0])
        ms = (time.process_time() - begun) / len(rows) * 1e3
        answers = np.concatenate(found)
        again = ""
        if "exact_labels" in arguments:
            counting = session(report.artifact, ("undecided_count",))
            counts = [int(counting.run(None, {argument: part})[1]) for part in batches]
            again = f"{sum(counts) / len(rows):.2%}"
        if not is_quantised:
            full_ms, wanted = ms, answers
        equal = float((answers.argmax(1) == wanted.argmax(1)).mean())
        table.add_row(
            name,
            f"{report.artifact_bytes / 1e6:.2f}",
            f"{ms:.3g}",
            f"{full_ms / ms:.2f} ×",
            f"{equal:.2%}",
            again,
            f"{np.abs(answers - wanted).max():.3g}",
        )
    out.print(table)
    labels = len(set(wanted.argmax(1).tolist()))
    flags = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    )
    out.print(
        f"{len(rows)} rows of {labels} labels in batches of {batch}, one thread, CPU seconds; "
        f"onnxruntime {onnxruntime.__version__}; VNNI: {'yes' if 'vnni' in flags else 'no'}"
    )


if __name__ == "__main__":
    main()
