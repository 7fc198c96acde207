import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import LayerIntegratedGradients
from torch import Tensor, nn

from modelyard.handlers import (
    BadInput,
    BaseHandler,
    Context,
    InputMismatch,
    LoadError,
    NoGradients,
    TextHandler,
)
from tests.shared import FURTHER

Initialized = Callable[..., tuple[TextHandler, Context]]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "not", "good", "bad", "a", "film", "!"]


def tokenizer_json() -> str:
    """A tokenizer of whole words in the file format of the tokenizers package."""
    special = [
        {"id": at, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for at, word in enumerate(WORDS[:4])
    ]
    frame = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": frame,
                "pair": [*frame, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {
                    word: {"id": word, "ids": [WORDS.index(word)], "tokens": [word]}
                    for word in ("[CLS]", "[SEP]")
                },
            },
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: at for at, word in enumerate(WORDS)},
                "unk_token": "[UNK]",
            },
        }
    )


class Mood(nn.Module):
    """An embedding, the mean over what the mask lets through, one layer to two labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(len(WORDS), 4)
        self.places = nn.Embedding(32, 4)
        self.hidden = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(N, L) and (N, L) to (N, 2)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = self.words(input_ids) + self.places(places)
        weights = attention_mask.unsqueeze(2).to(seen.dtype)
        mean = (seen * weights).sum(1) / weights.sum(1)
        return self.head(self.hidden(mean).tanh())  # type: ignore[no-any-return]


class Bag(nn.Module):
    """The mean of all embeddings: padding counts too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(len(WORDS), 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, L) to (N, 2)."""
        return self.head(self.words(tokens).mean(1))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def mood() -> Mood:
    return Mood().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, mood: Mood) -> dict[str, Path]:
    """Mood as pt2, TorchScript and ONNX, and Bag as pt2."""
    folder = tmp_path_factory.mktemp("text")
    example = (torch.randint(0, 10, (3, 5)), torch.ones(3, 5, dtype=torch.int64))
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", max=32)}
    program = torch.export.export(mood, example, dynamic_shapes=(dims, dims))
    torch.export.save(program, folder / "mood.pt2")
    bag = torch.export.export(Bag().eval(), example[:1], dynamic_shapes=(dims,))
    torch.export.save(bag, folder / "bag.pt2")
    with pytest.warns((DeprecationWarning, FutureWarning)):  # the latter from torch 2.14 on
        torch.jit.save(torch.jit.script(mood), folder / "mood.pt")
    return {path.stem + path.suffix: path for path in folder.iterdir()}


@pytest.fixture
def initialized(tmp_path: Path, artifacts: dict[str, Path]) -> Initialized:
    """Build the handler of an archive; `files` replaces the tokenizer's."""

    def make(
        artifact: str = "mood.pt2",
        config: dict[str, Any] | None = None,
        tokenizer: str | None = "tokenizer.json",
        requests: int = 1,
        query: dict[str, str] | None = None,
    ) -> tuple[TextHandler, Context]:
        (tmp_path / artifact).write_bytes(artifacts[artifact].read_bytes())
        (tmp_path / "index_to_name.json").write_text('{"0": "bad", "1": "good"}')
        if tokenizer:
            (tmp_path / tokenizer).write_text(tokenizer_json())
        context = Context(
            "mood",
            str(tmp_path),
            {"model": {"serializedFile": artifact}},
            model_yaml_config={"handler": config or {}},
        )
        context.reset([str(at) for at in range(requests)], queries=[query or {}] * requests)
        handler = TextHandler()
        handler.initialize(context)
        return handler, context

    return make


TEXT = "A  FILM not xyz good!"


@pytest.mark.parametrize(
    "body",
    [TEXT, TEXT.encode(), bytearray(json.dumps(TEXT), "utf-8")],
    ids=["str", "bytes", "JSON"],
)
def test_text_becomes_ids_and_a_mask(initialized: Initialized, body: Any) -> None:
    handler, _ = initialized()
    ids, mask = handler.preprocess([{"body": body}, {"body": "bad"}])
    assert ids.tolist() == [[2, 7, 8, 4, 1, 5, 9, 3], [2, 6, 3, 0, 0, 0, 0, 0]]
    assert mask.tolist() == [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]]


