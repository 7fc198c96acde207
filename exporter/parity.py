"""The same inputs through checkpoint and artifact → differences and a verdict.

The artifact runs in a fresh process, opened as a worker opens it:
`python -P -m modelyard.exporter.parity FOLDER`, with a folder that holds `task.json` and one file
of tensors per case (read with weights_only). What it finds, it leaves there in `result.json`. That
process knows nothing of the model's Python.

The rule: over every row of every output, e = max|a − b| / max(max|b|, 1) stays within the
tolerance, so that it is absolute up to values of 1 and relative above; integers are equal. A
quantised artifact is not a copy but an approximation: its rule is the same largest value in 99 % of
the rows, and a cosine of 0.99.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.exporter.arguments import flatten
from modelyard.exporter.differences import compare
from modelyard.exporter.errors import ExportError, ParityError, cause
from modelyard.exporter.reference import Case, Reference, full_precision

# Largest allowed scaled difference, by the dtype of the output. Integers must be equal.
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
MIN_TOP1_AGREEMENT = 0.99
MIN_COSINE = 0.99

SCALED_RULE = "max|a-b| <= tolerance * max(max|b|, 1) for every row of every output"
QUANTIZED_RULE = (
    f"top-1 agreement >= {MIN_TOP1_AGREEMENT} over all rows and cosine >= {MIN_COSINE} in every "
    "case: quantised weights approximate"
)

_ADVICE = {
    "pt2": "forward() must do the same while it is exported as when it runs",
    "onnx": "export --format pt2, which keeps torch's own operators",
    "torchscript": "forward() must do the same in TorchScript, where a trace keeps one branch only",
    "aoti": "export --format pt2, which runs torch's own kernels",
}
_OVERFLOW = "float16 ends at 65504: use --dtype bf16, or keep fp32"
_QUANTIZED_ADVICE = "this model needs its full precision: export without --quantize"

Locate = Callable[[Case], str]
"""Names the first submodule that differs for a case, or says why it cannot be named."""

_Measured = list[dict[str, Any]]
"""What `compare` found, case by case, for one output."""


@dataclass(frozen=True)
class Difference:
    """How far one output is from the checkpoint's, over all cases."""

    max_abs: float
    """Largest absolute difference of one value."""
    max_rel: float
    """Largest ratio, over the cases, of the absolute difference to the largest value."""
    scaled: float
    """Largest difference of a row over its largest value, where that is above 1: what is judged."""
    cosine: float
    """Smallest cosine, over the cases, between the two outputs as vectors."""
    top1_agreement: float | None
    """Share of rows whose largest value is at the same place; None where that means nothing."""
    top1_margin: float | None
    """Largest lead of a row whose largest value moved: a tie when it is within the tolerance."""
    tolerance: float
    """Largest `scaled` that agrees, by the output's dtype."""


@dataclass(frozen=True)
class Parity:
    """Proof that an artifact agrees with its checkpoint; without agreement there is none."""

    tolerance: float
    cases: int
    batches: tuple[int, ...]
    outputs: Mapping[str, Difference]
    rule: str = SCALED_RULE
    compared_with: str = "the checkpoint"
    scope: Mapping[str, Any] = field(default_factory=dict)
    """What was tried: sizes of the other dims, bounds of integers, samples, arithmetic."""

    @property
    def max_abs(self) -> float:
        """The largest difference of all outputs."""
        return max(difference.max_abs for difference in self.outputs.values())

    def to_json(self) -> dict[str, Any]:
        """Return the form that the report holds."""
        return {
            "verdict": "agrees",
            "rule": self.rule,
            "compared_with": self.compared_with,
            "tolerance": self.tolerance,
            "cases": self.cases,
            "batches": list(self.batches),
            **self.scope,
            "outputs": {
                name: {**asdict(difference), "verdict": "agrees"}
                for name, difference in self.outputs.items()
            },
        }


