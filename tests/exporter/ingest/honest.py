"""Checkpoints as real trainers leave them, each written by its library or in its documented form.

Every writer fills a folder and says what a trusted load would give.
"""

import argparse
import collections
import copy
import datetime
import importlib
import json
import pickle
import random
import shutil
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.swa_utils import AveragedModel


@dataclass(frozen=True)
class Honest:
    """One checkpoint and what must be found in it."""

    path: Path
    expected: Mapping[str, Tensor]
    """Names without wrappers' prefixes → tensors."""
    kind: str
    loader: str
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `read_checkpoint`."""


Writer = Callable[[Path], Honest]
WRITERS: dict[str, Writer] = {}


def writes(name: str) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        assert name not in WRITERS
        WRITERS[name] = writer
        return writer

    return register


class Net(nn.Module):
    """Parameters, persistent and other buffers, nested modules, a tied weight."""

    def __init__(self, width: int = 4, act: Any = nn.ReLU, folder: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.body = nn.Sequential(nn.Linear(width, width), act(), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(x)))
        return logits


def trained() -> tuple[Net, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randint(0, 7, (5,))).sum().backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler


def rng() -> dict[str, Any]:
    return {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": np.random.RandomState(3).get_state(),
        "random_rng_state": random.Random(3).getstate(),
    }


# Plain state dicts.


@writes("state dict, zip")
def _zip(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net.state_dict(), folder / "net.pt")
    return Honest(folder / "net.pt", net.state_dict(), "state dict", "weights_only")


@writes("state dict, renamed file")
def _renamed(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net.state_dict(), folder / "first.pt")
    (folder / "first.pt").rename(folder / "model.safetensors")
    return Honest(folder / "model.safetensors", net.state_dict(), "state dict", "weights_only")


@writes("state dict, legacy format")
def _legacy(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net.state_dict(), folder / "net.pth", _use_new_zipfile_serialization=False)
    return Honest(folder / "net.pth", net.state_dict(), "state dict", "weights_only")


@writes("state dict, protocol 4")
def _protocol_4(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net.state_dict(), folder / "net.pt", pickle_protocol=4)
    return Honest(folder / "net.pt", net.state_dict(), "state dict", "inert")


@writes("state dict, protocol 5, legacy format")
def _protocol_5(folder: Path) -> Honest:
    net, _, _ = trained()
    path = folder / "net.pt"
    torch.save(net.state_dict(), path, pickle_protocol=5, _use_new_zipfile_serialization=False)
    return Honest(path, net.state_dict(), "state dict", "inert")


@writes("views, empty, scalar, strided and complex tensors")
def _odd_tensors(folder: Path) -> Honest:
    big = torch.arange(10_000.0).view(100, 100)
    state = {
        "row": big[3],
        "column": big[:, 5],
        "transposed": torch.randn(3, 4).t(),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(2.5),
        "expanded": torch.randn(1, 3).expand(4, 3),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "flags": torch.tensor([True, False]),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    torch.save(state, folder / "odd.pt")
    return Honest(folder / "odd.pt", state, "state dict", "weights_only")


@writes("views in the legacy format")
def _legacy_views(folder: Path) -> Honest:
    big = torch.arange(100.0).view(10, 10)
    state = {"row": big[3], "column": big[:, 5], "same": big[3], "half": torch.ones(3).half()}
    torch.save(state, folder / "odd.pt", _use_new_zipfile_serialization=False)
    return Honest(folder / "odd.pt", state, "state dict", "weights_only")


@writes("every float and integer type")
def _dtypes(folder: Path) -> Honest:
    kinds = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8"
    kinds += " uint8 uint16 uint32 uint64 bool"
    names = kinds.split()
    state = {name: torch.arange(6).to(getattr(torch, name)) for name in names}
    torch.save(state, folder / "kinds.pt")
    return Honest(folder / "kinds.pt", state, "state dict", "weights_only")


@writes("sparse tensors")
def _sparse(folder: Path) -> Honest:
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 3]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse (CSR|CSC|BSR|BSC) tensor support", UserWarning)
        state = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr()}
    torch.save(state, folder / "sparse.pt")
    return Honest(folder / "sparse.pt", state, "state dict", "weights_only")


@writes("parameters kept as parameters")
def _parameters(folder: Path) -> Honest:
    net, _, _ = trained()
    state = dict(net.named_parameters())
    torch.save(state, folder / "net.pt")
    return Honest(folder / "net.pt", state, "state dict", "weights_only")


@writes("DDP and compiled prefixes")
def _prefixes(folder: Path) -> Honest:
    net, _, _ = trained()
    compiled: Any = torch.compile(nn.DataParallel(net), backend="eager")
    torch.save(compiled.state_dict(), folder / "net.pt")
    return Honest(folder / "net.pt", net.state_dict(), "state dict", "weights_only")


@writes("checkpoint wrappers in the middle of names")
def _inner_prefixes(folder: Path) -> Honest:
    net, _, _ = trained()
    state = {
        key.replace("body.", "body._fsdp_wrapped_module."): value
        for key, value in net.state_dict().items()
    }
    torch.save(state, folder / "net.pt")
    return Honest(folder / "net.pt", net.state_dict(), "state dict", "weights_only")


@writes("averaged model")
def _averaged(folder: Path) -> Honest:
    net, _, _ = trained()
    averaged = AveragedModel(net)
    torch.save(averaged.state_dict(), folder / "ema.pt")
    return Honest(folder / "ema.pt", net.state_dict(), "state dict", "weights_only")


# Training checkpoints.


@writes("loop with optimizer, scheduler and numpy numbers")
def _loop(folder: Path) -> Honest:
    net, optimizer, scheduler = trained()
    content = {
        "epoch": 4,
        "model_state_dict": net.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "best_acc": np.float64(0.75),
        "history": np.arange(6, dtype=np.float32).reshape(2, 3),
        "counts": collections.defaultdict(int, a=1),
        "started": datetime.datetime(2024, 5, 1, 12, 0),
        "args": argparse.Namespace(lr=0.1, folder=Path("runs/a"), sizes=frozenset([1, 2])),
    }
    torch.save(content, folder / "loop.pth")
    return Honest(
        folder / "loop.pth",
        net.state_dict(),
        "training checkpoint",
        "profile numpy-scalars+stdlib-inert",
        {"lr": 0.1, "folder": "runs/a", "sizes": [1, 2]},
        {"epoch": 4, "best_acc": 0.75},
    )


@writes("loop in the legacy format, protocol 4, with numpy arrays")
def _loop_legacy(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    content = {"net": net.state_dict(), "optim": optimizer.state_dict(), "acc": np.float32(0.5)}
    path = folder / "loop.pth"
    torch.save(content, path, pickle_protocol=4, _use_new_zipfile_serialization=False)
    kind, loader = "training checkpoint", "profile numpy-scalars"
    return Honest(path, net.state_dict(), kind, loader)


@writes("loop with averaged weights, asked for")
def _loop_ema(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    averaged = AveragedModel(net, multi_avg_fn=None)
    for value in averaged.parameters():
        value.data.mul_(0.5)
    content = {
        "model": net.state_dict(),
        "model_ema": averaged.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, folder / "loop.pth")
    expected = averaged.module.state_dict()
    kind, loader = "training checkpoint", "weights_only"
    return Honest(folder / "loop.pth", expected, kind, loader, options={"ema": True})


@writes("two networks, one chosen by its key")
def _two(folder: Path) -> Honest:
    net, _, _ = trained()
    other = nn.Linear(3, 2)
    content = {"netG": net.state_dict(), "netD": other.state_dict()}
    torch.save(content, folder / "gan.pth")
    return Honest(
        folder / "gan.pth",
        other.state_dict(),
        "training checkpoint",
        "weights_only",
        options={"weights_key": "netD"},
    )


@writes("timm")
def _timm(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    content = {
        "epoch": 3,
        "arch": "net_tiny",
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "version": 2,
        "args": argparse.Namespace(model="net_tiny", num_classes=7),
        "amp_scaler": {"scale": 65536.0, "growth_factor": 2.0},
        "metric": 71.5,
    }
    torch.save(content, folder / "timm.pth.tar")
    return Honest(
        folder / "timm.pth.tar",
        net.state_dict(),
        "timm checkpoint",
        "profile stdlib-inert",
        {"model": "net_tiny", "num_classes": 7},
        {"epoch": 3, "metric": 71.5, "grad scalers": ["amp_scaler"]},
    )


@writes("torchvision references")
def _torchvision(folder: Path) -> Honest:
    net, optimizer, scheduler = trained()
    content = {
        "model": nn.DataParallel(net).state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "epoch": 9,
        "args": argparse.Namespace(batch_size=32),
    }
    torch.save(content, folder / "checkpoint.pth")
    return Honest(
        folder / "checkpoint.pth",
        net.state_dict(),
        "torchvision checkpoint",
        "profile stdlib-inert",
        {"batch_size": 32},
        {"epoch": 9},
    )


@writes("fairseq, with an OmegaConf configuration")
def _fairseq(folder: Path) -> Honest:
    net, _, _ = trained()
    content = {
        "args": None,
        "cfg": OmegaConf.create({"model": {"layers": 6, "dims": [1, 2]}, "seed": 1}),
        "model": net.state_dict(),
        "optimizer_history": [{"num_updates": 10}],
        "extra_state": {"epoch": 2},
    }
    torch.save(content, folder / "checkpoint_best.pt")
    return Honest(
        folder / "checkpoint_best.pt",
        net.state_dict(),
        "fairseq checkpoint",
        "profile omegaconf",
        {"model": {"layers": 6, "dims": [1, 2]}, "seed": 1},
        {"epoch": 2},
    )


@writes("OpenMMLab, with an object of its own")
def _mmlab(folder: Path) -> Honest:
    net, _, _ = trained()
    content = {
        "meta": {"mmengine_version": "0.10.1", "epoch": 12, "seed": np.int64(3)},
        "state_dict": net.state_dict(),
        "message_hub": {"log": HistoryBuffer()},
    }
    torch.save(content, folder / "epoch_12.pth")
    return Honest(
        folder / "epoch_12.pth",
        net.state_dict(),
        "OpenMMLab checkpoint",
        "inert",
        training={"epoch": 12},
        refused=(f"{HistoryBuffer.__module__}.HistoryBuffer",),
    )


class HistoryBuffer:
    """Stands for the class that mmengine pickles among its logs."""

    def __init__(self) -> None:
        self.values = [1.0]


# Lightning.


def _lightning(folder: Path, hyper: Mapping[str, Any], **options: Any) -> tuple[Path, Any]:
    """Train two steps and save, with the real trainer."""
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self, width: int = 4, act: Any = nn.ReLU, folder: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = Net(width)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    rows = torch.utils.data.TensorDataset(torch.randint(0, 7, (8,)))
    with warnings.catch_warnings():
        # Said of the machine, of workers and of unused folders, not of the checkpoint.
        warnings.simplefilter("ignore")
        module = Lit(**hyper)
        trainer = pl.Trainer(
            max_epochs=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            default_root_dir=folder,
            callbacks=[pl.callbacks.ModelCheckpoint(dirpath=folder / "kept")],
        )
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        trainer.save_checkpoint(folder / "lit.ckpt", **options)
    return folder / "lit.ckpt", module


@writes("Lightning")
def _lightning_plain(folder: Path) -> Honest:
    path, module = _lightning(folder, {"width": 5})
    # `act` is a class by default, so the file wants it.
    return Honest(
        path,
        module.state_dict(),
        "Lightning checkpoint",
        "profile torch-nn",
        {"width": 5, "act": nn.ReLU, "folder": None},
        {"global_step": 2},
    )


@writes("Lightning, weights only, plain hyper-parameters")
def _lightning_weights(folder: Path) -> Honest:
    path, module = _lightning(folder, {"width": 5, "act": "relu"}, weights_only=True)
    kind, loader = "Lightning checkpoint", "weights_only"
    return Honest(
        path, module.state_dict(), kind, loader, {"width": 5, "act": "relu", "folder": None}
    )


@writes("Lightning, with a path and a dict config")
def _lightning_path(folder: Path) -> Honest:
    path, module = _lightning(folder, {"act": "relu", "folder": Path("/data/scans")})
    return Honest(
        path,
        module.state_dict(),
        "Lightning checkpoint",
        "profile stdlib-inert",
        {"width": 4, "act": "relu", "folder": "/data/scans"},
    )


@writes("Lightning, with an OmegaConf argument")
def _lightning_omegaconf(folder: Path) -> Honest:
    config = OmegaConf.create({"a": {"b": [1, "x"]}})
    path, module = _lightning(folder, {"act": "relu", "folder": config})
    return Honest(
        path,
        module.state_dict(),
        "Lightning checkpoint",
        "profile stdlib-inert+omegaconf",
        {"width": 4, "act": "relu", "folder": {"a": {"b": [1, "x"]}}},
    )


@writes("Lightning, with an object of the author's own")
def _lightning_object(folder: Path) -> Honest:
    path, module = _lightning(folder, {"act": "relu", "folder": HistoryBuffer()})
    return Honest(
        path,
        module.state_dict(),
        "Lightning checkpoint",
        "inert",
        refused=(f"{HistoryBuffer.__module__}.HistoryBuffer",),
    )


class AttributeDict(dict[str, Any]):
    """Stands for the class of Lightning 1.x."""


AttributeDict.__module__ = "pytorch_lightning.utilities.parsing"


@writes("Lightning 1, callbacks keyed by class")
def _lightning_old(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    content = {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "1.4.2",
        "state_dict": net.state_dict(),
        "callbacks": {"early": {"patience": 3}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "hparams",
        "hyper_parameters": AttributeDict(width=4),
    }
    path = folder / "old.ckpt"
    parsing: Any = importlib.import_module("pytorch_lightning.utilities.parsing")
    parsing.AttributeDict, kept = AttributeDict, parsing.AttributeDict
    try:
        torch.save(content, path, _use_new_zipfile_serialization=False)
    finally:
        parsing.AttributeDict = kept
    return Honest(
        path,
        net.state_dict(),
        "Lightning checkpoint",
        "profile lightning-old",
        {"width": 4},
        {"epoch": 1, "global_step": 10},
    )


# Flyte and Determined.


@writes("Flyte PyTorchCheckpoint")
def _flyte(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    content = {
        "width": 4,
        "act": "relu",
        "module_state_dict": net.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
    }
    torch.save(content, folder / "a3f9.pt")
    return Honest(
        folder / "a3f9.pt",
        net.state_dict(),
        "Flyte PyTorchCheckpoint",
        "weights_only",
        {"width": 4, "act": "relu"},
    )


@writes("Flyte PyTorchModule of torch's own layers")
def _flyte_module(folder: Path) -> Honest:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4))
    torch.save(module, folder / "b71.pt")
    kind, loader = "pickled module", "profile torch-nn"
    return Honest(folder / "b71.pt", module.state_dict(), kind, loader)


def _determined_folder(folder: Path, content: Any, **save: Any) -> Path:
    torch.save(content, folder / "state_dict.pth", **save)
    (folder / "code").mkdir()
    (folder / "code" / "trial.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    return folder


@writes("Determined folder")
def _determined(folder: Path) -> Honest:
    net, optimizer, scheduler = trained()
    content = {
        "models_state_dict": [net.state_dict()],
        "optimizers_state_dict": [optimizer.state_dict()],
        "lr_schedulers_state_dict": [scheduler.state_dict()],
        "callbacks": {},
        "rng_state": rng(),
    }
    _determined_folder(folder, content)
    described = {
        "trial_type": "PyTorchTrial",
        "trial_cls_spec": "trial:Trial",
        "hparams": {"width": 4},
        "experiment_config": None,
    }
    (folder / "load_data.json").write_text(json.dumps(described), encoding="utf-8")
    metadata = {"determined_version": "0.21.0", "steps_completed": 50, "format": "pickle"}
    (folder / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    return Honest(
        folder,
        net.state_dict(),
        "Determined checkpoint",
        "profile numpy-rng",
        {"width": 4},
        {"steps": 50},
    )


@writes("Determined before 0.12.13, legacy format")
def _determined_old(folder: Path) -> Honest:
    net, optimizer, scheduler = trained()
    content = {
        "model_state_dict": nn.DataParallel(net).state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
        "callbacks": {},
        "rng_state": rng(),
    }
    _determined_folder(folder, content, _use_new_zipfile_serialization=False)
    kind = "Determined checkpoint (before 0.12.13)"
    return Honest(folder, net.state_dict(), kind, "profile numpy-rng")


@writes("Determined state_dict.pth alone, saved on CUDA")
def _determined_cuda(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    content = {
        "models_state_dict": [net.state_dict()],
        "optimizers_state_dict": [optimizer.state_dict()],
        "lr_schedulers_state_dict": [],
        "callbacks": {},
        "rng_state": rng(),
    }
    torch.save(content, folder / "cpu.pth")
    _say_cuda(folder / "cpu.pth", folder / "state_dict.pth")
    kind, loader = "Determined checkpoint", "profile numpy-rng"
    return Honest(folder / "state_dict.pth", net.state_dict(), kind, loader)


def _say_cuda(source: Path, target: Path) -> None:
    """Write the file that the same run on a CUDA device would have written."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                content = content.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            new.writestr(name, content)


