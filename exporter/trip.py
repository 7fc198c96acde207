"""The export trip: load → run → write → check → artifact and report, or no file of that format."""

import functools
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from modelyard.archiver.signature import Signature
from modelyard.base.extras import what_is_missing
from modelyard.base.plugins import registered
from modelyard.exporter.arguments import goes_elsewhere, read_inputs, take_inputs, take_submodule
from modelyard.exporter.checker import Checker
from modelyard.exporter.checkpoint import open_model, split_model
from modelyard.exporter.command import (
    command_of,
    rename_file,
    without_class,
    without_name,
)
from modelyard.exporter.errors import (
    ExportError,
    NoClass,
    PartialExportError,
    UsageError,
    cause,
    join_failures,
    propose_no_failed_format,
)
from modelyard.exporter.formats import to_aoti, to_exported_program, to_onnx, to_torchscript
from modelyard.exporter.formats.from_onnx import file_of
from modelyard.exporter.ingest import Announce, Checkpoint, read_checkpoint
from modelyard.exporter.ingest.single_file import ONNX, PROGRAM
from modelyard.exporter.inputs.sample_batches import Split, has_rows, hold_out
from modelyard.exporter.inputs.samples import (
    Sample,
    as_request,
    read_sample,
    sample_of,
)
from modelyard.exporter.inputs.settle import settle_inputs
from modelyard.exporter.locate import first_difference
from modelyard.exporter.parity import ExportReport, Parity, check, publish, report_path, sha256
from modelyard.exporter.reference import Reference, observe

SUFFIXES = {"pt2": ".pt2", "onnx": ".onnx", "torchscript": ".pt", "aoti": ".aoti.pt2"}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATIC = "int8-static"
QUANTIZATIONS = ("int8-dynamic", STATIC)

Progress = Callable[[str, int, int], None]
"""Called before each step with its name, its number from 0, and the number of steps."""

_Writer = Callable[[Path], Mapping[str, object]]


@dataclass(frozen=True)
class ExportRequest:
    """What one export is asked for: the arguments of `api.export`, which says what each means."""

    checkpoint: Path
    model: str | None
    inputs: Sequence[str]
    _: KW_ONLY
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
    tolerance: float | None = None
    dtype: str | None = None
    quantize: str | None = None
    generate: bool = False
    samples: Sequence[Path] = ()
    quick: bool = False
    tell: Callable[[str], None] | None = None
    sample_only: bool = False
    progress: Progress | None = None

    def target(self, format: str) -> Path:
        """Return where the artifact of a format goes."""
        return self.output_dir / f"{self.name or self.checkpoint.stem}{SUFFIXES[format]}"

    def chosen_formats(self) -> tuple[str, ...]:
        """Return the formats to write, each once."""
        default = ("onnx",) if self.quantize else ("pt2", "onnx")
        return tuple(dict.fromkeys(default if self.formats is None else self.formats))


