"""What an export takes as its inputs: those given, those of samples, those that the model says.

Where none of these is, its layers say it as far as they can, and sizes are tried; more than one
that runs is not chosen from, but proposed.
"""

import hashlib
import inspect
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from modelyard.archiver.signature import Signature
from modelyard.exporter.arguments import goes_elsewhere, needed_arguments, read_inputs
from modelyard.exporter.errors import UsageError, cause
from modelyard.exporter.ingest import ONNX, PROGRAM, Checkpoint
from modelyard.exporter.inputs.described import complete, left_out, propose_inputs
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
    if checkpoint.kind not in (PROGRAM, ONNX):  # whose arguments have no names
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
