"""What a model says that it takes: proposed, complete with what is given, and runnable."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from modelyard.archiver.signature import parse_inputs
from modelyard.exporter.arguments import flatten, take_inputs
from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.cli import app
from modelyard.exporter.ingest import read_checkpoint
from modelyard.exporter.inputs.settle import Proposal, complete, propose_inputs
from modelyard.exporter.inputs.tried import find_inputs
from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs
from tests.exporter.tiny import save
from tests.exporter.unseen import CASES

NETWORKS = Path(__file__).parent / "unseen.py"
LENGTH = "length=2..32"
PROPOSED = {
    "BertForSequenceClassification": (
        f"input_ids:int64[batch,{LENGTH}]<60",
        "attention_mask:int64[batch,length]",
        "token_type_ids:int64[batch,length]<2",
    ),
    "RobertaForMaskedLM": (
        # Its positions start behind the padding's.
        "input_ids:int64[batch,length=2..30]<60",
        "attention_mask:int64[batch,length]",
    ),
    "GPT2LMHeadModel": (
        f"input_ids:int64[batch,{LENGTH}]<60",
        "attention_mask:int64[batch,length]",
    ),
    "T5ForConditionalGeneration": (
        "input_ids:int64[batch,length=2..128]<60",
        "attention_mask:int64[batch,length]",
        "decoder_input_ids:int64[batch,target=1..32]<60",
    ),
    "WhisperForConditionalGeneration": (
        "input_features:float32[batch,8,20]",
        "decoder_input_ids:int64[batch,target=1..12]<60",
    ),
    "ViTForImageClassification": ("pixel_values:float32[batch,3,16,16]",),
    "VideoMAEForVideoClassification": ("pixel_values:float32[batch,4,3,16,16]",),
    "SegformerForSemanticSegmentation": ("pixel_values:float32[batch,3,224,224]",),
    "Wav2Vec2ForCTC": ("input_values:float32[batch,samples=4000..16000]",),
    "ASTForAudioClassification": ("input_values:float32[batch,32,16]",),
    "PatchTSTForPrediction": ("past_values:float32[batch,16,2]",),
    "CLIPModel": (
        f"input_ids:int64[texts,{LENGTH}]<60",
        "pixel_values:float32[batch,3,16,16]",
        "attention_mask:int64[texts,length]",
    ),
}


@pytest.mark.parametrize("name", PROPOSED)
def test_a_folder_says_what_its_model_takes_and_it_does(name: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(save(tmp_path, name))
    with open_model(checkpoint, None) as model:
        proposal = propose_inputs(model, checkpoint)
        assert proposal is not None
        assert proposal.inputs == PROPOSED[name]
        signature = parse_inputs(proposal.inputs)
        smallest = {dim: size.min for dim, size in signature.dims.items()}
        for sizes in (smallest, example_sizes(signature)):
            taken = make_inputs(signature, Probe("random", sizes))
            with torch.no_grad():
                assert flatten(take_inputs(model, signature)(*taken))


def test_a_processor_says_the_size_where_the_model_takes_any(tmp_path: Path) -> None:
    save(tmp_path, "SegformerForSemanticSegmentation")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["image_size"] = None
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    processor = {"size": {"height": 64, "width": 96}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    checkpoint = read_checkpoint(tmp_path)
    with open_model(checkpoint, None) as model:
        proposal = propose_inputs(model, checkpoint)
    assert proposal is not None
    assert proposal.inputs == ("pixel_values:float32[batch,3,64,96]",)


BERT = Proposal(PROPOSED["BertForSequenceClassification"], frozenset(["input_ids"]), "config.json")


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        pytest.param((), BERT.inputs, id="nothing"),
        pytest.param(
            ("input_ids:int64[n,seq=2..9]",),
            ("input_ids:int64[n,seq=2..9]",),
            id="what it runs with",
        ),
        pytest.param(
            ("attention_mask:bool[n,seq=2..9]", "position_ids:int64[n,seq]"),
            (
                "input_ids:int64[n,seq]<60",
                "attention_mask:bool[n,seq=2..9]",
                "token_type_ids:int64[n,seq]<2",
                "position_ids:int64[n,seq]",
            ),
            id="a part, with names of its own",
        ),
        pytest.param(
            ("attention_mask:int64[1,8]",),
            (
                "input_ids:int64[1,8]<60",
                "attention_mask:int64[1,8]",
                "token_type_ids:int64[1,8]<2",
            ),
            id="a part, of fixed sizes",
        ),
    ],
)
def test_given_inputs_replace_the_proposed(
    given: tuple[str, ...], completed: tuple[str, ...]
) -> None:
    assert complete(given, BERT) == completed


NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Conv2d(3, 2, 3)

    def forward(self, picture, facts, scale=1.0):
        return self.see(picture).mean((2, 3)) + facts.sum(1, keepdim=True) * scale


class Says(Net):
    example_input_array = torch.zeros(4, 3, 8, 8), torch.zeros(4, 5)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A model file and a state dict of its classes."""
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    torch.manual_seed(0)
    state = {f"see.{key}": value for key, value in nn.Conv2d(3, 2, 3).state_dict().items()}
    torch.save(state, tmp_path / "net.pt")
    return tmp_path