@writes("state dict saved on CUDA")
def _cuda(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net.state_dict(), folder / "cpu.pth")
    _say_cuda(folder / "cpu.pth", folder / "cuda.pth")
    return Honest(folder / "cuda.pth", net.state_dict(), "state dict", "weights_only")


# safetensors and Hugging Face.


@writes("state dict with entries beside its tensors")
def _metadata_beside(folder: Path) -> Honest:
    net, _, _ = trained()
    beside = {"_metadata": {"version": 1, "act": HistoryBuffer()}, "epoch": 3}
    torch.save({**net.state_dict(), **beside}, folder / "net.pth")
    name = f"{HistoryBuffer.__module__}.HistoryBuffer"
    return Honest(folder / "net.pth", net.state_dict(), "state dict", "inert", refused=(name,))


@writes("safetensors, one file")
def _safetensors(folder: Path) -> Honest:
    state = {"a": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.empty(0)}
    safetensors.torch.save_file(state, folder / "weights.bin", metadata={"format": "pt"})
    return Honest(folder / "weights.bin", state, "safetensors", "safetensors")


def _bert() -> Any:
    make: Any = transformers.BertConfig
    config = make(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=20,
        num_labels=3,
    )
    torch.manual_seed(1)
    model: Any = transformers.BertForSequenceClassification(config)
    return model.eval()


