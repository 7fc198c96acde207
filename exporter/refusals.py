"""What an export refuses before it reads anything: arguments that mean nothing, or not together."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from modelyard.archiver.signature import Signature
from modelyard.base.plugins import registered
from modelyard.exporter.arguments import read_inputs
from modelyard.exporter.checkpoint import split_model
from modelyard.exporter.classes import without_name
from modelyard.exporter.errors import UsageError, cause
from modelyard.exporter.request import AUTO, STATIC, SUFFIXES, ExportRequest, report_path

_PRECISIONS = ("fp32", "bf16", "fp16")
_QUANTIZATIONS = ("int8-dynamic", STATIC, AUTO)


def check_request(request: ExportRequest) -> None:
    """Raise a `UsageError` for the first argument that means nothing."""
    if request.inputs and not request.generate:
        check_output_names(request.output_names, read_inputs(request.inputs))
    if request.model is not None:
        if request.model.endswith(".py") and Path(request.model).is_file():
            raise without_name(request, Path(request.model))
        split_model(request.model)
    for problem in (*_problems(request), *_target_problems(request)):
        raise UsageError(problem)


def _problems(request: ExportRequest) -> Iterator[str]:
    formats, name, quantize = request.chosen_formats(), request.name, request.quantize
    if not formats:
        yield f"no --format given; expected one of {', '.join(SUFFIXES)}"
    for option, values, known in (
        ("--format", formats, SUFFIXES),
        ("--dtype", [request.dtype], _PRECISIONS),
        ("--quantize", [quantize], _QUANTIZATIONS),
    ):
        for value in values:
            if value is not None and value not in known:
                yield f'{option} "{value}" is unknown; expected one of {", ".join(known)}'
    if name is not None and (not name or PurePath(name).name != name):
        yield f'--name "{name}" is not a file name; expected one without a folder'
    if request.tolerance is not None and not 0 <= request.tolerance < math.inf:
        yield f"--tolerance {request.tolerance} is not a difference; expected 0 or more"
    if request.max_loss is not None and not 0 <= request.max_loss < 1:
        yield f"--max-loss {request.max_loss} is not a share; expected 0 or more, below 1"
    if request.exact_labels and (quantize in (None, AUTO) or not request.samples):
        yield (
            "--exact-labels runs undecided rows of a quantised model again in float32; give "
            "--quantize int8-static or int8-dynamic, and --sample FILE with rows to learn from"
        )
    if request.tf32 and not request.device.startswith("cuda"):
        yield f"--tf32 is of CUDA devices, and --device is {request.device}; give --device cuda"
    if request.sample_only and not request.samples:
        yield "--sample-only has nothing to compare on; give --sample FILE too"
    try:
        json.dumps(request.model_args)
    except (TypeError, ValueError) as error:
        yield f"model_args cannot be kept in the report: {cause(error)}"
    if request.generate and "generate" not in registered("exports"):
        yield "--generate needs the plug-in of generation, which is not installed here"
    if request.generate and request.submodule is not None:
        yield "--submodule does not go with --generate, which exports the whole of a decoder"
    if request.generate and request.samples:
        yield (
            "--sample does not go with --generate: a decoder's inputs are tokens and its own cache"
        )
    if request.dtype == "bf16" and "onnx" in formats:
        yield (
            "--dtype bf16 does not go with --format onnx: onnxruntime's CPU kernels know no "
            "bfloat16; use --format pt2, or --dtype fp16"
        )
    if quantize is None:
        return
    if others := [format for format in formats if format != "onnx"]:
        yield (
            f"--quantize {quantize} does not go with --format {others[0]}: torch.export "
            "and TorchScript keep no quantised weights of torch.ao that this version could prove; "
            "use --format onnx"
        )
    if request.dtype not in (None, "fp32"):
        yield f"--quantize {quantize} starts from float32; leave --dtype {request.dtype} out"
    if quantize == STATIC and request.generate:
        yield f"--quantize {STATIC} does not go with --generate, without samples; use int8-dynamic"
    if quantize == STATIC and not request.samples:
        yield (
            f"--quantize {STATIC} takes the ranges of values from real inputs; give --sample FILE "
            "with some dozens of them, or use int8-dynamic, which needs none"
        )


def _target_problems(request: ExportRequest) -> Iterator[str]:
    """Refuse to write over the checkpoint, or where no file can be."""
    checkpoint = request.checkpoint
    for format in (
        request.chosen_formats() if set(request.chosen_formats()) <= set(SUFFIXES) else ()
    ):
        for target in (request.target(format), report_path(request.target(format))):
            if target.exists() and checkpoint.exists() and target.samefile(checkpoint):
                yield (
                    f'--format {format} would write "{target.name}" over the checkpoint; '
                    "use -o with another folder, or --name"
                )
            if target.is_dir():
                yield f'"{target}" is a folder; expected a file or nothing there: use --name'


def check_output_names(names: Sequence[str], signature: Signature) -> None:
    """Refuse `--output` names that an artifact cannot give an output."""
    inputs = {spec.name for spec in signature.inputs}
    for name in names:
        if not name.isidentifier() or name in inputs:
            seen = (
                "is also an input" if name in inputs else "is not a name of letters, digits and _"
            )
            raise UsageError(f'--output "{name}" {seen}; expected a name of its own')


def as_onnx(request: ExportRequest) -> ExportRequest:
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
