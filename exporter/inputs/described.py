"""The inputs of a model that says itself what it takes, as `--input` writes them.

What is proposed is printed and stands in the report's command, so that it can be edited. Sizes of
dynamic dimensions are modest: each costs time to prove.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.formats.from_onnx import file_of
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.ingest.source import inside, read_object_or_nothing
from modelyard.handlers.models.backends import dtype_name

_LENGTH = 128
_TARGET_LENGTH = 32
_SAMPLES = "4000..16000"  # a quarter to a whole second of speech
_IMAGE_SIZE = 224


@dataclass(frozen=True)
class Proposal:
    """What a model takes, by its own word."""

    inputs: tuple[str, ...]
    """Inputs as `--input` is written, in the order of forward()'s arguments."""
    needed: frozenset[str]
    """Names without which the model does not run; the others may be left out."""
    source: str
    """Who says so, as in `config.json`."""


def propose_inputs(model: nn.Module, checkpoint: Checkpoint) -> Proposal | None:
    """Return the inputs of a model that describes itself; None of one that does not."""
    for propose in (_of_onnx, _of_example, _of_transformers, _of_timm, _of_diffusers):
        if (proposal := propose(model, checkpoint)) is not None:
            return proposal
    if checkpoint.inputs:
        taken = list(inspect.signature(model.forward).parameters)
        texts = tuple(
            text if _name(text) else f"{name}{text}"
            for text, name in zip(checkpoint.inputs, (*taken, *checkpoint.inputs), strict=False)
        )
        return Proposal(texts, frozenset(map(_name, texts)), f"the {checkpoint.kind}")
    return None


def _of_onnx(model: nn.Module, checkpoint: Checkpoint) -> Proposal | None:
    file = file_of(model)
    inputs = file.propose() if file else ()
    return Proposal(inputs, frozenset(map(_name, inputs)), "the file") if inputs else None


def complete(given: Sequence[str], proposal: Proposal) -> tuple[str, ...]:
    """Return the given inputs, and the proposed ones that a call still needs.

    Given inputs that the model runs with are complete: whoever leaves the attention mask out has
    no mask, and as many as are proposed stand in their places, whatever they are called. Where one that is needed is missing, every proposed one that is not given is added,
    with the dimensions of those that are.
    """
    by_name = {_name(text): text for text in given}
    have_names_of_their_own = by_name.keys().isdisjoint(map(_name, proposal.inputs))
    if proposal.needed <= set(by_name) or (
        have_names_of_their_own and len(given) == len(proposal.inputs)
    ):
        return tuple(given)
    renamed: dict[str, str] = {}
    for text in proposal.inputs:
        if (other := by_name.get(_name(text))) is not None:
            for ours, theirs in zip(_dims(text), _dims(other), strict=False):
                renamed[ours.partition("=")[0]] = theirs.partition("=")[0]
    merged = [by_name.pop(_name(text), _rename(text, renamed)) for text in proposal.inputs]
    return (*merged, *by_name.values())


def left_out(given: Sequence[str], proposal: Proposal) -> list[str]:
    """List the proposed masks that are not among the inputs of a call."""
    names = {_name(text) for text in given}
    return [text for text in proposal.inputs if "mask" in _name(text) and _name(text) not in names]


def _name(text: str) -> str:
    return text.partition(":")[0]


def _dims(text: str) -> list[str]:
    found = re.search(r"\[(.*?)\]", text)
    return [part.strip() for part in found[1].split(",")] if found else []


def _rename(text: str, renamed: Mapping[str, str]) -> str:
    dims = [renamed.get(dim.partition("=")[0], dim) for dim in _dims(text)]
    return re.sub(r"\[.*?\]", lambda _: f"[{','.join(dims)}]", text, count=1)


# -- Lightning, timm -----------------------------------------------------------------------------


