"""Four tasks of texts, each beside the pipeline of transformers on the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast, pipeline

from examples.tasks import text as example
from modelyard.handlers import (
    BadInput,
    FillMask,
    LoadError,
    QuestionAnswering,
    TextHandler,
    TokenClassifier,
)
from modelyard.serve.worker.load import _text_entry
from tests.handlers.folders import (
    Tensors,
    ask,
    copied,
    explain,
    lightened,
    load,
    loaded,
    save_program,
)

SENTENCE = "Anna lives in New York and Dmitri went to San Marino, today!"
OUTPUTS = {
    "pairs": ["logits"],
    "entities": ["logits"],
    "answers": ["start_logits", "end_logits"],
    "gaps": ["logits"],
}
CLASSES = {
    "pairs": "BertForSequenceClassification",
    "entities": "BertForTokenClassification",
    "answers": "BertForQuestionAnswering",
    "gaps": "BertForMaskedLM",
}
INPUTS = ("input_ids", "token_type_ids", "attention_mask")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The example's folders, each with a program of its model."""
    made = example.make(tmp_path_factory.mktemp("text"))
    inputs = [f"{name}:int64[batch=1..4,length=2..64]" for name in INPUTS]
    for task, folder in made.items():
        module = Tensors(model_of(task, folder), INPUTS, OUTPUTS[task])
        save_program(module, inputs, folder / "model.pt2")
    return made


def model_of(task: str, folder: Path) -> Any:
    return getattr(transformers, CLASSES[task]).from_pretrained(folder)


def tokenizer_of(folder: Path) -> Any:
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")
    }
    file = str(folder / "tokenizer.json")
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_file=file, model_input_names=list(INPUTS), **special)


def piped(kind: str, task: str, folder: Path, *texts: Any, **options: Any) -> Any:
    pipe: Any = pipeline(kind, model=model_of(task, folder), tokenizer=tokenizer_of(folder))
    return [pipe(text, **options) for text in texts]


# -- pairs ----------------------------------------------------------------------------------------


def test_a_pair_of_texts_is_classified_as_the_pipeline_does(folders: dict[str, Path]) -> None:
    folder = folders["pairs"]
    bodies = [{"text": "Anna lives in Rome", "text_pair": "Rome is where Anna lives"},
              {"text": "Anna lives in Rome"}]  # fmt: skip
    answers = ask(load(TextHandler, folder, batch_size=2), *bodies)
    for (expected,), answer in zip(
        (each if isinstance(each[0], list) else [each]
         for each in piped("text-classification", "pairs", folder, *bodies, top_k=None)),
        answers, strict=True,
    ):  # fmt: skip
        wanted = {each["label"]: each["score"] for each in expected}
        assert answer == pytest.approx(wanted, abs=1e-5)
        assert list(answer) == list(wanted)


def test_a_pair_as_json_text_is_the_pair_as_an_object(folders: dict[str, Path]) -> None:
    handler = loaded(TextHandler, folders["pairs"])
    pair = {"text": "Anna", "text_pair": "Rome"}
    assert ask(handler, json.dumps(pair).encode()) == ask(handler, pair)
    # An object of something else is a text that looks like JSON.
    assert ask(handler, b'{"a": 1}') == ask(handler, {"text": '{"a": 1}'})


