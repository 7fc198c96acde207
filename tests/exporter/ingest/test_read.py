import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.cli import app
from modelyard.exporter.errors import CheckpointError, UsageError
from modelyard.exporter.ingest import read_checkpoint
from modelyard.exporter.ingest.value import strip_wrappers
from tests.exporter.ingest.honest import WRITERS
from tests.exporter.ingest.hostile import FILES, shell

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, x):
        return self.layer(x)
"""


class Heard:
    """Keeps what a trusted file said that it would import."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, file: str, names: Sequence[str]) -> None:
        self.names += names


def test_several_sets_of_weights_are_listed_and_asked_for(tmp_path: Path) -> None:
    content = {"netG": nn.Linear(4, 4).state_dict(), "netD": nn.Linear(2, 2).state_dict()}
    torch.save(content, tmp_path / "gan.pt")
    with pytest.raises(CheckpointError, match=r"netG \(20 parameters\), netD \(6 .*--weights-key"):
        read_checkpoint(tmp_path / "gan.pt")
    with pytest.raises(UsageError, match="no averaged weights"):
        read_checkpoint(tmp_path / "gan.pt", ema=True)


def test_tied_weights_stay_tied_and_are_named(tmp_path: Path) -> None:
    found = read_checkpoint(WRITERS["state dict, zip"](tmp_path).path)
    assert found.tied == (("embed.weight", "head.weight"),)
    assert found.tensors["embed.weight"].data_ptr() == found.tensors["head.weight"].data_ptr()
    assert found.parameters == sum(
        value.numel() for name, value in found.tensors.items() if name != "head.weight"
    )


def test_tensors_are_mapped_and_writing_to_them_leaves_the_file_alone(tmp_path: Path) -> None:
    written = WRITERS["state dict, protocol 4"](tmp_path)
    before = written.path.read_bytes()
    found = read_checkpoint(written.path)
    found.tensors["body.0.weight"].zero_()
    assert written.path.read_bytes() == before


def test_a_folders_files_are_hashed_under_one_digest(tmp_path: Path) -> None:
    path = WRITERS["Determined folder"](tmp_path).path
    first = read_checkpoint(path)
    names = [file.name for file in first.files]
    assert names == ["load_data.json", "metadata.json", "state_dict.pth"]
    (path / "metadata.json").write_text('{"determined_version": "0.22"}', encoding="utf-8")
    assert read_checkpoint(path).sha256 != first.sha256


def test_the_trial_class_of_determined_is_named_and_not_imported(tmp_path: Path) -> None:
    found = read_checkpoint(WRITERS["Determined folder"](tmp_path).path)
    assert found.class_hint is not None
    assert found.class_hint.name == "trial:Trial"
    assert "trial" not in sys.modules


def test_the_source_of_a_legacy_module_is_kept_as_text(tmp_path: Path) -> None:
    found = read_checkpoint(
        WRITERS["pickled module in the legacy format, with its source"](tmp_path).path
    )
    assert "class Net(nn.Module)" in found.sources["tests.exporter.ingest.honest.Net"]


def test_labels_of_an_archive_and_a_folder_are_read(tmp_path: Path) -> None:
    archive = tmp_path / "a"
    folder = tmp_path / "b"
    archive.mkdir()
    folder.mkdir()
    assert read_checkpoint(WRITERS["TorchServe archive, zip"](archive).path).labels == {
        0: "cat",
        1: "dog",
    }
    labels = read_checkpoint(WRITERS["Hugging Face folder"](folder).path).labels
    assert labels == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


@pytest.mark.parametrize("name", ["Hugging Face folder", "Hugging Face .bin shards"])
def test_a_hugging_face_folder_builds_its_own_class(name: str, tmp_path: Path) -> None:
    written = WRITERS[name](tmp_path)
    with open_model(written.path, None) as model:
        assert type(model).__name__ == "BertForSequenceClassification"
        assert not model.training
        for key, value in model.state_dict().items():
            assert torch.equal(value, written.expected[key])


