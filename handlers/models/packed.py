"""What an unpacked archive holds of a model → artifacts that can be called."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.report import Report, parse_report
from modelyard.archiver.signature import Signature, parse_signature
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import Artifact, detect_format, open_artifact, torch_dtype
from modelyard.handlers.models.compiled import compile_artifact, compile_options, runs_on_tensorrt
from modelyard.handlers.proof.agree import Rule, joint_rules
from modelyard.handlers.proof.probes import Probe, example_sizes, make_case


@dataclass(frozen=True)
class PackedModel:
    """An archive's artifact, and what explains it."""

    path: Path
    """Of the artifact."""
    artifact: Artifact
    explainer: Artifact | None
    """A differentiable twin, the artifact itself where that is differentiable, or None."""
    agreement: Rule | None
    """How far the two may be apart, where both have a certificate."""
    signature: Signature
    """From the export's report, else as far as the artifact says."""
    report: Report | None
    """Of the artifact's export."""


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
        open_twin = partial(_open, folder, explain["artifact"], twin_report, device)
        artifact, explainer = _open_both(open_first, open_twin, device)
        if report and report.parity and twin_report and twin_report.parity:
            # Explanations are of the first output.
            agreement = next(iter(joint_rules(report.parity, twin_report.parity).values()))
    signature = _read_signature(ours.get("signature"), artifact)
    options = compile_options(config)
    if options is not None:
        if report is None:
            raise LoadError(
                f"pt2.compile in model-config.yaml: {file} has no report that says its inputs; "
                "archive it with the report that `modelyard export` left beside it"
            )
        artifact = compile_artifact(artifact, options, _examples(report))
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
    folder: Path,
    file: str,
    report: Report | None,
    device: torch.device,
    on_tensorrt: bool = False,
) -> Artifact:
    path = folder / file
    if not path.is_file():
        raise LoadError(f"the manifest names {file}, which the archive does not hold")
    format = report.format if report else detect_format(path)
    share = partial(_examples, report) if report else True
    trusted = report.trusted_operators if report else ()
    return open_artifact(
        path, format, device, share=share, on_tensorrt=on_tensorrt, trusted=trusted
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
        torch_dtype(spec.dtype)  # of a name that torch knows
    return signature
