"""What an export takes as its inputs: those given, those of samples, those that the model says.

Where none of these is, its layers say it as far as they can, and sizes are tried; more than one
that runs is not chosen from, but proposed.
"""

import inspect
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from modelyard.exporter.command import paste
from modelyard.exporter.errors import UsageError
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.inputs.described import complete, left_out, propose_inputs
from modelyard.exporter.inputs.samples import (
    is_picture,
    names_inputs,
    picture_size,
    signature_of_samples,
)
from modelyard.exporter.inputs.tried import (
    Found,
    find_inputs,
    first_layers,
    guess_inputs,
    needed_arguments,
    picture_input,
    runs,
)

if TYPE_CHECKING:
    from modelyard.exporter.trip import ExportRequest


def settle_inputs(
    request: "ExportRequest", module: nn.Module, checkpoint: Checkpoint, notes: list[str]
) -> tuple[str, ...]:
    """Return the inputs that were given, and those that the model itself says it needs.

    Raises:
        UsageError: none was given, and nothing says what the model takes; it ends with a command.
    """
    # What is known of the whole says nothing of a part.
    proposal = None if request.submodule else propose_inputs(module, checkpoint)
    named = [path for path in request.samples if names_inputs(path)]
    if named and not request.inputs:
        inputs, source = _of_samples(named, module), "--sample"
    elif proposal is not None:
        inputs, source = complete(request.inputs, proposal), proposal.source
    elif request.inputs:
        return tuple(request.inputs)
    elif pictures := [path for path in request.samples if is_picture(path)]:
        inputs, source = _of_picture(request, module, pictures[0]), pictures[0].name
    else:
        found = find_inputs(module)
        if found is None or not found.is_only:
            raise _without_inputs(request, module, found)
        inputs, source = found.inputs, "what its layers take and the size that runs"
    if inputs != tuple(request.inputs) and request.tell is not None:
        chosen = shlex.join(word for text in inputs for word in ("--input", text))
        request.tell(f"inputs, from {source}: {chosen}")
    if proposal is not None and (rest := left_out(inputs, proposal)):
        notes.append(
            f"forward() also takes {rest[0]}: without it, texts that are padded to one length "
            "change each other's answers"
        )
    return inputs


def _of_samples(paths: Sequence[Path], module: nn.Module) -> tuple[str, ...]:
    """Write the inputs that files hold, whose rows may lack the batch's dimension."""
    ranks = {name: taken.rank for name, taken in first_layers(module).items()}
    signature = signature_of_samples(paths, needed_arguments(module), ranks)
    return tuple(map(str, signature.inputs))


def _of_picture(request: "ExportRequest", module: nn.Module, picture: Path) -> tuple[str, ...]:
    """Write the input of a model that takes pictures of this one's size."""
    size = picture_size(picture)
    text = picture_input(module, size)
    if text is not None and runs(module, [text]):
        return (text,)
    found = find_inputs(module)
    if found is None:
        raise _without_inputs(replace(request, samples=()), module, None)
    proposed = replace(request, inputs=found.inputs, samples=())
    width, height = size
    raise UsageError(
        f'--sample "{picture}" is {width} × {height} pixels, which the model does not take; it '
        f"runs with these, so give a picture of that size, or none{paste(proposed)}"
    )


def _without_inputs(request: "ExportRequest", module: nn.Module, found: Found | None) -> UsageError:
    """Return the error of a model that says nothing of its inputs, with a command."""
    problem = (
        f'no --input given, and "{request.checkpoint.name}" does not say what forward'
        f"{inspect.signature(module.forward)} takes"
    )
    if found is None:
        return UsageError(
            f"{problem}; write dtype and sizes of each tensor, or give a file of real ones as "
            f"--sample (.npy, .npz, .pt, .json)"
            f"{paste(replace(request, inputs=guess_inputs(module)))}"
        )
    return UsageError(
        f"{problem}; it runs with these, and with other sizes too: change them to yours"
        f"{paste(replace(request, inputs=found.inputs))}"
    )
