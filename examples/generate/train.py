"""Train a tiny GPT-2 on verses by Lewis Carroll, and write it as a Hugging Face folder.

Run from the repository's folder: `python -m examples.generate.train FOLDER`. It takes seconds,
needs transformers (which brings tokenizers) and no network. The folder holds what `save_pretrained`
writes and `tokenizer.json`: pairs of bytes that occur often in the verses, so that every text has
tokens.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import GPT2Config, GPT2LMHeadModel

VERSES = Path(__file__).parent / "verses.txt"
END = "<|end|>"
TOKENS = 384
PLACES = 256
STEPS = 120
BATCH, LENGTH = 8, 64
SEED = 0


def train(folder: Path) -> None:
    """Write `config.json`, `model.safetensors`, `generation_config.json` and `tokenizer.json`."""
    text = VERSES.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text)
    end = tokenizer.token_to_id(END)
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=PLACES, n_embd=96, n_layer=2, n_head=4,
        bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.tensor(tokenizer.encode(text).ids)
    for _ in range(STEPS):
        # The verses as a ring, so that every place is as often at the start as others.
        begin = torch.randint(len(ids), (BATCH, 1))
        rows = ids[(begin + torch.arange(LENGTH)) % len(ids)]
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def train_tokenizer(text: str) -> Tokenizer:
    """Learn pairs of bytes as GPT-2's tokenizer does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    train(parser.parse_args().folder)
