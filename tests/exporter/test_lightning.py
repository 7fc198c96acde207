"""Modules that Lightning itself trained and saved, in every format that is right for them."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from modelyard.exporter import export
from modelyard.exporter.arguments import flatten
from modelyard.handlers.models.backends import open_artifact

FOLDER = Path(__file__).parent / "lightning_modules"
ALL = ("pt2", "onnx", "torchscript")


def _module(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"lightning_{file}", FOLDER / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batches(*shape: int) -> DataLoader[Any]:
    data = [(torch.randn(4, *shape), torch.tensor([0, 1, 2, 1])) for _ in range(2)]
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def _train(model: Any, path: Path, *, package: str = "lightning.pytorch", **options: Any) -> None:
    trainer = importlib.import_module(package).Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=path.parent,
        **options,
    )
    trainer.fit(model, _batches(8))
    trainer.save_checkpoint(path)


def _train_older(model: Any, path: Path) -> None:
    trainer = importlib.import_module("pytorch_lightning").Trainer(
        max_epochs=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=path.parent,
    )
    trainer.fit(model, _batches(1, 12, 12))
    trainer.save_checkpoint(path)


def _train_averaged(model: Any, path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    _train(model, path, callbacks=[EMAWeightAveraging(decay=0.5)])


def _train_in_mixed_precision(model: Any, path: Path) -> None:
    _train(model, path, precision="bf16-mixed")


def _train_by_command_line(model: Any, path: Path) -> None:
    from lightning.pytorch.cli import LightningCLI

    command = LightningCLI(
        type(model),
        run=False,
        save_config_callback=None,
        seed_everything_default=0,
        trainer_defaults={"logger": False, "default_root_dir": str(path.parent)},
        args=["--model.hidden=5", "--model.activation=tanh", "--trainer.max_epochs=1"],
    )
    command.trainer.fit(command.model, _batches(8))
    command.trainer.save_checkpoint(path)


def _save_with_fabric(model: Any, path: Path) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu")
    prepared, optimizer = fabric.setup(model, model.configure_optimizers())
    for x, target in _batches(8):
        fabric.backward(nn.functional.cross_entropy(prepared(x), target))
        optimizer.step()
    fabric.save(path, {"model": prepared, "optimizer": optimizer, "step": 2})


@dataclass(frozen=True)
class Row:
    name: str
    """Of the class or factory."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    file: str = "modules"
    save: Callable[[Any, Path], None] = _train
    formats: tuple[str, ...] = ALL
    inputs: tuple[str, ...] = ("x:float32[batch,8]",)
    sizes: tuple[tuple[int, ...], ...] = ((5, 8),)
    how: str = "script"
    """The way in which Lightning itself makes TorchScript of it; "" where it has none."""


TWENTY = [
    Row("Plain", formats=(*ALL, "aoti")),
    Row("Logs"),
    Row("Manual"),
    Row("Metrics"),
    Row("TrainerInHooks"),
    Row("TrainerInProperty", how="trace"),
    Row("ExampleInput"),
    Row("HyperParameters", {"hidden": 5, "scale": 0.5}, how="trace"),
    Row("autoencoder"),
    Row("LightningInside"),
    Row("Averaged", save=_train_averaged),
    Row("Compiled", how=""),
    Row("MixedPrecision", save=_train_in_mixed_precision),
    Row("FromCommandLine", {"hidden": 5, "activation": "tanh"}, save=_train_by_command_line),
    Row("WithFabric", save=_save_with_fabric),
    Row("CNNModel", file="older_import", save=_train_older,
        inputs=("x:float32[batch,1,12,12]",), sizes=((5, 1, 12, 12),)),
    Row("TwoInputs", inputs=("x:float32[batch,8]", "extra:float32[batch,5]"),
        sizes=((5, 8), (5, 5))),
    Row("TorchsOwnNames"),
    Row("LightningsOwnNames"),
    Row("Gan"),
    Row("Branches", formats=("torchscript",)),
    Row("Recurrent"),
    Row("LossWithWeights"),
]  # fmt: skip
BY_DAY = ("Metrics",)


@pytest.fixture(autouse=True)
def _what_lightning_warns_of() -> Iterator[None]:
    """Silence the advice on data loaders and the deprecation of `to_torchscript`."""
    importlib.import_module("lightning.pytorch")  # which adds filters of its own in front
    with warnings.catch_warnings():
        for category in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.name in BY_DAY else pytest.mark.nightly)
        for row in TWENTY
    ],
)
def test_what_lightning_saved_is_exported_in_every_format_that_is_right(
    row: Row, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    kind = getattr(_module(row.file), row.name)
    checkpoint = tmp_path / "lit.ckpt"
    row.save(kind(**row.arguments), checkpoint)
    reports = export(
        checkpoint,
        f"{FOLDER / row.file}.py:{row.name}",
        row.inputs,
        output_dir=tmp_path / "out",
        formats=row.formats,
        quick=True,
    )
    assert [report.format for report in reports] == list(row.formats)
    saved = torch.load(checkpoint, weights_only=False)
    model = kind(**row.arguments).eval()
    model.load_state_dict(saved.get("state_dict") or saved["model"])
    inputs = tuple(torch.randn(size) for size in row.sizes)
    with torch.no_grad():
        eager = flatten(model(*inputs))
        script = model.to_torchscript(method=row.how, example_inputs=inputs) if row.how else model
        lightnings = flatten(script(*inputs))
        for report in reports:
            if report.format == "torchscript":
                assert report.details["torchscript"] == (row.how or "script")
            given = open_artifact(report.artifact, report.format)(*inputs)
            ours = dict(zip(eager, [given] if isinstance(given, Tensor) else given, strict=True))
            _assert_close(ours, lightnings if report.format == "torchscript" else eager)


def _assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0.0, atol=1e-6)
