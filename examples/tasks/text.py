"""Make folders like those of Hugging Face for four tasks of texts: tiny, with random weights.

Run from the repository's folder: `python -m examples.tasks.text FOLDER`. It writes FOLDER/pairs
(which of three relations do two texts have), FOLDER/entities, FOLDER/answers and FOLDER/gaps, each
with `config.json`, `model.safetensors` and `tokenizer.json`. The model of entities has learned
which words are people and which are places; the answers of the others mean nothing.
"""

import argparse
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedModel,
)

from examples.minilm.make import train_tokenizer

PEOPLE = ("Anna", "Bruno", "Chiara", "Dmitri", "Elif", "Farah")
PLACES = ("Paris", "Rome", "New York", "Lagos", "Oslo", "San Marino")
FORMS = (
    "{} lives in {}",
    "{} lives in {} .",
    "{} went to {} today",
    "in {1} we met {0} !",
    "does {} like {} ?",
)
RELATIONS = ("entailment", "neutral", "contradiction")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
STEPS = 120
SEED = 0


def sentences() -> list[str]:
    """Return every form with every person and place."""
    return [form.format(who, where) for form in FORMS for who in PEOPLE for where in PLACES]


def make(folder: Path) -> dict[str, Path]:
    """Write the four folders; return task → folder."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(sentences())

    def config(*labels: str) -> BertConfig:
        return BertConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=1,
            num_attention_heads=2, intermediate_size=64, max_position_embeddings=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
            id2label=dict(enumerate(labels)),
        )  # fmt: skip

    models: dict[str, PreTrainedModel] = {
        "pairs": BertForSequenceClassification(config(*RELATIONS)),
        "entities": BertForTokenClassification(config(*TAGS)),
        "answers": BertForQuestionAnswering(config("0", "1")),
        "gaps": BertForMaskedLM(config("0", "1")),
    }
    _learn_entities(models["entities"], tokenizer)
    for task, model in models.items():
        model.save_pretrained(folder / task)
        tokenizer.save(str(folder / task / "tokenizer.json"))
    return {task: folder / task for task in models}


def _learn_entities(model: PreTrainedModel, tokenizer: object) -> None:
    """Teach the model the tags of the words of all sentences."""
    texts = sentences()
    encodings = tokenizer.encode_batch(texts)  # type: ignore[attr-defined]
    length = max(map(len, encodings))
    ids = torch.zeros(len(texts), length, dtype=torch.int64)
    wanted = torch.full_like(ids, -100)
    for row, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
        ids[row, : len(encoding)] = torch.tensor(encoding.ids)
        for at, (start, end) in enumerate(encoding.offsets):
            if not encoding.special_tokens_mask[at]:
                wanted[row, at] = _tag(text, start, end)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        rows = torch.tensor(random.sample(range(len(texts)), 48))
        logits = model(ids[rows], (ids[rows] != 0).long()).logits
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(logits.flatten(0, 1), wanted[rows].flatten()))
        optimizer.step()


def _tag(text: str, start: int, end: int) -> int:
    for kind, names in ((1, PEOPLE), (3, PLACES)):
        for name in names:
            at = text.find(name)
            if at <= start and end <= at + len(name):
                return kind + (start > at)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
