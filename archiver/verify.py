"""Run an archive here, before it is written and after: signature, golden requests, parity."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelyard.archiver import explanations
from modelyard.archiver.errors import ArchiveError, CannotArchive, DoesNotRun
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.proven import describe_repeated, find_other_versions, find_unproven
from modelyard.archiver.read import Archive
from modelyard.archiver.replay import UNPACKED, GoldenResult, Pair, ParityResult, Replay, replay
from modelyard.archiver.report import ceiling, parse_report
from modelyard.archiver.signing import find_signer
from modelyard.archiver.untrusted.json import format_json, parse_json
from modelyard.archiver.untrusted.names import EXPLANATIONS_NAME, REFERENCE_NAME, SIGNING_NAME

if TYPE_CHECKING:
    from modelyard.archiver.collect import Plan
    from modelyard.archiver.signing import Trust


MOST_GOLDEN = 1e-2
"""Largest tolerance of a golden request that is believed without a word of the user's."""
CODE = (".py", ".so", ".pyd", ".whl")
"""Ends of the names of files whose code an archive's worker may import."""
NO_DIGESTS = (
    "the manifest holds none, so nothing in the archive is proven: another archiver wrote it, or "
    "they were taken out; write it with `modelyard archive`"
)
NOTHING_COMPARED = (
    "nothing says what it must answer, so a model that is wrong would pass: archive it with "
    "--example FILE, or with --explain-artifact"
)


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    subject: str
    """`digests`, `signature`, `tolerance`, `loading`, `golden 0`, `parity`, `proof`, `nothing`,
    `code`."""
    result: str
    """What was seen, in a few words."""
    problem: str | None = None
    """What differs; None when nothing does."""


def verify_archive(
    archive: Archive,
    *,
    trust: "Trust | None" = None,
    run: bool = True,
    device: str = "auto",
    tolerance: float | None = None,
) -> list[Check]:
    """Compare what an open archive states with what it does here.

    Args:
        archive: opened, so its names, sizes and digests agree already.
        trust: the keys, one of which must have signed it; checked before anything runs.
        run: whether to load it and run its code, as a worker does.
        device: where it runs: auto, cpu, cuda or cuda:N.
        tolerance: largest one of the archive's own that is believed; ten times that of the outputs'
            dtype when absent.

    Raises:
        NotTrusted: none of the keys signed it, or it holds no longer.
    """
    seal = archive.manifest.modelyard
    # Whoever changes an archive can take its digests out: that must not pass for a check.
    checks = [
        Check("digests", f"all {len(seal.digests)} agree with the manifest")
        if seal
        else Check("digests", "none to compare with", NO_DIGESTS)
    ]
    if trust is not None:
        checks.append(Check("signature", f"by the trusted key {find_signer(archive, trust)}"))
    elif SIGNING_NAME in archive.names:
        checks.append(Check("signature", "there; not checked without --public-key"))
    if seal is not None:
        checks += _tolerances(archive, tolerance)
        unproven = find_unproven(archive.manifest, archive.read)
        if unproven and unproven.reason == "another":
            checks.append(Check("proof", "of something else", f"{unproven.text}; export it again"))
    if seal is not None and run:
        checks += _run(archive, device)
    elif seal is not None and (other := find_other_versions(archive.manifest, archive.read)):
        checks.append(Check("proof", f"{other}; nothing was run"))
    return checks


def _tolerances(archive: Archive, most: float | None) -> Iterator[Check]:
    """Check that nobody has widened what the archive is judged by until everything agrees."""
    seal = archive.manifest.modelyard
    assert seal is not None
    stated = [
        (f"golden request {each.request}", each.tolerance, MOST_GOLDEN) for each in seal.golden
    ]
    for name in filter(None, (seal.report, seal.explain.report if seal.explain else None)):
        report = parse_report(archive.read(name), Path(name))
        dtypes = {spec.name: spec.dtype for spec in report.signature.outputs}
        for output, allowed in report.parity.tolerances.items() if report.parity else ():
            stated.append((f'{name}, output "{output}"', allowed, ceiling(dtypes[output])))
    for place, allowed, usual in stated:
        believed = usual if most is None else most
        if allowed > believed:
            yield Check(
                "tolerance",
                f"{allowed:g}",
                f"{place} allows a difference of {allowed:g}, and so agrees with much that is "
                f"wrong; expected {believed:g} or less (say --tolerance {allowed:g} to believe it)",
            )


