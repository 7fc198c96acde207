"""Read `<artifact>.report.json`, which the exporter writes beside an artifact; compare two."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

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
    path = artifact.with_name(artifact.name + REPORT)
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
    try:
        fields = Fields(parse_json(data, _MAX_REPORT_BYTES))
    except ValueError as error:
        raise CannotArchive("cannot read the report", [f"{path.name}: {error}"]) from error
    signature = read_signature(fields.object("signature"))
    checkpoint, details = fields.object("checkpoint"), fields.object("details", may_lack=True)
    table = details.values.get("table")
    report = Report(
        path,
        format=fields.text("format"),
        artifact_sha256=fields.sha256("artifact_sha256"),
        checkpoint_sha256=checkpoint.sha256("sha256"),
        signature=signature,
        parity=_parity(fields, details, signature) if "parity" in fields.values else None,
        model=fields.text_or_none("model") or "",
        command=fields.text_or_none("command") or "",
        end_tokens=_end_tokens(details.object("generation", may_lack=True)),
        checkpoint=checkpoint.text_or_none("file") or "",
        checkpoint_kind=checkpoint.text_or_none("kind") or "",
        versions=fields.mapping("versions", Fields.text, may_lack=True),
        probabilities=details.mapping("probabilities", Fields.boolean, may_lack=True),
        labels=details.mapping("labels", lambda at, key: at.text_or_none(key) or "", may_lack=True),
        table=table if isinstance(table, dict) else {},
        trusted_operators=tuple(details.items("trusted_operators", [])),
        tf32=fields.boolean("tf32", False),
    )
    if fields.problems:
        problems = [f"{path.name}: {problem}" for problem in fields.problems]
        raise CannotArchive("cannot read the report", problems)
    return report


def _parity(fields: Fields, details: Fields, signature: Signature) -> Parity:
    parity = fields.object("parity")
    # Reports of older versions state one tolerance for all outputs, and less of the inputs.
    outputs, integers, plan = (
        parity.object(key, may_lack=True) for key in ("outputs", "integers", "plan")
    )
    judged = {name: outputs.object(name) for name in outputs.values}
    for each in (parity, *judged.values()):
        if each.values.get("verdict", "agrees") != "agrees":
            each.wrong("verdict", '"agrees", or no report', each.values["verdict"])
    return Parity(
        tolerances={
            spec.name: judged.get(spec.name, parity).number("tolerance")
            for spec in signature.outputs
        },
        is_quantized="quantize" in details.values,
        integers={
            spec.name: _range(integers, spec, signature)
            for spec in signature.inputs
            if spec.name in integers.values
        },
        kinds=tuple(parity.items("kinds", [])),
        extent=_extent(plan),
        left_out=tuple(plan.items("left_out", [])),
        allowed=_allowed(parity.object("ill_conditioned", may_lack=True)),
        cases=parity.integer("cases", 0),
        largest=_stated(judged, "scaled"),
        errors=_stated(judged, "error"),
        scales={name: _scale(each) for name, each in judged.items() if "scale" in each.values},
    )


def _stated(judged: Mapping[str, Fields], key: str) -> dict[str, float]:
    return {n: each.number(key) for n, each in judged.items() if each.values.get(key) is not None}


def _scale(output: Fields) -> Mapping[str, Any]:
    stated = output.object("scale")
    shape, centre, spread = map(stated.items, ("shape", "centre", "spread"))
    are_sizes = all(type(size) is int and size > 0 for size in shape)
    are_numbers = all(type(each) in (int, float) for each in (*centre, *spread))
    if not are_sizes or not are_numbers or {len(centre), len(spread)} != {math.prod(shape)}:
        output.wrong("scale", "a shape, and a centre and a spread of each place", stated.values)
    return stated.values


def _allowed(ill_conditioned: Fields) -> dict[str, dict[str, float]]:
    allowed: dict[str, dict[str, float]] = {}
    for case in ill_conditioned.objects("cases") if ill_conditioned.values else ():
        allowed.setdefault(case.text("output"), {})[case.text("case")] = case.number("allowed")
    return allowed


def _extent(plan: Fields) -> Extent:
    """Read how much was tried; reports of older versions only say whether it was reduced."""
    if "extent" not in plan.values:
        return "few" if plan.boolean("reduced", True) else "every"
    stated = plan.text("extent")
    if stated not in get_args(Extent):
        plan.wrong("extent", f"one of {', '.join(get_args(Extent))}", stated)
        return "few"
    return cast("Extent", stated)


def _end_tokens(generation: Fields) -> tuple[int, ...]:
    found = generation.items("end_tokens") if generation.values else []
    if not all(type(token) is int for token in found):
        generation.wrong("end_tokens", "a list of whole numbers", found)
    return tuple(found)


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


# -- other artifacts of the same checkpoint in an archive, any of which may predict ----------------

ARTIFACT_KEY = "artifact"
"""Key of model-config.yaml that chooses one: it must have its report beside it, prove as large a
batch as the archive's own, and take and give the same."""
REPORT = ".report.json"