def _of_example(model: nn.Module, checkpoint: Checkpoint) -> Proposal | None:
    """Read the example that a Lightning module may keep; its first dimension is the batch."""
    example = getattr(model, "example_input_array", None)
    if isinstance(example, Tensor):
        example = (example,)
    parameters = list(inspect.signature(model.forward).parameters)
    if isinstance(example, Mapping):
        named = dict(example)
    elif isinstance(example, tuple | list) and len(example) <= len(parameters):
        named = dict(zip(parameters, example, strict=False))
    else:
        return None
    if not named or not all(isinstance(value, Tensor) and value.ndim for value in named.values()):
        return None
    texts = [
        f"{name}:{dtype_name(value.dtype)}[{','.join(('batch', *map(str, value.shape[1:])))}]"
        for name, value in named.items()
    ]
    return Proposal(tuple(texts), frozenset(named), "its example_input_array")


def _of_timm(model: nn.Module, checkpoint: Checkpoint) -> Proposal | None:
    settings = getattr(model, "default_cfg", None)
    size = settings.get("input_size") if isinstance(settings, Mapping) else None
    if not isinstance(size, tuple | list) or len(size) != 3:
        return None
    convolutions = (part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d))
    channels = getattr(model, "in_chans", None) or next(convolutions, size[0])
    # A Vision Transformer may have been made for another size.
    own = getattr(getattr(model, "patch_embed", None), "img_size", None)
    height, width = own if isinstance(own, tuple) and len(own) == 2 else size[1:]
    text = f"image:float32[batch,{channels},{height},{width}]"
    return Proposal((text,), frozenset(["image"]), "its default_cfg")


# -- transformers and diffusers: config.json says the sizes of what forward() names ----------------


def _first(configs: Any, *names: str) -> Any:
    """Return the first value that is there, of a configuration or of several in turn."""
    each = configs if isinstance(configs, list) else [configs]
    found = (getattr(config, name, None) for config in each for name in names)
    return next((value for value in found if value is not None), None)


def _whole(configs: Any, *names: str) -> int | None:
    """Return the first value, where it is a whole number above 0."""
    value = _first(configs, *names)
    return value if type(value) is int and value > 0 else None


def _of_transformers(model: Any, checkpoint: Checkpoint) -> Proposal | None:
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if not isinstance(main, str) or not hasattr(config, "get_text_config"):
        return None
    taken = inspect.signature(model.forward).parameters
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    found = {
        name: text
        for name, describe in _ARGUMENTS.items()
        if name in taken and (text := describe(model, config, folder)) is not None
    }
    if "input_ids" not in found:  # of sounds and pictures, a mask has sizes of its own
        found = {name: text for name, text in found.items() if name not in _COMPANIONS}
    needed = set(found) - _COMPANIONS
    required = {p.name for p in taken.values() if p.default is p.empty and p.name != "kwargs"}
    if not required | {main} <= set(found):
        return None
    if "return_loss" in taken:  # CLIP and its like: texts beside pictures, which are not pairs
        found = {
            name: text if name in needed and name != "input_ids" else text.replace("batch", "texts")
            for name, text in found.items()
        }
    texts = [f"{name}:{found[name]}" for name in taken if name in found]
    return Proposal(tuple(texts), frozenset(needed), "config.json")


def _tokens(model: nn.Module, config: Any, folder: Path) -> str:
    text = config.get_text_config()
    most = _whole(text, "max_position_embeddings", "n_positions", "max_source_positions")
    # A table may have places up to the padding's that are not used.
    places = [
        part.num_embeddings - part.padding_idx - 1
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding) and "position" in name and part.padding_idx is not None
    ]
    longest = min(_LENGTH, most or _LENGTH, *places)
    return f"int64[batch,length=2..{max(longest, 3)}]{_below(_whole(text, 'vocab_size'))}"


def _below(bound: int | None) -> str:
    return f"<{bound}" if bound else ""


def _segments(model: nn.Module, config: Any, folder: Path) -> str | None:
    kinds = _whole(config.get_text_config(), "type_vocab_size") or 0
    return f"int64[batch,length]<{kinds}" if kinds > 1 else None