def find_pair(manifest: Manifest, read: Callable[[str], bytes]) -> Pair | None:
    """Return an archive's artifact and its twin, when it holds two that can be compared.

    Args:
        manifest: manifest of the archive.
        read: returns the content of one of its files.
    """
    seal, artifact = manifest.modelyard, manifest.serialized_file
    explain = seal and seal.explain
    if not (seal and explain and seal.report and artifact) or explain.artifact == artifact:
        return None
    reports = (seal.report, explain.report)
    if None in [parse_report(read(name), Path(name)).parity for name in reports]:
        return None
    return Pair(artifact, explain.artifact, *reports)


def _run(archive: Archive, device: str) -> Iterator[Check]:
    stated = None
    try:
        if EXPLANATIONS_NAME in archive.names:
            stated = explanations.parse_explanations(archive.read(EXPLANATIONS_NAME))
        pair = find_pair(archive.manifest, archive.read)
        with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
            folder = Path(name) / UNPACKED
            archive.unpack(folder)
            asked = stated.requests if stated else ()
            outcome = replay(folder, archive.manifest, pair=pair, explained=asked, device=device)
    except ValueError as error:
        yield Check("explanations", "cannot be read", f"{EXPLANATIONS_NAME}: {error}")
        return
    except ArchiveError as error:
        failed = "failed" if isinstance(error, DoesNotRun) else "not possible"
        yield Check("loading", failed, str(error))
        return
    lacking = f"; without walls: {', '.join(outcome.lacking)}" if outcome.lacking else ""
    yield Check("loading", f"as a worker, on {outcome.device}{lacking}")
    yield from _golden_checks(archive, outcome)
    parity = outcome.parity
    if not outcome.golden and not (parity and parity.cases):
        what = "was compared: the archive holds no golden request and no two artifacts"
        yield Check("nothing", what, NOTHING_COMPARED)
    if parity is None:
        yield Check("parity", "nothing to compare: the archive holds no two artifacts")
    else:
        yield _parity_check(parity)
    if stated is not None:
        yield _explanations_check(stated, outcome.explained)
    if other := find_other_versions(archive.manifest, archive.read):
        # How it does on versions that nobody has proven.
        differs = (parity and parity.differences) or any(each.difference for each in outcome.golden)
        repeated = describe_repeated(len(outcome.golden), parity.cases if parity else 0)
        yield Check("proof", f"{other}; {'its answers are others here' if differs else repeated}")
    if own := [name for name in archive.names if name.endswith(CODE)]:
        shown = ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
        yield Check("code", f"{shown} ran in the process that compares: believe whoever wrote it")


def _explanations_check(
    stated: explanations.Explanations, again: explanations.Explanations | str | None
) -> Check:
    if not isinstance(again, explanations.Explanations):
        return Check("explanations", "not measured", f"nothing was measured: {again}")
    if problem := stated.difference(again):
        return Check("explanations", "differ", f"the certificate does not hold: {problem}")
    names = ", ".join(each.name for each in again.measured)
    missing = "".join(f"; {name} not measured" for name in again.not_measured)
    return Check("explanations", f"hold on {len(again.requests)} requests: {names}{missing}")


def _golden_checks(archive: Archive, outcome: Replay) -> Iterator[Check]:
    for i, result in enumerate(outcome.golden):
        has_model = "model" in parse_json(archive.read(result.golden.expected))
        seen = "" if has_model else "; what the model reads and gives is not recorded"
        yield Check(
            f"golden {i}",
            "differs" if result.difference else f"answered as expected{seen}",
            result.difference and f"{result.golden.request}: {result.difference}",
        )


def _parity_check(parity: ParityResult) -> Check:
    both = f"{parity.pair.artifact} and {parity.pair.twin}"
    if parity.differences:
        return Check("parity", "differs", f"{both}: {'; '.join(parity.differences)}")
    if not parity.cases:
        return Check(
            "parity",
            f"{both} not compared: their export used samples alone, which no archive holds; golden "
            "requests are what can be repeated",
        )
    return Check("parity", f"{both} agree in {parity.cases} cases: {parity.summary}")


