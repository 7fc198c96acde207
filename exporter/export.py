"""The export trip: load → run → write → check → artifact and report, or nothing at all."""

import functools
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import nn

from modelyard.archiver.signature import Signature
from modelyard.exporter import to_aoti, to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.arguments import read_inputs, take_inputs
from modelyard.exporter.checkpoint import open_model, split_model
from modelyard.exporter.errors import ExportError, UsageError, cause
from modelyard.exporter.ingest import Announce, Checkpoint, read_checkpoint
from modelyard.exporter.locate import first_difference
from modelyard.exporter.parity import Parity, check
from modelyard.exporter.reference import Reference, observe
from modelyard.exporter.report import ExportReport, publish, report_path, sha256
from modelyard.exporter.samples import read_samples

SUFFIXES = {"pt2": ".pt2", "onnx": ".onnx", "torchscript": ".pt", "aoti": ".aoti.pt2"}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZATIONS = ("int8-dynamic",)

Progress = Callable[[str, int, int], None]
"""Called before each step with its name, its number from 0, and the number of steps."""

_Writer = Callable[[Path], Mapping[str, object]]


@dataclass(frozen=True)
class _Plan:
    """The arguments of one export, checked before anything is read."""

    checkpoint: Path
    model: str | None
    weights_key: str | None
    ema: bool
    announce: Announce | None
    model_args: Mapping[str, Any]
    inputs: Sequence[str]
    signature: Signature
    output_names: Sequence[str]
    formats: tuple[str, ...]
    output_dir: Path
    name: str | None
    device: torch.device
    tolerance: float | None
    dtype: str | None
    quantize: str | None
    samples: Sequence[Path]

    def target(self, format: str) -> Path:
        return self.output_dir / f"{self.name or self.checkpoint.stem}{SUFFIXES[format]}"


def export(
    checkpoint: Path,
    model: str | None,
    inputs: Sequence[str],
    *,
    output_dir: Path,
    weights_key: str | None = None,
    ema: bool = False,
    announce: Announce | None = None,
    formats: Sequence[str] | None = None,
    model_args: Mapping[str, Any] | None = None,
    output_names: Sequence[str] = (),
    name: str | None = None,
    device: str = "cpu",
    tolerance: float | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    samples: Sequence[Path] = (),
    progress: Progress | None = None,
) -> list[ExportReport]:
    """Write artifacts that are proven to agree with the checkpoint, and a report beside each.

    Args:
        checkpoint: a file or folder of any kind that `modelyard.exporter.ingest` reads.
        model: `file.py:Class`, `package.module:Class` or `package.module:factory`; None where the
            checkpoint names a class that is installed.
        inputs: one `name:dtype[dims]` per tensor that forward() takes; see `archiver/signature.py`.
        output_dir: made when it is not there.
        weights_key: dotted path of the weights in a checkpoint that has several.
        ema: take the averaged weights.
        announce: only for a checkpoint that is trusted to run its code: told what it will import.
        formats: of `SUFFIXES`; pt2 and onnx when absent, onnx alone when quantised.
        model_args: keyword arguments for the class or factory; they replace those of the same
            name among the checkpoint's hyper-parameters.
        output_names: one per output, in order.
        name: the artifacts' name without suffix; the checkpoint's when absent.
        device: "cpu" or "cuda[:N]", where it is traced and checked. The artifact loads on any.
        tolerance: largest difference of floats, over a row's largest value where that is above 1;
            1e-4 for float32 when absent.
        dtype: of `PRECISIONS`, what weights and floating-point inputs become; the checkpoint's own
            when absent. Parity compares with the checkpoint in float32.
        quantize: of `QUANTIZATIONS`, for onnx.
        samples: files of real inputs to compare on; nothing of them stays.
        progress: told of every step.

    Raises:
        ExportError: nothing was written, and artifacts of an earlier export are as they were.
    """
    plan = _Plan(
        checkpoint=checkpoint,
        model=model,
        weights_key=weights_key,
        ema=ema,
        announce=announce,
        model_args=model_args or {},
        inputs=inputs,
        signature=read_inputs(inputs),
        output_names=output_names,
        formats=tuple(dict.fromkeys(_formats(formats, quantize))),
        output_dir=output_dir,
        name=name,
        device=_device(device),
        tolerance=tolerance,
        dtype=dtype,
        quantize=quantize,
        samples=tuple(samples),
    )
    _check_plan(plan)
    read = read_samples(plan.samples, plan.signature)
    steps = _steps(plan, progress)
    finished: list[tuple[ExportReport, Path]] = []
    next(steps)
    found = read_checkpoint(
        plan.checkpoint, weights_key=plan.weights_key, ema=plan.ema, announce=plan.announce
    )
    is_trusted = plan.announce is not None
    with open_model(found, plan.model, plan.model_args, trust=is_trusted) as module:
        next(steps)
        reference = observe(
            take_inputs(module, plan.signature),
            plan.signature,
            plan.output_names,
            plan.device,
            dtype=PRECISIONS[plan.dtype] if plan.dtype else None,
            samples=read,
        )
        writers = _writers(plan, reference)
        with _workspace(plan.output_dir) as folder:
            for format in plan.formats:
                next(steps)
                draft = folder / plan.target(format).name
                details = writers[format](draft)
                next(steps)
                parity = _prove(plan, format, draft, reference)
                report = ExportReport(
                    artifact=plan.target(format),
                    format=format,
                    artifact_sha256=sha256(draft),
                    artifact_bytes=draft.stat().st_size,
                    signature=reference.signature,
                    parity=parity,
                    checkpoint=plan.checkpoint.name,
                    checkpoint_sha256=found.sha256,
                    checkpoint_kind=found.kind,
                    checkpoint_details=_ingested(found),
                    model=_model_name(plan, module),
                    model_args=plan.model_args,
                    device=str(plan.device),
                    details={**_precision(plan), **details},
                    command=_command(plan, format),
                    warnings=(*_checkpoint_warnings(found), *reference.warnings),
                )
                finished.append((report, draft))
            for report, draft in finished:
                publish(report, draft)
    return [report for report, _ in finished]