@writes("Hugging Face folder")
def _hugging_face(folder: Path) -> Honest:
    model = _bert()
    model.save_pretrained(folder)
    return Honest(folder, model.state_dict(), "Hugging Face folder", "safetensors")


@writes("Hugging Face folder, sharded")
def _hugging_face_sharded(folder: Path) -> Honest:
    model = _bert()
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return Honest(folder, model.state_dict(), "Hugging Face folder", "safetensors")


@writes("Hugging Face folder, pytorch_model.bin")
def _hugging_face_bin(folder: Path) -> Honest:
    model = _bert()
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return Honest(folder, model.state_dict(), "Hugging Face folder", "weights_only")


@writes("Hugging Face .bin shards")
def _bin_shards(folder: Path) -> Honest:
    model = _bert()
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names, weight_map = list(state), {}
    for number, part in enumerate((names[:10], names[10:]), start=1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    return Honest(folder, state, "Hugging Face folder", "weights_only")


@writes("Trainer run, its last checkpoint")
def _trainer_run(folder: Path) -> Honest:
    model = _bert()
    for step in (5, 20):
        inside = folder / f"checkpoint-{step}"
        model.save_pretrained(inside)
        (inside / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.0}))
        torch.save(rng(), inside / "rng_state.pth")
        torch.save(HistoryBuffer(), inside / "training_args.bin")
        state = copy.deepcopy(model.state_dict())
        for parameter in model.parameters():
            parameter.data.add_(1)
    kind = "Hugging Face folder"
    return Honest(folder, state, kind, "safetensors", training={"global_step": 20})


