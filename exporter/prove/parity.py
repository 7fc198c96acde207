"""The same inputs through checkpoint and artifact → differences, a verdict and its report.

The artifact runs in the fresh process of `checker`, which gets one case at a time: nothing grows
with their number. Both are judged by the rule of `handlers.proof.agree`.
"""

import hashlib
import json
import math
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from modelyard.archiver.signature import Dim, Signature
from modelyard.base.disk import flush
from modelyard.exporter.errors import ParityError
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.limits import Unusual, find_limits, with_limits
from modelyard.exporter.prove.loss import MAX_LOSS, Loss, LossLearner
from modelyard.exporter.prove.reference import Case, Cases, Reference
from modelyard.exporter.request import report_path
from modelyard.handlers.proof.agree import (
    ILL_CONDITIONED_RULE,
    ORDINARY_KINDS,
    QUANTIZED_RULE,
    SCALED_RULE,
    Difference,
    Rule,
    allowance,
    compare,
    disagreement,
    rule_for,
    worst,
)
from modelyard.handlers.proof.probes import Probe

SCHEMA = 1

_ADVICE = {
    "pt2": "forward() must do the same while it is exported as when it runs",
    "onnx": "export --format pt2, which keeps torch's own operators",
    "torchscript": "forward() must do the same in TorchScript, where a trace keeps one branch only",
    "aoti": "export --format pt2, which runs torch's own kernels",
}
_CHOICE = (
    "forward() chooses by a size, and went the way for {}: give --input a range in which that "
    "holds, use torch.cond, or export --format torchscript"
)
_COARSE = (
    "this --dtype is too coarse for the model: keep fp32, or give the --tolerance that is meant"
)
_OVERFLOW = "float16 ends at 65504: use --dtype bf16, or keep fp32"
_QUANTIZED_ADVICE = "this model needs its full precision: export without --quantize"

Locate = Callable[[Case], str]
"""Names the first submodule that differs for a case, or says why it cannot be named."""

_Judged = tuple[str, Rule, list[dict[str, Any]]]
"""An output, its rule, and what `compare` found case by case."""


@dataclass(frozen=True)
class IllConditioned:
    """A case in which the checkpoint's own output moves; all are scaled differences."""

    output: str
    case: str
    moved: float
    """The amount by which it moves when its sums are rounded otherwise."""
    allowed: float
    found: float
    """The distance of the artifact from it."""


