"""What an unpacked archive holds of a model → artifacts that can be called."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.report import Report, parse_report
from modelyard.archiver.signature import Signature, parse_signature
from modelyard.base.nearest import did_you_mean
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models import backends
from modelyard.handlers.models.backends import Artifact
from modelyard.handlers.proof.agree import Rule, compare, disagreement, joint_rules, rule_for
from modelyard.handlers.proof.agree import run as run_in_full
from modelyard.handlers.proof.probes import Probe, example_sizes, make_case

_OPTIONS = ("backend", "mode")
_TENSORRT = ("tensorrt", "torch_tensorrt")
_FORM = "pt2: {compile: {enable: true, backend: inductor, mode: default}}"


def compile_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read `pt2.compile` of model-config.yaml: what `torch.compile` is given; None where it is off.

    Raises:
        LoadError: it has another form.
    """
    section = config.get("pt2")
    if section is None:
        return None
    stated = section.get("compile") if isinstance(section, dict) else None
    near = _near(section, ("compile",)) or _near(stated, ("enable", *_OPTIONS))
    is_form = isinstance(stated, dict) and isinstance(stated.get("enable"), bool)
    if stated is None or near or not is_form or set(section) != {"compile"}:
        raise LoadError(f"pt2 in model-config.yaml is {section!r}; expected as in {_FORM}{near}")
    options = {name: value for name, value in stated.items() if name != "enable"}
    for name, value in options.items():
        if name not in _OPTIONS or not isinstance(value, str):
            raise LoadError(
                f"pt2.compile.{name} in model-config.yaml is {value!r}; expected as in {_FORM}"
            )
    return options if stated["enable"] else None


def runs_on_tensorrt(config: Mapping[str, Any]) -> bool:
    """Read `onnx.tensorrt` of model-config.yaml.

    Raises:
        LoadError: it is not true or false, or `onnx` holds something else.
    """
    section = config.get("onnx", {})
    wanted = section.get("tensorrt", False) if isinstance(section, dict) else None
    if not isinstance(wanted, bool) or set(section) - {"tensorrt"}:
        raise LoadError(
            f"onnx in model-config.yaml is {section!r}; expected onnx: {{tensorrt: true}}"
            + _near(section, ("tensorrt",))
        )
    return wanted


def _near(section: Any, known: Sequence[str]) -> str:
    """Return what is likely meant by the first key that is unknown, for messages."""
    unknown = [key for key in section if key not in known] if isinstance(section, dict) else []
    return did_you_mean(str(unknown[0]), known) if unknown else ""


def compile_artifact(
    artifact: Artifact,
    options: Mapping[str, Any],
    examples: Iterable[Sequence[Tensor]],
    rules: Sequence[Rule] = (),
) -> Artifact:
    """Compile a pt2 artifact, for every size of its dynamic dimensions.

    Args:
        artifact: stays as it is, and explains.
        options: `torch.compile`'s.
        examples: inputs of the sizes to compile for, on which both must agree.
        rules: rule of each output; by its dtype and its own numbers alone when absent.

    Raises:
        LoadError: it is not a pt2 artifact, cannot be compiled here, or gives something else then.
    """
    if artifact.format != "pt2" or artifact.module is None:
        raise LoadError(
            f"pt2.compile in model-config.yaml: the artifact is {artifact.format}; expected pt2, "
            "as `modelyard export --format pt2` writes it"
        )
    if options.get("backend") in _TENSORRT:
        _need_tensorrt(artifact.device)
    try:
        run = torch.compile(artifact.module, dynamic=True, **options)
        compiled = Artifact(artifact.format, run, artifact.inputs, artifact.device)
        compiled.file = artifact.file
        measured = [_measure(artifact, compiled, inputs, rules) for inputs in examples]
    except LoadError:
        raise
    # A backend fails in whatever way it likes: no compiler, an operator that it does not have.
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise LoadError(
            f"torch.compile({dict(options)}) fails: {type(error).__name__}: {first}; leave "
            "pt2.compile out of model-config.yaml, or ask `modelyard doctor` for the compiler"
        ) from error
    for output, case in enumerate(measured):
        if case is not None:
            raise LoadError(
                f"what torch.compile makes differs from the artifact: {case} ({output})"
            )
    return compiled


def _measure(
    artifact: Artifact, compiled: Artifact, inputs: Sequence[Tensor], rules: Sequence[Rule]
) -> str | None:
    """Run both on the same inputs; return how they differ, None where they agree."""
    sizes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    with torch.inference_mode():  # as requests will be answered: another mode compiles again
        pairs = zip(run_in_full(artifact, inputs), run_in_full(compiled, inputs), strict=True)
    for place, (expected, found) in enumerate(pairs):
        rule = rules[place] if rules else rule_for(backends.dtype_name(expected.dtype))
        case = compare(expected, found, rule.tolerance, rule.scale)
        if text := disagreement(str(place), rule, [case], [f"inputs {sizes}"]):
            return text
    return None