def run(request: ExportRequest) -> list[ExportReport]:
    """Run one export; see `modelyard.exporter.export`."""
    device = read_device(request.device)
    _check_request(request)
    announce_step = _step_announcer(request)
    finished: list[tuple[ExportReport, Path]] = []
    failures: dict[str, ExportError] = {}
    announce_step(_LOAD.format(request.checkpoint.name))
    checkpoint = read_checkpoint(
        request.checkpoint,
        weights_key=request.weights_key,
        ema=request.ema,
        announce=request.announce,
    )
    if checkpoint.kind == ONNX:
        request = _as_onnx(request)
        announce_step = _step_announcer(request)
    elif "onnx" in request.chosen_formats() and (advice := what_is_missing("onnxscript")):
        raise UsageError(f"--format onnx: {advice}, or export --format pt2")
    is_trusted = request.announce is not None
    notes = _checkpoint_warnings(checkpoint)
    with (
        _explained(request, checkpoint),
        open_model(
            checkpoint,
            request.model,
            request.model_args or {},
            task=request.task,
            trust=is_trusted,
            keeps_cache=request.generate,
            notes=notes,
        ) as module,
    ):
        known: dict[str, object] = {"dtype": request.dtype} if request.dtype else {}
        model_name = _model_name(request, checkpoint, module)
        if request.submodule is not None:
            module = take_submodule(module, request.submodule)
            known["submodule"] = request.submodule
        signature = Signature(())
        if not request.generate:
            request = replace(request, inputs=settle_inputs(request, module, checkpoint, notes))
            signature = read_inputs(request.inputs)
            if checkpoint.kind not in (PROGRAM, ONNX):  # whose arguments have no names
                for line in goes_elsewhere(module, signature):
                    _tell(request, line)
        _check_output_names(request.output_names, signature)
        is_split = request.quantize == STATIC and has_rows(signature)
        samples: Sequence[Sample] = [
            read_sample(path, signature, is_split=is_split, folder=checkpoint.path)
            for path in request.samples
        ]
        calibration: Sequence[Sample] = ()
        if request.quantize == STATIC:
            split = hold_out(samples, signature)
            calibration, samples = split.calibration, split.held_out
            known["calibration"] = _calibrated(request.samples, split)
        example = _example(request, checkpoint, signature, notes)
        if example is not None:
            samples = [*samples, example]
        announce_step(_RUN)
        if request.generate:
            open_decoder = registered("exports")["generate"].load()
            module, signature, proof = open_decoder(module, request.inputs)
            known["generation"] = proof
        reference = observe(
            take_inputs(module, signature),
            signature,
            request.output_names,
            device,
            dtype=PRECISIONS[request.dtype] if request.dtype else None,
            samples=samples,
            quick=request.quick,
            # Values outside of what it is calibrated for are cut off, as made-up ones would be.
            sample_only=request.sample_only or request.quantize == STATIC,
        )
        if reference.probabilities:
            known["probabilities"] = dict(reference.probabilities)
        if labels := _labels(checkpoint):
            known["labels"] = labels
        writers = _writers(reference, request.quantize, calibration)
        with _workspace(request.output_dir) as folder, _exchange(folder) as checker:
            for format in request.chosen_formats():
                target = request.target(format)
                draft = folder / target.name
                try:
                    announce_step(_WRITE.format(target.name))
                    details = writers[format](draft)
                    announce_step(_CHECK.format(target.name))
                    foreign = cast(list[str], details.get("trusted_operators", []))
                    trusted = foreign if is_trusted else []
                    parity = _prove(request, format, draft, reference, checker, trusted)
                except ExportError as error:
                    failures[format] = error
                    continue
                report = ExportReport(
                    artifact=target,
                    format=format,
                    artifact_sha256=sha256(draft),
                    artifact_bytes=draft.stat().st_size,
                    signature=reference.signature,
                    parity=parity,
                    checkpoint=request.checkpoint.name,
                    checkpoint_sha256=checkpoint.sha256,
                    checkpoint_kind=checkpoint.kind,
                    checkpoint_details=_ingested(checkpoint),
                    model=model_name,
                    model_args=request.model_args or {},
                    device=str(device),
                    details={**known, **details},
                    command=command_of(request, [format]),
                    warnings=(*notes, *reference.warnings),
                )
                finished.append((report, draft))
            propose_no_failed_format(failures)
            if not finished:
                raise _nothing_written(failures)
            for report, draft in finished:
                if report.artifact.exists():
                    _tell(request, f"replaces {report.artifact.name} of an earlier export")
                publish(report, draft)
            if example is not None:
                _keep_example(request, example, finished[0][0].signature)
    reports = [report for report, _ in finished]
    if failures:
        raise PartialExportError(reports, failures)
    return reports


