"""Links in a stranger's folder: the hub cache's own are followed, those that leave are not."""

from pathlib import Path

import pytest
import torch
from torch import nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest import read_checkpoint


def _write(folder: Path, *names: str) -> Path:
    """Write the same weights under each name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(nn.Linear(3, 2).state_dict(), folder / name)
    return folder


SECRET = b"SECRET-1234 of somebody else\n"
LINKED = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "trainer_state.json",
    "load_data.json",
    "metadata.json",
    "state_dict.pth",
    "MLmodel",
    ".metadata.json",
    ".metadata",
    "latest",
)


@pytest.mark.parametrize("name", LINKED)
def test_a_link_that_leaves_the_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    folder = tmp_path / "folder"
    folder.mkdir()
    # So that each reader gets to the file.
    (folder / "a.distcp").touch()
    if name != "config.json" and name.startswith(("model", "pytorch", "trainer")):
        (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    if name == "trainer_state.json":
        _write(folder, "pytorch_model.bin")
    if name == "latest":
        (folder / "checkpoint").mkdir()
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder)
    assert f'"{name}" is a link that leaves' in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_folder_behind_a_link_is_not_entered(tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere", "state_dict.pth")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "determined").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r'"determined/state_dict\.pth" is a link that'):
        read_checkpoint(tmp_path / "folder")


def test_links_of_the_hubs_cache_and_inside_the_folder_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f" / "unet"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    _write(blobs, "5" * 64, "net.pt")
    (snapshot / "pytorch_model.bin").symlink_to(Path("../../../blobs") / ("5" * 64))
    assert set(read_checkpoint(snapshot).tensors) == {"weight", "bias"}
    inside = _write(tmp_path / "inside", "files/net.pt")
    (inside / "pytorch_model.bin").symlink_to("files/net.pt")
    assert set(read_checkpoint(inside).tensors) == {"weight", "bias"}
    (blobs / ("5" * 64)).unlink()
    (blobs / ("5" * 64)).symlink_to(inside / "files" / "net.pt")
    with pytest.raises(CheckpointError, match="is a link that leaves"):
        read_checkpoint(snapshot)


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    _write(tmp_path / "runs", "net.pt")
    (tmp_path / "last.pt").symlink_to(tmp_path / "runs" / "net.pt")
    assert set(read_checkpoint(tmp_path / "last.pt").tensors) == {"weight", "bias"}
    (tmp_path / "run").symlink_to(_write(tmp_path / "runs", "pytorch_model.bin"))
    assert set(read_checkpoint(tmp_path / "run").tensors) == {"weight", "bias"}
