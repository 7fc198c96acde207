"""Check an archive on this machine: its signature, its golden requests, its parity."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelyard.archiver import proven
from modelyard.archiver.errors import ArchiveError, DoesNotRun
from modelyard.archiver.explanations import Explanations, parse_explanations
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.read import Archive
from modelyard.archiver.replay import UNPACKED, Pair, ParityResult, Replay, replay
from modelyard.archiver.report import ceiling, parse_report
from modelyard.archiver.signing import find_signer
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import EXPLANATIONS_NAME, SIGNING_NAME

if TYPE_CHECKING:
    from modelyard.archiver.signing import Trust


MOST_GOLDEN = 1e-2
"""Largest tolerance of a golden request that is believed without a word of the user's."""
CODE = (".py", ".so", ".pyd", ".whl")
"""Ends of the names of files whose code an archive's worker may import."""
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
    if seal is None:
        # Whoever changes an archive can take its digests out: that must not pass for a check.
        checks = [
            Check(
                "digests",
                "none to compare with",
                "the manifest holds none, so nothing in the archive is proven: another archiver "
                "wrote it, or they were taken out; write it with `modelyard archive`",
            )
        ]
    else:
        checks = [Check("digests", f"all {len(seal.digests)} agree with the manifest")]
    if trust is not None:
        checks.append(Check("signature", f"by the trusted key {find_signer(archive, trust)}"))
    elif SIGNING_NAME in archive.names:
        checks.append(Check("signature", "there; not checked without --public-key"))
    if seal is not None:
        checks += _tolerances(archive, tolerance)
        unproven = proven.find_unproven(archive.manifest, archive.read)
        if unproven and unproven.reason == "another":
            checks.append(Check("proof", "of something else", f"{unproven.text}; export it again"))
    if seal is not None and run:
        checks += _run(archive, device)
    elif seal is not None and (other := proven.find_other_versions(archive.manifest, archive.read)):
        checks.append(Check("proof", f"{other}; nothing was run"))
    return checks


def _tolerances(archive: Archive, most: float | None) -> Iterator[Check]:
    """Check that nobody has widened what the archive is judged by until everything agrees."""
    seal = archive.manifest.modelyard
    assert seal is not None
    stated: list[tuple[str, float, float]] = [
        (f"golden request {golden.request}", golden.tolerance, MOST_GOLDEN)
        for golden in seal.golden
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
    reports = proven.read_reports(manifest, read)
    if len(reports) < 2 or None in [report.parity for report in reports.values()]:
        return None
    return Pair(*reports, *(str(report.path) for report in reports.values()))


def _run(archive: Archive, device: str) -> Iterator[Check]:
    stated = None
    try:
        if EXPLANATIONS_NAME in archive.names:
            stated = parse_explanations(archive.read(EXPLANATIONS_NAME))
        pair = find_pair(archive.manifest, archive.read)
        with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
            folder = Path(name) / UNPACKED
            archive.unpack(folder)
            asked = stated.requests if stated else ()
            outcome = replay(folder, archive.manifest, pair=pair, explained=asked, device=device)
    except ValueError as error:
        yield Check("explanations", "cannot be read", f"{EXPLANATIONS_NAME}: {error}")
        return
    except DoesNotRun as error:
        yield Check("loading", "failed", str(error))
        return
    except ArchiveError as error:
        yield Check("loading", "not possible", str(error))
        return
    lacking = f"; without walls: {', '.join(outcome.lacking)}" if outcome.lacking else ""
    yield Check("loading", f"as a worker, on {outcome.device}{lacking}")
    yield from _golden_checks(archive, outcome)
    if not outcome.golden and not (outcome.parity and outcome.parity.cases):
        yield Check(
            "nothing",
            "was compared: the archive holds no golden request and no two artifacts",
            NOTHING_COMPARED,
        )
    if outcome.parity is None:
        yield Check("parity", "nothing to compare: the archive holds no two artifacts")
    else:
        yield _parity_check(outcome.parity)
    if stated is not None:
        yield _explanations_check(stated, outcome.explained)
    if other := proven.find_other_versions(archive.manifest, archive.read):
        yield Check("proof", f"{other}; {_describe(outcome)}")
    if own := [name for name in archive.names if name.endswith(CODE)]:
        shown = ", ".join(own[:3]) + (f" and {len(own) - 3} more" if len(own) > 3 else "")
        yield Check("code", f"{shown} ran in the process that compares: believe whoever wrote it")


def _explanations_check(stated: Explanations, again: Explanations | str | None) -> Check:
    if not isinstance(again, Explanations):
        return Check("explanations", "not measured", f"nothing was measured: {again}")
    if problem := stated.difference(again):
        return Check("explanations", "differ", f"the certificate does not hold: {problem}")
    names = ", ".join(each.name for each in again.measured)
    missing = "".join(f"; {name} not measured" for name in again.not_measured)
    return Check("explanations", f"hold on {len(again.requests)} requests: {names}{missing}")


def _describe(outcome: Replay) -> str:
    """Return how an archive does on versions that nobody has proven."""
    parity = outcome.parity
    if (parity and parity.differences) or any(each.difference for each in outcome.golden):
        return "its answers are others here"
    return proven.describe_repeated(len(outcome.golden), parity.cases if parity else 0)


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
