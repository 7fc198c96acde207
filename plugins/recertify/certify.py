"""An archive's artifacts, run here and in other environments, and judged by the archive's own rule.

The inputs are those of the export, made anew, and what the model reads for the golden requests. Two
runs of an artifact are two copies of it: `handlers.proof.copies` judges them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelyard.archiver.errors import ArchiveError, DoesNotRun
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.proven import DIFFERS, SAME, WITHIN, find_difference, read_reports
from modelyard.archiver.read import Archive, open_archive
from modelyard.archiver.replay import UNPACKED, replay
from modelyard.archiver.report import Parity, Report
from modelyard.archiver.untrusted.container import OpenFile
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.verify import verify_archive
from modelyard.exporter.prove.locate import expose, first_tolerance
from modelyard.handlers.errors import HandlerError, UnsafeProgram
from modelyard.handlers.judge.check import check
from modelyard.handlers.judge.onnx_file import check_onnx
from modelyard.handlers.models.backends import detect_format, dtype_name, type_name
from modelyard.handlers.proof.agree import Rule, allowance, compare, disagreement
from modelyard.handlers.proof.copies import judge, repeated_probes
from modelyard.handlers.proof.probes import Probe, make_case
from modelyard.handlers.proof.witness import describe_difference, restored
from modelyard.plugins.recertify.environments import Environment, plan
from modelyard.plugins.recertify.further import Further, further_inputs, rounded_otherwise
from modelyard.plugins.recertify.runs import Case, Outcome, Program, Runners, Where

NOT_RUN, UNTOUCHED = "not run", "untouched"
_LOOSE = 4.0
"""Times what an answer moves by when it is rounded otherwise here, that it may move by there."""


@dataclass(frozen=True)
class Row:
    """What came of one artifact of an archive in one environment."""

    archive: Path
    digest: str
    """Digest of the archive that was run; empty where it cannot be opened."""
    environment: str
    verdict: str
    """`same bits`, `within`, `differs`, `not run`, or `untouched` where nothing of the archive runs
    on what was asked for."""
    artifact: str = ""
    artifact_sha256: str = ""
    runtime: str = ""
    there: str = ""
    """Its version."""
    here: str = ""
    """What it is compared with: `onnxruntime 1.31.1`."""
    cases: int = 0
    golden: int = 0
    """How many of the cases are what the model reads for golden requests."""
    further: int = 0
    """How many of them the export did not try."""
    share: float = 0.0
    """Largest difference over what the archive's rule allows; may be infinite."""
    max_abs: float = 0.0
    sample: str = ""
    """The case that shows it most."""
    moved: int = 0
    """Rows whose largest value is at another place."""
    first: str = ""
    """The first value inside the model that differs."""
    why: str = ""
    """Sentences: what differs, or why nothing was run."""
    note: str = ""
    """What holds back a line of the archive."""
    seconds: float = 0.0
    """Time of the model there."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What the runner says of its environment."""
    written: str = ""
    """The archive's digest with a line about this."""


@dataclass(frozen=True)
class GoldenCase(Probe):
    """What the model reads for a golden request."""

    request: str
    values: Sequence[Tensor]
    recorded: Mapping[str, Any]
    """What the archive says of it, as `handlers.proof.witness` has it; may be empty."""

    what: str = "golden request"

    def __str__(self) -> str:
        return f"{self.what} {self.request}"


