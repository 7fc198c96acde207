"""Texts to vectors: a small BERT of transformers, of which every export is asked the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from examples.minilm.make import train_tokenizer
from modelyard.archiver import open_archive, write_archive
from modelyard.handlers import BadInput, Context, LoadError, TextEncoder
from modelyard.serve.control.model_config import load_model_config
from modelyard.serve.settings import load_settings

TEXTS = (
    "a good film",
    "not good",
    "the film was not as good as the book, and the book was long; nobody who had read it to its "
    "end went to see the film a second time",
    "long",
)
TOLERANCE = 1e-5
"""As certificates of exports have it: the same sums in another order."""

Initialized = Callable[..., tuple[TextEncoder, Context]]


@pytest.fixture(scope="module")
def bert() -> BertModel:
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    model.eval()
    model.requires_grad_(False)
    return model


class Pooled(torch.nn.Module):
    """The first token's vector: an output of texts, not of tokens."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids, attention_mask).last_hidden_state[:, 0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory, bert: BertModel) -> Path:
    """tokens.pt2 gives a vector per token, texts.pt2 one per text."""
    folder = tmp_path_factory.mktemp("encoder")
    dims = {0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("length", max=64)}
    example = (torch.randint(0, 300, (3, 7)), torch.ones(3, 7, dtype=torch.int64))
    for name, module in {"tokens": Tokens(bert), "texts": Pooled(bert)}.items():
        program = torch.export.export(module, example, dynamic_shapes=(dims, dims))
        torch.export.save(program, folder / f"{name}.pt2")
    return folder


def convert(program: Path) -> None:
    """Write a program as ONNX, beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the converter's own libraries
        torch.onnx.export(
            torch.export.load(program), f=program.with_suffix(".onnx"), external_data=False
        )


class Tokens(torch.nn.Module):
    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a second output too, as a BertModel with its pooler does."""
        vectors = self.bert(input_ids, attention_mask).last_hidden_state
        return vectors, vectors[:, 0]


@pytest.fixture
def initialized(tmp_path: Path, artifacts: Path) -> Initialized:
    """Build the handler of an archive."""

    def make(artifact: str, **section: Any) -> tuple[TextEncoder, Context]:
        if artifact.endswith(".onnx"):
            convert((artifacts / artifact).with_suffix(".pt2"))
        (tmp_path / artifact).write_bytes((artifacts / artifact).read_bytes())
        train_tokenizer(TEXTS).save(str(tmp_path / "tokenizer.json"))
        context = Context(
            "encoder",
            str(tmp_path),
            {"model": {"serializedFile": artifact}},
            model_yaml_config={"handler": {"text": {"max_length": 48, **section}}},
        )
        handler = TextEncoder()
        handler.initialize(context)
        return handler, context

    return make


def answers(handler: TextEncoder, context: Context, texts: Sequence[str]) -> torch.Tensor:
    context.reset([str(at) for at in range(len(texts))], queries=[{}] * len(texts))
    return torch.tensor(handler.handle([{"body": text} for text in texts], context))


@pytest.mark.parametrize(
    "artifact", ["tokens.pt2", pytest.param("tokens.onnx", marks=pytest.mark.nightly)]
)
def test_a_text_is_the_mean_of_its_own_tokens_whatever_company_it_has(
    initialized: Initialized, bert: BertModel, artifact: str
) -> None:
    handler, context = initialized(artifact)
    together = answers(handler, context, TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        alone = answers(handler, context, [text])[0]
        torch.testing.assert_close(vector, alone, rtol=0, atol=TOLERANCE)
        ids = torch.tensor([handler.tokenizer.encode(text).ids])
        mean = bert(ids).last_hidden_state.mean(1)
        expected = torch.nn.functional.normalize(mean, dim=1)[0]
        torch.testing.assert_close(vector, expected, rtol=0, atol=TOLERANCE)
    lengths = {len(handler.tokenizer.encode(text)) for text in TEXTS}
    assert max(lengths) > 8 * min(lengths), "the texts differ in length"
    assert (together[0] - together[1]).abs().max() > 100 * TOLERANCE, "and in their vectors"


def test_an_output_of_texts_is_taken_as_it_is(initialized: Initialized, bert: BertModel) -> None:
    handler, context = initialized("texts.pt2", normalize=False)
    found = answers(handler, context, TEXTS[:1])
    ids = torch.tensor([handler.tokenizer.encode(TEXTS[0]).ids])
    torch.testing.assert_close(found, bert(ids).last_hidden_state[:, 0], rtol=0, atol=TOLERANCE)
    assert found.norm() > 2


def test_a_vector_has_the_length_1(initialized: Initialized) -> None:
    handler, context = initialized("texts.pt2")
    torch.testing.assert_close(answers(handler, context, TEXTS).norm(dim=1), torch.ones(4))


def test_a_wrong_setting_is_named(initialized: Initialized) -> None:
    with pytest.raises(LoadError, match=r"handler\.text\.normalize is 'maybe'; expected true or"):
        initialized("texts.pt2", normalize="maybe")
    with pytest.raises(LoadError, match=r"handler\.text\.pool is unknown; expected .*normalize"):
        initialized("texts.pt2", pool="mean")


def test_an_explanation_is_refused(initialized: Initialized) -> None:
    handler, context = initialized("texts.pt2")
    with pytest.raises(BadInput, match="explain a classifier"):
        handler.explain([{"body": "good"}], context)


def test_batches_are_of_like_length(tmp_path: Path) -> None:
    (artifact := tmp_path / "weights.bin").write_bytes(b"none")
    file = write_archive("m", version="1.0", artifact=artifact, handler="text_encoder",
                         output_dir=tmp_path)  # fmt: skip
    with open_archive(file) as archive:
        assert load_model_config(archive, load_settings({}, None, {})).by_length