def _example(
    request: ExportRequest, checkpoint: Checkpoint, signature: Signature, notes: list[str]
) -> Sample | None:
    """Return the request that was saved with the checkpoint, where it is one of the model's."""
    if checkpoint.example is None or request.generate or request.quantize == STATIC:
        return None
    try:
        return sample_of(f"the example in {checkpoint.path.name}", checkpoint.example, signature)
    # It is of whatever its writer took.
    except (UsageError, TypeError, ValueError, RuntimeError) as error:
        notes.append(f"the example in {checkpoint.path.name} is not used: {cause(error)}")
        return None


def _keep_example(request: ExportRequest, example: Sample, signature: Signature) -> None:
    """Write the request beside the artifacts, to be a golden one."""
    path = request.output_dir / f"{request.name or request.checkpoint.stem}.example.json"
    path.write_text(json.dumps(as_request(example, signature)), encoding="utf-8")
    _tell(
        request,
        f"wrote {path.name}, the request that was saved with the model: archive with "
        f"--example {path}",
    )


def _tell(request: ExportRequest, line: str) -> None:
    if request.tell is not None:
        request.tell(line)


def _nothing_written(failures: Mapping[str, ExportError]) -> ExportError:
    """Return the one error of all formats, or one that has them all."""
    first, *others = failures.values()
    if all(str(error) == str(first) for error in others):
        return first
    same_kind = all(type(error) is type(first) for error in others)
    return (type(first) if same_kind else ExportError)(join_failures(failures))


def _prove(
    request: ExportRequest,
    format: str,
    draft: Path,
    reference: Reference,
    checker: Checker,
    trusted: Sequence[str],
) -> Parity:
    """Compare a written artifact with the checkpoint; its submodules too, where it differs."""
    file = file_of(reference.original)
    return check(
        draft,
        format,
        reference,
        checker,
        device=request.device,
        tolerance=request.tolerance,
        is_quantized=request.quantize is not None or (file is not None and file.is_quantized),
        locate=lambda case: first_difference(draft, format, reference, case),
        trusted=trusted,
    )


@contextmanager
def _explained(request: ExportRequest, checkpoint: Checkpoint) -> Iterator[None]:
    """Add to an error about a class what was found of it."""
    try:
        yield
    except NoClass as error:
        raise without_class(request, checkpoint, str(error)) from error


def _check_request(request: ExportRequest) -> None:
    """Refuse arguments that mean nothing, before anything is read."""
    if request.inputs and not request.generate:
        _check_output_names(request.output_names, read_inputs(request.inputs))
    if request.model is not None:
        if request.model.endswith(".py") and Path(request.model).is_file():
            raise without_name(request, Path(request.model))
        split_model(request.model)
    known = ", ".join(SUFFIXES)
    if not request.chosen_formats():
        raise UsageError(f"no --format given; expected one of {known}")
    if unknown := [format for format in request.chosen_formats() if format not in SUFFIXES]:
        raise UsageError(f'--format "{unknown[0]}" is unknown; expected one of {known}')
    name, tolerance = request.name, request.tolerance
    if name is not None and (not name or PurePath(name).name != name):
        raise UsageError(f'--name "{name}" is not a file name; expected one without a folder')
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance {tolerance} is not a difference; expected 0 or more")
    if request.sample_only and not request.samples:
        raise UsageError("--sample-only has nothing to compare on; give --sample FILE too")
    try:
        json.dumps(request.model_args)
    except (TypeError, ValueError) as error:
        raise UsageError(f"model_args cannot be kept in the report: {cause(error)}") from error
    if request.generate and "generate" not in registered("exports"):
        raise UsageError("--generate needs the plug-in of generation, which is not installed here")
    if request.generate and request.submodule is not None:
        raise UsageError(
            "--submodule does not go with --generate, which exports the whole of a decoder"
        )
    if request.generate and request.samples:
        raise UsageError(
            "--sample does not go with --generate: a decoder's inputs are tokens and its own cache"
        )
    _check_precision(request)
    _check_targets(request)