def _prove(plan: _Plan, format: str, draft: Path, reference: Reference) -> Parity:
    """Compare a written artifact with the checkpoint; its submodules too, where it differs."""
    with tempfile.TemporaryDirectory(dir=draft.parent) as exchange:
        return check(
            draft,
            format,
            reference,
            Path(exchange),
            device=str(plan.device),
            tolerance=plan.tolerance,
            is_quantized=plan.quantize is not None,
            locate=lambda case: first_difference(draft, format, reference, case),
        )


def _precision(plan: _Plan) -> dict[str, object]:
    return {"dtype": plan.dtype} if plan.dtype else {}


def _formats(formats: Sequence[str] | None, quantize: str | None) -> Sequence[str]:
    if formats is None:
        return ("onnx",) if quantize else ("pt2", "onnx")
    return formats


def _check_plan(plan: _Plan) -> None:
    """Refuse arguments that mean nothing, before anything is read."""
    if plan.model is not None:
        split_model(plan.model)
    known = ", ".join(SUFFIXES)
    if not plan.formats:
        raise UsageError(f"no --format given; expected one of {known}")
    if unknown := [format for format in plan.formats if format not in SUFFIXES]:
        raise UsageError(f'--format "{unknown[0]}" is unknown; expected one of {known}')
    name, tolerance = plan.name, plan.tolerance
    if name is not None and (not name or PurePath(name).name != name):
        raise UsageError(f'--name "{name}" is not a file name; expected one without a folder')
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance {tolerance} is no difference; expected 0 or more")
    try:
        json.dumps(plan.model_args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"model_args cannot be kept in the report: {cause(error)}") from error
    _check_precision(plan)
    _check_output_names(plan.output_names, plan.signature)
    _check_targets(plan)


def _check_precision(plan: _Plan) -> None:
    """Refuse a dtype or quantisation that the formats have no form for."""
    if plan.dtype not in (None, *PRECISIONS):
        known = ", ".join(PRECISIONS)
        raise UsageError(f'--dtype "{plan.dtype}" is unknown; expected one of {known}')
    if plan.dtype == "bf16" and "onnx" in plan.formats:
        raise UsageError(
            "--dtype bf16 does not go with --format onnx: onnxruntime's CPU kernels know no "
            "bfloat16; use --format pt2, or --dtype fp16"
        )
    if plan.quantize is None:
        return
    if plan.quantize not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise UsageError(f'--quantize "{plan.quantize}" is unknown; expected {known}')
    if others := [format for format in plan.formats if format != "onnx"]:
        raise UsageError(
            f"--quantize {plan.quantize} does not go with --format {others[0]}: torch.export and "
            "TorchScript keep no quantised weights of torch.ao that this version could prove; use "
            "--format onnx"
        )
    if plan.dtype not in (None, "fp32"):
        raise UsageError(
            f"--quantize {plan.quantize} starts from float32; leave --dtype {plan.dtype} out"
        )


def _check_output_names(names: Sequence[str], signature: Signature) -> None:
    inputs = {spec.name for spec in signature.inputs}
    for name in names:
        if not name.isidentifier() or name in inputs:
            seen = (
                "is also an input" if name in inputs else "is not a name of letters, digits and _"
            )
            raise UsageError(f'--output "{name}" {seen}; expected a name of its own')


def _check_targets(plan: _Plan) -> None:
    """Refuse to write over the checkpoint, or where no file can be."""
    for format in plan.formats:
        for target in (plan.target(format), report_path(plan.target(format))):
            if target.exists() and plan.checkpoint.exists() and target.samefile(plan.checkpoint):
                raise UsageError(
                    f'--format {format} would write "{target.name}" over the checkpoint; '
                    "use -o with another folder, or --name"
                )
            if target.is_dir():
                raise UsageError(f'"{target}" is a folder; expected room for a file: use --name')


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise UsageError(f'--device "{text}" is unknown; expected cpu or cuda[:N]') from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f'--device "{text}" is not supported; expected cpu or cuda[:N]')
    present = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= present:
        raise ExportError(
            f'--device "{text}": this machine has {present} CUDA devices; use --device cpu, or a '
            "torch build for CUDA"
        )
    return device


