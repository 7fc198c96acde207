"""Run a planned archive before it is written: it loads, and its examples are answered as said."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from modelyard.archiver.collect import Plan
from modelyard.archiver.errors import CannotArchive, DoesNotRun
from modelyard.archiver.explanations import (
    BUDGET_S,
    FEWEST,
    PATIENCE_S,
    Explanations,
    format_explanations,
)
from modelyard.archiver.proven import describe_repeated, find_other_versions
from modelyard.archiver.replay import GoldenResult, replay
from modelyard.archiver.untrusted.json import format_json, parse_json
from modelyard.archiver.untrusted.names import EXPLANATIONS_NAME, REFERENCE_NAME
from modelyard.archiver.verify import find_pair


class Rehearsal(NamedTuple):
    """What came of a dry run."""

    answers: Mapping[str, bytes]
    """The golden answers' files → what is expected, and what the model read and gave; and the files
    of the reference and of the certificate of explanations, where there are such."""
    repeated: str
    """What was repeated where the artifact was proven on other versions: its parity too."""
    coverage: str
    """Which changes of the pipeline the golden requests would notice."""
    explanations: Explanations | str
    """What was measured of explanations, or why nothing was; empty where nobody would ask."""


def rehearse(plan: Plan, folder: Path) -> Rehearsal:
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
            explained=plan.explained if len(plan.explained) >= FEWEST else (),
            budget_s=PATIENCE_S if plan.certificate else BUDGET_S,
            doubts=True,
        )
    except DoesNotRun as error:
        raise CannotArchive(summary, error.problems) from error
    problems = [_problem(plan, result) for result in outcome.golden if result.difference]
    if outcome.parity:
        problems += outcome.parity.differences
    explanations = outcome.explained or _too_few(plan)
    missed = explanations.problems if isinstance(explanations, Explanations) else (explanations,)
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
    if isinstance(explanations, Explanations) and not missed:
        answers[EXPLANATIONS_NAME] = format_explanations(explanations)
    golden = len(outcome.golden) - len(plan.unanswered)
    repeated = describe_repeated(golden, outcome.parity.cases if outcome.parity else 0)
    return Rehearsal(answers, repeated, describe_coverage(outcome.coverage), explanations)


def _too_few(plan: Plan) -> str:
    """Return why no explanation is measured; empty where nothing could be explained anyway."""
    if plan.certificate is False or not (plan.explained or plan.reference):
        return ""
    more = "--certificate packs some of --reference" if plan.reference else "add --example FILE"
    return f"{FEWEST} requests are needed, there are {len(plan.explained)} ({more})"


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


def _expected(plan: Plan, result: GoldenResult) -> dict[str, Any]:
    if result.golden in plan.unanswered:
        return {"answer": result.answer}
    expected: dict[str, Any] = parse_json(plan.read(result.golden.expected))
    return expected


def _problem(plan: Plan, result: GoldenResult) -> str:
    """Name the example by its file, which the author knows."""
    (request,) = (part for part in plan.parts if part.name == result.golden.request)
    said = f"example {request.label}: {result.difference}"
    if "got status" in said or result.golden in plan.unanswered:
        return said
    return f"{said}; correct what is expected, or the labels, the preprocessing or the weights"
