"""Which handler an artifact gets, and which files of its checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.choose import Choice, choose
from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import Report
from modelyard.archiver.signature import Signature, TensorSpec, parse_inputs
from tests.archiver.test_cli import run_archive

IDS = ("input_ids:int64[batch,length=2..32]", "attention_mask:int64[batch,length]")
IMAGE = ("pixel_values:float32[batch,3,32,32]",)
SOUND = ("input_values:float32[batch,samples=400..16000]",)
LOGITS, ROWS, MAP = "logits[batch,3]", "logits[batch,length,9]", "logits[batch,3,8,8]"
BOXES = ("logits[batch,16,4]", "pred_boxes[batch,16,4]")
SPANS = ("start_logits[batch,length]", "end_logits[batch,length]")


def report(
    inputs: Sequence[str], outputs: Sequence[str], model: str = "", command: str = ""
) -> Report:
    signature = parse_inputs(inputs)
    specs = []
    for text in outputs:
        name, _, dims = text.removesuffix("]").partition("[")
        shape = tuple(int(n) if n.isdigit() else signature.dims[n] for n in dims.split(","))
        specs.append(TensorSpec(name, "int64" if name == "label" else "float32", shape))
    name = f"transformers.models.x.modeling_x:{model}" if model else "net.py:Net"
    whole = Signature(signature.inputs, tuple(specs))
    return Report(Path("m.report.json"), "pt2", "0" * 64, "0" * 64, whole, None, name, command)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with every file that some handler reads."""
    for name in ("tokenizer.json", "vocab.json", "preprocessor_config.json", "model.safetensors",
                 "tokenizer_config.json", "generation_config.json"):  # fmt: skip
        (tmp_path / name).write_text("{}")
    config = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("inputs", "outputs", "model", "handler", "files"),
    [
        (IDS, [LOGITS], "BertForSequenceClassification", "text", "tokenizer config"),
        (IDS, [ROWS], "BertForTokenClassification", "token_classifier", "tokenizer config"),
        (IDS, [ROWS], "BertForMaskedLM", "fill_mask", "tokenizer config"),
        (IDS, SPANS, "BertForQuestionAnswering", "question_answering", "tokenizer config"),
        (IDS, [ROWS, LOGITS], "BertModel", "text_encoder", "tokenizer"),
        (IMAGE, [LOGITS], "ViTForImageClassification", "image_classifier",
         "config preprocessor_config"),
        (IMAGE, [MAP], "SegformerForSemanticSegmentation", "image_segmenter",
         "config preprocessor_config"),
        (IMAGE, BOXES, "DetrForObjectDetection", "object_detector", "config preprocessor_config"),
        (IMAGE, ["last_hidden_state[batch,17,32]", LOGITS], "ViTModel", "image_encoder",
         "preprocessor_config"),
        ([*IDS, "pixel_values:float32[images=1..4,3,32,32]"], ["logits_per_image[images,batch]"],
         "CLIPModel", "image_text", "tokenizer config preprocessor_config"),
        (SOUND, [LOGITS], "Wav2Vec2ForSequenceClassification", "audio_classifier",
         "config preprocessor_config"),
        (SOUND, ["logits[batch,49,32]"], "Wav2Vec2ForCTC", "speech_recognizer",
         "vocab tokenizer config preprocessor_config tokenizer_config"),
        (["past_values:float32[batch,64,2]"], ["prediction_outputs[batch,8,2]"],
         "PatchTSTForPrediction", "forecaster", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)  # fmt: skip
def test_a_transformer_gets_the_handler_of_its_class(
    folder: Path, inputs: list[str], outputs: list[str], model: str, handler: str, files: str
) -> None:
    choice = choose("auto", report(inputs, outputs, model), folder, ())
    assert choice.handler == handler
    assert {file.name for file in choice.files} == {f"{name}.json" for name in files.split()}
    assert choice.reason == f"the model is a {model}"


def test_a_net_of_ones_own_gets_the_one_that_fits(folder: Path) -> None:
    assert choose("auto", report(IMAGE, [MAP]), None, ()).handler == "image_segmenter"
    assert choose("auto", report(IMAGE, BOXES), None, ()).handler == "object_detector"
    assert choose("auto", report(IDS, SPANS), folder, ()).handler == "question_answering"
    assert choose("auto", report(SOUND, ["y[batch,49,6]"]), folder, ()).handler == (
        "speech_recognizer"
    )


@pytest.mark.parametrize(
    ("file", "handler"), [("features.json", "tabular"), ("scaler.json", "forecaster")]
)
@pytest.mark.parametrize("outputs", [["y[batch,2]"], ["label[batch]", "y[batch,2]"]])
def test_a_row_of_numbers_is_what_its_file_says(
    file: str, handler: str, outputs: list[str]
) -> None:
    numbers = report(["x:float32[batch,12]"], outputs)
    assert choose("auto", numbers, None, [file]).handler == handler
    with pytest.raises(CannotArchive, match=r"fit: forecaster .*, with scaler.json; tabular"):
        choose("auto", numbers, None, ())


def test_a_decoder_with_its_cache_gets_generate(folder: Path) -> None:
    cache = ("past_mask:int64[batch,past=1..64]", "past_key_0:float32[batch,2,past,8]")
    choice = choose(
        "auto", report([*IDS, *cache], ["logits[batch,96]"], "GPT2LMHeadModel"), folder, ()
    )
    assert choice.handler == "generate"
    assert [file.name for file in choice.files] == ["tokenizer.json"]


def test_labels_make_a_classifier_of_what_may_be_an_encoder() -> None:
    vectors = report(IMAGE, ["y[batch,3]"])
    assert choose("auto", vectors, None, ["index_to_name.json"]).handler == "image_classifier"
    named = replace(vectors, labels={"0": "cat"})
    assert choose("auto", named, None, ()).handler == "image_classifier"
    assert choose("auto", report(IMAGE, [LOGITS]), None, ()) == Choice(
        "image_classifier", "by the artifact's inputs and outputs: logits are those of classes", ()
    )
    chances = replace(vectors, probabilities={"y": True})
    assert choose("auto", chances, None, ()).handler == "image_classifier"
    with pytest.raises(CannotArchive) as caught:
        choose("auto", vectors, None, ())
    assert str(caught.value) == (
        "several handlers fit: image_classifier for image to one row of numbers; image_encoder for "
        "image to one row of numbers or a row for each place; base_handler for JSON numbers as "
        "they are. the model takes pixel_values:float32[batch=1..8,3,32,32] and gives "
        "y:float32[batch=1..8,3]; give one as --handler"
    )


def test_the_folder_is_found_where_the_export_found_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    model = "BertForSequenceClassification"
    found = report(IDS, [LOGITS], model, f"modelyard export {folder.name} --format pt2 -o out")
    assert str(choose("auto", found, None, ())) == (
        f"handler text: the model is a {model}; from {folder.name}: tokenizer.json, "
        "config.json (3 labels)"
    )
    elsewhere = report(IDS, [LOGITS], model, "modelyard export gone --format pt2 -o out")
    with pytest.raises(CannotArchive, match=r"folder is not here .* give it with --from"):
        choose("auto", elsewhere, None, ())


def test_a_file_that_is_given_comes_before_the_folders(folder: Path) -> None:
    choice = choose("text", report(IDS, [LOGITS]), folder, ["tokenizer.json"])
    assert choice == Choice("text", "as given", (folder / "config.json",))


@pytest.mark.parametrize(
    ("handler", "given", "message"),
    [
        ("auto", report(["x:float32[batch,4,4,4,4]"], ["y[batch,2]"]), "no built-in handler is"),
        ("text", report(IDS, [LOGITS]), "the handler text needs tokenizer.json, and .* holds none"),
        ("net.py", report(IDS, [LOGITS]), "--from goes with a built-in handler"),
        ("auto", None, "chosen by the artifact's report, .* there is none beside it: write both"),
        ("text", None, "--from needs the artifact.s report, .* write both"),
    ],
    ids=["five dims", "no tokenizer", "handler of one's own", "no report", "from without"],
)
def test_what_cannot_be_chosen_says_what_to_give(
    tmp_path: Path, handler: str, given: Report | None, message: str
) -> None:
    with pytest.raises(CannotArchive, match=message):
        choose(handler, given, tmp_path, ())


def test_the_command_packs_what_it_chose_and_says_so(inputs: Path) -> None:
    result = run_archive(inputs, "--from", str(inputs), handler="auto")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-2] == (
        "handler image_classifier: by the artifact's inputs and outputs, and the labels; from "
        f"{inputs}: index_to_name.json (1 labels)"
    )
    with open_archive(inputs.parent / "store" / "digits.mar") as opened:
        assert "index_to_name.json" in opened.names
        assert opened.manifest.handler == "image_classifier"


def test_the_command_refuses_in_one_line(inputs: Path) -> None:
    file = inputs / "digits.onnx.report.json"
    file.write_text(file.read_text().replace('"logits"', '"y"'))
    result = run_archive(inputs, handler="auto")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot archive digits: several handlers fit: image_cl")
    assert not (inputs.parent / "store").exists()