def _as_onnx(request: ExportRequest) -> ExportRequest:
    """Return the request for a file that is ONNX itself; refuse what only a model has."""
    given = f'"{request.checkpoint.name}" is an ONNX file'
    if others := [format for format in request.formats or () if format != "onnx"]:
        raise UsageError(
            f"--format {others[0]}: {given}, of which only onnx can be written; export the "
            "checkpoint that it was made from, or leave --format out"
        )
    for option, value in (("--dtype", request.dtype), ("--submodule", request.submodule)):
        if value is not None:
            raise UsageError(
                f"{option} {value}: {given}, which is taken as it is; export the checkpoint that "
                f"it was made from, or leave {option} out"
            )
    return replace(request, formats=("onnx",))


def _check_precision(request: ExportRequest) -> None:
    """Refuse a dtype or quantisation that the formats have no form for."""
    if request.dtype not in (None, *PRECISIONS):
        known = ", ".join(PRECISIONS)
        raise UsageError(f'--dtype "{request.dtype}" is unknown; expected one of {known}')
    if request.dtype == "bf16" and "onnx" in request.chosen_formats():
        raise UsageError(
            "--dtype bf16 does not go with --format onnx: onnxruntime's CPU kernels know no "
            "bfloat16; use --format pt2, or --dtype fp16"
        )
    if request.quantize is None:
        return
    if request.quantize not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise UsageError(f'--quantize "{request.quantize}" is unknown; expected one of {known}')
    if others := [format for format in request.chosen_formats() if format != "onnx"]:
        raise UsageError(
            f"--quantize {request.quantize} does not go with --format {others[0]}: torch.export "
            "and TorchScript keep no quantised weights of torch.ao that this version could prove; "
            "use --format onnx"
        )
    if request.dtype not in (None, "fp32"):
        raise UsageError(
            f"--quantize {request.quantize} starts from float32; leave --dtype {request.dtype} out"
        )
    if request.quantize == STATIC and request.generate:
        raise UsageError(
            f"--quantize {STATIC} does not go with --generate, which takes no samples; use "
            "int8-dynamic"
        )
    if request.quantize == STATIC and not request.samples:
        raise UsageError(
            f"--quantize {STATIC} takes the ranges of values from real inputs; give --sample FILE "
            "with some dozens of them, or use int8-dynamic, which needs none"
        )


def _check_output_names(names: Sequence[str], signature: Signature) -> None:
    inputs = {spec.name for spec in signature.inputs}
    for name in names:
        if not name.isidentifier() or name in inputs:
            seen = (
                "is also an input" if name in inputs else "is not a name of letters, digits and _"
            )
            raise UsageError(f'--output "{name}" {seen}; expected a name of its own')


def _check_targets(request: ExportRequest) -> None:
    """Refuse to write over the checkpoint, or where no file can be."""
    for format in request.chosen_formats():
        for target in (request.target(format), report_path(request.target(format))):
            if (
                target.exists()
                and request.checkpoint.exists()
                and target.samefile(request.checkpoint)
            ):
                raise UsageError(
                    f'--format {format} would write "{target.name}" over the checkpoint; '
                    "use -o with another folder, or --name"
                )
            if target.is_dir():
                raise UsageError(
                    f'"{target}" is a folder; expected a file or nothing there: use --name'
                )


def read_device(text: str) -> torch.device:
    """Return the device that an option names.

    Raises:
        UsageError: it names none.
        ExportError: this machine has none of that number.
    """
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


_LOAD, _RUN, _WRITE, _CHECK = "load {}", "run the checkpoint's model", "write {}", "check {}"


def _step_announcer(request: ExportRequest) -> Callable[[str], None]:
    """Return what announces one of the trip's steps by its name."""
    names = [_LOAD.format(request.checkpoint.name), _RUN]
    for format in request.chosen_formats():
        target = request.target(format).name
        names += [_WRITE.format(target), _CHECK.format(target)]

    def announce(name: str) -> None:
        if request.progress is not None:
            request.progress(name, names.index(name), len(names))

    return announce


