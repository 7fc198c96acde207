"""A tiny decoder of bytes with random weights, as an export leaves it, and its tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.shared import made_once

END = "<|end|>"
PLACES = 512
"""Of the decoder that modules share."""


def build_tokenizer() -> Tokenizer:
    """Every byte is a token, so that é is two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {each: at for at, each in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def build_decoder(places: int) -> Any:
    """Return a GPT-2 of those tokens that writes letters and signs of ASCII, without an end."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    config = GPT2Config(
        vocab_size=257, n_positions=places, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=256, eos_token_id=256, initializer_range=0.3,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train(False)
    with torch.no_grad():
        # Their logits are 0, which is never the largest.
        model.transformer.wte.weight[94:] = 0
    return model


def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of that decoder, written once in a test run: leave it as it is."""
    with made_once(tmp_path_factory, "decoder") as (folder, is_empty):
        if is_empty:
            write_decoder(build_decoder(PLACES), folder)
    return folder


def write_decoder(model: Any, folder: Path) -> None:
    """Write `model.pt2`, its report without parity, and `tokenizer.json`."""
    from modelyard.exporter.formats import to_exported_program
    from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs
    from modelyard.plugins.tasks.export_decoder import open_decoder

    module, signature, proof = open_decoder(model, ["input_ids:int64[batch=1..4,length=1..16]"])
    example = make_inputs(signature, Probe("random", example_sizes(signature)))
    program = to_exported_program.capture(module, signature, example)
    artifact = folder / "model.pt2"
    to_exported_program.write(program, artifact)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    report = {
        "format": "pt2",
        "artifact_sha256": hashlib.sha256(artifact.read_bytes()).hexdigest(),
        "checkpoint": {"sha256": "0" * 64},
        "signature": signature.to_json(),
        "details": {"generation": proof},
    }
    (folder / "model.pt2.report.json").write_text(json.dumps(report))