@dataclass(frozen=True)
class Parity:
    """Proof that an artifact agrees with its checkpoint; without agreement there is none."""

    tolerance: float
    cases: int
    batches: tuple[int, ...]
    outputs: Mapping[str, Difference]
    rule: str = SCALED_RULE
    compared_with: str = "the checkpoint"
    ill_conditioned: Sequence[IllConditioned] = ()
    scope: Mapping[str, Any] = field(default_factory=dict)
    """What was tried: sizes of the other dims, bounds of integers, samples, arithmetic."""
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Output → what its numbers are measured by."""
    unusual: Unusual = field(default_factory=Unusual)
    """What it does on values that nobody promised."""

    losses: Mapping[str, Loss] = field(default_factory=dict)
    """Output → what a lower precision loses of it."""
    losses_on: str = ""
    """Rows on which that was measured."""

    @property
    def loss(self) -> float:
        """The largest loss of all outputs; 0 where none was measured."""
        return max((each.loss for each in self.losses.values()), default=0.0)

    def outside(self, most: float | None) -> list[str]:
        """Name the outputs that lose more than a lower precision may without a word."""
        most = MAX_LOSS if most is None else most
        return [
            f'"{name}" loses more than {most:.2%} by the lower precision, on {each.rows} '
            f"{self.losses_on}: {lost}"
            for name, each in self.losses.items()
            if (lost := each.outside(most))
        ]

    @property
    def max_abs(self) -> float:
        """The largest difference of all outputs."""
        return max(difference.max_abs for difference in self.outputs.values())

    def to_json(self) -> dict[str, Any]:
        """Return the form that the report holds."""
        verdict = {"verdict": "agrees"}
        stated = ("rule", "compared_with", "tolerance", "cases", "batches")
        found = {**verdict, **{name: getattr(self, name) for name in stated}, **self.scope}
        found |= {"batches": list(self.batches), "unusual": self.unusual.to_json()}
        if self.ill_conditioned:
            cases = [asdict(case) for case in self.ill_conditioned]
            found["ill_conditioned"] = {"rule": ILL_CONDITIONED_RULE, "cases": cases}
        outputs = {
            name: {**asdict(each), **verdict, "scale": self.scales.get(name, {})}
            for name, each in self.outputs.items()
        }
        for name, loss in self.losses.items():
            outputs[name]["loss"] = {**asdict(loss), "loss": loss.loss, "on": self.losses_on}
        return {**found, "outputs": outputs}


@dataclass(frozen=True)
class ExportReport:
    """One artifact and the proof that it agrees with its checkpoint."""

    artifact: Path
    format: str
    artifact_sha256: str
    artifact_bytes: int
    signature: Signature
    parity: Parity
    checkpoint: str
    """The checkpoint's file name."""
    checkpoint_sha256: str
    model: str
    """`--model` without its folder."""
    model_args: Mapping[str, Any]
    device: str
    details: Mapping[str, object]
    """What one format alone has to say, such as how TorchScript was made."""
    command: str
    """The command line that makes this artifact, without absolute paths."""
    tf32: bool = False
    """Whether CUDA rounds what the artifact computes; the checkpoint is computed without."""
    checkpoint_kind: str = "state dict"
    checkpoint_details: Mapping[str, object] = field(default_factory=dict)
    """How the checkpoint was read: loader, weights chosen, prefixes stripped, names refused."""
    warnings: Sequence[str] = ()
    """What the author may want to change in the model."""

    @property
    def path(self) -> Path:
        """Where the report lies: beside the artifact."""
        return report_path(self.artifact)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the report file; equal exports give equal content."""
        return {
            "schema": SCHEMA,
            "format": self.format,
            "artifact": self.artifact.name,
            "artifact_sha256": self.artifact_sha256,
            "artifact_bytes": self.artifact_bytes,
            "signature": with_limits(self.signature, self.parity.unusual.limits).to_json(),
            "parity": self.parity.to_json(),
            "checkpoint": {
                "file": self.checkpoint,
                "kind": self.checkpoint_kind,
                "sha256": self.checkpoint_sha256,
                **self.checkpoint_details,
            },
            "model": self.model,
            "model_args": dict(self.model_args),
            "device": self.device,
            "tf32": self.tf32,
            "details": dict(self.details),
            "warnings": list(self.warnings),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "onnx", "onnxruntime")},
            },
            "command": self.command,
        }


def sha256(path: Path) -> str:
    """Digest a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(report: ExportReport, finished: Path) -> None:
    """Move a finished artifact to its place, with its report beside it.

    Args:
        report: names the place.
        finished: the artifact, in a folder of the same file system.

    Both are whole on disk before either has its name. The report holds the artifact's digest, so
    that a power cut between the two renames cannot leave a pair that seems to belong together.
    """
    draft = report_path(finished)
    # Not NaN: JSON has none, and a proof of parity needs none.
    text = json.dumps(report.to_json(), indent=2, allow_nan=False) + "\n"
    draft.write_text(text, encoding="utf-8")
    for path in (finished, draft, finished.parent):
        flush(path)
    finished.replace(report.artifact)
    draft.replace(report.path)
    flush(report.artifact.parent)


