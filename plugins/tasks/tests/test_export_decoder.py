"""Decoders with their cache: the program, its certificate, and the text that comes out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from modelyard.exporter import ExportReport, export
from modelyard.exporter.errors import ModelError, UsageError
from modelyard.handlers.models.backends import open_artifact
from modelyard.plugins.tasks.decoder import Decoder, is_decoder
from modelyard.plugins.tasks.export_decoder import WithCache, open_decoder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
RANGES = (
    "input_ids:int64[batch=1..2,length=1..8]",
    "past_mask:int64[batch,past=1..32]",
)
PROMPTS = ([7, 11, 13], [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37], [41])
"""The second one is longer than a call."""


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = SIZES if kind == "GPT2" else GROUPED
    config = getattr(transformers, f"{kind}Config")(
        **{**sizes, **more}, bos_token_id=1, eos_token_id=95, pad_token_id=0
    )
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{kind}{head}")(config).eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what transformers itself writes after a prompt."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def written(decoder: Decoder, count: int) -> list[list[int]]:
    """Return what the decoder writes after all prompts, together."""
    logits, cache = decoder.read(PROMPTS)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    for _ in range(count):
        chosen = logits.argmax(dim=1).tolist()
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
        logits = decoder.step(cache, chosen)
    return texts


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return build("GPT2")


@pytest.fixture(scope="module")
def reports(gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportReport]:
    folder = tmp_path_factory.mktemp("decoder")
    gpt2.save_pretrained(folder / "gpt2")
    found = export(folder / "gpt2", None, RANGES, generate=True, output_dir=folder / "out")
    return {report.format: report for report in found}


@pytest.mark.nightly
@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_prompts_and_steps_write_what_the_checkpoint_writes(
    format: str, reports: dict[str, ExportReport], gpt2: Any
) -> None:
    report = reports[format]
    artifact = open_artifact(report.artifact, format)
    decoder = Decoder(artifact, report.signature.inputs)
    assert written(decoder, 20) == [greedy(gpt2, prompt, 20) for prompt in PROMPTS]


@pytest.mark.nightly
def test_a_call_copies_the_cache_once(reports: dict[str, ExportReport]) -> None:
    module = open_artifact(reports["pt2"].artifact, "pt2").module
    assert isinstance(module, torch.fx.GraphModule)
    joined = [node for node in module.graph.nodes if node.target is torch.ops.aten.cat.default]
    assert len(joined) == 2 * 2 + 1  # keys and values of two layers, and the mask


@pytest.mark.nightly
def test_rows_join_and_leave_between_steps(reports: dict[str, ExportReport], gpt2: Any) -> None:
    report = reports["pt2"]
    decoder = Decoder(open_artifact(report.artifact, "pt2"), report.signature.inputs)
    first, second = PROMPTS[:2]
    logits, cache = decoder.read([first, first])
    texts = [[int(logits[0].argmax())], []]
    decoder.step(cache, [texts[0][-1], 0])
    cache.keep([0])
    logits, joined = decoder.read([second])
    texts[1].append(int(logits.argmax()))
    cache.extend(joined)
    texts[0].append(greedy(gpt2, first, 2)[1])
    for _ in range(5):
        logits = decoder.step(cache, [text[-1] for text in texts])
        for text, token in zip(texts, logits.argmax(dim=1).tolist(), strict=True):
            text.append(token)
    assert texts == [greedy(gpt2, first, 7), greedy(gpt2, second, 6)]


@pytest.mark.nightly
def test_the_report_proves_the_cache_and_says_what_ends_a_text(
    reports: dict[str, ExportReport],
) -> None:
    report = json.loads(reports["onnx"].path.read_text())
    assert is_decoder(reports["onnx"].signature.inputs)
    assert reports["onnx"].signature.batching is not None
    assert reports["onnx"].signature.batching.batchable
    assert report["parity"]["verdict"] == "agrees"
    assert {1, 32} < {*report["parity"]["sizes"]["past"]}
    found = report["details"]["generation"]
    assert found.pop("max_abs") < 1e-5
    assert found == {
        "end_tokens": [95],
        "positions": 32,
        "steps": 4,
        "compared_with": "forward() of the whole text",
    }
    assert "--generate" in report["command"]
    assert report["warnings"] == []


@pytest.mark.parametrize(
    ("kind", "more", "positions"),
    [
        ("Llama", {}, 32),
        ("Qwen3", {"head_dim": 16}, 32),
        ("Mistral", {"sliding_window": 24}, 24),
        pytest.param("Gemma", {"head_dim": 16}, 32, marks=pytest.mark.nightly),
        pytest.param("GPTNeoX", {}, 32, marks=pytest.mark.nightly),
    ],
)
def test_other_decoders_are_taken_within_the_places_that_they_know(
    kind: str, more: dict[str, Any], positions: int
) -> None:
    model = build(kind, **more)
    module, signature, proof = open_decoder(model, ())
    assert proof["positions"] == positions
    decoder = Decoder(lambda *inputs: list(module(*inputs).values()), signature.inputs)
    assert written(decoder, 10) == [greedy(model, prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear generates no text"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1, num_heads=2)
            ),
            "has an encoder, too",
        ),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
            ),
            "MambaForCausalLM",
        ),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)
            ),
            "BloomForCausalLM fails step by step: .* otherwise than most decoders",
        ),
    ],
    ids=["layer", "encoder", "state", "distances"],
)
def test_what_keeps_no_keys_and_values_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_decoder(model().eval(), ())


def test_a_model_that_takes_its_positions_otherwise_is_refused(gpt2: Any) -> None:
    class Stubborn(transformers.GPT2LMHeadModel):  # type: ignore[misc]
        """Counts every call's tokens from the first place."""

        def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **rest: Any) -> Any:
            places = torch.arange(input_ids.shape[1])[None].expand_as(input_ids)
            return super().forward(input_ids, position_ids=places, **rest)

    with pytest.raises(ModelError, match=r"after 0 steps through its cache .* otherwise than"):
        open_decoder(Stubborn(gpt2.config).train(False), ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("x:float32[batch]", "does not go with --generate"),
        ("past_mask:int64[batch,32]", r"expected other ranges of these dims"),
        ("past_mask:int64[batch,past=1..64]", r"64 places, and the model knows 32"),
    ],
)
def test_ranges_that_no_decoder_has_are_refused(gpt2: Any, given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_decoder(gpt2, [given])


def test_real_inputs_do_not_go_with_a_cache(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--sample does not go with --generate"):
        export(tmp_path, None, (), generate=True, samples=[tmp_path / "x.npz"], output_dir=tmp_path)


def test_what_fills_a_row_up_changes_nothing(gpt2: Any) -> None:
    module = WithCache(gpt2, 32)
    _, signature, _ = open_decoder(gpt2, ())
    decoder = Decoder(lambda *inputs: list(module(*inputs).values()), signature.inputs)
    together, _ = decoder.read(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone, _ = decoder.read([prompt])
        assert torch.allclose(alone[0], together[row], atol=1e-5)
