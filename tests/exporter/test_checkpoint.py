import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from modelyard.exporter.checkpoint import open_model, split_model
from modelyard.exporter.errors import CheckpointError, ModelError, UsageError
from modelyard.exporter.ingest import read_checkpoint

Author = Callable[[str], tuple[Path, str]]

HEAD = "import torch\nfrom torch import nn\n"
LINEAR = """
class Net(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.layer = nn.Linear(3, outputs)
        self.dropout = nn.Dropout()

    def forward(self, x):
        return self.dropout(self.layer(x))


def make(outputs):
    return Net(outputs)


def give_text():
    return "text"
"""


class _Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.folder,)


def test_the_model_has_the_checkpoints_weights_and_is_in_eval_mode(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    with open_model(checkpoint, model, {}) as module:
        weights = torch.load(checkpoint, weights_only=True)["layer.weight"]
        assert torch.equal(module.state_dict()["layer.weight"], weights)
        assert not any(part.training for part in module.modules())


def test_a_factory_gets_the_model_args(author: Author, tmp_path: Path) -> None:
    checkpoint, model = author(LINEAR)
    torch.save(nn.ModuleDict({"layer": nn.Linear(3, 7)}).state_dict(), checkpoint)
    with open_model(checkpoint, model.replace(":Net", ":make"), {"outputs": 7}) as module:
        assert module(torch.zeros(1, 3)).shape == (1, 7)


def test_a_class_of_an_installed_package_needs_no_file(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "linear.pt")
    arguments = {"in_features": 3, "out_features": 2}
    with open_model(tmp_path / "linear.pt", "torch.nn:Linear", arguments) as module:
        assert isinstance(module, nn.Linear)


def test_a_model_file_imports_its_neighbours_and_leaves_no_trace(
    author: Author, tmp_path: Path
) -> None:
    (tmp_path / "layers.py").write_text("WIDTH = 3\n", encoding="utf-8")
    before = list(sys.path)
    checkpoint, model = author(LINEAR)
    source = "from layers import WIDTH\n" + HEAD + LINEAR.replace("Linear(3,", "Linear(WIDTH,")
    (tmp_path / "net.py").write_text(source, encoding="utf-8")
    with open_model(checkpoint, model, {}):
        assert sys.path == before
    assert not {"layers", "modelyard_model_net"} & set(sys.modules)


def test_every_misfit_is_named_at_once(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    torch.save({"layer.weight": torch.zeros(4, 3), "head.bias": torch.zeros(2)}, checkpoint)
    with pytest.raises(CheckpointError) as caught, open_model(checkpoint, model, {}):
        pass
    assert (
        "missing layer.bias; unexpected head.bias (nearest missing: layer.bias); mis-shaped "
        "layer.weight (checkpoint [4, 3], model [2, 3])" in str(caught.value)
    )


def test_a_checkpoint_without_tensors_fits_no_model_that_has_some(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    torch.save({}, checkpoint)
    with (
        pytest.raises(CheckpointError, match=r"missing layer\.weight, layer\.bias\."),
        open_model(checkpoint, model, {}),
    ):
        pass


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "model.", "module.net."])
def test_a_wrappers_prefix_is_stripped(prefix: str, author: Author) -> None:
    checkpoint, model = author(LINEAR)
    state = torch.load(checkpoint, weights_only=True)
    torch.save({f"{prefix}{key}": value for key, value in state.items()}, checkpoint)
    with open_model(checkpoint, model, {}) as module:
        assert torch.equal(module.state_dict()["layer.weight"], state["layer.weight"])


def test_a_prefix_that_no_wrapper_has_is_pointed_at(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    state = torch.load(checkpoint, weights_only=True)
    torch.save({f"trunk.{key}": value for key, value in state.items()}, checkpoint)
    with (
        pytest.raises(CheckpointError, match=r'Every name starts with "trunk\."'),
        open_model(checkpoint, model, {}),
    ):
        pass


def test_a_prefix_that_the_class_has_itself_stays(author: Author, tmp_path: Path) -> None:
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)
        self.model = nn.Linear(3, 2)

    def forward(self, x):
        return self.module(x)
"""
    checkpoint, model = author(source)
    torch.save({f"module.{k}": v for k, v in torch.load(checkpoint).items()}, checkpoint)
    with open_model(checkpoint, model, {}) as module:
        assert set(module.state_dict()) == {"module.weight", "module.bias"} | {
            "model.weight",
            "model.bias",
        }


def test_a_state_dict_under_module_fits_the_class_whose_attribute_that_is(author: Author) -> None:
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)

    def forward(self, x):
        return self.module(x)
"""
    checkpoint, model = author(source)
    weights = torch.load(checkpoint)["module.weight"]
    with open_model(checkpoint, model, {}) as module:
        assert torch.equal(module.state_dict()["module.weight"], weights)


def test_a_tied_weight_that_was_saved_once_fills_both_names(author: Author) -> None:
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))
"""
    checkpoint, model = author(source)
    weight = torch.randn(5, 3)
    torch.save({"embed.weight": weight}, checkpoint)
    with open_model(checkpoint, model, {}) as module:
        assert torch.equal(module.state_dict()["head.weight"], weight)


def test_hyper_parameters_build_the_class_and_model_args_replace_them(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    content = {
        "state_dict": nn.ModuleDict({"layer": nn.Linear(3, 7)}).state_dict(),
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"outputs": 7, "learning_rate": 0.1},
        "hparams_name": "kwargs",
    }
    torch.save(content, checkpoint)
    with open_model(checkpoint, model) as module:
        assert module(torch.zeros(1, 3)).shape == (1, 7)
    with (
        pytest.raises(CheckpointError, match="mis-shaped"),
        open_model(checkpoint, model, {"outputs": 8}),
    ):
        pass


def test_hyper_parameters_of_one_argument_are_given_as_it(author: Author) -> None:
    source = """