def _writers(
    reference: Reference, quantization: str | None, calibration: Sequence[Sample]
) -> dict[str, _Writer]:
    """Return for each format the function that writes it; three of them share one trace."""
    model, signature, example = reference.model, reference.signature, reference.example
    program = _once(lambda: to_exported_program.capture(model, signature, example))

    file = file_of(model)

    def write_onnx(path: Path) -> Mapping[str, object]:
        if file is not None:
            details = file.write(path, signature, reference.keys)
        else:
            details = to_onnx.write(program(), signature, path)
        if quantization is None:
            return details
        if quantization == STATIC:
            return {**details, **to_onnx.quantize_static(path, signature, calibration)}
        return {**details, **to_onnx.quantize(path)}

    return {
        "pt2": lambda path: to_exported_program.write(program(), path),
        "onnx": write_onnx,
        "torchscript": lambda path: to_torchscript.write(model, signature, example, path),
        "aoti": lambda path: to_aoti.write(program(), signature, path),
    }


def _once(capture: Callable[[], ExportedProgram]) -> Callable[[], ExportedProgram]:
    """Return what traces when it is first called, and fails alike each time."""

    @functools.cache
    def attempt() -> ExportedProgram | ExportError:
        try:
            return capture()
        except ExportError as error:
            return error

    def get() -> ExportedProgram:
        result = attempt()
        if isinstance(result, ExportError):
            raise result
        return result

    return get


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


@contextmanager
def _exchange(folder: Path) -> Iterator[Checker]:
    """Start the process that checks: it imports its libraries while the first file is written."""
    with tempfile.TemporaryDirectory(dir=folder) as exchange, Checker(Path(exchange)) as checker:
        yield checker


def _calibrated(files: Sequence[Path], split: Split) -> dict[str, object]:
    """State what static quantisation took its ranges from: of the values themselves, a digest."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return {
        "method": "min-max",
        "rows": split.rows,
        "held_out_rows": split.held_out_rows,
        "samples_sha256": digest.hexdigest(),
    }


def _model_name(request: ExportRequest, checkpoint: Checkpoint, module: nn.Module) -> str:
    """Return `--model` without its folder, or the class or program that the checkpoint names."""
    if request.model is None and checkpoint.kind in (PROGRAM, ONNX):
        return checkpoint.path.name
    if request.model is None:
        return f"{type(module).__module__}:{type(module).__qualname__}"
    return rename_file(request.model, lambda source: Path(source).name)


def _labels(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the checkpoint calls its classes; none where it only numbers them."""
    names = {str(index): label for index, label in checkpoint.labels.items()}
    return {} if all(label == f"LABEL_{index}" for index, label in names.items()) else names


def _ingested(checkpoint: Checkpoint) -> dict[str, object]:
    """Return how the checkpoint was read, for the report."""
    return {
        "writer": " ".join(filter(None, (checkpoint.writer, checkpoint.writer_version))) or None,
        "loader": checkpoint.loader,
        "weights_key": checkpoint.weights_key,
        "prefixes_stripped": list(checkpoint.prefixes),
        "refused": list(checkpoint.refused),
        "imported": list(checkpoint.imports),
    }


def _checkpoint_warnings(checkpoint: Checkpoint) -> list[str]:
    """Return what a person should know of the checkpoint, whatever becomes of the model."""
    lines = list(checkpoint.notes)
    if checkpoint.refused:
        lines.append(
            f"the checkpoint wants {', '.join(checkpoint.refused)}, which was not imported"
        )
    if checkpoint.alternatives:
        others = ", ".join(
            f"{key} ({n:,} parameters)" for key, n in checkpoint.alternatives.items()
        )
        lines.append(f'the weights are those of "{checkpoint.weights_key}"; it also has {others}')
    return lines
