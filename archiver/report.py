"""Read `<artifact>.report.json`, which the exporter writes beside every artifact."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.signature import Signature, TensorSpec, ends_of, read_signature
from modelyard.archiver.untrusted.json import Fields, parse_json
from modelyard.archiver.values import End, Values, read_end

Extent = Literal["every", "random", "few", "quick", "none"]
"""How much was tried; `modelyard.handlers.proof.plan` says what each is."""

# Largest allowed scaled difference, by the dtype of the output. Integers must be equal.
# That of float64 is for models that compute in nothing coarser.
TOLERANCES = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}

_BELIEVED_TIMES = 10.0
_MAX_REPORT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Parity:
    """The rule by which an artifact agreed with its checkpoint, and the inputs on which it did.

    What the numbers mean is written in `agree` and `probes` of `modelyard.handlers.proof`.
    """

    tolerances: Mapping[str, float]
    """Output → largest scaled difference that was allowed."""
    is_quantized: bool = False
    integers: Mapping[str, Values] = field(default_factory=dict)
    """Integer input → the values that were tried, where its signature states none."""
    kinds: tuple[str, ...] = ()
    """Kinds of values that were tried; empty for all."""
    extent: Extent = "few"
    """How much was tried; reports of older versions do not all say."""
    left_out: tuple[str, ...] = ()
    """Sizes that were too large to try."""
    allowed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Output → case where the checkpoint is ill-conditioned → scaled difference allowed there."""
    cases: int = 0
    """How many inputs were compared; 0 where the report does not say."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """Output → largest scaled difference that was found, where the report says it."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Output → largest error of a case, as quantised artifacts are judged."""
    scales: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Output → what its numbers are measured by, as `base.scale` reads it."""


def ceiling(dtype: str) -> float:
    """Return the largest tolerance of a report that is believed without a word of the user's."""
    return _BELIEVED_TIMES * TOLERANCES.get(dtype, 0.0)


def joint_tolerance(one: float, other: float) -> float:
    """Return how far apart two may be that are this far from the same checkpoint.

    Args:
        one: largest scaled difference of the first.
        other: the same of the second, by whose rows the two are scaled; these may be smaller than
            the checkpoint's by as much.
    """
    return (one + other) / (1 - other) if other < 1 else math.inf


@dataclass(frozen=True)
class Report:
    """What archives and their handlers need of a report."""

    path: Path
    format: str
    """`pt2`, `onnx`, `torchscript` …"""
    artifact_sha256: str
    checkpoint_sha256: str
    signature: Signature
    parity: Parity | None
    """None in reports that prove nothing."""
    model: str = ""
    """Module and class of the checkpoint's model, as `package.module:Class`."""
    command: str = ""
    """The command line that made the artifact, with relative paths."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a decoder's text."""
    checkpoint: str = ""
    """The name of its file or folder."""
    checkpoint_kind: str = ""
    """What it was recognised as, such as `state dict`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of Python and of the packages that made the artifact."""
    probabilities: Mapping[str, bool] = field(default_factory=dict)
    """Output → whether its numbers are probabilities already, where the export found it out."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What the checkpoint calls its classes, by index."""
    table: Mapping[str, Any] = field(default_factory=dict)
    """Content of `features.json`, where the export knows the columns that the model takes."""
    trusted_operators: tuple[str, ...] = ()
    """What a program calls beside the operators of the list; its author said `--trust`."""
    tf32: bool = False
    """Whether it was proven with what CUDA rounds to TensorFloat-32, and so is served with it."""

    @property
    def tried(self) -> Signature:
        """The signature with the integers that the export found by trying."""
        return self.signature.with_values(self.parity.integers if self.parity else {})


def read_report(artifact: Path) -> Report | None:
    """Read the report beside an artifact, or return None when there is none.

    Raises:
        CannotArchive: the report is not valid JSON, or lacks a field; each problem names its field.
    """
    path = artifact.with_name(f"{artifact.name}.report.json")
    if not path.exists():
        return None
    try:
        return parse_report(path.read_bytes(), path)
    except OSError as error:
        raise CannotArchive("cannot read the report", [f"{path.name}: {error}"]) from error


def parse_report(data: bytes, path: Path) -> Report:
    """Read a report's content.

    Raises:
        CannotArchive: as `read_report`.
    """
    problems: list[str] = []
    try:
        fields = Fields(parse_json(data, _MAX_REPORT_BYTES), "", problems)
    except ValueError as error:
        raise CannotArchive("cannot read the report", [f"{path.name}: {error}"]) from error
    signature = read_signature(fields.object("signature"))
    checkpoint, versions = fields.object("checkpoint"), _optional(fields, "versions")
    details = _optional(fields, "details")
    stated, labels = _optional(details, "probabilities"), _optional(details, "labels")
    table = details.values.get("table")
    report = Report(
        path,
        format=fields.text("format"),
        artifact_sha256=fields.sha256("artifact_sha256"),
        checkpoint_sha256=checkpoint.sha256("sha256"),
        signature=signature,
        parity=_parity(fields, signature) if "parity" in fields.values else None,
        model=fields.text_or_none("model") or "",
        command=fields.text_or_none("command") or "",
        end_tokens=_end_tokens(_optional(details, "generation")),
        checkpoint=checkpoint.text_or_none("file") or "",
        checkpoint_kind=checkpoint.text_or_none("kind") or "",
        versions={name: versions.text(name) for name in versions.values},
        probabilities={name: stated.boolean(name) for name in stated.values},
        labels={index: labels.text_or_none(index) or "" for index in labels.values},
        table=table if isinstance(table, dict) else {},
        trusted_operators=_trusted(details),
        tf32=fields.boolean("tf32") if "tf32" in fields.values else False,
    )
    if problems:
        raise CannotArchive("cannot read the report", [f"{path.name}: {p}" for p in problems])
    return report