def _need_tensorrt(device: torch.device) -> None:
    """Import Torch-TensorRT, which makes its backend known to torch."""
    if device.type != "cuda":
        raise LoadError("TensorRT needs a CUDA device, and this worker runs on the CPU")
    try:
        import_module("torch_tensorrt")
    except ImportError as error:
        raise LoadError(
            "the backend tensorrt needs Torch-TensorRT: pip install torch-tensorrt"
        ) from error


@dataclass(frozen=True)
class PackedModel:
    """An archive's artifact, and what explains it."""

    path: Path
    """Path of the artifact."""
    artifact: Artifact
    explainer: Artifact | None
    """A differentiable twin, the artifact itself where that is differentiable, or None."""
    agreement: Rule | None
    """How far the two may be apart, where both have a certificate."""
    signature: Signature
    """Signature of the export's report, else as far as the artifact says."""
    report: Report | None
    """Report of the artifact's export."""


def open_packed(
    folder: Path, manifest: Mapping[str, Any], device: torch.device, config: Mapping[str, Any]
) -> PackedModel:
    """Load what the manifest of the archive in `folder` names, as its model-config.yaml asks.

    Raises:
        LoadError: a file is missing or cannot be read.
    """
    file = (manifest.get("model") or {}).get("serializedFile")
    if not isinstance(file, str) or not file:
        raise LoadError(
            "the manifest names no artifact (model.serializedFile); "
            "build the archive with `modelyard archive … --artifact FILE`, or override initialize, "
            "which loads it"
        )
    ours = manifest.get("modelyard") or {}
    explain = ours.get("explain") or {}
    report = _read_report(folder, ours.get("report"))
    open_first = partial(_open, folder, file, report, device, runs_on_tensorrt(config))
    agreement = None
    if explain.get("artifact", file) == file:
        artifact = open_first()
        explainer = artifact if artifact.is_differentiable else None
    else:
        twin_report = _read_report(folder, explain.get("report"))
        if twin_report and report and twin_report.tf32 != report.tf32:
            raise LoadError(
                f"{file} and {explain['artifact']} are proven one with TF32 and one without, and "
                "a process has one rule; export both with --tf32, or both without"
            )
        open_twin = partial(_open, folder, explain["artifact"], twin_report, device)
        artifact, explainer = _open_both(open_first, open_twin, device)
        if report and report.parity and twin_report and twin_report.parity:
            main = report.signature.main
            joint = joint_rules(report.parity, twin_report.parity)
            agreement = joint[main.name] if main else None
    signature = _read_signature(ours.get("signature"), artifact)
    options = compile_options(config)
    if options is not None:
        if report is None:
            raise LoadError(
                f"pt2.compile in model-config.yaml: {file} has no report that says its inputs; "
                "archive it with the report that `modelyard export` left beside it"
            )
        proven = report.parity and joint_rules(report.parity, report.parity)
        rules = list((proven or {}).values())
        artifact = compile_artifact(artifact, options, _examples(report), rules)
    return PackedModel(folder / file, artifact, explainer, agreement, signature, report)


def _open_both(
    open_first: Callable[[], Artifact], open_twin: Callable[[], Artifact], device: torch.device
) -> tuple[Artifact, Artifact]:
    """Return what the two open, at the same time on a CPU.

    Which device CUDA uses is said for each thread. Elsewhere the first is native code or
    onnxruntime's, and mostly waits for another process that tries its weights mapped.

    Raises:
        Exception: what the first raises, else what the twin raises.
    """
    if device.type != "cpu":
        return open_first(), open_twin()
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(open_first)
        try:
            twin = open_twin()
        except Exception:
            first.result()
            raise
        return first.result(), twin


def _read_report(folder: Path, name: str | None) -> Report | None:
    try:
        return parse_report((folder / name).read_bytes(), Path(name)) if name else None
    except (OSError, ArchiveError) as error:
        raise LoadError(f"{name} cannot be read: {error}; build the archive again") from error


def _open(
    folder: Path, file: str, report: Report | None, device: torch.device, on_tensorrt: bool = False
) -> Artifact:
    path = folder / file
    if not path.is_file():
        raise LoadError(f"the manifest names {file}, which the archive does not hold")
    if report is None:
        return backends.open_artifact(path, backends.detect_format(path), device, True, on_tensorrt)
    share, trusted = partial(_examples, report), report.trusted_operators
    return backends.open_artifact(
        path, report.format, device, share, on_tensorrt, trusted, report.tf32
    )


def _examples(report: Report) -> Iterator[tuple[Tensor, ...]]:
    """Return inputs of two sizes that the model is known to take, made when they are used."""
    signature = report.tried
    smallest = {name: dim.min for name, dim in signature.dims.items()}
    probes = [Probe("random", sizes) for sizes in (smallest, example_sizes(signature))]
    return (make_case(signature, probe) for probe in probes)


def _read_signature(stated: Mapping[str, Any] | None, artifact: Artifact) -> Signature:
    if stated is None:
        return Signature(artifact.inputs)
    try:
        signature = parse_signature(stated)
    except ValueError as error:
        raise LoadError(
            f"the manifest's signature cannot be read: {error}; build the archive again"
        ) from error
    for spec in signature.inputs:
        backends.torch_dtype(spec.dtype)  # of a name that torch knows
    return signature