class Net(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.layer = nn.Linear(3, config.outputs if config else 2)

    def forward(self, x):
        return self.layer(x)
"""
    checkpoint, model = author(source)
    content = {
        "state_dict": nn.ModuleDict({"layer": nn.Linear(3, 7)}).state_dict(),
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"outputs": 7},
        "hparams_name": "config",
    }
    torch.save(content, checkpoint)
    with open_model(checkpoint, model) as module:
        assert module(torch.zeros(1, 3)).shape == (1, 7)


def test_a_refused_hyper_parameter_that_the_class_needs_is_named(author: Author) -> None:
    source = LINEAR.replace("outputs=2", "outputs=2, folder=None")
    checkpoint, model = author(source)
    content = {
        "state_dict": torch.load(checkpoint),
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"folder": _Evil(checkpoint.parent / "ran")},
        "hparams_name": "kwargs",
    }
    torch.save(content, checkpoint)
    with (
        pytest.raises(
            CheckpointError, match=rf'"folder" of .* is {os.name}\.mkdir, .*--model-args'
        ),
        open_model(checkpoint, model),
    ):
        pass
    assert not (checkpoint.parent / "ran").exists()


def test_layers_of_torch_alone_need_no_model(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    torch.save(whole, tmp_path / "net.pt")
    with open_model(tmp_path / "net.pt", None) as module:
        image = torch.randn(2, 1, 5, 5)
        assert torch.equal(module(image), whole.eval()(image))


def test_weights_without_a_class_ask_for_model(author: Author) -> None:
    checkpoint, _ = author(LINEAR)
    with (
        pytest.raises(UsageError, match=r"holds the weights of a class .* --model file\.py:Class"),
        open_model(checkpoint, None),
    ):
        pass


@pytest.mark.parametrize("model", ["net.py", "net.py:", ":Net", "net.py:a b", "folder/net:Net"])
def test_a_model_of_another_form_is_wrong_usage(model: str) -> None:
    with pytest.raises(UsageError, match=r"expected file\.py:Class"):
        split_model(model)


@pytest.mark.parametrize(
    ("name", "arguments", "seen"),
    [
        pytest.param("Nett", {}, 'net.py has no "Nett"; it has Net', id="unknown class"),
        pytest.param("Net", {"size": 1}, "Net(size=1) fails: TypeError", id="wrong argument"),
        pytest.param("torch", {}, "torch is a module", id="no class"),
        pytest.param("give_text", {}, "give_text() gives a str", id="no model"),
    ],
)
def test_a_class_that_gives_no_model_is_refused(
    name: str, arguments: dict[str, int], seen: str, author: Author
) -> None:
    checkpoint, model = author(LINEAR)
    with (
        pytest.raises(ModelError) as caught,
        open_model(checkpoint, model.replace(":Net", f":{name}"), arguments),
    ):
        pass
    assert seen in str(caught.value)


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        pytest.param("x = 1\n1 / 0\n", 'net.py:2 "1 / 0": ZeroDivisionError', id="raises"),
        pytest.param("x = 1\n\nx x\n", "net.py:3: SyntaxError", id="syntax"),
        pytest.param(
            "import no_such_thing\n",
            'net.py:1 "import no_such_thing": ModuleNotFoundError',
            id="import",
        ),
        pytest.param(
            "raise SystemExit(3)\n",
            'net.py:1 "raise SystemExit(3)": SystemExit: 3',
            id="ends the process",
        ),
    ],
)
def test_a_model_file_that_fails_is_refused_by_file_and_line(
    source: str, seen: str, author: Author, tmp_path: Path
) -> None:
    checkpoint, model = author(LINEAR)
    (tmp_path / "net.py").write_text(source, encoding="utf-8")
    before = list(sys.path)
    with pytest.raises(ModelError) as caught, open_model(checkpoint, model, {}):
        pass
    assert seen in str(caught.value)
    assert sys.path == before


def test_an_unknown_file_and_an_unknown_module_are_refused(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    with (
        pytest.raises(ModelError, match=r'nett\.py" does not exist'),
        open_model(checkpoint, model.replace("net.py", "nett.py"), {}),
    ):
        pass
    with (
        pytest.raises(ModelError, match="No module named 'no_such_package'"),
        open_model(checkpoint, "no_such_package.net:Net", {}),
    ):
        pass


WRAP = """
class Net(nn.Module):
    def __init__(self, net, rate=0.1):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)