def _steps(plan: _Plan, progress: Progress | None) -> Iterator[None]:
    """Announce the trip's steps, one per `next`."""
    names = [f"load {plan.checkpoint.name}", "run the checkpoint's model"]
    for format in plan.formats:
        names += [f"write {plan.target(format).name}", f"check {plan.target(format).name}"]
    for number, name in enumerate(names):
        if progress is not None:
            progress(name, number, len(names))
        yield


def _writers(plan: _Plan, reference: Reference) -> dict[str, _Writer]:
    """Return for each format the function that writes it; three of them share one trace."""
    model, signature, example = reference.model, reference.signature, reference.example
    program = functools.cache(lambda: to_exported_program.capture(model, signature, example))

    def write_onnx(path: Path) -> Mapping[str, object]:
        details = to_onnx.write(program(), signature, path)
        return {**details, **to_onnx.quantize(path)} if plan.quantize else details

    return {
        "pt2": lambda path: to_exported_program.write(program(), path),
        "onnx": write_onnx,
        "torchscript": lambda path: to_torchscript.write(model, signature, example, path),
        "aoti": lambda path: to_aoti.write(program(), signature, path),
    }


@contextmanager
def _workspace(output_dir: Path) -> Iterator[Path]:
    """Yield a folder beside the artifacts' place; leave no folder behind where nothing was written.

    It is on the file system of `output_dir`, so that a finished file moves in one step.
    """
    made = [path for path in (output_dir, *output_dir.parents) if not path.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output_dir, prefix=".export-") as folder:
            yield Path(folder)
    except OSError as error:
        raise ExportError(
            f'cannot write to "{output_dir}": {error}; use -o with another'
        ) from error
    finally:
        for path in made:  # only empty ones can be removed: after a failure
            with suppress(OSError):
                path.rmdir()


def _command(plan: _Plan, format: str) -> str:
    """Write the command line that makes one artifact; equal for equal exports."""
    words = ["modelyard", "export", _relative(plan.checkpoint)]
    if plan.model is not None:
        words += ["--model", _named(plan.model, lambda source: _relative(Path(source)))]
    if plan.weights_key is not None:
        words += ["--weights-key", plan.weights_key]
    if plan.ema:
        words += ["--ema"]
    if plan.announce is not None:
        words += ["--trust"]
    if plan.model_args:
        words += ["--model-args", json.dumps(plan.model_args, sort_keys=True)]
    for text in plan.inputs:
        words += ["--input", text]
    for name in plan.output_names:
        words += ["--output", name]
    words += ["--format", format]
    if plan.name is not None:
        words += ["--name", plan.name]
    if plan.device.type != "cpu":
        words += ["--device", str(plan.device)]
    if plan.tolerance is not None:
        words += ["--tolerance", f"{plan.tolerance:g}"]
    if plan.dtype is not None:
        words += ["--dtype", plan.dtype]
    if plan.quantize is not None:
        words += ["--quantize", plan.quantize]
    for path in plan.samples:
        words += ["--sample", _relative(path)]
    return shlex.join([*words, "-o", _relative(plan.output_dir)])


def _relative(path: Path) -> str:
    """Keep a relative path as it was given; of an absolute one, only the last part."""
    return path.name if path.is_absolute() else path.as_posix()


def _model_name(plan: _Plan, module: nn.Module) -> str:
    """Return `--model` without its folder, or the class that the checkpoint itself named."""
    if plan.model is None:
        return f"{type(module).__module__}:{type(module).__qualname__}"
    return _named(plan.model, lambda source: Path(source).name)


def _named(model: str, rename: Callable[[str], str]) -> str:
    """Return `--model` with its file, where it is one, under another name."""
    source, colon, attribute = model.rpartition(":")
    return f"{rename(source)}{colon}{attribute}" if source.endswith(".py") else model


def _ingested(found: Checkpoint) -> dict[str, object]:
    """Return how the checkpoint was read, for the report."""
    return {
        "writer": " ".join(filter(None, (found.writer, found.writer_version))) or None,
        "loader": found.loader,
        "weights_key": found.weights_key,
        "prefixes_stripped": list(found.prefixes),
        "refused": list(found.refused),
        "imported": list(found.imports),
    }


def _checkpoint_warnings(found: Checkpoint) -> list[str]:
    """Return what a person should know of the checkpoint, whatever becomes of the model."""
    lines = list(found.notes)
    if found.refused:
        lines.append(f"the checkpoint wants {', '.join(found.refused)}, which was not imported")
    if found.alternatives:
        others = ", ".join(f"{key} ({n:,} parameters)" for key, n in found.alternatives.items())
        lines.append(f'the weights are those of "{found.weights_key}"; it also has {others}')
    return lines