@dataclass(frozen=True)
class Subject:
    """An artifact with its report, and what it is given."""

    program: Program
    report: Report
    parity: Parity
    probes: Sequence[Probe]
    loose: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """A further input, and the place of an output → how far that may move whatever the rule."""

    @property
    def golden(self) -> list[GoldenCase]:
        """What the model reads for golden requests."""
        return [probe for probe in self.probes if isinstance(probe, GoldenCase)]

    def inputs(self, probe: Probe) -> Sequence[Tensor]:
        """Return the inputs of a case."""
        if isinstance(probe, GoldenCase):
            return probe.values
        of = self.report.tried
        return probe.inputs(of) if isinstance(probe, Further) else make_case(of, probe)

    def named(self, inputs: Sequence[Tensor]) -> Case:
        """Return inputs as a runner gets them."""
        return dict(zip(self.program.inputs, inputs, strict=True))

    def cases(self) -> Iterator[Case]:
        """Yield the inputs of all cases."""
        return (self.named(self.inputs(probe)) for probe in self.probes)

    def outputs(self, of: Outcome) -> Iterator[list[Tensor]]:
        """Yield what was computed for each case.

        Raises:
            ArchiveError: there are not as many outputs as the report says.
        """
        expected = len(self.program.outputs)
        for place in range(len(self.probes)):
            given = list(of.outputs(place).values())
            if len(given) != expected:
                raise ArchiveError(f"{len(given)} outputs are given; expected {expected}")
            yield given

    def judge(
        self, found: Outcome, expected: Outcome
    ) -> tuple[dict[str, Rule], dict[str, list[dict[str, Any]]]]:
        """Return the rule of each output, and what `agree.compare` says of it in each case."""
        pairs = zip(self.probes, self.outputs(expected), self.outputs(found), strict=True)
        nearer = (
            [
                _nearer(*two, self.loose.get((str(probe), at), 0.0))
                for at, two in enumerate(zip(one, other, strict=True))
            ]
            for probe, one, other in pairs
        )
        wanted = partial(self.outputs, expected)
        return judge(self.parity, self.parity, self.probes, nearer, wanted)

    def is_as_recorded(self, outcome: Outcome) -> bool:
        """Return whether the model gives for golden requests what it gave when it was archived."""
        return not any(
            describe_difference(
                probe.recorded, [(tuple(probe.values), tuple(given))], self.report
            )
            for probe, given in zip(self.probes, self.outputs(outcome), strict=True)
            if isinstance(probe, GoldenCase) and probe.recorded
        )  # fmt: skip


def recertify(
    paths: Sequence[Path], environments: Sequence[Environment], draws: int = 1
) -> Iterator[list[Row]]:
    """Yield the rows of each archive; environments are made before.

    Args:
        paths: archives.
        environments: where they are run, beside here.
        draws: how many further inputs of each kind.

    Raises:
        NothingCompared: an environment cannot be made.
    """
    for environment in environments:
        environment.build()
    with Runners() as runners:
        for path in paths:
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(runners.folder()))
                try:
                    archive = stack.enter_context(open_archive(path, staging=folder))
                    yield list(certify(archive, folder, environments, runners, draws))
                except (ArchiveError, HandlerError) as error:
                    said = " ".join(str(error).split())
                    yield [Row(path, "", each.name, NOT_RUN, why=said) for each in environments]


def certify(
    archive: Archive,
    folder: Path,
    environments: Sequence[Environment],
    runners: Runners,
    draws: int = 1,
    golden: Sequence[GoldenCase] | None = None,
) -> Iterator[Row]:
    """Yield what comes of an archive's artifacts in each environment.

    Args:
        archive: open, so that its digests agree.
        folder: an empty folder of the runners', in which it is unpacked.
        environments: made already.
        runners: run it.
        draws: how many further inputs of each kind.
        golden: instead of what the model reads for the archive's golden requests.

    Raises:
        ArchiveError, HandlerError: nothing of it can be run or compared.
    """
    unpacked = folder / UNPACKED
    archive.unpack(unpacked)
    reports = dict(_reports(archive))
    formats = {report.format for report in reports.values()}
    for environment in environments:
        if not any(formats & {*each.formats} for each in environment.runtimes):
            why = f"it holds {', '.join(sorted(formats))}, which none of that runs"
            yield Row(archive.path, archive.digest, environment.name, UNTOUCHED, why=why)
    for name, report in reports.items():
        runs = [
            (environment, runtime)
            for environment in environments
            for runtime in environment.runtimes
            if report.format in runtime.formats
        ]
        if not runs:
            continue
        golden = _golden(archive, unpacked) if golden is None else golden
        subject = _subject(unpacked / name, report, golden)
        further = further_inputs(report.tried, subject.parity.extent, subject.probes, draws)
        subject, expected = _run_here(subject, list(further), runners)
        if name == archive.manifest.serialized_file and not subject.is_as_recorded(expected):
            _replayed(unpacked, archive.manifest)  # a handler may give something else on purpose
        for environment, runtime in runs:
            row = Row(archive.path, archive.digest, environment.name, NOT_RUN, name,
                      report.artifact_sha256, runtime.name)  # fmt: skip
            try:
                yield _compare(row, subject, expected, (runtime, environment.python), runners)
            except (ArchiveError, HandlerError) as error:
                yield replace(row, why=" ".join(str(error).split()))
        expected.discard()


