"""The digits example as three artifacts, and a folder that looks like its unpacked archive."""

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from torch import Tensor, nn

from modelyard.handlers import Context
from tests.shared import DIGITS, made_once

SIGNATURE = {
    "inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 1, 8, 8]}],
    "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", 10]}],
    "dims": {"batch": {"min": 1, "max": 8}},
}

MakeContext = Callable[..., Context]


def export_all(net: nn.Module, example: Tensor, stem: Path) -> None:
    """Write STEM.pt2, STEM.onnx and STEM.pt of a net of one input with a batch of 1..8."""
    dims = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(net, (example,), dynamic_shapes=dims)
    program._example_inputs = None
    torch.export.save(program, stem.with_suffix(".pt2"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        torch.jit.save(torch.jit.script(net), stem.with_suffix(".pt"))
        torch.onnx.export(
            program,
            (example,),
            stem.with_suffix(".onnx"),
            dynamo=True,
            input_names=["image"],
            output_names=["logits"],
            external_data=False,
            verbose=False,
        )


@pytest.fixture(scope="session")
def digits_net() -> nn.Module:
    spec = importlib.util.spec_from_file_location("digits_net", DIGITS / "net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = cast("nn.Module", module.DigitsNet())
    net.load_state_dict(torch.load(DIGITS / "digits.pt", weights_only=True))
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def digits_folder(digits_net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with made_once(tmp_path_factory, "digits_folder") as (folder, is_empty):
        if is_empty:
            fill_digits(digits_net, folder)
    return folder


def fill_digits(net: nn.Module, folder: Path) -> None:
    """Write what an archive of each format holds when it is unpacked."""
    export_all(net, torch.rand(5, 1, 8, 8), folder / "digits")
    shutil.copy(DIGITS / "index_to_name.json", folder)
    for name, format in (("pt2", "pt2"), ("onnx", "onnx"), ("pt", "torchscript")):
        report = folder / f"digits.{name}.report.json"
        proof = {"parity": {"tolerance": 1e-4, "outputs": {"logits": {"tolerance": 1e-4}}}}
        digests = {"artifact_sha256": "0" * 64, "checkpoint": {"sha256": "0" * 64}}
        report.write_text(json.dumps({"format": format, "signature": SIGNATURE} | proof | digests))


@pytest.fixture(scope="session")
def scans() -> list[bytes]:
    """The example's ten PNG files, 0 to 9."""
    return [(DIGITS / "scans" / f"{digit}.png").read_bytes() for digit in range(10)]


@pytest.fixture
def make_context(digits_folder: Path) -> MakeContext:
    """Build the context of a digits archive; keywords replace parts of it."""

    def make(
        artifact: str = "digits.onnx",
        twin: str | None = "digits.pt2",
        config: dict[str, Any] | None = None,
        folder: Path = digits_folder,
        signature: dict[str, Any] | None = SIGNATURE,
        batch_size: int = 8,
        requests: int = 1,
        **model: Any,
    ) -> Context:
        settings = yaml.safe_load((DIGITS / "model-config.yaml").read_text())
        explain = {"artifact": twin, "report": f"{twin}.report.json"} if twin else None
        manifest = {
            "model": {"modelName": "digits", "modelVersion": "1.0", "serializedFile": artifact}
            | model,
            "modelyard": {
                "report": f"{artifact}.report.json" if signature is SIGNATURE else None,
                "signature": signature,
                "explain": explain,
            },
        }
        context = Context(
            "digits",
            str(folder),
            manifest,
            batch_size=batch_size,
            model_yaml_config=settings if config is None else config,
        )
        context.reset([f"id-{index}" for index in range(requests)])
        return context

    return make