def check(
    artifact: Path,
    format: str,
    reference: Reference,
    checker: Checker,
    *,
    device: str = "cpu",
    tolerance: float | None = None,
    is_quantized: bool = False,
    locate: Locate | None = None,
    trusted: Sequence[str] = (),
    tf32: bool = False,
) -> Parity:
    """Compare the artifact with the checkpoint's outputs in a fresh process.

    Args:
        artifact: the file, complete and closed.
        format: its name in `modelyard.handlers.models.backends`.
        reference: the checkpoint's outputs.
        checker: the process.
        device: where the artifact is to run.
        tolerance: largest allowed scaled difference of floats; by the outputs' dtype when absent,
            and by what they are computed in.
        is_quantized: judge as an approximation.
        locate: asked for the first submodule that differs, in the case that differs most.
        trusted: operators that a program may call beside those of the list.
        tf32: whether CUDA rounds what the artifact computes, and so later answers.

    Raises:
        ParityError: it does not load or run, or an output differs by more than the tolerance;
            names every such output, by how much and where.
    """
    signature, probes = reference.signature, reference.cases.probes
    rules = {
        spec.name: rule_for(spec.dtype, tolerance, is_quantized, reference.is_double)
        for spec in signature.outputs
    }
    by_case: list[list[dict[str, Any]]] = []
    is_coarse = is_quantized or reference.is_lowered
    losses = {name: LossLearner() for name in rules if is_coarse}

    def open_artifact() -> None:
        checker.open(artifact, format, device, trusted=trusted, tf32=tf32)

    try:
        open_artifact()
        for _ in probes:
            by_case.append(_measure(checker, reference, rules, len(by_case), losses.values()))
    except ParityError as error:
        guard = reference.cases.why(probes[len(by_case)].sizes) if by_case else ""
        advice = _CHOICE.format(guard) if guard else _ADVICE[format]
        raise ParityError(f"{format}: {error}; {advice}") from error
    judged: list[_Judged] = [
        (name, rule, list(measured))
        for (name, rule), measured in zip(rules.items(), zip(*by_case, strict=True), strict=True)
    ]
    # An approximation, or other dtypes than the checkpoint's, are judged by their own tolerance.
    ill: list[IllConditioned] = []
    if not is_coarse:
        judged, ill = _allow_ill_conditioned(judged, reference.cases)
    wrong = [(each, text) for each in judged if (text := disagreement(*each, probes))]
    if wrong:
        differences = "; ".join(text for _, text in wrong)
        if is_quantized:
            raise ParityError(f"{format}: {differences}; {_QUANTIZED_ADVICE}")
        _, rule, measured = wrong[0][0]
        places = rule.wrong(measured, probes)
        place = places[worst([measured[place] for place in places])]
        where = f"; {locate(reference.cases[place])}" if locate else ""
        if guard := reference.cases.why(probes[place].sizes):
            raise ParityError(f"{format}: {differences}; {_CHOICE.format(guard)}")
        advice = _COARSE if reference.is_lowered else _ADVICE[format]
        if _overflows(judged, reference, where):
            advice = _OVERFLOW
        raise ParityError(f"{format}: {differences}{where}; {advice}")
    return Parity(
        tolerance=max(rule.tolerance for rule in rules.values()),
        cases=len(probes),
        batches=_batches(signature, probes),
        outputs={name: rule.merge(measured, probes) for name, rule, measured in judged},
        rule=QUANTIZED_RULE if is_quantized else SCALED_RULE,
        compared_with=reference.compared_with,
        ill_conditioned=ill,
        scope=_scope(reference),
        scales={
            name: scale.to_json()
            for name, scale in zip(rules, reference.cases.scales.of(), strict=True)
        },
        unusual=find_limits(checker, open_artifact, reference, list(rules.values())),
        losses={name: learner.loss() for name, learner in losses.items()},
        losses_on="rows of the samples" if reference.samples else "made-up rows",
    )