def check(
    artifact: Path,
    format: str,
    reference: Reference,
    folder: Path,
    *,
    device: str = "cpu",
    tolerance: float | None = None,
    is_quantized: bool = False,
    locate: Locate | None = None,
) -> Parity:
    """Compare the artifact with the checkpoint's outputs in a fresh process.

    Args:
        artifact: the file, complete and closed.
        format: as in `modelyard.handlers.backends`.
        reference: the checkpoint's outputs.
        folder: an empty folder for the exchange of files.
        device: where the artifact is to run.
        tolerance: largest allowed scaled difference of floats; by the outputs' dtype when absent.
        is_quantized: judge by `QUANTIZED_RULE`.
        locate: asked for the first submodule that differs, in the case that differs most.

    Raises:
        ParityError: it does not load or run, or an output differs by more than the tolerance;
            names every such output, by how much and where.
    """
    signature = reference.signature
    _write_task(folder, artifact, format, device, reference)
    result = _run_child(folder, format)
    if "error" in result:
        raise ParityError(f"{format}: {result['error']}; {_ADVICE[format]}")
    measured: list[_Measured] = [
        list(of_output) for of_output in zip(*result["cases"], strict=True)
    ]
    judged = [
        (spec, per_case, _merge(per_case, _tolerance(spec.dtype, tolerance)))
        for spec, per_case in zip(signature.outputs, measured, strict=True)
    ]
    agrees = _approximates if is_quantized else _agrees
    wrong = [(spec, per_case, merged) for spec, per_case, merged in judged if not agrees(merged)]
    if wrong:
        raise ParityError(_disagreements(format, wrong, reference, is_quantized, locate))
    return Parity(
        tolerance=max(merged.tolerance for _, _, merged in judged),
        cases=len(reference.cases),
        batches=_batches(signature, reference.cases),
        outputs={spec.name: merged for spec, _, merged in judged},
        rule=QUANTIZED_RULE if is_quantized else SCALED_RULE,
        compared_with=reference.precision,
        scope=_scope(reference),
    )


def _agrees(found: Difference) -> bool:
    """Judge a copy; a largest value that moved by more than the tolerance explains is an error."""
    is_tie = (found.top1_margin or 0.0) <= 2 * max(found.tolerance, found.max_abs)
    return found.scaled <= found.tolerance and is_tie


def _approximates(found: Difference) -> bool:
    """Judge a quantised artifact."""
    agreement = 1.0 if found.top1_agreement is None else found.top1_agreement
    return agreement >= MIN_TOP1_AGREEMENT and found.cosine >= MIN_COSINE


def _disagreements(
    format: str,
    wrong: Sequence[tuple[TensorSpec, _Measured, Difference]],
    reference: Reference,
    is_quantized: bool,
    locate: Locate | None,
) -> str:
    """Return what differs, by how much, where in the inputs and where in the model."""
    if is_quantized:
        found = "; ".join(
            f'output "{spec.name}": top-1 agreement {merged.top1_agreement}, smallest cosine '
            f"{merged.cosine:.4f}; expected {MIN_TOP1_AGREEMENT} and {MIN_COSINE} or more"
            for spec, _, merged in wrong
        )
        return f"{format}: {found}; {_QUANTIZED_ADVICE}"
    found = "; ".join(
        _disagreement(spec.name, per_case, reference.cases, merged.tolerance)
        for spec, per_case, merged in wrong
    )
    where = ""
    if locate is not None:
        where = f"; {locate(reference.cases[_worst(wrong[0][1])])}"
    is_half = any(spec.dtype == "float16" for spec in reference.signature.outputs)
    overflows = is_half and (
        "by inf" in where or not all(merged.scaled < math.inf for _, _, merged in wrong)
    )
    return f"{format}: {found}{where}; {_OVERFLOW if overflows else _ADVICE[format]}"


def _worst(measured: _Measured) -> int:
    """Choose the case that differs most; of equal ones, the one of the largest values."""
    return max(
        range(len(measured)),
        # Rounded, since the same relative difference is not the same number twice.
        key=lambda case: (float(f"{measured[case]['scaled']:.1e}"), measured[case]["max_abs"]),
    )


def _disagreement(name: str, measured: _Measured, cases: Sequence[Case], allowed: float) -> str:
    """Return by how much and where an output differs most."""
    worst = _worst(measured)
    found, largest = measured[worst]["max_abs"], measured[worst]["largest"]
    return (
        f'output "{name}": max_abs {found:.1e} ({measured[worst]["scaled"]:.1e} scaled to values '
        f"up to {largest:.3g}) over tolerance {allowed:g} at {cases[worst].probe}"
    )


