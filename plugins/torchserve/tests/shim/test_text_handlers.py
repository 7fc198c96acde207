"""TorchServe's text handlers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator
from ts.torch_handler.text_classifier import TextClassifier
from ts.torch_handler.text_handler import TextHandler

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError

MakeContext = Callable[..., Context]

SOURCE = """
from torch import nn


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(8, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))
"""
VOCABULARY = {"<unk>": 0, "good": 1, "bad": 2, "good bad": 3, "it": 4, "is": 5}


@pytest.fixture
def classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_context: MakeContext
) -> TextClassifier:
    (tmp_path / "handler.py").write_text(SOURCE, encoding="utf-8")
    torch.save(VOCABULARY, tmp_path / "source_vocab.pt")
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    handler = TextClassifier()
    handler.initialize(make_context(modelFile="handler.py"))
    handler.mapping = {"0": "negative", "1": "positive"}
    return handler


def test_a_text_is_classified_by_its_words_and_pairs(
    classifier: TextClassifier, make_context: MakeContext
) -> None:
    (answer,) = classifier.handle([{"body": bytearray(b"Good, bad!")}], make_context())
    logits = classifier.model(torch.tensor([1, 2, 3]), torch.tensor([0]))
    expected = torch.softmax(logits, dim=1)[0].tolist()
    assert answer == {"negative": expected[0], "positive": expected[1]}


def test_a_text_is_cleaned_before_it_is_looked_up(classifier: TextClassifier) -> None:
    indices, tokens = classifier.preprocess([{"data": "<p>IT'S &amp; Góod</p>"}])
    assert tokens == ["it", "is", "good"]
    assert indices.tolist() == [4, 5, 1, 0, 0]


def test_an_explanation_has_a_number_for_each_dimension_and_the_words(
    classifier: TextClassifier, make_context: MakeContext
) -> None:
    context = make_context(headers={"explain": "True"})
    (answer,) = classifier.handle([{"data": "good bad", "target": 1}], context)
    assert answer["words"] == ["good", "bad"]
    ((*importances,),) = answer["importances"]
    assert len(importances) == 4
    assert sum(importances) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no source_vocab.pt"),
        (["good"], "holds list; expected a dict"),
        (nn.ReLU(), r"save it as one, as in torch.save\(dict"),
    ],
    ids=["absent", "list", "objects"],
)
def test_a_vocabulary_that_cannot_be_used_is_said(
    classifier: TextClassifier,
    make_context: MakeContext,
    tmp_path: Path,
    content: Any,
    message: str,
) -> None:
    path = tmp_path / "source_vocab.pt"
    path.unlink()
    if content is not None:
        torch.save(content, path)
    with pytest.raises(LoadError, match=message):
        TextClassifier().initialize(make_context(modelFile="handler.py"))


def test_a_vocabulary_without_unk_knows_its_own_words_only(classifier: TextClassifier) -> None:
    del classifier.source_vocab["<unk>"]
    with pytest.raises(KeyError, match="other"):
        classifier.preprocess([{"data": "other"}])


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("i don't know", "i do not know"),
        ("it's what we've got", "it is what we have got"),
        ("You'll see she'd won't", "You will see she would will not"),
        ("where'd they're let's", "where did they are let us"),
        ("the cat's", "the cats"),
    ],
)
def test_contractions_are_written_out(text: str, expanded: str) -> None:
    assert TextHandler()._expand_contractions(text) == expanded


def test_basic_english_sets_punctuation_apart() -> None:
    tokens = get_tokenizer("basic_english")('Hello, (World)! It\'s "a.b"; c: d<br />e')
    assert tokens == [
        "hello",
        ",",
        "(",
        "world",
        ")",
        "!",
        "it",
        "'",
        "s",
        "a",
        ".",
        "b",
        "c",
        "d",
        "e",
    ]
    assert get_tokenizer(None)("A b.") == ["A", "b."]
    with pytest.raises(ValueError, match="no tokenizer 'moses'"):
        get_tokenizer("moses")


def test_ngrams_come_by_length() -> None:
    assert list(ngrams_iterator(["here", "we", "are"], 2)) == [
        "here",
        "we",
        "are",
        "here we",
        "we are",
    ]