def _targets(model: Any, config: Any, folder: Path) -> str | None:
    decodes = type(model).__name__.endswith("Model") or model.can_generate()
    if not decodes:  # a classifier's decoder reads the same tokens
        return None
    configs = [_first(config, "decoder"), config]
    most = _whole(configs, "max_target_positions", "max_position_embeddings") or _TARGET_LENGTH
    sizes = f"target=1..{min(_TARGET_LENGTH, most)}"
    return f"int64[batch,{sizes}]{_below(_whole(configs, 'vocab_size'))}"


def _pixels(model: nn.Module, config: Any, folder: Path) -> str | None:
    if getattr(config, "image_token_id", None) is not None:
        return None  # a picture goes where tokens of its own stand in the text
    nested = ("vision_config", "encoder", "backbone_config")
    configs = [*(_first(config, name) for name in nested), config]
    channels = _whole(configs, "num_channels", "in_channels", "in_chans") or 3
    size = _first(configs, "image_size") or _processed_size(folder) or _IMAGE_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = _whole(configs, "num_frames")
    return f"float32[batch,{f'{frames},' if frames else ''}{channels},{height},{width}]"


def _processed_size(folder: Path) -> Sequence[int] | None:
    """Return the size that the folder's own processor makes of a picture."""
    try:
        content = read_object_or_nothing(inside(folder, "preprocessor_config.json"))
    except CheckpointError:
        return None
    for key in ("crop_size", "size"):
        value = content.get(key)
        if isinstance(value, Mapping):
            edge = value.get("shortest_edge")
            sides = [value.get("height", edge), value.get("width", edge)]
        else:
            sides = [value, value]
        if all(type(side) is int and side > 0 for side in sides):
            return sides
    return None


def _sound(model: nn.Module, config: Any, folder: Path) -> str:
    bins, frames = _whole(config, "num_mel_bins"), _whole(config, "max_length")
    if bins and frames:  # the Audio Spectrogram Transformer
        return f"float32[batch,{frames},{bins}]"
    channels = _whole(config, "audio_channels")
    return f"float32[batch,{f'{channels},' if channels else ''}samples={_SAMPLES}]"


def _features(model: nn.Module, config: Any, folder: Path) -> str | None:
    bins, positions = _whole(config, "num_mel_bins"), _whole(config, "max_source_positions")
    per_frame = _whole(config, "input_feat_per_channel", "feature_projection_input_dim")
    if per_frame:
        return f"float32[batch,frames=16..64,{per_frame}]"
    # Whisper pads every sound to one length, which its convolutions halve.
    return f"float32[batch,{bins},{2 * positions}]" if bins and positions else None


def _series(model: nn.Module, config: Any, folder: Path) -> str | None:
    length, channels = _whole(config, "context_length"), _whole(config, "num_input_channels")
    return f"float32[batch,{length},{channels}]" if length and channels else None


_COMPANIONS = frozenset(("attention_mask", "token_type_ids", "bbox"))
_ARGUMENTS: Mapping[str, Callable[[Any, Any, Path], str | None]] = {
    "input_ids": _tokens,
    "attention_mask": lambda *_: "int64[batch,length]",
    "token_type_ids": _segments,
    "bbox": lambda *_: "int64[batch,length,4]",
    "pixel_values": _pixels,
    "input_values": _sound,
    "input_features": _features,
    "past_values": _series,
    "decoder_input_ids": _targets,
}


def _of_diffusers(model: nn.Module, checkpoint: Checkpoint) -> Proposal | None:
    config = getattr(model, "config", None)
    is_theirs = type(model).__module__.partition(".")[0] == "diffusers"
    if not is_theirs or not isinstance(config, Mapping):
        return None
    channels, size = config.get("in_channels"), config.get("sample_size")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    known = {
        "sample": f"float32[batch,{channels},{height},{width}]" if channels and size else None,
        "timestep": "int64[batch]",
        "encoder_hidden_states": f"float32[batch,tokens=2..77,{config['cross_attention_dim']}]"
        if isinstance(config.get("cross_attention_dim"), int)
        else None,
    }
    taken = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in taken if p.default is p.empty and p.name != "kwargs"]
    texts = [f"{name}:{known[name]}" for name in needed if known.get(name)]
    if len(texts) < len(needed):
        return None
    return Proposal(tuple(texts), frozenset(needed), "config.json")
