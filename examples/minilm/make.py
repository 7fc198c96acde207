"""Make a folder like that of all-MiniLM-L6-v2: the same architecture, size and files.

Run from the repository's folder: `python -m examples.minilm.make FOLDER`. It takes seconds, needs
transformers (which brings tokenizers) and no network. The weights are random, and the tokenizer
learns its words from the pages of docs/: paths and speeds are those of the real model, the vectors
mean nothing.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import WordPieceTrainer
from transformers import BertConfig, BertModel

PAGES = Path(__file__).parents[2] / "docs"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = 30522
LAYERS = 6
SEED = 0


def make(folder: Path, layers: int = LAYERS) -> None:
    """Write `config.json`, `model.safetensors` and `tokenizer.json` of a BERT of width 384."""
    torch.manual_seed(SEED)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=384, num_hidden_layers=layers, num_attention_heads=12,
        intermediate_size=1536, max_position_embeddings=512,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    train_tokenizer(page.read_text() for page in sorted(PAGES.rglob("*.md"))).save(
        str(folder / "tokenizer.json")
    )


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn word pieces as BERT's, in lower case, at most `WORDS` of them."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = WordPieceTrainer(vocab_size=WORDS, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    # In an order that is the same each time: the trainer's is not, where pieces are as frequent.
    pieces = [*SPECIAL, *sorted(tokenizer.get_vocab().keys() - set(SPECIAL))]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    tokenizer.model = models.WordPiece(vocab=numbers, unk_token="[UNK]")
    begin, end = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")  # they are learned first
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", end), ("[CLS]", begin))
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