class Rehearsal(NamedTuple):
    """What came of a dry run."""

    answers: Mapping[str, bytes]
    """The golden answers' files → what is expected, and what the model read and gave; and the files
    of the reference and of the certificate of explanations, where there are such."""
    repeated: str
    """What was repeated where the artifact was proven on other versions: its parity too."""
    coverage: str
    """Which changes of the pipeline the golden requests would notice."""
    explanations: explanations.Explanations | str
    """What was measured of explanations, or why nothing was; empty where nobody would ask."""


def rehearse(plan: "Plan", folder: Path) -> Rehearsal:
    """Load the plan's files, which lie in `folder`, as a worker does, and replay the examples.

    Raises:
        CannotArchive: the archive does not load, or answers something else than expected; the
            message is the worker's own.
    """
    summary = f"cannot archive {plan.manifest.model_name}, its dry run failed"
    moved = find_other_versions(plan.manifest, plan.read)
    try:
        outcome = replay(
            folder,
            plan.manifest,
            unanswered=plan.unanswered,
            pair=find_pair(plan.manifest, plan.read) if moved else None,
            reference=plan.reference,
            explained=plan.explained if len(plan.explained) >= explanations.FEWEST else (),
            budget_s=explanations.PATIENCE_S if plan.certificate else explanations.BUDGET_S,
            doubts=True,
        )
    except DoesNotRun as error:
        raise CannotArchive(summary, error.problems) from error
    problems = [_problem(plan, result) for result in outcome.golden if result.difference]
    if outcome.parity:
        problems += outcome.parity.differences
    found = outcome.explained or _too_few(plan)
    missed = found.problems if isinstance(found, explanations.Explanations) else (found,)
    if plan.certificate:
        problems += [f"no certificate of explanations: {each}" for each in missed]
    if problems:
        raise CannotArchive(summary, problems)
    answers = {
        result.golden.expected: format_json(dict(result.seen) | _expected(plan, result))
        for result in outcome.golden
    }
    if outcome.reference:
        answers[REFERENCE_NAME] = outcome.reference
    if isinstance(found, explanations.Explanations) and not missed:
        answers[EXPLANATIONS_NAME] = explanations.format_explanations(found)
    golden = len(outcome.golden) - len(plan.unanswered)
    repeated = describe_repeated(golden, outcome.parity.cases if outcome.parity else 0)
    return Rehearsal(answers, repeated, describe_coverage(outcome.coverage), found)


def _too_few(plan: "Plan") -> str:
    """Return why no explanation is measured; empty where nothing could be explained anyway."""
    if plan.certificate is False or not (plan.explained or plan.reference):
        return ""
    more = "--certificate packs some of --reference" if plan.reference else "add --example FILE"
    return f"{explanations.FEWEST} requests are needed, there are {len(plan.explained)} ({more})"


def describe_coverage(coverage: Mapping[str, str]) -> str:
    """Return which changes golden requests would notice, and the examples that are missing."""
    if not coverage:
        return ""
    missed = {name: example for name, example in coverage.items() if example}
    text = f"golden coverage {len(coverage) - len(missed)} of {len(coverage)}"
    if missed:
        said = (f"none sees `{name}` (add an example {what})" for name, what in missed.items())
        text += f": {'; '.join(said)}"
    return text


def _expected(plan: "Plan", result: GoldenResult) -> dict[str, Any]:
    if result.golden in plan.unanswered:
        return {"answer": result.answer}
    expected: dict[str, Any] = parse_json(plan.read(result.golden.expected))
    return expected


def _problem(plan: "Plan", result: GoldenResult) -> str:
    """Name the example by its file, which the author knows."""
    (request,) = (part for part in plan.parts if part.name == result.golden.request)
    said = f"example {request.label}: {result.difference}"
    if "got status" in said or result.golden in plan.unanswered:
        return said
    return f"{said}; correct what is expected, or the labels, the preprocessing or the weights"
