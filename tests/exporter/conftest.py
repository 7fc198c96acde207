"""A model as an author leaves it: a Python file and the checkpoint of its class."""

import runpy
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

HEAD = "import torch\nfrom torch import nn\n\n"


@pytest.fixture(autouse=True)
def _reports_in_a_folder_of_the_test(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep the reports of failed exports out of the machine's temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temp")))


@pytest.fixture
def author(tmp_path: Path) -> Callable[[str], tuple[Path, str]]:
    """Write a model file whose class is `Net`, and its checkpoint; give `(checkpoint, --model)`."""

    def write(source: str) -> tuple[Path, str]:
        file = tmp_path / "net.py"
        file.write_text(HEAD + source, encoding="utf-8")
        torch.manual_seed(0)
        model = runpy.run_path(str(file))["Net"]()
        checkpoint = tmp_path / "net.pt"
        torch.save(model.state_dict(), checkpoint)
        return checkpoint, f"{file}:Net"

    return write


@pytest.fixture(scope="module", autouse=True)
def _one_checker(one_checker: None) -> None:
    """Have all exports of the room ask one process."""


@pytest.fixture(scope="session", autouse=True)
def _signatures_are_parsed_once() -> Iterator[None]:
    """Have torch's converter parse its 500 functions once; it does so at each export, for 0.3 s."""
    from onnxscript.values import TracedOnnxFunction as Traced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traced, "function_ir", property(cache(vars(Traced)["function_ir"].fget)))
        yield