Read = Callable[[str], bytes]


def find_alternatives(
    manifest: Mapping[str, Any], names: Collection[str], read: Read
) -> Iterator[str]:
    """Yield the artifacts that could predict in place of the one that the manifest names.

    Args:
        manifest: manifest as it is in the archive.
        names: names of the archive's files.
        read: returns one file's content.
    """
    for name in sorted(names):
        other = name.removesuffix(REPORT)
        if other != name and other in names and other != manifest["model"].get("serializedFile"):
            try:
                choose_artifact(manifest, other, read)
            except CannotArchive:
                continue
            yield other


def choose_artifact(manifest: Mapping[str, Any], name: str, read: Read) -> dict[str, Any]:
    """Return the manifest as if the archive had been made with another of its artifacts.

    Args:
        manifest: manifest as it is in the archive.
        name: name of the artifact.
        read: returns one file's content; raises KeyError or OSError where there is none.

    Raises:
        CannotArchive: it cannot take that place.
    """
    chosen = deepcopy(dict(manifest))
    file, seal = chosen["model"].get("serializedFile"), chosen.get("modelyard") or {}
    if name == file:
        return chosen
    summary = f"{ARTIFACT_KEY}: {name} cannot predict in place of {file}"
    try:
        other = parse_report(read(name + REPORT), Path(name + REPORT))
        own = parse_report(read(seal["report"]), Path(seal["report"]))
    except (KeyError, OSError) as error:
        reason = f"{error.args[-1] if error.args else error}: expected a report beside each of both"
        raise CannotArchive(summary, [reason]) from error
    if problem := difference(own, other) or _shortage(own, other):
        raise CannotArchive(summary, [problem])
    chosen["model"]["serializedFile"] = name
    seal["report"] = name + REPORT
    return chosen


def difference(report: Report, other: Report) -> str | None:
    """Return why two artifacts are not the same model; None where they are."""
    if other.checkpoint_sha256 != report.checkpoint_sha256:
        return (
            f"their checkpoints differ (SHA-256 {other.checkpoint_sha256[:12]}… and "
            f"{report.checkpoint_sha256[:12]}…); export both from one checkpoint"
        )
    ours, theirs = _static(report.signature.inputs), _static(other.signature.inputs)
    if ours != theirs:
        return f"it takes {theirs} instead of {ours}; export both with the same --input"
    return None


def _shortage(report: Report, other: Report) -> str | None:
    ours, theirs = _static(report.signature.outputs), _static(other.signature.outputs)
    if ours != theirs:
        return f"it gives {theirs} instead of {ours}; export both with the same --output"
    if other.parity is None:
        return "its report proves nothing; write it with `modelyard export`"
    proven, wanted = other.signature.proven_batch, report.signature.proven_batch
    if wanted is not None and proven is not None and proven < wanted:
        return f"it is proven for batches of {proven}, not {wanted}; export both alike"
    return None


def _static(tensors: Iterable[TensorSpec]) -> str:
    """Write dtypes and shapes without the names, in which two exports may differ."""
    return ", ".join(
        f"{tensor.dtype}[{','.join(str(n) if isinstance(n, int) else '*' for n in tensor.shape)}]"
        for tensor in tensors
    )