def _merge(measured: _Measured, tolerance: float) -> Difference:
    rows = sum(case["rows"] for case in measured)
    return Difference(
        max_abs=max(case["max_abs"] for case in measured),
        max_rel=max(case["max_rel"] for case in measured),
        scaled=max(case["scaled"] for case in measured),
        cosine=min(case["cosine"] for case in measured),
        top1_agreement=sum(case["same"] for case in measured) / rows if rows else None,
        top1_margin=max(case["margin"] for case in measured) if rows else None,
        tolerance=tolerance,
    )


def _tolerance(dtype: str, wanted: float | None) -> float:
    if dtype not in TOLERANCES:
        return 0.0
    return TOLERANCES[dtype] if wanted is None else wanted


def _batches(signature: Signature, cases: Sequence[Case]) -> tuple[int, ...]:
    batch = signature.batch
    if isinstance(batch, Dim):
        return tuple(sorted({case.probe.sizes[batch.name] for case in cases}))
    return (batch or 1,)


def _scope(reference: Reference) -> dict[str, Any]:
    """State what was tried, for the report."""
    tried = {
        name: sorted({case.probe.sizes[name] for case in reference.cases})
        for name in reference.signature.dims
    }
    return {
        "sizes": tried,
        "integers": {name: [0, bound - 1] for name, bound in reference.below.items()},
        "kinds": sorted({case.probe.kind for case in reference.cases}),
        "samples": [{"file": sample.file, "rows": sample.rows} for sample in reference.samples],
        "plan": reference.plan.to_json(),
    }


def _write_task(
    folder: Path, artifact: Path, format: str, device: str, reference: Reference
) -> None:
    for place, case in enumerate(reference.cases):
        tensors = {"inputs": list(case.inputs), "outputs": list(case.outputs)}
        torch.save(tensors, folder / f"{place}.pt")
    task = {
        "artifact": str(artifact.absolute()),
        "format": format,
        "device": device,
        "outputs": [[spec.name, spec.dtype] for spec in reference.signature.outputs],
        "cases": [str(case.probe) for case in reference.cases],
    }
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")


def _run_child(folder: Path, format: str) -> dict[str, Any]:
    """Run this module as a program; -P keeps files of the working folder from being imported."""
    command = [sys.executable, "-P", "-m", "modelyard.exporter.parity", str(folder.absolute())]
    # Beside other work, threads that spin while they wait make the same run many times slower.
    environment = {"GOMP_SPINCOUNT": "0", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise ParityError(
            f"{format}: the process that checks the artifact ended with code {done.returncode} "
            f"and no result: {said[-1]}; {_ADVICE[format]}"
        ) from error
    return result


def main(folder: Path) -> None:
    """Run in the fresh process: open the artifact, run every case, leave `result.json`."""
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    try:
        result: dict[str, Any] = {"cases": _run_cases(folder, task)}
    except ExportError as error:
        result = {"error": str(error)}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _run_cases(folder: Path, task: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    from modelyard.handlers.backends import open_artifact

    try:
        artifact = open_artifact(Path(task["artifact"]), task["format"], task["device"])
    # Each format's library fails in its own ways; all mean that a worker could not load it.
    except Exception as error:
        raise ParityError(f"the artifact does not load: {cause(error)}") from error
    measured = []
    for place, probe in enumerate(task["cases"]):
        tensors = torch.load(folder / f"{place}.pt", weights_only=True)
        try:
            with full_precision(artifact.device), torch.no_grad():
                found = flatten(
                    artifact(*(value.to(artifact.device) for value in tensors["inputs"]))
                )
        except Exception as error:
            raise ParityError(f"the artifact does not run at {probe}: {cause(error)}") from error
        outputs = [value.cpu() for value in found.values()]
        measured.append(_measure(task["outputs"], tensors["outputs"], outputs, probe))
    return measured


def _measure(
    names: Sequence[tuple[str, str]],
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    probe: str,
) -> list[dict[str, Any]]:
    """Compare one case's outputs: their number, then dtypes and shapes, then values."""
    if len(found) != len(expected):
        listed = ", ".join(name for name, _ in names)
        raise ParityError(f"the artifact gives {len(found)} outputs, expected {listed}")
    for (name, dtype), wanted, got in zip(names, expected, found, strict=True):
        sought = f"{dtype}[{','.join(map(str, wanted.shape))}]"
        if _type(got) != sought:
            raise ParityError(f'output "{name}" is {_type(got)} at {probe}, expected {sought}')
    return [compare(wanted, got) for wanted, got in zip(expected, found, strict=True)]


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