"""


def test_a_network_as_argument_gets_the_factory_to_write(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(HEAD + WRAP, encoding="utf-8")
    content = {
        "state_dict": nn.ModuleDict({"net": nn.Linear(3, 2)}).state_dict(),
        "pytorch-lightning_version": "2.6.6",
        "hyper_parameters": {"rate": 0.5},
        "hparams_name": "kwargs",
    }
    torch.save(content, tmp_path / "net.ckpt")
    model = f"{tmp_path / 'net.py'}:"
    with pytest.raises(ModelError) as caught, open_model(tmp_path / "net.ckpt", f"{model}Net"):
        pass
    line = "def make(rate): return Net(net=…, rate=rate)"
    assert "Net() needs net, which neither the checkpoint nor" in str(caught.value)
    assert f"add the factory `{line}` to net.py" in str(caught.value)
    assert "or name the class of net, whose weights these are" in str(caught.value)
    with (tmp_path / "net.py").open("a", encoding="utf-8") as file:
        file.write(line.replace("…", "nn.Linear(3, 2)"))
    with open_model(tmp_path / "net.ckpt", f"{model}make") as built:
        assert built(torch.zeros(1, 3)).shape == (1, 2)


def test_a_class_that_is_made_by_its_method_names_it(author: Author) -> None:
    checkpoint, model = author(LINEAR)
    source = LINEAR.replace("outputs=2):", "blocks=None):\n        assert blocks").replace(
        "nn.Linear(3, outputs)", "nn.Linear(3, blocks)"
    )
    source += """

class Other(Net):
    @classmethod
    def from_name(cls, name):
        return cls(int(name))
"""
    checkpoint.with_name("net.py").write_text(HEAD + source, encoding="utf-8")
    other = model.replace(":Net", ":Other")
    with (
        pytest.raises(
            ModelError, match=r"has from_name\(name\) to make it: .* net\.py:Other\.from"
        ),
        open_model(checkpoint, other),
    ):
        pass
    with open_model(checkpoint, f"{other}.from_name", {"name": "2"}) as built:
        assert built(torch.zeros(1, 3)).shape == (1, 2)


CLASSES = """
class Net(nn.Module):
    def __init__(self, num_classes=1000, hidden=8):
        super().__init__()
        self.body = nn.Linear(3, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, image):
        return self.head(self.body(image))
"""


def test_what_the_class_is_to_be_given_is_proposed_and_fits(author: Author) -> None:
    checkpoint, model = author(CLASSES)
    state = nn.ModuleDict({"body": nn.Linear(3, 5), "head": nn.Linear(5, 4)}).state_dict()
    classes = ["ant", "bee", "cat", "dog"]
    torch.save({"model_state_dict": state, "classes": classes}, checkpoint)
    proposed = '--model-args \'{"num_classes": 4, "hidden": 5}\''
    with pytest.raises(CheckpointError, match=proposed), open_model(checkpoint, model, {}):
        pass
    with open_model(checkpoint, model, {"num_classes": 4, "hidden": 5}) as module:
        assert module(torch.zeros(1, 3)).shape == (1, 4)
    assert read_checkpoint(checkpoint).labels == dict(enumerate(classes))


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("classes", ["cat", "dog"]),
        ("class_to_idx", {"dog": 1, "cat": 0}),
        ("idx_to_class", {0: "cat", 1: "dog"}),
    ],
)
def test_names_of_classes_beside_the_weights_are_its_labels(
    key: str, names: object, tmp_path: Path
) -> None:
    path = tmp_path / "loop.pt"
    torch.save({"model": nn.Linear(3, 2).state_dict(), key: names, "epoch": 3}, path)
    assert read_checkpoint(path).labels == {0: "cat", 1: "dog"}
