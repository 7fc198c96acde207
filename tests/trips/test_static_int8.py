"""`--quantize int8-static`: calibrated, proven on what was held out, archived and served."""

import hashlib
import json
import logging
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.verify import verify_archive
from modelyard.exporter import export
from modelyard.exporter.bench.measure import read_signature
from modelyard.handlers import BaseHandler
from tests.handlers.folders import ask, load

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4),
            nn.LayerNorm(4),
        )

    def forward(self, image):
        return self.layers(image)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor, Tensor]:
    """Return the artifact, the samples, and what the checkpoint answers to them."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "net.py").write_text(NET)
    namespace: dict[str, Any] = {}
    exec(NET, namespace)
    torch.manual_seed(0)
    net = namespace["Net"]()
    torch.save(net.state_dict(), folder / "net.ckpt")
    # Four kinds of pictures, far apart, as a trained net tells them.
    images = torch.randn(4, 1, 6, 6).repeat(25, 1, 1, 1) + 0.1 * torch.randn(100, 1, 6, 6)
    torch.save({"image": images}, folder / "images.pt")
    said = BufferingHandler(capacity=1000)
    logging.getLogger().addHandler(said)
    (report,) = export(
        folder / "net.ckpt",
        f"{folder}/net.py:Net",
        ["image:float32[batch,1,6,6]"],
        output_dir=folder / "out",
        quantize="int8-static",
        samples=[folder / "images.pt"],
    )
    logging.getLogger().removeHandler(said)
    assert not [record.getMessage() for record in said.buffer if record.name == "root"]
    with torch.no_grad():
        return report.artifact, images, net.eval()(images)


@pytest.mark.nightly
def test_the_report_says_what_it_was_calibrated_with_and_proven_on(
    exported: tuple[Path, Tensor, Tensor],
) -> None:
    artifact, *_ = exported
    report = json.loads(artifact.with_name("net.onnx.report.json").read_text())
    samples = (artifact.parents[1] / "images.pt").read_bytes()
    assert report["details"]["quantize"] == "int8-static"
    assert report["details"]["quantized_operators"] == 2
    assert report["details"]["calibration"] == {
        "method": "min-max",
        "rows": 75,
        "held_out_rows": 25,
        "samples_sha256": hashlib.sha256(samples).hexdigest(),
    }
    assert report["parity"]["rule"].startswith("top-1 agreement >= 0.99")
    assert report["parity"]["batches"] == [1, 2, 7, 8]
    assert sum(sample["rows"] for sample in report["parity"]["samples"]) == 25
    assert report["parity"]["outputs"]["output"]["max_abs"] > 1e-4
    assert "--quantize int8-static --sample images.pt -o" in report["command"]
    assert str(read_signature(artifact).inputs[0]) == "image:float32[batch=1..8,1,6,6]"


@pytest.mark.nightly
def test_weights_and_activations_are_of_eight_bits(exported: tuple[Path, Tensor, Tensor]) -> None:
    model = onnx.load(exported[0])
    by_name = {each.name: each for each in model.graph.initializer}
    kernel = next(each for each in by_name.values() if list(each.dims) == [8, 1, 3, 3])
    values = onnx.numpy_helper.to_array(kernel)
    assert kernel.data_type == onnx.TensorProto.INT8
    assert abs(values.astype(int)).max() <= 64  # seven bits
    assert "BatchNormalization" not in {node.op_type for node in model.graph.node}
    scales = [
        each for name, each in by_name.items() if name.endswith("_scale") and each.dims == [8]
    ]
    assert scales  # one for each channel
    assert [each.domain for each in model.opset_import] == [""]


@pytest.mark.nightly
def test_a_handler_answers_as_the_checkpoint_and_the_archive_verifies(
    exported: tuple[Path, Tensor, Tensor], tmp_path: Path
) -> None:
    artifact, images, expected = exported
    report = json.loads(artifact.with_name("net.onnx.report.json").read_text())
    artifact.with_suffix(".signature").write_text(json.dumps(report["signature"]))
    handler = load(BaseHandler, artifact.parent, "net.onnx", batch_size=8)
    found = ask(handler, *(image.tolist() for image in images[:8]))
    answers = torch.tensor(found)
    assert torch.equal(answers.argmax(1), expected[:8].argmax(1))
    assert 1e-4 < (answers - expected[:8]).abs().max() < 0.1 * expected.abs().max()
    request = tmp_path / "request.json"
    request.write_text(json.dumps(images[0].tolist()))
    path = write_archive(
        "net",
        version="1.0",
        artifact=artifact,
        handler="base_handler",
        examples=[f"{request}={json.dumps(found[0])}"],
        output_dir=tmp_path / "store",
        dry_run=False,
    )
    with open_archive(path) as opened:
        checks = list(verify_archive(opened, device="cpu"))
    assert [check.problem for check in checks] == [None] * 4
    # Without a dry run, nobody has seen what the model reads and gives.
    assert checks[2].result.startswith("answered as expected; ")
