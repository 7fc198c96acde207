"""What an export takes as its inputs: those given, those of samples, those that the model says.

Where none of these is, its layers say it as far as they can, and sizes are tried; more than one
that runs is not chosen from, but proposed. What is proposed is printed and stands in the report's
command, so that it can be edited. Sizes of dynamic dimensions are modest: each costs time to prove.
"""

import hashlib
import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelyard.archiver.signature import Signature
from modelyard.exporter.arguments import goes_elsewhere, needed_arguments, read_inputs
from modelyard.exporter.errors import CheckpointError, UsageError, cause
from modelyard.exporter.formats.from_onnx import file_of
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.ingest.source import inside, read_object_or_nothing
from modelyard.exporter.inputs.samples import (
    Sample,
    has_rows,
    hold_out,
    in_batches,
    is_picture,
    names_inputs,
    picture_size,
    read_sample,
    sample_of,
    signature_of_samples,
)
from modelyard.exporter.inputs.tried import (
    TriedInputs,
    find_inputs,
    first_layers,
    guess_inputs,
    picture_input,
    runs,
)
from modelyard.exporter.refusals import check_output_names
from modelyard.exporter.request import STATIC, ExportRequest, paste
from modelyard.handlers.models.backends import dtype_name


@dataclass(frozen=True)
class Inputs:
    """What a model takes, and the real inputs that it is compared on."""

    texts: tuple[str, ...]
    """Every input as `--input` is written."""
    signature: Signature = field(default_factory=lambda: Signature(()))
    """The same, read; empty for a decoder, whose cache is among its inputs."""
    samples: tuple[Sample, ...] = ()
    calibration: tuple[Sample, ...] = ()
    """Samples that static quantisation takes its ranges from."""
    example: Sample | None = None
    """The request that was saved with the checkpoint, which is among the samples, too."""
    details: Mapping[str, object] = field(default_factory=dict)
    """What the report states of them."""


def settle(
    request: ExportRequest, module: nn.Module, checkpoint: Checkpoint, notes: list[str]
) -> Inputs:
    """Return the inputs that were given, and those that the model itself says it needs.

    Args:
        request: what is exported.
        module: the model, in eval mode on the CPU.
        checkpoint: its weights, and what it says of the inputs.
        notes: gets a sentence for each thing that a person should know.

    Raises:
        UsageError: none was given, and nothing says what the model takes; or a sample is not of
            the model's inputs.
    """
    if request.generate:
        return Inputs(tuple(request.inputs))
    texts = _settle_texts(request, module, checkpoint, notes)
    signature = read_inputs(texts)
    if not checkpoint.is_program:  # whose arguments have no names
        for line in goes_elsewhere(module, signature):
            request.report_line(line)
    check_output_names(request.output_names, signature)
    is_static = request.quantize == STATIC
    is_split = has_rows(signature)
    samples = tuple(
        read_sample(path, signature, is_split=is_split, folder=checkpoint.path)
        for path in request.samples
    )
    if is_static:
        split = hold_out(samples, signature)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in request.samples))
        stated = {
            "method": "min-max",
            "rows": split.rows,
            "held_out_rows": split.held_out_rows,
            "samples_sha256": digest.hexdigest(),  # of the values themselves, nothing is kept
        }
        return Inputs(
            texts, signature, split.held_out, split.calibration, None, {"calibration": stated}
        )
    samples = tuple(part for sample in samples for part in in_batches(sample, signature))
    example = _saved_example(checkpoint, signature, notes)
    return Inputs(texts, signature, (*samples, *([example] if example else [])), (), example)


def _saved_example(checkpoint: Checkpoint, signature: Signature, notes: list[str]) -> Sample | None:
    """Return the request that was saved with the checkpoint, where it is one of the model's."""
    if checkpoint.example is None:
        return None
    name = f"the example in {checkpoint.path.name}"
    try:
        return sample_of(name, checkpoint.example, signature)
    # It is of whatever its writer took.
    except (UsageError, TypeError, ValueError, RuntimeError) as error:
        notes.append(f"{name} is not used: {cause(error)}")
        return None


def _settle_texts(
    request: ExportRequest, module: nn.Module, checkpoint: Checkpoint, notes: list[str]
) -> tuple[str, ...]:
    # What is known of the whole says nothing of a part.
    proposal = None if request.submodule else propose_inputs(module, checkpoint)
    named = [path for path in request.samples if names_inputs(path)]
    pictures = [path for path in request.samples if is_picture(path)]
    given = tuple(request.inputs)
    if named and not given:
        # Rows of files may lack the batch's dimension.
        ranks = {name: taken.rank for name, taken in first_layers(module).items()}
        signature = signature_of_samples(named, needed_arguments(module), ranks)
        texts, source = tuple(map(str, signature.inputs)), "--sample"
    elif proposal is not None:
        texts, source = complete(given, proposal), proposal.source
    elif given:
        return given
    else:
        found = None
        if pictures:
            source, size = pictures[0].name, picture_size(pictures[0])
            text = picture_input(module, size)
            if text is not None and runs(module, [text]):
                found = TriedInputs((text,), is_only=True)
        if found is None:
            found = find_inputs(module)
            source = "what its layers take and the size that runs"
            if pictures or found is None or not found.is_only:
                raise _without_inputs(request, module, found)
        texts = found.texts
    if texts != given:
        chosen = shlex.join(word for text in texts for word in ("--input", text))
        request.report_line(f"inputs, from {source}: {chosen}")
    if proposal is not None and (rest := left_out(texts, proposal)):
        notes.append(
            f"forward() also takes {rest[0]}: without it, texts that are padded to one length "
            "change each other's answers"
        )
    return texts


def _without_inputs(
    request: ExportRequest, module: nn.Module, found: TriedInputs | None
) -> UsageError:
    """Return the error of a model that says nothing of its inputs, with a command."""
    pictures = [path for path in request.samples if is_picture(path)]
    if pictures:
        request = replace(request, samples=())
    problem = (
        f'no --input given, and "{request.checkpoint.name}" does not say what forward'
        f"{inspect.signature(module.forward)} takes"
    )
    if found is None:
        advice = (
            "write dtype and sizes of each tensor, or give a file of real ones as --sample (.npy, "
            ".npz, .pt, .json)"
        )
    elif pictures:
        width, height = picture_size(pictures[0])
        problem = (
            f'--sample "{pictures[0]}" is {width} × {height} pixels, which the model does not take'
        )
        advice = "it runs with these, so give a picture of that size, or none"
    else:
        advice = "it runs with these, and with other sizes too: change them to yours"
    texts = found.texts if found else guess_inputs(module)
    return UsageError(f"{problem}; {advice}{paste(replace(request, inputs=texts))}")


# -- what a model says of itself -------------------------------------------------------------------

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
    no mask, and as many as are proposed stand in their places, whatever they are called. Where one
    that is needed is missing, every proposed one that is not given is added, with the dimensions of
    those that are.
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