def certify_batch(
    archive: Archive, name: str, read: Sequence[Mapping[str, str]], versions: Sequence[str]
) -> list[Row]:
    """Return what comes of a batch that the model read, and of the export's inputs, elsewhere.

    Args:
        archive: open.
        name: what the batch is called.
        read: its inputs, as `handlers.proof.witness.inputs_read` has them; may be none.
        versions: as `plan` takes them.

    Raises:
        ArchiveError, HandlerError: nothing of it can be run or compared.
    """
    environments = plan(versions)
    for environment in environments:
        environment.build()
    inputs = _whole(read)
    cases = [GoldenCase("sample", {}, name, inputs, {}, "the batch")] if inputs else []
    with Runners() as runners, runners.folder() as folder:
        return list(certify(archive, Path(folder), environments, runners, 0, cases))


def read_subject(archive: Archive, folder: Path, format: str) -> Subject:
    """Return an archive's artifact of a format, unpacked below an empty folder.

    Raises:
        ArchiveError: it holds none with a proof, or nothing to compare it on.
        HandlerError: the file is not what it says.
    """
    unpacked = folder / UNPACKED
    archive.unpack(unpacked)
    for name, report in _reports(archive):
        if report.format == format:
            return _subject(unpacked / name, report, _golden(archive, unpacked))
    raise ArchiveError(
        f"{archive.path.name} holds no {format} with a report; export it with --format {format}"
    )


def _reports(archive: Archive) -> Iterator[tuple[str, Report]]:
    """Yield the artifacts that the archive holds a proof of, with their reports.

    Raises:
        ArchiveError: it holds none, one of something else, or one that nothing would differ by.
    """
    if problems := [each.problem for each in verify_archive(archive, run=False) if each.problem]:
        raise ArchiveError("; ".join(problems))
    reports = read_reports(archive.manifest, archive.read)
    proven = {name: report for name, report in reports.items() if report.parity is not None}
    if not proven:
        raise ArchiveError(
            "it holds no proof of an export, so nothing says how far an answer may move; archive "
            "what `modelyard export` wrote"
        )
    yield from proven.items()


def _golden(archive: Archive, unpacked: Path) -> list[GoldenCase]:
    """Return what the model reads: as the archive holds it, or else by answering the requests.

    Raises:
        ArchiveError: they had to be answered, and one is answered otherwise.
    """
    seal = archive.manifest.modelyard
    found = []
    for golden in seal.golden if seal else ():
        recorded = parse_json(archive.read(golden.expected)).get("model", {})
        if not (inputs := _whole(recorded.get("inputs", ()))):
            return _replayed(unpacked, archive.manifest)
        found.append(GoldenCase("sample", {}, golden.request, inputs, recorded))
    return found


def _replayed(unpacked: Path, manifest: Manifest) -> list[GoldenCase]:
    """Answer the golden requests here, behind walls, and return what the model reads.

    Raises:
        ArchiveError: it does not run here, or answers one of them otherwise.
    """
    results = replay(unpacked, manifest, device="cpu", inputs=True).golden
    for each in results:
        if each.difference:
            raise ArchiveError(
                f"{each.golden.request} gets another answer here already: {each.difference}"
            )
    return [
        GoldenCase("sample", {}, each.golden.request, _whole(each.seen.get("inputs", ())), {})
        for each in results
    ]


def _whole(stated: Sequence[Mapping[str, str]]) -> list[Tensor]:
    """Return tensors that are there whole: none where one is not."""
    tensors = [tensor for each in stated if (tensor := restored(each)) is not None]
    return tensors if len(tensors) == len(stated) else []