def _trusted(details: Fields) -> tuple[str, ...]:
    key = "trusted_operators"
    return tuple(details.items(key)) if key in details.values else ()


def _parity(fields: Fields, signature: Signature) -> Parity:
    parity = fields.object("parity")
    # Reports of older versions state one tolerance for all outputs, and less of the inputs.
    outputs = _optional(parity, "outputs")
    integers = _optional(parity, "integers")
    plan = _optional(parity, "plan")
    for judged in (parity, *map(outputs.object, outputs.values)):
        if judged.values.get("verdict", "agrees") != "agrees":
            judged.wrong("verdict", '"agrees", or no report', judged.values["verdict"])
    return Parity(
        tolerances={
            spec.name: (
                outputs.object(spec.name) if spec.name in outputs.values else parity
            ).number("tolerance")
            for spec in signature.outputs
        },
        is_quantized="quantize" in _optional(fields, "details").values,
        integers={
            spec.name: _range(integers, spec, signature)
            for spec in signature.inputs
            if spec.name in integers.values
        },
        kinds=tuple(parity.items("kinds")) if "kinds" in parity.values else (),
        extent=_extent(plan),
        left_out=tuple(plan.items("left_out")) if "left_out" in plan.values else (),
        allowed=_allowed(_optional(parity, "ill_conditioned")),
        cases=parity.integer("cases") if "cases" in parity.values else 0,
        largest=_stated(outputs, "scaled"),
        errors=_stated(outputs, "error"),
        scales=_scales(outputs),
    )


def _stated(outputs: Fields, key: str) -> dict[str, float]:
    each = ((name, outputs.object(name)) for name in outputs.values)
    return {name: found.number(key) for name, found in each if found.values.get(key) is not None}


def _scales(outputs: Fields) -> dict[str, Mapping[str, Any]]:
    scales: dict[str, Mapping[str, Any]] = {}
    for name in outputs.values:
        if "scale" not in (output := outputs.object(name)).values:
            continue
        stated = output.object("scale")
        shape, centre, spread = map(stated.items, ("shape", "centre", "spread"))
        are_sizes = all(type(size) is int and size > 0 for size in shape)
        are_numbers = all(type(each) in (int, float) for each in (*centre, *spread))
        if not are_sizes or not are_numbers or {len(centre), len(spread)} != {math.prod(shape)}:
            output.wrong("scale", "a shape, and a centre and a spread of each place", stated.values)
        scales[name] = stated.values
    return scales


def _allowed(ill_conditioned: Fields) -> dict[str, dict[str, float]]:
    allowed: dict[str, dict[str, float]] = {}
    for case in ill_conditioned.objects("cases") if ill_conditioned.values else ():
        allowed.setdefault(case.text("output"), {})[case.text("case")] = case.number("allowed")
    return allowed


def _extent(plan: Fields) -> Extent:
    """Read how much was tried; reports of older versions only say whether it was reduced."""
    if "extent" not in plan.values:
        reduced = plan.boolean("reduced") if "reduced" in plan.values else True
        return "few" if reduced else "every"
    stated = plan.text("extent")
    for extent in get_args(Extent):
        if stated == extent:
            return extent  # type: ignore[no-any-return]
    plan.wrong("extent", f"one of {', '.join(get_args(Extent))}", stated)
    return "few"


def _end_tokens(generation: Fields) -> tuple[int, ...]:
    found = generation.items("end_tokens") if generation.values else []
    if not all(type(token) is int for token in found):
        generation.wrong("end_tokens", "a list of whole numbers", found)
    return tuple(found)


def _optional(fields: Fields, key: str) -> Fields:
    return fields.object(key) if key in fields.values else Fields({}, fields.at(key), [])


def _range(integers: Fields, spec: TensorSpec, signature: Signature) -> Values:
    """Read `[smallest, largest]`, of which each is a number or the size of a dim."""
    found = integers.items(spec.name)
    match [end for value in found if (end := read_end(value))]:
        case [low, high] if len(found) == 2:
            values = Values(low, high)
            problem = values.problem(spec.dtype, ends_of(signature.dims))
            if problem is None:
                return values
            integers.problems.append(f"{integers.at(spec.name)}: {problem}")
        case _:
            integers.wrong(spec.name, "the smallest and the largest value", found)
    return Values(End(0), End(0))