def test_code_of_a_hugging_face_folder_is_refused_by_name(tmp_path: Path) -> None:
    path = WRITERS["Hugging Face folder"](tmp_path).path
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_net.Net"}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "modeling_net.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    with (
        pytest.raises(CheckpointError, match=r"code in the folder \(modeling_net\.Net\).*--trust"),
        open_model(path, None),
    ):
        pass


def test_tensors_that_do_not_fit_a_hugging_face_class_are_named(tmp_path: Path) -> None:
    written = WRITERS["Hugging Face folder, pytorch_model.bin"](tmp_path)
    state = dict(written.expected)
    state["trunk.weight"] = state.pop("classifier.weight")
    torch.save(state, tmp_path / "pytorch_model.bin")
    with (
        pytest.raises(CheckpointError, match=r"missing keys classifier\.weight.*trunk\.weight"),
        open_model(tmp_path, None),
    ):
        pass


def test_lightnings_hyper_parameters_build_the_users_class(tmp_path: Path) -> None:
    path = WRITERS["Lightning"](tmp_path).path
    # Its class has `model` inside; the network alone takes `width` and `act`, not `folder`.
    (tmp_path / "net.py").write_text(
        "from tests.exporter.ingest.honest import Net\n"
        "def make(width, act):\n    return Net(width, act)\n",
        encoding="utf-8",
    )
    with open_model(path, f"{tmp_path / 'net.py'}:make") as model:
        weight = read_checkpoint(path).tensors["model.body.0.weight"]
        assert torch.equal(model.state_dict()["body.0.weight"], weight)


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pickled module whose class is in a file beside it."""
    (tmp_path / "author_net.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    module: Any = importlib.import_module("author_net")
    torch.manual_seed(0)
    torch.save(module.Net(), tmp_path / "net.pt")
    monkeypatch.undo()
    del sys.modules["author_net"]
    return tmp_path / "net.pt"


def test_a_trusted_file_says_what_it_imports_and_gives_its_model(pickled: Path) -> None:
    heard = Heard()
    before = list(sys.path)
    found = read_checkpoint(pickled, announce=heard)
    assert heard.names == ["author_net.Net"]
    assert (found.loader, found.imports) == ("trusted", ("author_net.Net",))
    assert sys.path == before
    with open_model(found, None) as model:
        assert torch.equal(model.state_dict()["layer.weight"], found.tensors["layer.weight"])
    del sys.modules["author_net"]


def test_without_trust_the_same_file_gives_its_weights_alone(pickled: Path) -> None:
    found = read_checkpoint(pickled)
    assert (found.loader, found.module, found.refused) == ("inert", None, ("author_net.Net",))
    assert "author_net" not in sys.modules
    with open_model(found, f"{pickled.parent / 'author_net.py'}:Net") as model:
        assert torch.equal(model.state_dict()["layer.weight"], found.tensors["layer.weight"])


def test_trust_is_not_asked_where_nothing_needs_it(tmp_path: Path) -> None:
    heard = Heard()
    written = WRITERS["loop with optimizer, scheduler and numpy numbers"](tmp_path)
    assert read_checkpoint(written.path, announce=heard).loader == written.loader
    assert heard.names == []


def test_the_command_announces_what_a_trusted_file_imports(pickled: Path) -> None:
    arguments = [str(pickled), "--input", "x:float32[batch=1..2,3]", "--trust", "--format", "pt2"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(pickled.parent / "out")])
    assert result.exit_code == 0, result.output
    assert 'trusted: "net.pt" will import and may run author_net.Net' in result.output
    report = json.loads((pickled.parent / "out" / "net.pt2.report.json").read_text())
    assert report["model"] == "author_net:Net"
    assert report["checkpoint"]["kind"] == "pickled module"
    assert report["checkpoint"]["imported"] == ["author_net.Net"]
    assert "--trust" in report["command"]


def test_the_model_file_of_an_archive_is_used_when_trusted(tmp_path: Path) -> None:
    written = WRITERS["TorchServe archive, folder"](tmp_path)
    (tmp_path / "model.py").write_text(SOURCE, encoding="utf-8")
    torch.save({"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(2)}, tmp_path / "net.pt")
    with pytest.raises(UsageError, match=r"model\.py"), open_model(written.path, None):
        pass
    with open_model(written.path, None, trust=True) as model:
        assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 2), 4.0))


def test_export_takes_weights_by_key_and_ema_by_option(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE, encoding="utf-8")
    first, second = nn.Linear(3, 2).state_dict(), nn.Linear(3, 2).state_dict()
    content = {
        "model": {f"layer.{key}": value for key, value in first.items()},
        "model_ema": {f"module.layer.{key}": value for key, value in second.items()},
    }
    torch.save(content, tmp_path / "loop.pt")
    arguments = [str(tmp_path / "loop.pt"), "--model", f"{tmp_path / 'net.py'}:Net"]
    arguments += ["--input", "x:float32[batch=1..2,3]", "--format", "pt2", "--ema"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "loop.pt2.report.json").read_text())
    assert report["checkpoint"]["weights_key"] == "model_ema"
    assert report["checkpoint"]["prefixes_stripped"] == ["module."]
    assert "--ema" in report["command"]


def test_a_hostile_file_is_not_run_by_export_either(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE, encoding="utf-8")
    state = {f"layer.{key}": value for key, value in nn.Linear(3, 2).state_dict().items()}
    torch.save({"model": state, "x": shell(tmp_path / "marker")}, tmp_path / "evil.pt")
    arguments = [str(tmp_path / "evil.pt"), "--model", f"{tmp_path / 'net.py'}:Net"]
    arguments += ["--input", "x:float32[batch=1..2,3]", "--format", "pt2"]
    result = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "wants posix.system" in result.output
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("names", "renamed", "stripped"),
    [
        (["module.a", "module.b.c"], ["a", "b.c"], ("module.",)),
        (["_orig_mod.module.a"], ["a"], ("_orig_mod.", "module.")),
        (["module.a", "b"], ["module.a", "b"], ()),
        (["n_averaged", "module.a"], ["a"], ("module.",)),
        (["n_averaged", "a"], ["n_averaged", "a"], ()),
        (["a._orig_mod.b", "c"], ["a.b", "c"], ("…._orig_mod.",)),
        (["a._orig_mod.b", "a.b"], ["a._orig_mod.b", "a.b"], ()),
        (["module."], ["module."], ()),
        ([], [], ()),
    ],
)
def test_prefixes_go_only_when_every_name_has_them(
    names: list[str], renamed: list[str], stripped: tuple[str, ...]
) -> None:
    found, prefixes = strip_wrappers(names)
    assert list(found.values()) == renamed
    assert prefixes == stripped


def test_a_file_replaced_by_a_truncated_copy_is_refused(tmp_path: Path) -> None:
    path = WRITERS["state dict, zip"](tmp_path).path
    content = path.read_bytes()
    for length in (1, 3, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_the_hostile_set_has_a_payload_in_every_container() -> None:
    names = " ".join(FILES)
    for container in ("zip", "legacy", "module", "DCP index", "DCP byte", "Lightning", ".bin"):
        assert container in names
    for container in (".mar", "sample inputs", "safetensors", "grows", "..", "2^40", "twice"):
        assert container in names


@pytest.mark.slow
def test_tensors_that_two_ranks_saved_in_slices_are_put_together(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.exporter.ingest.two_ranks import main; "
    )
    code += "main(int(sys.argv[1]), Path(sys.argv[2]))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path / "dcp")])
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    found = read_checkpoint(tmp_path / "dcp")
    assert torch.equal(found.tensors["whole"], torch.arange(35.0).view(5, 7))
    assert torch.equal(found.tensors["columns"], torch.arange(35.0).view(5, 7))
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp.*missing"):
        read_checkpoint(tmp_path / "dcp")
