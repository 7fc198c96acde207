"""The export trip: load → run → write → check → artifact and report, or no file of that format."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from modelyard.archiver.signature import Batching
from modelyard.base.extras import what_is_missing
from modelyard.base.plugins import registered
from modelyard.exporter.arguments import take_inputs, take_submodule
from modelyard.exporter.checkpoint import open_model
from modelyard.exporter.classes import without_class
from modelyard.exporter.errors import (
    ArgumentsKnown,
    ConversionError,
    ExportError,
    ModelError,
    NoClass,
    PartialExportError,
    UsageError,
    join_failures,
    propose_no_failed_format,
)
from modelyard.exporter.formats import (
    quantize,
    to_aoti,
    to_exported_program,
    to_onnx,
    to_torchscript,
)
from modelyard.exporter.formats.diagnose import explain
from modelyard.exporter.formats.from_onnx import file_of
from modelyard.exporter.formats.guards import Guards
from modelyard.exporter.ingest import ONNX, Checkpoint, read_checkpoint
from modelyard.exporter.inputs.samples import as_request
from modelyard.exporter.inputs.settle import Inputs, settle
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.locate import first_difference
from modelyard.exporter.prove.loss import doubts
from modelyard.exporter.prove.parity import ExportReport, Parity, check, publish, sha256
from modelyard.exporter.prove.reference import Reference, observe
from modelyard.exporter.refusals import as_onnx, check_request
from modelyard.exporter.request import STATIC, ExportRequest, command_of, paste, rename_file
from modelyard.handlers.models.backends import set_precision
from modelyard.handlers.proof.probes import Probe, make_inputs

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOAD, _RUN, _WRITE, _CHECK = "load {}", "run the checkpoint's model", "write {}", "check {}"

_Writer = Callable[[Path], Mapping[str, object]]
_Draft = tuple[Path, Mapping[str, object], Parity, Batching]
"""An artifact that agrees, what the report states of it, and whether its rows keep apart."""


def run(request: ExportRequest) -> list[ExportReport]:
    """Run one export; see `modelyard.exporter.export`."""
    device = read_device(request.device)
    check_request(request)
    _announce(request, _LOAD.format(request.checkpoint.name))
    checkpoint = read_checkpoint(
        request.checkpoint,
        weights_key=request.weights_key,
        ema=request.ema,
        announce=request.announce,
    )
    if checkpoint.kind == ONNX:
        request = as_onnx(request)
    elif "onnx" in request.chosen_formats() and (advice := what_is_missing("onnxscript")):
        raise UsageError(f"--format onnx: {advice}, or export --format pt2")
    notes = checkpoint.warnings()
    with _open(request, checkpoint, notes) as module:
        model_name = _model_name(request, checkpoint, module)
        if request.submodule is not None:
            module = take_submodule(module, request.submodule)
        inputs = settle(request, module, checkpoint, notes)
        request, signature = replace(request, inputs=inputs.texts), inputs.signature
        _announce(request, _RUN)
        details: dict[str, object] = dict(inputs.details)
        if request.generate:
            open_decoder = registered("exports")["generate"].load()
            module, signature, details["generation"] = open_decoder(module, request.inputs)
        reference = observe(
            take_inputs(module, signature),
            signature,
            request.output_names,
            device,
            dtype=PRECISIONS[request.dtype] if request.dtype else None,
            samples=inputs.samples,
            quick=request.quick,
            # Values outside of what it is calibrated for are cut off, as made-up ones would be.
            sample_only=request.sample_only or request.quantize == STATIC,
        )
        if inputs.calibration:
            notes += doubts(reference.original, inputs.calibration, signature)
        origin = {"origin": dict(request.origin)} if request.origin else {}
        details |= {
            "dtype": request.dtype,
            "submodule": request.submodule,
            "probabilities": dict(reference.probabilities),
            "labels": checkpoint.named_labels(),
            "table": _table(reference, checkpoint.columns),
        }
        with _workspace(request.output_dir) as folder, set_precision(device, request.tf32):
            drafts, failures = _write_each(request, reference, inputs, folder)
            if not drafts:
                raise _nothing_written(failures)
            reports = [
                ExportReport(
                    artifact=request.target(format),
                    format=format,
                    artifact_sha256=sha256(draft),
                    artifact_bytes=draft.stat().st_size,
                    signature=replace(reference.signature, batching=batching),
                    parity=parity,
                    checkpoint=request.checkpoint.name,
                    checkpoint_sha256=checkpoint.sha256,
                    checkpoint_kind=checkpoint.kind,
                    checkpoint_details=checkpoint.how_read() | origin,
                    model=model_name,
                    model_args=request.model_args or {},
                    device=str(device),
                    tf32=request.tf32,
                    details={key: value for key, value in details.items() if value} | dict(written),
                    command=command_of(request, [format]),
                    warnings=(
                        *notes,
                        *reference.warnings,
                        *(f"{format}: {lost}" for lost in parity.outside(request.max_loss)),
                    ),
                )
                for format, (draft, written, parity, batching) in drafts.items()
            ]
            for report in reports:
                if report.artifact.exists():
                    request.report_line(f"replaces {report.artifact.name} of an earlier export")
                publish(report, drafts[report.format][0])
        _keep_example(request, inputs, reference)
    if failures:
        raise PartialExportError(reports, failures)
    return reports


@contextmanager
def _open(request: ExportRequest, checkpoint: Checkpoint, notes: list[str]) -> Iterator[nn.Module]:
    """Yield the checkpoint's model; an error about its class says what was found of it."""
    try:
        with open_model(
            checkpoint,
            request.model,
            request.model_args or {},
            task=request.task,
            trust=request.announce is not None,
            keeps_cache=request.generate,
            notes=notes,
        ) as module:
            yield module
    except NoClass as error:
        raise without_class(request, checkpoint, str(error)) from error
    except ArgumentsKnown as error:
        arguments = {**(request.model_args or {}), **error.arguments}
        raise ModelError(f"{error}{paste(replace(request, model_args=arguments))}") from error