def test_an_explained_pair_says_which_text_a_token_is_of(folders: dict[str, Path]) -> None:
    handler = loaded(TextHandler, folders["pairs"])
    pair = {"text": "Anna", "text_pair": "in Rome"}
    tokens = explain(handler, pair, n_steps="5")["tokens"]
    assert [token.get("part") for token in tokens] == [
        None, "text", None, "text_pair", "text_pair", None,
    ]  # fmt: skip
    assert [(each["start"], each["end"]) for each in tokens[3:5]] == [(0, 2), (3, 7)]
    page = explain(handler, pair, n_steps="5", format="html").decode()
    assert ">Rome</span>" in page


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "a", "pair": "b"}, "an object of text, pair"),
        ({"text_pair": "b"}, "an object of text_pair"),
        ({"text": "a", "text_pair": 3}, "text_pair is a int"),
        ([1], "text 0 of the list: the body is a int; expected text, a JSON string or"),
    ],
    ids=["key", "first missing", "number", "list"],
)
def test_another_pair_is_refused(folders: dict[str, Path], body: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ask(loaded(TextHandler, folders["pairs"]), body)


def test_a_model_that_measures_gives_a_number(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["pairs"], tmp_path)
    torch.manual_seed(1)
    head = torch.nn.Linear(1, 1)

    class Measure(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return head(input_ids.float().mean(1, keepdim=True))  # type: ignore[no-any-return]

    save_program(Measure(), ["input_ids:int64[batch=1..4,length=1..64]"], folder / "model.pt2")
    text = {"text": "Rome"}
    encoded = tokenizer_of(folder)("Rome")["input_ids"]
    logit = head(torch.tensor([encoded]).float().mean(1, keepdim=True)).item()
    by_rule = {"entailment": 1 / (1 + np.exp(-logit))}
    assert ask(load(TextHandler, folder), text)[0] == pytest.approx(by_rule)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": "regression"}))
    assert ask(load(TextHandler, folder), text)[0] == pytest.approx(logit)
    settings = {"function": "sigmoid"}
    assert ask(load(TextHandler, folder, config=settings), text)[0] == pytest.approx(by_rule)
    with pytest.raises(LoadError, match=r"handler\.function is 'tanh'; expected one of softmax"):
        load(TextHandler, folder, config={"function": "tanh"})


# -- entities -------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
def test_entities_are_those_of_the_pipeline(
    folders: dict[str, Path], tmp_path: Path, aggregation: str
) -> None:
    folder = folders["entities"]
    texts = [SENTENCE, "lagos", "Brunhilde Xi!"]
    settings = {"text": {"aggregation": aggregation}}
    handler = load(TokenClassifier, lightened(folder, tmp_path), config=settings, batch_size=3)
    handler.model = loaded(TokenClassifier, folder).model
    expected = piped("token-classification", "entities", folder, *texts,
                     aggregation_strategy=aggregation)  # fmt: skip
    for text, answer, wanted in zip(texts, ask(handler, *texts), expected, strict=True):
        names = [each.get("entity_group", each.get("entity")) for each in wanted]
        assert [each["entity"] for each in answer] == names
        assert [(each["start"], each["end"]) for each in answer] == [
            (each["start"], each["end"]) for each in wanted
        ]
        assert [each["score"] for each in answer] == pytest.approx(
            [float(each["score"]) for each in wanted], abs=1e-5
        )
        assert all(each["word"] == text[each["start"] : each["end"]] for each in answer)


def test_the_example_has_learned_its_people_and_places(folders: dict[str, Path]) -> None:
    (answer,) = ask(loaded(TokenClassifier, folders["entities"]), "Elif went to San Marino today")
    assert [(each["entity"], each["word"]) for each in answer] == [
        ("PER", "Elif"),
        ("LOC", "San Marino"),
    ]


def test_an_entity_is_explained_by_its_tokens(folders: dict[str, Path]) -> None:
    handler = loaded(TokenClassifier, folders["entities"])
    text = "Elif went to Rome"
    found = explain(handler, text, target="B-LOC", n_steps="20")
    assert found["label"] == 'B-LOC at "Rome"'
    assert found["target"] == [4, example.TAGS.index("B-LOC")]
    shares = {each["token"]: each["attribution"] for each in found["tokens"]}
    assert list(shares) == ["[CLS]", "elif", "went", "to", "rome", "[SEP]"]
    assert shares["[CLS]"] == 0 != shares["rome"]
    assert sum(shares.values()) == pytest.approx(found["f_input"] - found["f_baseline"], abs=0.1)
    assert explain(handler, text, n_steps="2")["label"].startswith("B-")


def test_an_entity_is_explained_in_a_span_of_the_text(folders: dict[str, Path]) -> None:
    handler = loaded(TokenClassifier, folders["entities"])
    text = "Elif went to Rome and Oslo"
    place = example.TAGS.index("B-LOC")
    first, second = (
        explain(handler, text, target="B-LOC", n_steps="2", region=span)
        for span in ("13,17", "22,26")
    )
    assert (first["label"], second["label"]) == ('B-LOC at "Rome"', 'B-LOC at "Oslo"')
    both = explain(handler, text, target="sum:B-LOC", n_steps="2", region="13,26")
    logits = handler.score(handler.inference(handler.preprocess([{"body": text}])))[0]
    assert both["f_input"] == pytest.approx(float(logits[4:8, place].sum()), rel=1e-4)
    assert both["label"] == "sum of B-LOC over 4 places"  # "and" is two
    with pytest.raises(BadInput, match="region is 40,45; no token of text is there, which has 26"):
        explain(handler, text, target="B-LOC", region="40,45")


@pytest.mark.parametrize("method", ["kernel_shap", "feature_ablation", "occlusion"])
def test_the_tokens_of_a_word_are_one_feature(folders: dict[str, Path], method: str) -> None:
    handler = loaded(TokenClassifier, folders["entities"])
    found = explain(handler, "Elif and Oslo", target="B-LOC", method=method)
    tokens = {token["token"]: token["attribution"] for token in found["tokens"]}
    assert list(tokens) == ["[CLS]", "elif", "an", "##d", "oslo", "[SEP]"]
    assert tokens["an"] == tokens["##d"] != 0
    assert tokens["[CLS]"] == tokens["[SEP]"] == 0
    if method == "feature_ablation":
        assert found["n_steps"] == 3
        ids = handler.preprocess([{"body": "Elif and Oslo"}])
        assert isinstance(ids, tuple)
        place = handler.roles.index("ids")
        ids[place][0, 2:4] = handler.pad_id
        without = handler.score(handler.inference(ids))[0][tuple(found["target"])]
        fall = found["f_input"] - float(without)
        assert tokens["an"] + tokens["##d"] == pytest.approx(fall, abs=1e-5)


# -- answers --------------------------------------------------------------------------------------


def best_span(folder: Path, question: str, context: str) -> tuple[float, str]:
    """Try every span of one window, as the task's definition has it."""
    tokenizer, model = tokenizer_of(folder), model_of("answers", folder)
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets, own = encoded.pop("offset_mapping")[0], encoded.sequence_ids(0)
    with torch.no_grad():
        found = model(**encoded)
    places = [at for at, part in enumerate(own) if part == 1]
    start, end = (logits[0, places].softmax(0) for logits in (found.start_logits, found.end_logits))
    best = max(
        (float(start[i] * end[j]), i, j)
        for i in range(len(places)) for j in range(i, min(i + 30, len(places)))
    )  # fmt: skip
    words = encoded.word_ids(0)
    chosen = {words[places[best[1]]], words[places[best[2]]]}
    spans = [offsets[at] for n, at in enumerate(places)
             if best[1] <= n <= best[2] or words[at] in chosen]  # fmt: skip
    return best[0], context[int(min(s[0] for s in spans)) : int(max(s[1] for s in spans))]


def test_the_answer_is_the_likeliest_span(folders: dict[str, Path]) -> None:
    folder = folders["answers"]
    asked = [{"question": "where does Anna live", "context": SENTENCE},
             {"question": "who?", "context": "Farah went to Oslo today"}]  # fmt: skip
    answers = ask(load(QuestionAnswering, folder, batch_size=2), *asked)
    for request, answer in zip(asked, answers, strict=True):
        score, words = best_span(folder, request["question"], request["context"])
        assert (answer["answer"], answer["score"]) == (words, pytest.approx(score, abs=1e-5))
        assert request["context"][answer["start"] : answer["end"]] == words


def context_places(encoding: Any) -> set[tuple[int, int]]:
    places = zip(encoding.offsets, encoding.sequence_ids, strict=True)
    return {offsets for offsets, part in places if part == 1}


def test_a_long_context_is_read_in_windows(folders: dict[str, Path]) -> None:
    """Nine windows for a program that takes four rows; the best of them is the answer."""
    handler = load(QuestionAnswering, folders["answers"], config={"text": {"max_length": 24}})
    question, context = "who lives", " ".join([SENTENCE] * 8)
    (answer,) = ask(handler, {"question": question, "context": context})
    windows = handler.encodings
    assert len(windows) == len(handler.owners) > 4
    assert max(map(len, windows)) == 24
    covered = set().union(*map(context_places, windows))
    assert covered == context_places(handler.tokenizer.encode(question, context))
    ids = [torch.tensor([each.ids]) for each in windows]
    types = [torch.tensor([each.type_ids]) for each in windows]
    model = model_of("answers", folders["answers"])
    scores = []
    with torch.no_grad():
        for row, type_ids, window in zip(ids, types, windows, strict=True):
            found = model(row, token_type_ids=type_ids)
            own = [at for at, part in enumerate(window.sequence_ids) if part == 1]
            first, last = (each[0, own].softmax(0)
                           for each in (found.start_logits, found.end_logits))  # fmt: skip
            scores.append(float(torch.outer(first, last).triu().max()))
    assert answer["score"] == pytest.approx(max(scores), abs=1e-5)
    assert context[answer["start"] : answer["end"]] == answer["answer"] != ""
    with pytest.raises(BadInput, match=r"fills \d+ windows; an explanation is of one"):
        explain(handler, {"question": question, "context": context})


def test_windows_are_not_cut_off_wherever_a_worker_asks_what_a_text_takes(
    folders: dict[str, Path],
) -> None:
    handler = loaded(QuestionAnswering, folders["answers"])
    assert "truncation" not in {each.name for each in handler.mutations()}
    texts = [{"body": b'{"text": ["where?", "Rome"]}'}]
    with pytest.raises(BadInput, match="no vector or score of a text"):
        _text_entry(handler)(texts, handler.context)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("where?", 'a str; expected {"question": "…", "context": "…"}'),
        ({"question": "where?"}, "an object of question"),
        ({"question": "where?", "context": " "}, "the context has no words"),
        ({"question": "where " * 80, "context": "Rome"}, r"the question takes \d+ tokens"),
        ({"question": "where?", "context": "Rome " * 9999}, r"the limit is 64: send a part"),
    ],
    ids=["text", "no context", "empty context", "long question", "too many windows"],
)
def test_a_question_without_sense_is_refused(
    folders: dict[str, Path], body: Any, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        ask(loaded(QuestionAnswering, folders["answers"]), body)


@pytest.mark.parametrize("end", ["start", "end"])
def test_either_end_of_an_answer_is_explained(folders: dict[str, Path], end: str) -> None:
    handler = loaded(QuestionAnswering, folders["answers"])
    asked = {"question": "where does Anna live", "context": SENTENCE}
    (answer,) = ask(handler, asked)
    found = explain(handler, asked, target=end, n_steps="20")
    kind, token = found["target"]
    assert ("start", "end")[kind] == end
    assert found["label"].startswith(f'{end} at "')
    assert found["tokens"][token]["part"] == "context"
    place = found["tokens"][token]
    assert answer["start"] <= place["start"] < place["end"] <= answer["end"]


def test_an_answer_is_explained_as_a_whole(folders: dict[str, Path]) -> None:
    handler = load(QuestionAnswering, folders["answers"])
    handler.output_names = ("start_logits", "end_logits")
    asked = {"question": "where does Anna live", "context": SENTENCE}
    whole, start, end = (
        explain(handler, asked, target=target, n_steps="2") for target in ("answer", "start", "end")
    )
    assert whole["f_input"] == pytest.approx(start["f_input"] + end["f_input"], rel=1e-5)
    summed = torch.tensor(start["attributions"]) + torch.tensor(end["attributions"])
    assert torch.allclose(torch.tensor(whole["attributions"]), summed, atol=1e-4)
    assert whole["output_name"] == "start_logits,end_logits"
    at = SENTENCE.index("Dmitri")
    other = explain(handler, asked, target="answer", n_steps="2", region=f"{at},{at + 6}")
    assert other["label"] == 'answer "Dmitri"'
    alone = explain(handler, asked, output_name="end_logits", target="3", n_steps="2")
    assert (start["output_name"], alone["target"]) == ("start_logits", 3)
    assert alone["output_name"] == end["output_name"] == "end_logits"


# -- gaps -----------------------------------------------------------------------------------------


def test_gaps_are_filled_as_the_pipeline_does(folders: dict[str, Path]) -> None:
    folder = folders["gaps"]
    texts = ["Anna lives in [MASK] today", "in [MASK] we met [MASK] !"]
    answers = ask(load(FillMask, folder, config={"top_k": 3}, batch_size=2), *texts)
    expected = piped("fill-mask", "gaps", folder, *texts, top_k=3)
    assert answers[0] == [pytest.approx(each, abs=1e-5) for each in expected[0]]
    for answer, wanted in zip(answers[1], expected[1], strict=True):
        assert answer == [pytest.approx(each, abs=1e-5) for each in wanted]


def test_a_gap_is_explained_by_the_words_around_it(folders: dict[str, Path]) -> None:
    handler = loaded(FillMask, folders["gaps"])
    text = "Anna lives in [MASK]"
    (answer,) = ask(handler, text)
    assert explain(handler, text, n_steps="5")["label"] == answer[0]["token_str"]
    found = explain(handler, text, n_steps="5", target="rome")
    assert (found["label"], found["target"][0]) == ("rome", 4)


def test_a_text_without_a_gap_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(BadInput, match=r'the text has no "\[MASK\]" among its first 3 tokens'):
        ask(loaded(FillMask, folders["gaps"]), "Anna")


@pytest.mark.parametrize(
    ("handler", "section", "message"),
    [
        (TokenClassifier, {"aggregation": "all"}, "aggregation is 'all'; expected one of none"),
        (QuestionAnswering, {"max_answer": 0}, "max_answer is 0; expected a whole number from 1"),
        (FillMask, {"mask": "___"}, "the tokenizer knows no ___"),
        (FillMask, {"aggregation": "max"}, "handler.text.aggregation is unknown"),
    ],
    ids=["aggregation", "longest answer", "mask", "of another handler"],
)
def test_a_wrong_setting_ends_the_start(
    folders: dict[str, Path], tmp_path: Path, handler: Any, section: dict[str, Any], message: str
) -> None:
    task = {TokenClassifier: "entities", QuestionAnswering: "answers", FillMask: "gaps"}[handler]
    with pytest.raises(LoadError, match=message):
        load(handler, lightened(folders[task], tmp_path), config={"text": section})
