"""A Hugging Face decoder → a module with its cache among the inputs and outputs.

What it takes and gives is written in `modelyard.plugins.tasks.decoder`, which runs the artifact.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, Signature
from modelyard.exporter.arguments import read_inputs
from modelyard.exporter.errors import ModelError, UsageError, cause
from modelyard.handlers.models.backends import dtype_name
from modelyard.handlers.proof.agree import compare, rule_for
from modelyard.plugins.tasks.decoder import TOKENS, Decoder, Run, cache_names

MOST_POSITIONS = 1024
"""Places of the cache to prove, where neither the model nor `--input` say less."""
MOST_LENGTH = 64
"""New tokens of one call to prove; longer prompts are read in parts."""
_DIMS = (["batch", "length"], ["batch", "length"], ["batch", "past"])
_STEPS = 4
_PROMPTS = ((3, 1, 4, 1, 5), (9, 2))
"""Prompts of different length."""

_OTHERWISE = (
    "it takes a mask, positions or a cache otherwise than most decoders; export it without "
    "--generate"
)
_WANTED = "--generate takes a decoder of transformers, such as GPT-2, Llama or Qwen3"


class WithCache(nn.Module):
    """A decoder that takes its cache as tensors and gives what new tokens add to it.

    Args:
        model: model of transformers, with a head that gives logits.
        positions: places of the text that the model knows.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        super().__init__()
        self.wrapped_model = model  # by this name, reports leave it out of the weights' names
        self._positions = positions

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_mask: Tensor, *past: Tensor
    ) -> dict[str, Tensor]:
        """Return logits (N, V) after the last of the new tokens (N, L), and the cache's addition.

        Args:
            input_ids: (N, L).
            attention_mask: (N, L), 1 where a token is.
            past_mask: (N, P), 1 where the cache holds a token.
            past: keys and values of each layer in turn, (N, H, P, W).
        """
        before = past_mask.sum(dim=1, keepdim=True)
        places = before + attention_mask.cumsum(dim=1) - 1
        # Only of rows that nobody reads: what fills them up is before the first place.
        places = places.clamp(min=0, max=self._positions - 1)
        held = past[0].shape[2]
        cache = _cache_of(past)
        output: Any = self.wrapped_model(
            input_ids=input_ids,
            attention_mask=_attention(attention_mask, past_mask, past[0].dtype),
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        given = {"logits": output.logits[:, -1]}
        for layer, tensors in enumerate(cache.layers):
            given[f"new_key_{layer}"] = tensors.keys[:, :, held:]
            given[f"new_value_{layer}"] = tensors.values[:, :, held:]
        return given


def _attention(attention_mask: Tensor, past_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the attention (N, 1, L, P + L): 0 where a token sees another.

    Every token sees itself, also what fills a row up: attention over nothing is not a number, which
    the other rows' zeros would spread.
    """
    length = attention_mask.shape[1]
    square = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    own = (square.tril() & attention_mask.bool()[:, None, :]) | itself
    seen = past_mask.bool()[:, None, :].expand(-1, length, -1)
    allowed = torch.cat([seen, own], dim=2)[:, None]
    added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return added.masked_fill(~allowed, torch.finfo(dtype).min)


def open_decoder(
    model: nn.Module, given: Sequence[str]
) -> tuple[nn.Module, Signature, dict[str, Any]]:
    """Return the model with its cache as inputs and outputs, its inputs, and what is proven of it.

    Args:
        model: model as its checkpoint has it, on the CPU.
        given: inputs to state otherwise, which gives `batch`, `length` or `past` other ranges.

    Raises:
        ModelError: it is not a decoder, keeps something else than keys and values, or gives other
            tokens step by step than at once.
        UsageError: `given` names an input that no decoder has, or a range that is too long.
    """
    positions = _positions(_decoder_config(model))
    signature = _signature(_layers(model), positions, given)
    module = WithCache(model, positions)
    most = Decoder(_run(module), signature.inputs).positions
    if most > positions:
        raise UsageError(
            f"--input gives the cache {most} places, and the model knows {positions}; expected "
            f"past=1..{positions} at most"
        )
    proof = {"end_tokens": _end_tokens(model), "positions": most, **_prove(module, signature)}
    return module, signature, proof


def _signature(layers: Sequence[Any], positions: int, given: Sequence[str]) -> Signature:
    texts = {
        "input_ids": f"input_ids:int64[batch,length=1..{min(MOST_LENGTH, positions)}]",
        "attention_mask": "attention_mask:int64[batch,length]",
        "past_mask": f"past_mask:int64[batch,past=1..{min(MOST_POSITIONS, positions)}]",
    }
    for text in given:
        name = text.partition(":")[0]
        if name not in texts:
            raise UsageError(
                f'--input "{text}" does not go with --generate, whose inputs are those of every '
                f"decoder; expected other ranges of {', '.join(TOKENS)}"
            )
        texts[name] = text
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    held = (
        f"{name}:{dtype_name(tensor.dtype)}[batch,{tensor.shape[1]},past,{tensor.shape[3]}]"
        for name, tensor in zip(cache_names(len(layers)), tensors, strict=True)
    )
    signature = read_inputs([*texts.values(), *held])
    for spec, dims in zip(signature.inputs, _DIMS, strict=False):
        if [size.name for size in spec.shape if isinstance(size, Dim)] != dims:
            raise UsageError(
                f'--input "{spec}": a decoder\'s "{spec.name}" is '
                f"{spec.name}:int64[{','.join(dims)}]; expected other ranges of these dims"
            )
    return signature


def _prove(module: WithCache, signature: Signature) -> dict[str, Any]:
    """Prove that prompt and steps give what the model gives for the whole text at once.

    Two texts of different length go through the cache together, and each alone and without one
    through the checkpoint's own forward(), whose likeliest token is the next of both.

    Returns:
        For the report: how many steps, and the largest difference.
    """
    model: Any = module.wrapped_model
    decoder = Decoder(_run(module), signature.inputs)
    vocabulary = model.get_input_embeddings().num_embeddings
    texts = [[token % vocabulary for token in prompt] for prompt in _PROMPTS]
    rule = rule_for(signature.inputs[-1].dtype)
    largest = 0.0
    try:
        logits, cache = decoder.read(texts)
        for step in range(_STEPS):
            for row, text in enumerate(texts):
                with torch.inference_mode():
                    alone = model(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1]
                found = compare(alone, logits[row : row + 1], rule.tolerance)
                if not found["scaled"] <= rule.tolerance or found["same"] != found["rows"]:
                    raise ModelError(
                        f"after {step} steps through its cache the model's logits are "
                        f"{found['max_abs']:.1e} from those for the whole text at once (tolerance "
                        f"{rule.tolerance:g}): {_OTHERWISE}"
                    )
                largest = max(largest, found["max_abs"])
                text.append(int(alone.argmax()))
            if step + 1 < _STEPS:
                logits = decoder.step(cache, [text[-1] for text in texts])
    except ModelError:
        raise
    # The model is its author's code.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} fails step by step: {cause(error)}: {_OTHERWISE}"
        ) from error
    return {"steps": _STEPS, "max_abs": largest, "compared_with": "forward() of the whole text"}


def _run(module: WithCache) -> Run:
    return lambda *inputs: list(module(*inputs).values())


def _end_tokens(model: nn.Module) -> list[int]:
    """Return the ids that end a text, as the checkpoint says."""
    for place in ("generation_config", "config"):
        found = getattr(getattr(model, place, None), "eos_token_id", None)
        if found is not None:
            return [int(each) for each in (found if isinstance(found, list) else [found])]
    return []


def _decoder_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or not hasattr(model, "generate"):
        raise ModelError(f"{name} generates no text; {_WANTED}, with its head for language")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} has an encoder, too; {_WANTED}")
    return config.get_text_config()


def _layers(model: Any) -> Sequence[Any]:
    """Return the layers of the model's own cache after one token."""
    utilities: Any = importlib.import_module("transformers.cache_utils")
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad():
            found = model(input_ids=ids, use_cache=True).past_key_values
        layers: list[Any] = list(found.layers)
    # The model is its author's code.
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} gives no cache of keys and values: {cause(error)}; {_WANTED}"
        ) from error
    # A window is nothing but a shorter text, which `_positions` sees to.
    plain = (utilities.DynamicLayer, utilities.DynamicSlidingWindowLayer)
    if others := sorted({type(layer).__name__ for layer in layers if type(layer) not in plain}):
        raise ModelError(
            f"the cache of {type(model).__name__} holds {', '.join(others)}; expected keys and "
            f"values in every layer: {_WANTED}"
        )
    return layers


def _positions(config: Any) -> int:
    """Return how long a text may be: the model's own limit, and its window's where it has one."""
    limits = (
        getattr(config, name, None)
        for name in ("max_position_embeddings", "sliding_window", "attention_chunk_size")
    )
    return min((limit for limit in limits if isinstance(limit, int)), default=MOST_POSITIONS)


def _cache_of(past: Sequence[Tensor]) -> Any:
    """Return transformers' cache that holds these tensors; its own way there copies each."""
    utilities: Any = importlib.import_module("transformers.cache_utils")
    cache = utilities.DynamicCache()
    for key, value in zip(past[::2], past[1::2], strict=True):
        layer = utilities.DynamicLayer()
        layer.keys, layer.values = key, value
        layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
        cache.layers.append(layer)
    return cache