_STAGES = {
    "pt2": "torch.export",
    "onnx": "ONNX",
    "torchscript": "TorchScript",
    "aoti": "AOTInductor",
}


def _write_each(
    request: ExportRequest, reference: Reference, inputs: Inputs, folder: Path
) -> tuple[dict[str, _Draft], dict[str, ExportError]]:
    """Write and prove every format; return the drafts of those that agree, and why others do not.

    The process that checks imports its libraries while the first file is written.
    """
    writers, file = _writers(request, reference, inputs), file_of(reference.original)
    is_quantized = request.quantize is not None or (file is not None and file.is_quantized)
    drafts: dict[str, _Draft] = {}
    failures: dict[str, ExportError] = {}
    with tempfile.TemporaryDirectory(dir=folder) as exchange, Checker(Path(exchange)) as checker:
        for format in request.chosen_formats():
            draft = folder / request.target(format).name
            try:
                _announce(request, _WRITE.format(draft.name))
                written = writers[format](draft)
                _announce(request, _CHECK.format(draft.name))
                trusted = written.get("trusted_operators", []) if request.announce else []
                parity = check(
                    draft,
                    format,
                    reference,
                    checker,
                    device=request.device,
                    tolerance=request.tolerance,
                    is_quantized=is_quantized,
                    locate=functools.partial(first_difference, draft, format, reference),
                    trusted=cast("list[str]", trusted),
                    tf32=request.tf32,
                )
                drafts[format] = draft, written, parity, _batching(reference, checker, parity)
            except ExportError as error:
                failures[format] = error
            # Writers run torch's and the author's code, which fails in any way; others go on.
            except Exception as error:
                failures[format] = explain(error, _STAGES[format], reference.signature)
    propose_no_failed_format(failures)
    return drafts, failures


def _batching(reference: Reference, checker: Checker, parity: Parity) -> Batching:
    """Find whether rows keep apart in the artifact that was compared last, as it will be served."""
    assert reference.rows is not None
    return reference.rows.find(
        lambda inputs: checker.run("a batch of other rows", inputs),
        parity.tolerance if reference.is_lowered else 0.0,
        checker.find_sizes,
    )