def _export(folder: Path, name: str) -> Any:
    model = ["--model", f"{folder / 'net.py'}:{name}", "--format", "torchscript", "--json"]
    return CliRunner().invoke(app, [str(folder / "net.pt"), *model, "-o", str(folder / "out")])


def test_a_model_that_says_nothing_gets_a_command_to_fill_in(net: Path) -> None:
    result = _export(net, "Net")
    assert result.exit_code == 2
    assert '"net.pt" does not say what forward(picture, facts, scale=1.0) takes' in result.stderr
    assert result.stderr.splitlines()[-1].strip() == (
        f"modelyard export {net}/net.pt --model {net}/net.py:Net --input "
        "'picture:float32[batch,3,height,width]' --input 'facts:float32[batch,SIZES]' "
        f"--format torchscript -o {net}/out"
    )


def test_an_example_that_the_model_keeps_needs_no_input_and_is_in_the_command(net: Path) -> None:
    result = _export(net, "Says")
    assert result.exit_code == 0, result.output
    chosen = "--input 'picture:float32[batch,3,8,8]' --input 'facts:float32[batch,5]'"
    assert f"inputs, from its example_input_array: {chosen}" in result.stderr
    (report,) = json.loads(result.stdout)
    assert chosen in report["command"]


def test_an_exported_program_says_what_it_takes(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=6)
    program = torch.export.export(
        nn.Linear(3, 2).eval(), (torch.zeros(2, 3),), dynamic_shapes=({0: batch},)
    )
    torch.export.save(program, tmp_path / "net.pt2")
    checkpoint = read_checkpoint(tmp_path / "net.pt2")
    arguments = {"in_features": 3, "out_features": 2}
    with open_model(checkpoint, "torch.nn:Linear", arguments) as model:
        proposal = propose_inputs(model, checkpoint)
    assert proposal is not None
    assert proposal.inputs == ("input:float32[batch=1..6,3]",)


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        ((), ("image:float32[batch,3,224,224]",)),
        (("x:float32[batch=1..3,3,64,64]",), ("x:float32[batch=1..3,3,64,64]",)),
        (("image:float32[n,3,64,64]",), ("image:float32[n,3,64,64]",)),
    ],
)
def test_a_single_input_may_have_a_name_of_its_own(
    given: tuple[str, ...], completed: tuple[str, ...]
) -> None:
    """As timm's, whose forward() calls it x."""
    proposal = Proposal(("image:float32[batch,3,224,224]",), frozenset(["image"]), "default_cfg")
    assert complete(given, proposal) == completed


@pytest.mark.parametrize("name", CASES)
def test_what_runs_is_found_by_trying(name: str) -> None:
    kind, args, _ = CASES[name]
    found = find_inputs(kind(*args).eval())
    assert found is not None
    assert "SIZES" not in " ".join(found.texts)


@pytest.mark.slow
def test_proposed_commands_run_as_printed(tmp_path: Path) -> None:
    """Of networks as people write them; misses are printed."""
    missed, proposed = {}, 0
    for name, (kind, args, save_as) in CASES.items():
        torch.manual_seed(0)
        folder = tmp_path / name.replace(" ", "_")
        folder.mkdir()
        torch.save(save_as(kind(*args)), folder / "net.pt")
        words = [
            *(str(folder / "net.pt"), "--model", f"{NETWORKS}:{kind.__name__}"),
            *("--quick", "--format", "pt2", "-o", str(folder / "out")),
        ]
        for _ in range(3):  # one line for the class, one for its inputs
            result = CliRunner().invoke(app, words)
            printed = re.search(r"\n    modelyard export (.*)", result.output)
            if result.exit_code == 0 or printed is None:
                break
            words, proposed = shlex.split(printed[1]), proposed + 1
            assert "--quick" in words
        if result.exit_code:
            missed[name] = result.output[-300:]
    count = f"{len(CASES) - len(missed)} of {len(CASES)}, by {proposed} proposed commands"
    sys.stdout.write("\n".join([*(f"{name}: {said}" for name, said in missed.items()), count]))
    assert len(missed) <= len(CASES) // 15


def test_arguments_of_a_class_are_read_off_the_weights(tmp_path: Path) -> None:
    torch.save(CASES["words"][0](77, 12, 5).state_dict(), tmp_path / "net.pt")
    result = CliRunner().invoke(
        app, [str(tmp_path / "net.pt"), "--model", f"{NETWORKS}:VocabAndDim"]
    )
    assert "which the shapes of the weights say" in result.output
    printed = re.search(r"\n    modelyard export (.*)", result.output)
    assert printed is not None
    words = shlex.split(printed[1])
    given = json.loads(words[words.index("--model-args") + 1])
    assert given == {"vocab_size": 77, "embed_dim": 12, "num_classes": 5}