def _measure(
    checker: Checker,
    reference: Reference,
    rules: Mapping[str, Rule],
    place: int,
    losses: Collection[LossLearner],
) -> list[dict[str, Any]]:
    """Compare one case's outputs: their number, then dtypes and shapes, then values."""
    case = reference.cases[place]
    outputs, scales = reference.signature.outputs, reference.cases.scales.of(case.probe.kind)
    found = checker.run_alike(str(case.probe), case.inputs, outputs, case.outputs)
    measured = [
        compare(expected, tensor, rule.tolerance, scale)
        for rule, expected, tensor, scale in zip(
            rules.values(), case.outputs, found, scales, strict=True
        )
    ]
    if losses and place in _loss_places(reference):
        for learner, one, other in zip(losses, case.outputs, found, strict=True):
            learner.see(one, other)
    return measured


def _loss_places(reference: Reference) -> Collection[int]:
    """Return the cases of ordinary values: those of samples if there are."""
    kinds = [probe.kind for probe in reference.cases.probes]
    if not (given := len(reference.samples)):
        return [place for place, kind in enumerate(kinds) if kind == "random"]
    # Behind the samples come the same rows in other batches.
    first = kinds.index("sample")
    return range(first, first + given)


def _allow_ill_conditioned(
    judged: Sequence[_Judged], cases: Cases
) -> tuple[list[_Judged], list[IllConditioned]]:
    """Allow the cases that differ what the checkpoint's own answer moves in them, if they are such.

    The one that differs most is asked about first: where it is not such, the artifact is wrong, and
    that case is named. Of the others, which may differ more, those are left out that are such.
    """
    probes = cases.probes
    differ = {place for _, rule, measured in judged for place in rule.wrong(measured, probes)}
    by_size = sorted(
        differ,
        key=lambda place: max(measured[place]["scaled"] for *_, measured in judged),
        reverse=True,
    )
    ordinary = [place for place in by_size if probes[place].kind in ORDINARY_KINDS]
    found: list[IllConditioned] = []
    for places in (ordinary, [place for place in by_size if place not in ordinary]):
        for place in places:
            if not (ill := _ill_conditioned(judged, cases, place)):
                break
            found += ill
    lenient: list[_Judged] = []
    for name, rule, measured in judged:
        allowed = {case.case: case.allowed for case in found if case.output == name}
        lenient.append((name, replace(rule, allowed=allowed), measured))
    return lenient, found


def _ill_conditioned(judged: Sequence[_Judged], cases: Cases, place: int) -> list[IllConditioned]:
    """Return what is allowed in a case that differs; nothing where an output goes further."""
    probe = cases.probes[place]
    found = []
    for (name, rule, measured), moved in zip(judged, cases.sensitivity(place), strict=True):
        apart = measured[place]["scaled"]
        if apart > rule.tolerance:
            allowed = allowance(rule, probe.kind, moved)
            if allowed is None or apart > allowed:
                return []
            found.append(IllConditioned(name, str(probe), moved, allowed, apart))
    return found


def _overflows(judged: Sequence[_Judged], reference: Reference, where: str) -> bool:
    """Return whether what differs is a number that float16 does not hold."""
    is_half = any(spec.dtype == "float16" for spec in reference.signature.outputs)
    scaled = (case["scaled"] for _, _, measured in judged for case in measured)
    return is_half and ("by inf" in where or not all(map(math.isfinite, scaled)))


def _batches(signature: Signature, probes: Sequence[Probe]) -> tuple[int, ...]:
    batch = signature.batch
    if isinstance(batch, Dim):
        return tuple(sorted({probe.sizes[batch.name] for probe in probes}))
    return (batch or 1,)


def _scope(reference: Reference) -> dict[str, Any]:
    """State what was tried, for the report."""
    probes = reference.cases.probes
    dims = reference.signature.dims
    return {
        "sizes": {name: sorted({probe.sizes[name] for probe in probes}) for name in dims},
        "integers": {
            name: [stated["min"], stated["max"]]
            for name, values in reference.found.items()
            if (stated := values.to_json())
        },
        "kinds": sorted({probe.kind for probe in probes}),
        "samples": [{"file": sample.file, "rows": sample.rows} for sample in reference.samples],
        "plan": reference.plan.to_json(),
    }