def test_a_text_that_begins_with_a_quotation_is_text(initialized: Initialized) -> None:
    handler, _ = initialized()
    quoting = '"good" film'
    found, expected = (handler.preprocess([{"body": body}]) for body in (quoting.encode(), quoting))
    assert found[0].tolist() == expected[0].tolist()
    assert found[0].shape[1] == 6


@pytest.mark.parametrize(
    "body", [{"inputs": "good film"}, b'{"inputs": "good film", "parameters": {}}'],
    ids=["object", "bytes"],
)  # fmt: skip
def test_a_request_of_hugging_faces_clients_is_its_text(
    initialized: Initialized, body: Any
) -> None:
    handler, context = initialized()
    assert handler.handle([{"body": body}], context) == handler.handle(
        [{"body": "good film"}], context
    )


@pytest.mark.parametrize(
    ("artifact", "most"), [("mood.pt2", 2), ("bag.pt2", 8)], ids=["in batches", "without a mask"]
)
def test_a_list_is_answered_by_a_list(initialized: Initialized, artifact: str, most: int) -> None:
    handler, context = initialized(artifact)
    context.system_properties["batch_size"] = most
    texts = ["good", "not bad film", "[bad] film"]
    each = [handler.handle([{"body": text}], context)[0] for text in texts]
    bodies = [texts, {"inputs": texts}, json.dumps(texts).encode(), "good"]
    answers = [handler.handle([{"body": body}], context)[0] for body in bodies]
    for answer in answers[:3]:
        for found, expected in zip(answer, each, strict=True):
            assert found == pytest.approx(expected)
    # Beside a text, and one that only looks like a list.
    mixed = handler.handle([{"body": texts}, {"body": b"[bad] film"}], context)
    assert mixed[1] == pytest.approx(each[2])
    assert [list(found) for found in mixed[0]] == [list(expected) for expected in each]


def test_tensors_by_name_still_go_to_the_model_itself() -> None:
    # `infer.tensor_entry` takes a handler with a `handle` of its own for one that reads bodies.
    assert TextHandler.handle is BaseHandler.handle


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "the list holds 0 texts; expected 1 to 256"),
        (["a"] * 257, "the list holds 257 texts"),
        (["a", 3], r"text 1 of the list: the body is a int; expected text"),
    ],
    ids=["none", "many", "a number"],
)
def test_a_list_that_is_none_of_texts_is_refused(
    initialized: Initialized, texts: Any, message: str
) -> None:
    handler, context = initialized()
    with pytest.raises(BadInput, match=message):
        handler.handle([{"body": texts}], context)
    with pytest.raises(BadInput, match="the body is a list of"):
        handler.explain([{"body": texts}], context)


def test_answer_is_the_likeliest_label(initialized: Initialized, mood: Mood) -> None:
    handler, context = initialized()
    (answer,) = handler.handle([{"body": "good film"}], context)
    ids = torch.tensor([[2, 5, 8, 3]])
    expected = mood(ids, torch.ones_like(ids)).softmax(1)[0].tolist()
    assert answer == pytest.approx(dict(zip(("bad", "good"), expected, strict=True)))


