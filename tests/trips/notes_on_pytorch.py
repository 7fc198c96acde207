"""What the Notes on PyTorch do, call by call: `python notes_on_pytorch.py PART`, in a folder.

Each part writes its files there, and what it saw as JSON to `PART.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A block of MobileNetV2: wider, one filter a channel, narrower; added where shapes agree."""

    def __init__(self, inp: int, out: int, stride: int, wider: int) -> None:
        super().__init__()
        hidden = inp * wider
        layers: list[nn.Module] = [*convolution(inp, hidden, 1)] if wider > 1 else []
        layers += convolution(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.conv = nn.Sequential(*layers)
        self.is_added = stride == 1 and inp == out

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x)
        return x + found if self.is_added else found


def convolution(inp: int, out: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(inp, out, size, stride, size // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(out), nn.ReLU6(inplace=True)]


class MobileNetV2(nn.Module):
    """Sandler et al. 2018, table 2; weights are random."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers, inp = convolution(3, 32, 3, 2), 32
        for wider, out, count, stride in (
            *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
            *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
        ):
            for place in range(count):
                layers.append(Residual(inp, out, stride if place == 0 else 1, wider))
                inp = out
        self.features = nn.Sequential(*layers, *convolution(inp, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.features(x).mean([2, 3]))
        return found


def mobilenet() -> dict[str, Any]:
    """Export as the notes do, and save it."""
    net = MobileNetV2().eval()
    torch.save(net.state_dict(), "mobilenet.pt")
    ep = torch.export.export(net, (torch.randn(1, 3, 224, 224),))
    torch.export.save(ep, "mobilenet.pt2")
    return {"nodes": [node.name for node in ep.graph.nodes]}


def compiled() -> dict[str, Any]:
    """Compile a module, and a function by the decorator; ask for a backend that is not there."""
    mod = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    x = torch.randn(2, 4)

    @torch.compile
    def twice(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    compiled = torch.compile(mod)
    apart = [(compiled(x) - mod(x)), twice(x) - torch.relu(x) * 2]
    try:
        torch.compile(mod, backend="tensorrt")(x)
        refused = ""
    except Exception as error:
        refused = str(error)
    return {"max_abs": max(float(each.abs().max()) for each in apart), "refused": refused}


def profiled() -> dict[str, Any]:
    """Profile a model with memory and shapes, and print the table of operators."""
    from torch.profiler import ProfilerActivity, profile, record_function

    model, inputs = nn.Linear(4, 3), torch.randn(1, 4)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as prof,
        record_function("model_inference"),
    ):
        model(inputs)
    found = {each.key: each.self_cpu_memory_usage for each in prof.key_averages()}
    table = prof.key_averages().table(sort_by="cpu_time_total", row_limit=10)
    return {"bytes": found, "table": table}


def lightning() -> dict[str, Any]:
    """Train an autoencoder for two steps; write its checkpoint, TorchScript and ONNX."""
    from lightning import LightningModule, Trainer

    class LitAutoEncoder(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = batch.view(batch.size(0), -1)
            return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.encoder(x)
            return found

    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        profiler="simple",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    pictures: Any = torch.utils.data.DataLoader(torch.rand(8, 1, 28, 28), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(LitAutoEncoder(), pictures)
    trainer.save_checkpoint("autoencoder.ckpt")
    autoencoder = LitAutoEncoder.load_from_checkpoint("autoencoder.ckpt").eval()
    torch.jit.save(autoencoder.to_torchscript(), "model.pt")
    input_sample = torch.randn(1, 28 * 28)
    autoencoder.to_onnx("autoencoder.onnx", input_sample, export_params=True)
    import onnxruntime

    session = onnxruntime.InferenceSession("autoencoder.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: input_sample.numpy()})
    with torch.inference_mode():
        expected = autoencoder(input_sample)
    return {
        "input": input_sample.tolist(),
        "output": expected.tolist(),
        "session": found.tolist(),
        "profiled": trainer.profiler.summary(),  # type: ignore[attr-defined]
    }


PARTS = {
    "compiled": compiled,
    "lightning": lightning,
    "mobilenet": mobilenet,
    "profiled": profiled,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:]:
        Path(f"{name}.json").write_text(json.dumps(PARTS[name]()), encoding="utf-8")