def _subject(path: Path, report: Report, golden: Sequence[GoldenCase]) -> Subject:
    """Judge an artifact's file, and choose what it is given of what the archive says."""
    assert report.parity is not None, "others have no row"
    if (found := detect_format(path)) != report.format:
        raise ArchiveError(f"{path.name} holds {found}; its report says {report.format}")
    findings = []
    if report.format == "onnx":
        findings = check_onnx(path)[0]
    elif report.format == "pt2":
        with contextlib.closing(OpenFile(os.open(path, os.O_RDONLY))) as file:
            findings = check(file, report.trusted_operators)
    if findings:
        raise UnsafeProgram(path.name, findings, f"a file of {report.format} and nothing else")
    takes = [(spec.dtype, len(spec.shape)) for spec in report.signature.inputs]
    fitting = [
        read
        for read in golden
        if [(dtype_name(each.dtype), each.dim()) for each in read.values] == takes
    ]
    probes = (*repeated_probes(report), *fitting)
    if not probes:
        raise ArchiveError(
            f"{path.name}: its export used samples alone, which no archive holds, and it has no "
            "golden request; archive it with --example FILE"
        )
    signature = report.signature
    names = (tuple(spec.name for spec in specs) for specs in (signature.inputs, signature.outputs))
    return Subject(Program(path, report.format, *names), report, report.parity, probes)


def _run_here(
    subject: Subject, further: Sequence[Further], runners: Runners
) -> tuple[Subject, Outcome]:
    """Run a subject as a server does, on further inputs too, and say what it gives.

    How far an answer to these moves here, when they are rounded otherwise, decides what it may move
    by elsewhere, as it does in an export.
    """
    whole = replace(subject, probes=(*subject.probes, *further))
    here = partial(runners.run, subject.program.here, subject.program)
    rounded = (subject.named(rounded_otherwise(whole.inputs(probe))) for probe in further)
    try:
        outcome = here(itertools.chain(whole.cases(), rounded))
    except DoesNotRun:  # a number may be an index, say; without them it is not run, or is
        return subject, here(subject.cases())
    at, own = outcome.places, len(subject.probes)
    expected = replace(outcome, places=at[: len(whole.probes)])
    moved = replace(outcome, places=(*at[:own], *at[len(whole.probes) :]))
    rules, measured = whole.judge(moved, expected)
    kept = [
        place for place in range(len(whole.probes))
        if all(math.isfinite(each[place]["scaled"]) for each in measured.values())
    ]  # fmt: skip
    loose = {
        (str(whole.probes[place]), at_output): _LOOSE * each[place]["max_abs"]
        for at_output, (name, each) in enumerate(measured.items()) for place in kept
        if allowance(rules[name], whole.probes[place].kind, each[place]["scaled"]) is not None
    }  # fmt: skip
    steady = replace(whole, probes=[whole.probes[place] for place in kept], loose=loose)
    return steady, replace(expected, places=tuple(at[place] for place in kept))


def _compare(row: Row, subject: Subject, expected: Outcome, there: Where, runners: Runners) -> Row:
    """Run a subject there, and judge what it gives by what it gave here."""
    runtime, here = there[0], subject.program.here[0].name
    found = runners.run(there, subject.program, subject.cases())
    places = range(len(subject.probes))
    rules, of_all = subject.judge(found, expected)
    said = (disagreement(name, rule, of_all[name], subject.probes) for name, rule in rules.items())
    apart = list(filter(None, said))
    same = True
    for one, other in zip(subject.outputs(expected), subject.outputs(found), strict=True):
        kinds = [[dtype_name(each.dtype) for each in given] for given in (one, other)]
        if kinds[0] != kinds[1]:
            apart.append(f"its outputs are {kinds[1]}; expected {kinds[0]}")
            break
        same &= all(map(_same_bits, one, other))
    measured = [_measure(rules, of_all, place, str(subject.probes[place])) for place in places]
    worst = max(places, key=lambda place: measured[place][:2])
    first = _first(subject, there, measured, runners) if apart else ""
    found.discard()
    return replace(
        row,
        verdict=DIFFERS if apart else SAME if same else WITHIN,
        here=f"{here} {expected.told[here]}",
        there=found.told.get(runtime.name.partition(":")[0], ""),
        cases=len(subject.probes),
        golden=len(subject.golden),
        further=sum(isinstance(probe, Further) for probe in subject.probes),
        share=measured[worst][0],
        max_abs=max(each[1] for each in measured),
        sample="" if same else str(subject.probes[worst]),
        moved=sum(each[2] for each in measured),
        first=first,
        why="; ".join(apart),
        note=find_difference(subject.report, {}),
        seconds=float(found.told["seconds"]),
        versions={
            key: text for key, text in found.told.items() if key not in ("seconds", "values")
        },
    )