@writes("Accelerate save_state")
def _accelerate(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the machine, and of the tied weight
        accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
        accelerator.prepare(net, optimizer)
        accelerator.save_state(str(folder), safe_serialization=True)
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    assert set(net.state_dict()) - set(saved) in ({"head.weight"}, {"embed.weight"})
    return Honest(folder, saved, "safetensors", "safetensors")


# Distributed.


def _save_dcp(content: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save_distributed(content, checkpoint_id=folder)


@writes("DCP")
def _dcp(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 12}
    _save_dcp(content, folder)
    return Honest(
        folder,
        net.state_dict(),
        "distributed checkpoint (DCP)",
        "dcp",
        training={"step": 12, "optimizers": ["optimizer"]},
    )


class AppState(Stateful):
    """A model and its optimizer in one object, as PyTorch's tutorial saves them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return both, by name."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take both back, which no test does."""


@writes("DCP of an application's state")
def _dcp_app(folder: Path) -> Honest:
    net, optimizer, _ = trained()
    _save_dcp({"app": AppState(net, optimizer)}, folder)
    return Honest(
        folder,
        net.state_dict(),
        "distributed checkpoint (DCP)",
        "dcp",
        training={"optimizers": ["app.optim"]},
    )


class _EnumsByName(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


@writes("DCP, its index written by Python 3.11.2")
def _dcp_of_an_early_python(folder: Path) -> Honest:
    honest = _dcp(folder)
    index = folder / ".metadata"
    content = pickle.loads(index.read_bytes())  # harmless: `_dcp` has just written it
    with index.open("wb") as file:
        _EnumsByName(file, 4).dump(content)
    assert b"getattr" in index.read_bytes()
    return honest


@writes("DCP of a Lightning run, with meta.pt")
def _dcp_lightning(folder: Path) -> Honest:
    net, _, _ = trained()
    _save_dcp({"model": net.state_dict()}, folder)
    meta = {
        "epoch": 3,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.6",
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 4, "folder": Path("a")},
    }
    torch.save(meta, folder / "meta.pt")
    return Honest(
        folder,
        net.state_dict(),
        "Lightning checkpoint (sharded)",
        "dcp",
        {"width": 4, "folder": "a"},
        {"epoch": 3, "global_step": 30},
    )


@writes("DeepSpeed, ZeRO stage 1")
def _deepspeed(folder: Path) -> Honest:
    net, _, _ = trained()
    inside = folder / "global_step20"
    inside.mkdir()
    content = {
        "module": net.state_dict(),
        "optimizer": None,
        "lr_scheduler": HistoryBuffer(),
        "global_steps": 20,
        "skipped_steps": 0,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.14.0",
    }
    torch.save(content, inside / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step20", encoding="utf-8")
    return Honest(
        folder,
        net.state_dict(),
        "DeepSpeed checkpoint",
        "inert",
        training={"global_steps": 20, "dp_world_size": 2},
        refused=(f"{HistoryBuffer.__module__}.HistoryBuffer",),
    )


# Modules, programs and archives.


@writes("pickled module of the author's class")
def _module(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net, folder / "net.pth")
    refused = (f"{Net.__module__}.Net",)
    return Honest(folder / "net.pth", net.state_dict(), "pickled module", "inert", refused=refused)


@writes("pickled module in the legacy format, with its source")
def _module_legacy(folder: Path) -> Honest:
    net, _, _ = trained()
    torch.save(net, folder / "net.pth", _use_new_zipfile_serialization=False)
    refused = (f"{Net.__module__}.Net",)
    return Honest(folder / "net.pth", net.state_dict(), "pickled module", "inert", refused=refused)


@writes("MLflow, a module pickled by value")
def _mlflow(folder: Path) -> Honest:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

    local = Local()
    (folder / "data").mkdir()
    by_value = importlib.import_module("cloudpickle")
    torch.save(local, folder / "data" / "model.pth", pickle_module=by_value)
    described = {
        "flavors": {"pytorch": {"model_data": "data", "pytorch_version": "2.13.0"}},
        "mlflow_version": "2.9.2",
    }
    (folder / "MLmodel").write_text(yaml.safe_dump(described), encoding="utf-8")
    expected = local.state_dict()
    return Honest(
        folder, expected, "MLflow model (pickled module)", "inert", refused=("builtins.type",)
    )


@writes("Ray Train")
def _ray(folder: Path) -> Honest:
    net, _, _ = trained()
    (folder / ".metadata.json").write_text("{}", encoding="utf-8")
    torch.save(net.state_dict(), folder / "model.pt")
    kind = "Ray Train checkpoint (state dict)"
    return Honest(folder, net.state_dict(), kind, "weights_only")


def _quietly_scripted(net: Any, path: Path, *, traced: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
        example = torch.zeros(3, 2)
        jit: Any = torch.jit
        made = jit.trace(net, example) if traced else jit.script(net)
        torch.jit.save(made, str(path))


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.BatchNorm1d(3)])
        self.offset: Tensor
        self.register_buffer("offset", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.offset


@writes("TorchScript, scripted")
def _scripted(folder: Path) -> Honest:
    net = Scriptable().eval()
    _quietly_scripted(net, folder / "net.pt")
    return Honest(folder / "net.pt", net.state_dict(), "TorchScript", "inert")


@writes("TorchScript, traced")
def _traced(folder: Path) -> Honest:
    net = Scriptable().eval()
    _quietly_scripted(net, folder / "net.pt", traced=True)
    return Honest(folder / "net.pt", net.state_dict(), "TorchScript", "inert")


@writes("exported program")
def _exported(folder: Path) -> Honest:
    net = Scriptable().eval()
    program = torch.export.export(
        net, (torch.zeros(3, 2),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},)
    )
    torch.export.save(program, folder / "net.pt2")
    return Honest(folder / "net.pt2", net.state_dict(), "exported program", "json")


def _archive_files(folder: Path) -> tuple[Net, dict[str, bytes]]:
    net, _, _ = trained()
    torch.save(net.state_dict(), folder / "net.pt")
    manifest = {
        "createdOn": "01/02/2024 10:00:00",
        "runtime": "python",
        "model": {
            "modelName": "net",
            "serializedFile": "net.pt",
            "handler": "image_classifier",
            "modelFile": "model.py",
            "modelVersion": "1.0",
        },
        "archiverVersion": "0.12.0",
    }
    files = {
        "net.pt": (folder / "net.pt").read_bytes(),
        "model.py": b"raise SystemExit('imported')\n",
        "index_to_name.json": b'{"0": "cat", "1": ["n02", "dog"]}',
        "MAR-INF/MANIFEST.json": json.dumps(manifest).encode(),
    }
    (folder / "net.pt").unlink()
    return net, files


@writes("TorchServe archive, zip")
def _mar(folder: Path) -> Honest:
    net, files = _archive_files(folder)
    with zipfile.ZipFile(folder / "net.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    kind = "TorchServe archive (state dict)"
    return Honest(folder / "net.mar", net.state_dict(), kind, "weights_only")


@writes("TorchServe archive, tgz")
def _mar_tgz(folder: Path) -> Honest:
    net, files = _archive_files(folder)
    for name, content in files.items():
        path = folder / "net" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with tarfile.open(folder / "net.tar.gz", "w:gz") as archive:
        archive.add(folder / "net", "net")
    shutil.rmtree(folder / "net")
    kind = "TorchServe archive (state dict)"
    return Honest(folder / "net.tar.gz", net.state_dict(), kind, "weights_only")


@writes("TorchServe archive, folder")
def _mar_folder(folder: Path) -> Honest:
    net, files = _archive_files(folder)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    kind = "TorchServe archive (state dict)"
    return Honest(folder, net.state_dict(), kind, "weights_only")
