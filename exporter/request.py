"""An export as it is asked for: by a program, on a command line, and in the report's own command.

Nothing here imports torch, which takes a second, before `export` is called.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.exporter.sources import find_source

if TYPE_CHECKING:
    from modelyard.exporter.ingest import Announce
    from modelyard.exporter.prove.parity import ExportReport

SUFFIXES = {"pt2": ".pt2", "onnx": ".onnx", "torchscript": ".pt", "aoti": ".aoti.pt2"}
"""Format → suffix of its artifacts."""
STATIC, AUTO = "int8-static", "auto"

_OTHER_FLAGS = {
    "announce": "--trust",
    "inputs": "--input",
    "output_names": "--output",
    "formats": "--format",
    "samples": "--sample",
    "output_dir": "-o",
}
_WRITTEN = (
    "model task weights_key ema announce model_args generate inputs submodule output_names formats "
    "name device tf32 tolerance dtype quantize max_loss exact_labels "
    "samples quick sample_only output_dir"
)
FLAGS: Mapping[str, str] = {
    name: _OTHER_FLAGS.get(name, f"--{name.replace('_', '-')}") for name in _WRITTEN.split()
}
"""Argument of `export` → its option, in the order in which a command is written."""


def export(
    checkpoint: str | Path,
    model: str | None = None,
    inputs: str | Sequence[str] = (),
    *,
    output_dir: str | Path = "build",
    weights_key: str | None = None,
    ema: bool = False,
    announce: Announce | None = None,
    formats: str | Sequence[str] | None = None,
    model_args: Mapping[str, Any] | None = None,
    task: str | None = None,
    submodule: str | None = None,
    output_names: str | Sequence[str] = (),
    name: str | None = None,
    device: str = "cpu",
    tf32: bool = False,
    tolerance: float | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    max_loss: float | None = None,
    exact_labels: bool = False,
    generate: bool = False,
    samples: Sequence[str | Path] = (),
    quick: bool = False,
    tell: Callable[[str], None] | None = None,
    sample_only: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ExportReport]:
    """Write artifacts that are proven to agree with the checkpoint, and a report beside each.

    Args:
        checkpoint: file or folder that a training run left, of any kind that docs/checkpoints.md
            names; `modelyard inspect` says what it is. Or hf://OWNER/NAME@REVISION of a model hub,
            of which only safetensors are taken; or models:/NAME/VERSION of a registry.
        model: the class, as file.py:Class, package.module:Class or package.module:factory. Not
            needed for a Hugging Face folder, nor for pickled modules of torch.nn's own layers.
        inputs: each tensor that forward() takes, as name:dtype[dims]; a dim is a number, or a name
            for any size, or name=lo..hi with the sizes to prove (1..8 when absent); behind it the
            values, where not all are valid: <nodes, =1..length, =0,3,7. Each goes by the name of
            forward()'s argument or by place; batch.image is a key of a dict, pair.0 a place in a
            tuple or list. Not needed where the model says what it takes: Hugging Face and
            diffusers folders, timm, Lightning's example_input_array.
        output_dir: where the artifacts go; made if need be.
        weights_key: path of the weights in a checkpoint that has several, as in ema.model.
        ema: take the averaged weights.
        announce: only for a checkpoint that is trusted to run its code: called with what it will
            import.
        formats: what to write: pt2, onnx, torchscript or aoti (native code, needs g++). Default:
            pt2 and onnx; onnx alone when quantised.
        model_args: keyword arguments of the class or factory, by name; they replace those of the
            checkpoint's hyper-parameters, and values of a Hugging Face folder's config.json.
        task: what a Hugging Face folder is for, instead of a model: text-classification,
            feature-extraction, image-classification … Its head's weights must be there.
        submodule: a part of the model to export alone, such as encoder.layers.0; the inputs are
            then that part's.
        output_names: outputs of the model to keep, while the others are left out; or a new name
            for each, in order.
        name: name of the artifacts, without suffix. Default: the checkpoint's.
        device: where to trace and check, cpu or cuda[:N]. The artifact loads on any.
        tf32: with device cuda: let it round float32 to TensorFloat-32, which is 1e-3 apart and has
            to be within the tolerance; report and workers do the same.
        tolerance: largest difference of one output value, over its row's largest where that is
            above 1. Default: 1e-4 for float32 and float64, 1e-2 for float16, 3e-2 for bfloat16.
        dtype: precision of weights and floating-point inputs: fp32, bf16 or fp16. Default: the
            checkpoint's own. Parity compares with the checkpoint in float32.
        quantize: quantisation for onnx: int8-dynamic (8-bit weights) or int8-static (activations
            too, in the ranges that the rows of the samples reach, some of which are compared on),
            or auto: the smallest of these and float32 that loses no more than max_loss.
        max_loss: what a lower precision may lose without a warning: of rows with another largest
            value, and of variance (1 - R2), whichever is more. Default: 0.01.
        exact_labels: with quantize and samples: rows whose two largest values are closer than the
            samples' largest errors run again in float32, inside of the same file.
        generate: write a Hugging Face decoder (GPT-2, Llama …) with its cache, for the handler
            generate; inputs are needed for other ranges only.
        samples: real inputs to compare on: .npz, .npy, .pt, .json, .txt or a picture; nothing of
            them stays.
        quick: compare on few inputs, for a first look; report and archive say so.
        tell: called with a line about what was chosen where nothing was given.
        sample_only: make no inputs up, where none would be valid: trace with the samples and
            compare on them alone, their rows in batches of several sizes.
        progress: called before each step with its name, its number from 0, and the number of steps.

    Raises:
        PartialExportError: some formats were written, others not; it holds the reports of the
            former and the errors of the latter.
        ExportError: nothing was written. In both cases artifacts of an earlier export that could
            not be written anew are as they were.
    """
    given = locals()
    if quantize == AUTO:
        from modelyard.exporter.auto import choose as run
    else:
        from modelyard.exporter.trip import run

    for each in ("inputs", "formats", "output_names"):
        if isinstance(given[each], str):
            given[each] = (given[each],)
    fetch = find_source(checkpoint)
    with nullcontext() if fetch is None else fetch(str(checkpoint), tell) as found:
        if found is not None:
            given |= {"checkpoint": found.folder, "origin": found.origin}
            given["name"] = name or found.name
        for each in ("checkpoint", "output_dir"):
            given[each] = Path(given[each])
        request = ExportRequest(**{**given, "samples": [Path(sample) for sample in samples]})
        return run(request)


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of `export`, which says what each means."""

    checkpoint: Path
    model: str | None
    inputs: Sequence[str]
    output_dir: Path
    weights_key: str | None = None
    ema: bool = False
    announce: Announce | None = None
    formats: Sequence[str] | None = None
    model_args: Mapping[str, Any] | None = None
    task: str | None = None
    submodule: str | None = None
    output_names: Sequence[str] = ()
    name: str | None = None
    device: str = "cpu"
    tf32: bool = False
    tolerance: float | None = None
    dtype: str | None = None
    quantize: str | None = None
    max_loss: float | None = None
    exact_labels: bool = False
    generate: bool = False
    samples: Sequence[Path] = ()
    quick: bool = False
    tell: Callable[[str], None] | None = None
    sample_only: bool = False
    progress: Callable[[str, int, int], None] | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    """Where the checkpoint was fetched from, as `Fetched.origin`; empty for a path."""

    def target(self, format: str) -> Path:
        """Return where the artifact of a format goes."""
        return self.output_dir / f"{self.stem}{SUFFIXES[format]}"

    @property
    def stem(self) -> str:
        """The artifacts' name without suffix."""
        return self.name or self.checkpoint.stem

    def chosen_formats(self) -> tuple[str, ...]:
        """Return the formats to write, each once."""
        default = ("onnx",) if self.quantize else ("pt2", "onnx")
        return tuple(dict.fromkeys(default if self.formats is None else self.formats))

    def report_line(self, line: str) -> None:
        """Hand a line to whoever listens."""
        if self.tell is not None:
            self.tell(line)