def _table(reference: Reference, columns: Sequence[str]) -> Mapping[str, object]:
    """Return what `features.json` says of a file of scikit-learn and the like, or of columns."""
    file = file_of(reference.original)
    if file and (table := file.table(reference.signature, reference.keys)):
        return table
    spec, *others = reference.signature.inputs
    if not columns or others or spec.shape[1:] != (len(columns),):
        return {}
    return {"features": [{"name": name} for name in columns]}


def _nothing_written(failures: Mapping[str, ExportError]) -> ExportError:
    """Return the one error of all formats, or one that has them all."""
    first, *others = failures.values()
    if all(str(error) == str(first) for error in others):
        return first
    same_kind = all(type(error) is type(first) for error in others)
    return (type(first) if same_kind else ExportError)(join_failures(failures))


def _keep_example(request: ExportRequest, inputs: Inputs, reference: Reference) -> None:
    """Write the request that came with the checkpoint beside the artifacts, to be a golden one."""
    if inputs.example is not None:
        path = request.output_dir / f"{request.stem}.example.json"
        content = as_request(inputs.example, reference.signature)
        path.write_text(json.dumps(content), encoding="utf-8")
        request.report_line(
            f"wrote {path.name}, the request that was saved with the model: archive with "
            f"--example {path}"
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


def _announce(request: ExportRequest, name: str) -> None:
    """Announce one of the trip's steps by its name."""
    targets = [request.target(format).name for format in request.chosen_formats()]
    names = [_LOAD.format(request.checkpoint.name), _RUN]
    names += [step.format(target) for target in targets for step in (_WRITE, _CHECK)]
    if request.progress is not None:
        request.progress(name, names.index(name), len(names))


def _writers(request: ExportRequest, reference: Reference, inputs: Inputs) -> dict[str, _Writer]:
    """Return for each format the function that writes it; three of them share one trace."""
    model, signature, example = reference.model, reference.signature, reference.example

    def trace(example: tuple[Tensor, ...]) -> tuple[ExportedProgram, Guards]:
        captured = to_exported_program.capture(model, signature, example)
        return captured, Guards(captured, signature)

    @functools.cache
    def capture() -> ExportedProgram | ExportError:
        try:
            captured, guards = trace(example)
        except ExportError as error:
            return error
        if reference.plan.probes:  # values are made up at all
            if sizes := guards.larger():
                made = make_inputs(signature, Probe("random", sizes))
                larger = tuple(new.to(old) for new, old in zip(made, example, strict=True))
                with suppress(ConversionError):
                    captured, guards = trace(larger)
            reference.cases.why = guards.broken_at
            reference.cases.add_sizes(guards.probes())
            captured._guards_code = []  # each holds at every size of the range, or is tried
        return captured

    def program() -> ExportedProgram:
        if isinstance(captured := capture(), ExportError):  # alike in each format
            raise captured
        return captured

    def write_onnx(path: Path) -> Mapping[str, object]:
        if (file := file_of(model)) is not None:
            details = {**file.write(path, signature, reference.keys)}
        else:
            details = to_onnx.write(program(), signature, path)
        if request.quantize is None:
            return details
        full = path.with_name(f"full-{path.name}")
        shutil.copyfile(path, full)
        is_static = request.quantize == STATIC
        details |= (
            quantize.quantize_static(path, signature, inputs.calibration)
            if is_static
            else quantize.quantize_dynamic(path)
        )
        if request.exact_labels:
            samples = inputs.calibration if is_static else inputs.samples
            details |= quantize.run_undecided_again(path, full, signature, samples, reference.run)
        full.unlink()
        return details

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


def _model_name(request: ExportRequest, checkpoint: Checkpoint, module: nn.Module) -> str:
    """Return `--model` without its folder, or the class or program that the checkpoint names."""
    if request.model is not None:
        return rename_file(request.model, lambda source: Path(source).name)
    if checkpoint.is_program:
        return checkpoint.path.name
    return f"{type(module).__module__}:{type(module).__qualname__}"
