"""An export as a command line: what its report keeps, and what is proposed where words are missing.

Where nothing says which class the weights are of, or what it takes, the error ends with a command
that can be pasted. Classes are found by reading Python files, and none is imported unasked.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from modelyard.exporter.checkpoint import MODEL_FORM
from modelyard.exporter.classes import FoundClass, classes_in, classes_near
from modelyard.exporter.errors import UsageError
from modelyard.exporter.ingest import Checkpoint

if TYPE_CHECKING:
    from modelyard.exporter.trip import ExportRequest

_SHOWN = 5


def _relative(path: Path) -> str:
    """Keep a relative path as it was given; of an absolute one, only the last part."""
    return path.name if path.is_absolute() else path.as_posix()


def command_of(
    request: "ExportRequest", formats: Sequence[str], *, write: Callable[[Path], str] = _relative
) -> str:
    """Write the command line that makes artifacts; equal for equal exports.

    Args:
        request: what is exported.
        formats: those to name.
        write: how paths are written; for a report, without the folders of this machine.
    """
    model = request.model and rename_file(request.model, lambda source: write(Path(source)))
    model_args = request.model_args and json.dumps(request.model_args, sort_keys=True)
    device = "" if request.device.startswith("cpu") else request.device
    tolerance = None if request.tolerance is None else f"{request.tolerance:g}"
    words = ["modelyard", "export", write(request.checkpoint)]
    for option, values in (
        ("--model", [model]),
        ("--task", [request.task]),
        ("--weights-key", [request.weights_key]),
        ("--ema", [request.ema]),
        ("--trust", [request.announce is not None]),
        ("--model-args", [model_args]),
        ("--generate", [request.generate]),
        ("--input", request.inputs),
        ("--submodule", [request.submodule]),
        ("--output", request.output_names),
        ("--format", formats),
        ("--name", [request.name]),
        ("--device", [device]),
        ("--tolerance", [tolerance]),
        ("--dtype", [request.dtype]),
        ("--quantize", [request.quantize]),
        ("--sample", map(write, request.samples)),
        ("--quick", [request.quick]),
        ("--sample-only", [request.sample_only]),
        ("-o", [write(request.output_dir)]),
    ):
        for value in filter(None, values):
            words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def rename_file(model: str, rename: Callable[[str], str]) -> str:
    """Return `--model` with its file, where it is one, under another name."""
    source, colon, attribute = model.rpartition(":")
    return f"{rename(source)}{colon}{attribute}" if source.endswith(".py") else model


def paste(request: "ExportRequest") -> str:
    """Write the end of a message: a command line of its own, to be pasted where this one was."""
    return f":\n\n    {command_of(request, request.formats or (), write=str)}"


def _with_class(request: "ExportRequest", found: FoundClass) -> str:
    file = found.file
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return paste(replace(request, model=f"{file}:{found.name}"))


def without_class(request: "ExportRequest", checkpoint: Checkpoint, problem: str) -> UsageError:
    """Return the error of weights whose class nobody named, with those of the files beside them.

    Args:
        request: without a model.
        checkpoint: the weights.
        problem: what is missing.
    """
    beside = checkpoint.path.absolute().parent
    near = classes_near([beside, Path.cwd(), beside.parent])
    fitting = [found for found in near if found.fits(checkpoint.tensors)]
    if not fitting:
        seen = f"beside it are {_listed(near)}" if near else "no Python file beside it has one"
        return UsageError(f"{problem}; {seen}")
    first, *others = fitting
    takes = f", whose forward() takes {', '.join(first.takes)}" if first.takes else ""
    also = f" (so do {_listed(others)})" if others else ""
    return UsageError(
        f"{problem}. {_place(first)} has their names{takes}{also}{_with_class(request, first)}"
    )


def without_name(request: "ExportRequest", file: Path) -> UsageError:
    """Return the error of `--model net.py`, with the classes of the file."""
    found = classes_in(file)
    problem = f'--model "{file}" names no class in the file'
    if not found:
        return UsageError(f"{problem}, which defines none; expected {MODEL_FORM}")
    return UsageError(
        f"{problem}; it has {', '.join(each.name for each in found)}"
        f"{_with_class(request, found[0])}"
    )


def _listed(found: Sequence[FoundClass]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(_place, found[:_SHOWN])) + more


def _place(found: FoundClass) -> str:
    return f"{found.name} in {found.file.name}"