def _nearer(expected: Tensor, found: Tensor, by: float) -> Tensor:
    """Return numbers that are nearer to what is expected by so much."""
    if not by or expected.shape != found.shape:
        return found
    one, two = expected.double(), found.double()
    near = one + (two - one).sign() * ((two - one).abs() - by).clamp(min=0)
    return torch.where(one == two, two, near).to(found.dtype)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [each.flatten().view(torch.uint8) for each in (one, other)]
    return one.shape == other.shape and torch.equal(*bits)


def _measure(
    rules: Mapping[str, Rule], of_all: Mapping[str, Any], place: int, case: str
) -> tuple[float, float, int]:
    """Return of a case: share of what is allowed, largest difference, rows that moved."""
    found = [(rule, of_all[name][place]) for name, rule in rules.items()]
    return (
        max(_share(rule, each, case) for rule, each in found),
        max(each["max_abs"] for _, each in found),
        sum(each["rows"] - each["same"] for _, each in found),
    )


def _share(rule: Rule, measured: Mapping[str, Any], case: str) -> float:
    scaled, allowed = measured["scaled"], rule.allowed.get(case, rule.tolerance)
    if rule.is_quantized:
        scaled, allowed = measured["error"], rule.max_error
    return scaled / allowed if allowed else math.inf if scaled else 0.0


def _first(
    subject: Subject, there: Where, measured: Sequence[tuple[float, float, int]], runners: Runners
) -> str:
    """Name the first value that differs, in the smallest case that does; a request's before all."""
    differing = [place for place, each in enumerate(measured) if each[0] > 1] or [0]
    cases = {place: subject.inputs(subject.probes[place]) for place in differing}
    sizes = {place: sum(each.numel() for each in cases[place]) for place in differing}
    requests = [place for place in cases if isinstance(subject.probes[place], GoldenCase)]
    place = min(requests or cases, key=sizes.__getitem__)
    program, case = subject.program, subject.named(cases[place])
    layers: dict[str, tuple[str, str]] = {}
    try:
        if program.format == "onnx":
            program, layers = _exposed(program)
        outcomes = [
            runners.run(where, program, [case], every_value=True) for where in (program.here, there)
        ]
    except (ArchiveError, HandlerError, ValueError) as error:  # protobuf's, of 2 GB
        return f"where it first differs cannot be had: {error}"
    one, other = (each.outputs(0) for each in outcomes)
    layers |= json.loads(outcomes[0].told.get("values", "{}"))
    for name, value in one.items():
        found = other.get(name)
        if found is None:
            continue
        apart = compare(value, found)["scaled"]
        if apart > first_tolerance(value.dtype):
            operator, layer = layers.get(name, ("", ""))
            of = ", ".join(filter(None, (operator, layer)))
            by = f"by {apart:.1e}" if found.shape == value.shape else f"there {type_name(found)}"
            return f'"{name}" ({of}), {type_name(value)}, {by} at {subject.probes[place]}'
    return "no value inside differs, as soon as each of them is looked at"


def _exposed(program: Program) -> tuple[Program, dict[str, tuple[str, str]]]:
    """Write a copy of an ONNX file that gives what each node gives; say which nodes these are."""
    import onnx

    model = onnx.load(program.path)
    layers = {
        value: (node.op_type, node.name)
        for node in model.graph.node
        if node.op_type not in ("Constant", "Identity") and "Sequence" not in node.op_type
        for value in node.output
        if value
    }
    asked = [value.name for value in model.graph.output]
    expose(model, layers)
    # Those of the graph are last among its nodes', too.
    outputs = {value.name: value for value in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(outputs[name] for name in dict.fromkeys((*layers, *asked)))
    path = program.path.with_name(f"exposed-{program.path.name}")
    onnx.save(model, path)
    return replace(program, path=path, outputs=tuple(outputs)), layers
