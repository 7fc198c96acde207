"""Models that a library makes by their names: timm (a stand-in by day), diffusers."""

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.errors import CheckpointError, ModelError, UsageError
from modelyard.exporter.ingest import read_checkpoint
from modelyard.exporter.inputs.settle import propose_inputs

# What of timm is used, with the same names and meanings; the nightly tests run timm itself.
TIMM = """
from types import SimpleNamespace
from torch import nn

__version__ = "1.0"


class Net(nn.Module):
    default_cfg = {"input_size": (3, 16, 16)}

    def __init__(self, num_classes, in_chans, width):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, width, 3)
        self.fc = nn.Linear(width, num_classes) if num_classes else nn.Identity()

    def forward(self, x):
        return self.fc(self.conv1(x).mean((2, 3)))


def list_models():
    return ["tiny18"]


def is_model(name):
    return name in list_models()


def get_pretrained_cfg(name):
    return SimpleNamespace(classifier="fc", first_conv="conv1")


def create_model(name, pretrained=False, num_classes=1000, in_chans=3, width=4):
    assert not pretrained
    return Net(num_classes, in_chans, width)
"""


@pytest.fixture
def timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that has the stand-in in front of an installed timm."""
    before = {name: module for name, module in sys.modules.items() if name.startswith("timm")}
    for name in before:
        del sys.modules[name]
    (tmp_path / "timm.py").write_text(TIMM, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("timm")
    sys.modules.update(before)


def _state(classes: int = 7, channels: int = 1, width: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(width, classes).state_dict() if classes else {}
    return {
        **{f"conv1.{k}": v for k, v in nn.Conv2d(channels, width, 3).state_dict().items()},
        **{f"fc.{k}": v for k, v in head.items()},
    }


@pytest.mark.parametrize(("classes", "channels"), [(7, 1), (1000, 3), (0, 4)])
@pytest.mark.parametrize("name", ["tiny18", "tiny18.a1_in1k"])
def test_a_name_of_timm_takes_its_sizes_from_the_weights(
    name: str, classes: int, channels: int, timm: Path
) -> None:
    torch.save(_state(classes, channels), timm / "net.pt")
    checkpoint = read_checkpoint(timm / "net.pt")
    with open_model(checkpoint, f"timm:{name}") as model:
        assert model(torch.zeros(2, channels, 16, 16)).shape == (2, classes or 4)
        proposal = propose_inputs(model, checkpoint)
    assert proposal is not None
    assert proposal.inputs == (f"image:float32[batch,{channels},16,16]",)


def test_model_args_of_timm_come_first(timm: Path) -> None:
    torch.save(_state(width=6), timm / "net.pt")
    with open_model(timm / "net.pt", "timm:tiny18", {"width": 6}) as model:
        assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 7)
    with (
        pytest.raises(CheckpointError, match=r"does not fit tiny18: mis-shaped fc\.weight"),
        open_model(timm / "net.pt", "timm:tiny18", {"width": 6, "num_classes": 8}),
    ):
        pass


def test_a_folder_of_timm_names_its_own_model(timm: Path) -> None:
    folder = timm / "folder"
    folder.mkdir()
    torch.save(_state(width=6), folder / "pytorch_model.bin")
    config = {"architecture": "tiny18", "pretrained_cfg": {}, "model_args": {"width": 6}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with open_model(folder, None) as model:
        assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 7)


def test_a_name_that_timm_has_not_is_refused_with_the_nearest(timm: Path) -> None:
    torch.save(_state(), timm / "net.pt")
    with (
        pytest.raises(ModelError, match=r'timm 1\.0 has no model "tiny_18"; .* you mean tiny18'),
        open_model(timm / "net.pt", "timm:tiny_18"),
    ):
        pass


def test_a_library_that_is_not_installed_is_named(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(
        (tmp_path / "diffusion_pytorch_model.bin").read_bytes()
    )
    config = {"_class_name": "UNet2DModel", "_diffusers_version": "0.42"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if find_spec("diffusers"):
        pytest.skip("diffusers is installed here")
    with pytest.raises(ModelError, match="needs diffusers"), open_model(tmp_path, None):
        pass


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "arguments", "channels"),
    [
        ("resnet18", {"num_classes": 10, "in_chans": 1}, 1),
        ("vit_tiny_patch16_224", {"num_classes": 5}, 3),
        ("convnext_atto", {"num_classes": 0}, 3),
        ("tresnet_m", {"num_classes": 7}, 3),  # splits the picture before its first layer
        ("efficientnet_b0", {"in_chans": 4}, 4),
    ],
)
def test_models_of_timm_itself_are_read_off_their_weights(
    name: str, arguments: dict[str, Any], channels: int, tmp_path: Path
) -> None:
    library: Any = pytest.importorskip("timm")
    made = library.create_model(name, **arguments).eval()
    torch.save(made.state_dict(), tmp_path / "net.pt")
    checkpoint = read_checkpoint(tmp_path / "net.pt")
    with open_model(checkpoint, f"timm:{name}") as model:
        proposal = propose_inputs(model, checkpoint)
        assert proposal is not None
        assert proposal.inputs == (f"image:float32[batch,{channels},224,224]",)
        image = torch.randn(1, channels, 224, 224)
        with torch.no_grad():
            assert torch.equal(model(image), made(image))


@pytest.mark.nightly
def test_components_of_diffusers_say_what_they_take(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("diffusers")
    made = library.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )
    made.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    with open_model(checkpoint, None) as model:
        proposal = propose_inputs(model, checkpoint)
        assert type(model) is type(made)
    assert proposal is not None
    assert proposal.inputs == (
        "sample:float32[batch,4,16,16]",
        "timestep:int64[batch]",
        "encoder_hidden_states:float32[batch,tokens=2..77,16]",
    )
    with (
        pytest.raises(UsageError, match=r'"sampel_size" is not a value .* you mean sample_size'),
        open_model(checkpoint, None, {"sampel_size": 8}),
    ):
        pass


def test_numbers_that_json_has_not_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Every Mamba2 has one: its time steps may be endless."""
    library: Any = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_heads": 2, "head_dim": 16, "state_size": 4, "vocab_size": 32}
    config = library.Mamba2Config(**small, num_hidden_layers=1, n_groups=1)
    library.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    with open_model(read_checkpoint(tmp_path), None) as model:
        opened: Any = model
        assert list(opened.config.time_step_limit) == [0.0, float("inf")]
