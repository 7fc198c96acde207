"""What is not itself a checkpoint, and names the file or folder inside that is one."""

import gzip
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.exporter.checkpoint import load_weights
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest import read_checkpoint

LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {}


def _state() -> dict[str, Tensor]:
    return nn.Linear(3, 2).state_dict()


def _write(folder: Path, *names: str) -> Path:
    """Write the same weights under each name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(_state(), folder / name)
    return folder


def layout(name: str, says: str) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    """Add a layout, and what is said of it."""

    def add(write: Callable[[Path], Path]) -> Callable[[Path], Path]:
        LAYOUTS[name] = write, says
        return write

    return add


@layout("Llama, one file", "holds consolidated.00.pth: give the one")
def _llama(folder: Path) -> Path:
    (folder / "params.json").write_text("{}", encoding="utf-8")
    return _write(folder, "consolidated.00.pth")


@layout("Llama, ranks", "2 model-parallel ranks of Llama (consolidated.00.pth …); convert")
def _llama_ranks(folder: Path) -> Path:
    return _write(folder, "consolidated.00.pth", "consolidated.01.pth")


@layout("diffusers pipeline", "holds text_encoder (CLIPTextModel), vae (AutoencoderKL): give")
def _pipeline(folder: Path) -> Path:
    for name, key, value in (
        ("vae", "_class_name", "AutoencoderKL"),
        ("text_encoder", "architectures", ["CLIPTextModel"]),
    ):
        _write(folder / name, "pytorch_model.bin")
        (folder / name / "config.json").write_text(json.dumps({key: value}), encoding="utf-8")
    (folder / "model_index.json").write_text("{}", encoding="utf-8")
    (folder / "scheduler").mkdir()
    return folder


@layout("sentence-transformers", "holds 0_Transformer (BertModel): give the one")
def _sentences(folder: Path) -> Path:
    _write(folder / "0_Transformer", "pytorch_model.bin")
    config = json.dumps({"architectures": ["BertModel"]})
    (folder / "0_Transformer" / "config.json").write_text(config, encoding="utf-8")
    (folder / "modules.json").write_text("[]", encoding="utf-8")
    return folder


@layout("SpeechBrain", "holds model.ckpt: give the one")
def _speechbrain(folder: Path) -> Path:
    (folder / "CKPT.yaml").write_text("epoch: 1", encoding="utf-8")
    return _write(folder, "model.ckpt", "optimizer.ckpt", "brain.ckpt", "counter.ckpt")


@layout("MONAI bundle", "holds models/model.pt, models/model.ts: give the one")
def _bundle(folder: Path) -> Path:
    _write(folder / "configs").mkdir()
    (folder / "configs" / "metadata.json").write_text("{}", encoding="utf-8")
    return _write(folder, "models/model.pt", "models/model.ts")


@layout("TabNet", "holds network.pt: unpack it and give the one")
def _tabnet(folder: Path) -> Path:
    _write(folder, "network.pt")
    with zipfile.ZipFile(folder / "tabnet.zip", "w") as archive:
        archive.write(folder / "network.pt", "network.pt")
        archive.writestr("model_params.json", "{}")
    return folder / "tabnet.zip"


@layout("tar", "holds run/net.pt: unpack it and give the one")
def _tar(folder: Path) -> Path:
    _write(folder, "net.pt")
    with tarfile.open(folder / "run.tar.gz", "w:gz") as archive:
        archive.add(folder / "net.pt", "run/net.pt")
    return folder / "run.tar.gz"


@layout("gzip", "is packed with gzip; unpack it (gunzip)")
def _gzip(folder: Path) -> Path:
    _write(folder, "net.pt")
    (folder / "net.pt.gz").write_bytes(gzip.compress((folder / "net.pt").read_bytes()))
    return folder / "net.pt.gz"


@layout("nothing", "is not a checkpoint that can be read; expected a file of torch.save")
def _nothing(folder: Path) -> Path:
    (folder / "notes.txt").write_text("none", encoding="utf-8")
    return folder


@layout("a rank's DTensors", "holds DTensors, of which a rank has its share; gather them")
def _dtensors(folder: Path) -> Path:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {key: distribute_tensor(v, mesh, [Shard(0)]) for key, v in _state().items()}
        torch.save(state, folder / "rank.pt")
    finally:
        destroy_process_group()
    return folder / "rank.pt"


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_holds_a_checkpoint_names_it(name: str, tmp_path: Path) -> None:
    write, says = LAYOUTS[name]
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(write(tmp_path))
    assert says in str(caught.value)


def test_entries_beside_tensors_are_noted(tmp_path: Path) -> None:
    torch.save({**_state(), "_metadata": {"version": 1}}, tmp_path / "net.pt")
    found = read_checkpoint(tmp_path / "net.pt")
    assert found.notes == ('beside its tensors it holds "_metadata" (dict), which were left out',)


def test_a_class_that_writes_its_metadata_among_the_tensors_is_filled(tmp_path: Path) -> None:
    class Net(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().state_dict(*args, **kwargs), "_metadata": {"version": 1}}

    torch.save(Net(3, 2).state_dict(), tmp_path / "net.pt")
    model = Net(3, 2)
    load_weights(model, read_checkpoint(tmp_path / "net.pt"), "Net")
    assert torch.equal(model.weight, torch.load(tmp_path / "net.pt")["weight"])