def report_path(artifact: Path) -> Path:
    """Name the report of an artifact."""
    return artifact.with_name(f"{artifact.name}.report.json")


def _relative(path: Path) -> str:
    """Keep a relative path as it was given; of an absolute one, only the last part."""
    return path.name if path.is_absolute() else path.as_posix()


def command_of(
    request: ExportRequest, formats: Sequence[str], *, write: Callable[[Path], str] = _relative
) -> str:
    """Write the command line that makes artifacts; equal for equal exports.

    Args:
        request: what is exported.
        formats: those to name.
        write: how paths are written; for a report, without the folders of this machine.
    """
    written: dict[str, Any] = {
        **vars(request),
        "model": request.model and rename_file(request.model, lambda name: write(Path(name))),
        "announce": request.announce is not None,
        "model_args": request.model_args and json.dumps(request.model_args, sort_keys=True),
        "formats": formats,
        "device": "" if request.device.startswith("cpu") else request.device,
        "tolerance": None if request.tolerance is None else f"{request.tolerance:g}",
        "max_loss": None if request.max_loss is None else f"{request.max_loss:g}",
        "samples": [write(path) for path in request.samples],
        "output_dir": write(request.output_dir),
    }
    words = ["modelyard", "export", request.origin.get("location") or write(request.checkpoint)]
    for name, flag in FLAGS.items():
        values = written[name]
        for value in values if isinstance(values, list | tuple) else [values]:
            if value:
                words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def rename_file(model: str, rename: Callable[[str], str]) -> str:
    """Return `--model` with its file, where it is one, under another name."""
    source, colon, attribute = model.rpartition(":")
    return f"{rename(source)}{colon}{attribute}" if source.endswith(".py") else model


def paste(request: ExportRequest) -> str:
    """Write the end of a message: a command line of its own, to be pasted where this one was."""
    return f":\n\n    {command_of(request, request.formats or (), write=str)}"
