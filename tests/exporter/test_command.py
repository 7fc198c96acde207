"""A command with words missing: what it says that it found, and that its proposal works."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from modelyard.exporter.classes import classes_in
from modelyard.exporter.cli import app

NETS = """
import torch
from torch import nn
import lightning.pytorch as pl

raise SystemExit("whoever only looks for classes does not run this file")
"""
NET = """
import torch
from torch import nn


class _Part(nn.Module):
    pass


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Conv2d(1, 2, 3)


class Net(Base):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2 * 6 * 6, 3)

    def forward(self, image):
        return self.head(self.see(image).flatten(1))


class Any(Base):
    def forward(self, image):
        return self.see(image).mean((2, 3))


class Data:
    def __init__(self):
        self.see = self.head = None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a model file, and weights of two of its classes."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    torch.manual_seed(0)
    see = {f"see.{name}": value for name, value in nn.Conv2d(1, 2, 3).state_dict().items()}
    head = {f"head.{name}": value for name, value in nn.Linear(72, 3).state_dict().items()}
    torch.save({**see, **head}, "net.pt")
    torch.save(see, "any.pt")
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def proposed(result: Any) -> list[str]:
    """Return the words behind `modelyard export` of the command that a message ends with."""
    assert result.exit_code == 2, result.stderr
    program, command, *words = shlex.split(result.stderr.splitlines()[-1])
    assert (program, command) == ("modelyard", "export")
    return words


FAST = ("--format", "torchscript", "--quick")


def test_weights_alone_lead_to_their_class_and_its_inputs(folder: Path) -> None:
    result = run("net.pt", *FAST)
    assert '"net.pt" holds the weights of a class (state dict' in result.stderr
    assert "Net in net.py has their names, whose forward() takes image:" in result.stderr
    words = proposed(result)
    assert words[:3] == ["net.pt", "--model", "net.py:Net"]

    written = run(*words)
    assert written.exit_code == 0, written.stderr
    # Behind a Linear layer no other size runs.
    assert "--input 'image:float32[batch,1,8,8]'" in written.stderr
    assert Path("build/net.pt").is_file()


def test_a_file_without_a_class_is_answered_with_its_classes(folder: Path) -> None:
    result = run("net.pt", "--model", "net.py", *FAST)
    assert '--model "net.py" names no class in the file; it has Base, Net, Any:' in result.stderr
    assert proposed(result)[2] == "net.py:Base"
    Path("empty.py").touch()
    result = run("net.pt", "--model", "empty.py")
    assert "which defines none; expected file.py:Class" in result.stderr


@pytest.mark.nightly
def test_a_model_of_any_size_is_proposed_and_not_guessed(folder: Path) -> None:
    result = run("any.pt", "--model", "net.py:Any", *FAST)
    assert "it runs with these, and with other sizes too: change them to yours" in result.stderr
    words = proposed(result)
    assert "image:float32[batch,1,224,224]" in words
    smaller = [word.replace("224,224", "9,7") for word in words]
    written = run(*smaller)
    assert written.exit_code == 0, written.stderr


def test_a_sample_says_the_rest(folder: Path) -> None:
    Image.new("L", (8, 8)).save("8.png")
    Image.new("L", (30, 20)).save("photo.png")
    np.save("row.npy", np.zeros((1, 8, 8), "float32"))
    for sample in ("8.png", "row.npy"):
        written = run("net.pt", "--model", "net.py:Net", "--sample", sample, *FAST)
        assert written.exit_code == 0, written.stderr
        assert "--input 'image:float32[batch" in written.stderr
        assert ",1,8,8]'" in written.stderr
    result = run("net.pt", "--model", "net.py:Net", "--sample", "photo.png", *FAST)
    assert '"photo.png" is 30 × 20 pixels, which the model does not take' in result.stderr
    assert "image:float32[batch,1,8,8]" in proposed(result)
    Path("line.txt").write_text("a text")
    result = run("net.pt", "--model", "net.py:Net", "--sample", "line.txt", *FAST)
    assert (
        "a text becomes tokens by tokenizer.json in the folder of the checkpoint" in result.stderr
    )


def test_only_classes_that_hold_the_weights_are_proposed(folder: Path) -> None:
    torch.save({"other.weight": torch.zeros(2)}, "other.pt")
    result = run("other.pt")
    assert result.exit_code == 2
    classes = "Base in net.py, Net in net.py, Any in net.py"
    assert result.stderr.strip().endswith(f"beside it are {classes}")


def test_classes_are_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text(NETS + "class Lit(pl.LightningModule):\n    def forward(self, x, mask): ...\n")
    (found,) = classes_in(file)
    assert (found.name, found.takes) == ("Lit", ("x", "mask"))
    file.write_text("class Broken(nn.Module:\n")
    assert classes_in(file) == []
