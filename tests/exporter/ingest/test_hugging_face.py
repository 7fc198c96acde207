"""Folders of transformers: the class, the head, the configuration, and what is left out of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from modelyard.exporter.arguments import choose_outputs
from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.errors import CheckpointError, ModelError, UsageError
from tests.exporter.tiny import DECODERS, save


@pytest.fixture(scope="module")
def _bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), "BertForSequenceClassification")


@pytest.fixture
def bert(_bert: Path, tmp_path: Path) -> Path:
    """A classifier's folder, which the test may change."""
    return Path(shutil.copytree(_bert, tmp_path / "bert"))


def change(folder: Path, **values: Any) -> Path:
    """Replace values of its config.json."""
    config = json.loads((folder / "config.json").read_text("utf-8")) | values
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", DECODERS)
def test_what_decodes_is_built_without_its_cache_which_is_said(name: str, tmp_path: Path) -> None:
    notes: list[str] = []
    with open_model(save(tmp_path, name), None, notes=notes) as model:
        call: Any = model
        ids = torch.ones(2, 5, dtype=torch.int64)
        named = {"decoder_input_ids": ids} if name.startswith(("T5", "Whisper")) else {}
        sound = torch.randn(2, 8, 20)
        found = call(sound if name.startswith("Whisper") else ids, **named)
    assert "logits" in choose_outputs(found, ()).names  # which refuses a cache
    assert found["logits"].shape == (2, 5, 60)
    assert len(notes) == 1
    assert "use_cache=False" in notes[0]


def test_an_encoder_says_nothing_of_caches(bert: Path) -> None:
    notes: list[str] = []
    with open_model(bert, None, notes=notes):
        assert notes == []


def test_model_args_replace_values_of_the_configuration(tmp_path: Path) -> None:
    folder = save(tmp_path, "GPT2LMHeadModel")
    ids = torch.ones(1, 3, dtype=torch.int64)
    with open_model(folder, None, {"use_cache": True}) as model:
        assert "past_key_values" in model(ids)
    with open_model(folder, None, {"activation_function": "relu"}) as model:
        changed: Tensor = model(ids).logits
    with open_model(folder, None) as model:
        assert not torch.equal(changed, model(ids).logits)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        pytest.param({"num_hiden_layers": 1}, "did you mean num_hidden_layers", id="unknown"),
        pytest.param({"attn_implementation": "a/b"}, 'kernel "a/b" would be fetched', id="kernel"),
    ],
)
def test_model_args_that_mean_nothing_are_wrong_usage(
    arguments: dict[str, Any], seen: str, bert: Path
) -> None:
    with pytest.raises(UsageError, match=seen), open_model(bert, None, arguments):
        pass


def test_model_args_for_a_whole_module_are_wrong_usage(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(3, 2)), tmp_path / "net.pt")
    with (
        pytest.raises(UsageError, match=r"--model-args: .* is a whole module"),
        open_model(tmp_path / "net.pt", None, {"width": 3}),
    ):
        pass


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("transformers:BertModel", None),
        ("transformers:AutoModel", None),
        (None, "feature-extraction"),
    ],
)
def test_a_part_of_the_folders_model_is_taken_and_the_rest_is_noted(
    model: str | None, task: str | None, bert: Path
) -> None:
    notes: list[str] = []
    with open_model(bert, model, task=task, notes=notes) as built:
        assert type(built).__name__ == "BertModel"
    assert notes == [
        "BertModel has no place for classifier.bias, classifier.weight of the checkpoint, a "
        "BertForSequenceClassification"
    ]


def test_a_head_whose_weights_are_missing_is_refused_by_their_names(bert: Path) -> None:
    with (
        pytest.raises(
            CheckpointError, match=r"missing keys qa_outputs\.bias, .*a checkpoint of BertForSeq"
        ),
        open_model(bert, None, task="question-answering"),
    ):
        pass


@pytest.mark.parametrize(
    ("model", "task", "seen"),
    [
        pytest.param(None, "txt-classification", "did you mean text-classification", id="misspelt"),
        pytest.param(None, "object-detection", "no AutoModelForObjectDetection", id="other kind"),
        pytest.param("transformers:BertModl", None, "did you mean BertModel?", id="class"),
        pytest.param("net.py:Net", "fill-mask", "leave --model net.py:Net out", id="both"),
    ],
)
def test_a_task_or_class_that_is_none_is_wrong_usage(
    model: str | None, task: str | None, seen: str, bert: Path
) -> None:
    with pytest.raises(UsageError) as caught, open_model(bert, model, task=task):
        pass
    assert seen in str(caught.value)


def test_a_task_is_for_folders_alone(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "net.pt")
    with (
        pytest.raises(UsageError, match=r"for a Hugging Face folder, .* is a state dict"),
        open_model(tmp_path / "net.pt", None, task="fill-mask"),
    ):
        pass


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "experts_implementation"]
)
def test_a_kernel_that_the_folder_names_is_left_out(key: str, bert: Path) -> None:
    notes: list[str] = []
    # transformers would ask the hub for it, with a package that is not here.
    with open_model(change(bert, **{key: "someone/kernel"}), None, notes=notes) as model:
        assert "someone/kernel" not in str(vars(model.config))
    assert [note for note in notes if 'the kernel "someone/kernel", which was left out' in note]


@pytest.mark.parametrize(
    "value", [{"AutoModel": "evil.Net"}, ["evil.Net"], "evil.Net", None], ids=repr
)
def test_code_of_the_folder_is_refused_however_it_is_written(value: Any, bert: Path) -> None:
    (bert / "evil.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    with (
        pytest.raises(CheckpointError, match=r"its class is code in the folder .*--trust"),
        open_model(change(bert, auto_map=value), None),
    ):
        pass


@pytest.mark.parametrize(
    ("values", "error", "seen"),
    [
        pytest.param(
            {"quantization_config": {"quant_method": "mxfp4"}},
            CheckpointError,
            r"quantised weights .*dequantize",
            id="quantised",
        ),
        pytest.param({"model_type": "brt"}, ModelError, 'the model_type "brt"', id="unknown type"),
        pytest.param({"hidden_size": "wide"}, ModelError, "transformers refuses", id="value"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(
    values: dict[str, Any], error: type[Exception], seen: str, bert: Path
) -> None:
    with pytest.raises(error, match=seen), open_model(change(bert, **values), None):
        pass


def test_a_mixture_of_experts_is_traced_in_torchs_own_operators(tmp_path: Path) -> None:
    with open_model(save(tmp_path, "MixtralForCausalLM"), None) as model:
        ids = torch.randint(0, 60, (2, 5))
        program = torch.export.export(model, (ids,))
        found: Any = program.module()(ids)
    operators = {
        node.target.namespace
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    }
    assert operators == {"aten"}
    mixture = transformers.MixtralForCausalLM.from_pretrained(tmp_path)  # by its own operator
    assert mixture.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(found.logits, mixture(ids, use_cache=False).logits)