@pytest.mark.parametrize("artifact", ["mood.pt2", "mood.pt"])
@pytest.mark.parametrize("baseline", ["pad", "zero"])
def test_attributions_are_captums_on_the_checkpoint(
    initialized: Initialized, mood: Mood, artifact: str, baseline: str
) -> None:
    query = {"n_steps": "25", "target": "good", "baseline": baseline}
    handler, context = initialized(artifact, requests=2, query=query)
    together = handler.explain([{"body": TEXT}, {"body": "bad"}], context)
    ids = torch.tensor([[2, 7, 8, 4, 1, 5, 9, 3]])
    start = torch.tensor([[2, 0, 0, 0, 0, 0, 0, 3]])
    explainer = LayerIntegratedGradients(mood, mood.words)
    arguments: dict[str, Any] = {"target": 1, "n_steps": 25, "method": "riemann_middle"}
    if baseline == "pad":
        expected = explainer.attribute(
            ids, start, additional_forward_args=(torch.ones_like(ids),), **arguments
        ).sum(2)
        assert together[0]["attributions"] == pytest.approx(expected[0].tolist(), abs=1e-6)
        assert together[0]["attributions"][0] == together[0]["attributions"][-1] == 0.0
    assert together[0]["convergence_delta"] == pytest.approx(0.0, abs=1e-3)
    assert [len(each["tokens"]) for each in together] == [8, 3]
    assert together[1]["shape"] == [3]


def test_tokens_are_told_with_their_places_in_the_text(initialized: Initialized) -> None:
    handler, context = initialized()
    (answer,) = handler.explain([{"body": TEXT}], context)
    told = [(t["token"], TEXT[t["start"] : t["end"]], t["is_special"]) for t in answer["tokens"]]
    assert told == [
        ("[CLS]", "", True),
        ("a", "A", False),
        ("film", "FILM", False),
        ("not", "not", False),
        ("[UNK]", "xyz", False),
        ("good", "good", False),
        ("!", "!", False),
        ("[SEP]", "", True),
    ]
    assert [each["attribution"] for each in answer["tokens"]] == answer["attributions"]
    assert sum(answer["attributions"]) == pytest.approx(answer["sum_attributions"], abs=1e-5)


@pytest.mark.parametrize("method", ["occlusion", "feature_ablation"])
def test_methods_without_gradients_replace_tokens(
    initialized: Initialized, mood: Mood, method: str
) -> None:
    handler, context = initialized(query={"method": method, "target": "1"})
    (answer,) = handler.explain([{"body": "not good"}], context)
    ids = torch.tensor([[2, 4, 5, 3], [2, 0, 5, 3], [2, 4, 0, 3]])
    whole, first, second = mood(ids, torch.ones_like(ids))[:, 1].tolist()
    expected = [0.0, whole - first, whole - second, 0.0]
    assert answer["attributions"] == pytest.approx(expected, abs=1e-6)


def test_embedding_is_kept_whole_where_asked_for(initialized: Initialized) -> None:
    handler, context = initialized(query={"aggregate": "none"})
    (answer,) = handler.explain([{"body": "good"}], context)
    assert answer["shape"] == [3, 4]


@FURTHER
def test_layer_of_an_exported_program_is_explained(initialized: Initialized, mood: Mood) -> None:
    query = {"method": "layer_integrated_gradients", "layer": "hidden", "n_steps": "30"}
    handler, context = initialized(query={**query, "aggregate": "none", "target": "1"})
    (answer,) = handler.explain([{"body": "good"}], context)
    ids = torch.tensor([[2, 5, 3]])
    expected = LayerIntegratedGradients(mood, mood.hidden).attribute(
        ids,
        torch.tensor([[2, 0, 3]]),
        additional_forward_args=(torch.ones_like(ids),),
        target=1,
        n_steps=30,
        method="riemann_middle",
    )
    assert answer["attributions"] == pytest.approx(expected[0].tolist(), abs=1e-6)
    assert answer["shape"] == [8]
    assert "tokens" not in answer
    context.reset(["a"], queries=[{**query, "layer": "middle"}])
    with pytest.raises(BadInput, match='layer is "middle"; expected one of words, places, hidden'):
        handler.explain([{"body": "good"}], context)


@FURTHER
def test_layer_of_torchscript_is_refused(initialized: Initialized) -> None:
    query = {"method": "layer_integrated_gradients", "layer": "hidden"}
    handler, context = initialized("mood.pt", query=query)
    with pytest.raises(NoGradients, match="a torchscript artifact cannot be cut at a layer"):
        handler.explain([{"body": "good"}], context)


