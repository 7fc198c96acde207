"""Texts by the handler `generate`, as pt2 and ONNX, beside transformers' own `generate`.

    python -m benchmarks.generate [--rounds 5] [--tokens 64]

A GPT-2 of 6 layers and width 384 with random weights, on one thread. All take turns in one process,
greedy, with prompts of 32 tokens. The handler's share of tokenizer and text is in its time. Beside
the wall time stands the process's CPU time, which busy neighbours change less.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from modelyard.archiver.signature import Signature, TensorSpec
from modelyard.exporter.formats import to_exported_program, to_onnx
from modelyard.handlers import Context, Generate
from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs
from modelyard.plugins.tasks.export_decoder import open_decoder

LAYERS, WIDTH, HEADS, PLACES, TOKENS = 6, 384, 6, 512, 8000
PROMPT = 32
BATCHES = (1, 4)

Write = Callable[[int, int], None]
"""Writes so many texts of so many tokens."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def generate(
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of every run.")] = 5,
    tokens: Annotated[
        int, typer.Option(min=1, max=PLACES - PROMPT, help="Tokens of each text.")
    ] = 64,
) -> None:
    """Measure tokens per second, and the ratio to transformers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="modelyard-generate-") as folder:
        writers = _build(Path(folder))
    times: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for round in range(rounds + 1):
        for batch in BATCHES:
            for name, write in writers.items():
                began, worked = time.perf_counter(), time.process_time()
                write(batch, tokens)
                took = (time.perf_counter() - began, time.process_time() - worked)
                if round:  # the first is a warm-up
                    times[name, batch].append(took)
    table = Table("texts", "by", "tokens/s", "× transformers", "tokens per CPU s", "× transformers")
    for batch in BATCHES:
        base = [statistics.median(each) for each in zip(*times["transformers", batch], strict=True)]
        for name in writers:
            found = [statistics.median(each) for each in zip(*times[name, batch], strict=True)]
            cells = [
                text
                for own, other in zip(found, base, strict=True)
                for text in (f"{batch * tokens / own:.0f}", f"{other / own:.2f}")
            ]
            table.add_row(str(batch), name, *cells)
    Console().print(table)


def _build(folder: Path) -> dict[str, Write]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS, n_positions=PLACES, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).train(False)
    ids = torch.arange(PROMPT)

    def eager(batch: int, tokens: int) -> None:
        rows = ids.expand(batch, -1)
        model.generate(
            rows, attention_mask=torch.ones_like(rows), do_sample=False, max_new_tokens=tokens,
            pad_token_id=0,
        )  # fmt: skip

    _write_tokenizer(folder)
    module, signature, proof = open_decoder(model, [])
    example = make_inputs(signature, Probe("random", example_sizes(signature)))
    signature = replace(signature, outputs=_outputs(module, example))
    program = to_exported_program.capture(module, signature, example)
    to_exported_program.write(program, folder / "model.pt2")
    to_onnx.write(program, signature, folder / "model.onnx")
    writers: dict[str, Write] = {"transformers": eager}
    for format in ("pt2", "onnx"):
        writers[format] = _handler(folder, format, signature, proof)
    return writers


def _outputs(module: Any, example: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    with torch.no_grad():
        return tuple(TensorSpec(name) for name in module(*example))


def _write_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: at for at, word in enumerate([*letters, *map(str, range(TOKENS))][:TOKENS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _handler(folder: Path, format: str, signature: Signature, proof: dict[str, Any]) -> Write:
    artifact = folder / f"model.{format}"
    stated = replace(signature, outputs=()).to_json()
    report = {
        "format": format,
        "artifact_sha256": hashlib.sha256(artifact.read_bytes()).hexdigest(),
        "checkpoint": {"sha256": "0" * 64},
        "signature": stated,
        "details": {"generation": proof},
    }
    (folder / f"{artifact.name}.report.json").write_text(json.dumps(report))
    manifest = {
        "model": {"modelName": "story", "serializedFile": artifact.name},
        "modelyard": {"report": f"{artifact.name}.report.json", "signature": stated},
    }
    handler = Generate()
    handler.initialize(Context("story", str(folder), manifest, max(BATCHES)))

    def write(batch: int, tokens: int) -> None:
        body = {"prompt": " ".join(map(str, range(PROMPT))), "max_new_tokens": tokens}
        handler.context.reset([""] * batch)
        answers = handler.handle([{"body": body}] * batch, handler.context)
        assert all(answer["tokens"] == tokens for answer in answers)

    return write


if __name__ == "__main__":
    app()