def test_page_shows_every_character_of_the_text(initialized: Initialized) -> None:
    handler, context = initialized(query={"format": "html", "target": "top-2"})
    (page,) = handler.explain([{"body": "<b>good &  bad"}], context)
    assert context.get_response_content_type(0) == "text/html; charset=utf-8"
    text = page.decode()
    assert "<b>" not in text
    assert "&lt;" in text and "&amp;" in text
    assert text.count("<h2>") == 2
    assert text.count("<script") == 1
    assert ">good</span>" in text
    for absent in ("http:", "https:", "src="):
        assert absent not in text


def test_page_shows_what_was_not_read(initialized: Initialized) -> None:
    query = {"format": "html", "target": "good"}
    handler, context = initialized(config={"text": {"max_length": 4}}, query=query)
    (page,) = handler.explain([{"body": "good bad not a film"}], context)
    text = page.decode()
    assert '<span class="unread"> not a film</span>' in text
    assert "did not see the rest: text after 8 of 19 characters" in text


def test_pieces_of_a_word_say_so(initialized: Initialized) -> None:
    handler, context = initialized()
    (answer,) = handler.explain([{"body": "good bad!"}], context)
    assert [token["word"] for token in answer["tokens"]] == [None, 0, 1, 2, None]
    assert [each["word"] for each in answer["words"]] == ["[CLS]", "good", "bad", "!", "[SEP]"]
    shares = [each["attribution"] for each in answer["words"]]
    assert shares == pytest.approx([each["attribution"] for each in answer["tokens"]])


def test_texts_of_different_length_need_a_mask(initialized: Initialized) -> None:
    handler, context = initialized("bag.pt2")
    assert len(handler.handle([{"body": "good"}, {"body": "bad"}], context)) == 2
    with pytest.raises(InputMismatch, match="rows of shapes"):
        handler.preprocess([{"body": "good"}, {"body": "good film"}])


def test_long_text_is_cut_off(initialized: Initialized) -> None:
    handler, _ = initialized(config={"text": {"max_length": 4}})
    ids, _ = handler.preprocess([{"body": "good good good good good"}])
    assert ids.tolist() == [[2, 5, 5, 3]]


def test_explanation_says_that_a_long_text_was_cut_off(initialized: Initialized) -> None:
    handler, context = initialized(config={"text": {"max_length": 4}})
    (cut,) = handler.explain([{"body": "good good good good good"}], context)
    assert cut["truncated"] is True
    assert cut["warnings"] == [
        "the model takes 4 tokens and did not see the rest: text after 9 of 24 characters"
    ]
    (whole,) = handler.explain([{"body": "good good"}], context)
    assert (whole["truncated"], whole["warnings"]) == (False, [])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xff\xfe", "the body is not text in UTF-8"),
        ({"a": 1}, "an object of a; expected text"),
        (["good"], "the body is a list of 1; expected text"),
        ({"inputs": "good", "options": {}}, 'options is unknown beside "inputs"; leave it out'),
        ({"inputs": "good", "parameters": {"top_k": 1}}, "parameters are top_k; expected none"),
    ],
)
def test_body_that_is_no_text_is_refused(initialized: Initialized, body: Any, message: str) -> None:
    handler, _ = initialized()
    with pytest.raises(BadInput, match=message):
        handler.preprocess([{"body": body}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": None}, "the archive holds no tokenizer.json; pack the tokenizer's file"),
        ({"config": {"text": {"pad": "<none>"}}}, "the tokenizer knows no <none>"),
        ({"config": {"text": {"max_length": 33}}}, "expected a whole number from 1 to 32"),
        ({"config": {"text": {"vocab": 1}}}, "handler.text.vocab is unknown"),
    ],
)
def test_unusable_archive_is_refused(
    initialized: Initialized, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        initialized(**arguments)


def test_missing_package_is_named(
    initialized: Initialized, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(LoadError, match="needs the package tokenizers"):
        initialized()
