"""Check an archive on this machine: its signature, its golden requests, its parity."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelyard.archiver.errors import ArchiveError, DoesNotRun
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.proven import describe_repeated, find_other_versions
from modelyard.archiver.read import Archive
from modelyard.archiver.replay import Pair, ParityResult, Replay, replay
from modelyard.archiver.report import parse_report
from modelyard.archiver.signing import find_signer
from modelyard.archiver.untrusted.names import SIGNING_NAME

if TYPE_CHECKING:
    from modelyard.archiver.signing import Trust


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    subject: str
    """`digests`, `signature`, `loading`, `golden 0`, `parity`, `proof`."""
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
) -> list[Check]:
    """Compare what an open archive states with what it does here.

    Args:
        archive: opened, so its names, sizes and digests agree already.
        trust: the keys, one of which must have signed it; checked before anything runs.
        run: whether to load it and run its code, as a worker does.
        device: where it runs: auto, cpu, cuda or cuda:N.

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
    if seal is not None and run:
        checks += _run(archive, device)
    elif seal is not None and (other := find_other_versions(archive.manifest, archive.read)):
        checks.append(Check("proof", f"{other}; nothing was run"))
    return checks


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
    try:
        pair = find_pair(archive.manifest, archive.read)
        with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
            folder = Path(name) / "archive"
            archive.unpack(folder)
            outcome = replay(folder, archive.manifest, pair=pair, device=device)
    except DoesNotRun as error:
        yield Check("loading", "failed", str(error))
        return
    except ArchiveError as error:
        yield Check("loading", "not possible", str(error))
        return
    yield Check("loading", f"as a worker, on {outcome.device}")
    yield from _golden_checks(outcome)
    if outcome.parity is None:
        yield Check("parity", "nothing to compare: the archive holds no two artifacts")
    else:
        yield _parity_check(outcome.parity)
    if other := find_other_versions(archive.manifest, archive.read):
        yield Check("proof", f"{other}; {_describe(outcome)}")


def _describe(outcome: Replay) -> str:
    """Return how an archive does on versions that nobody has proven."""
    parity = outcome.parity
    if (parity and parity.differences) or any(each.difference for each in outcome.golden):
        return "its answers are others here"
    return describe_repeated(len(outcome.golden), parity.cases if parity else 0)


def _golden_checks(outcome: Replay) -> Iterator[Check]:
    for i, result in enumerate(outcome.golden):
        yield Check(
            f"golden {i}",
            "differs" if result.difference else "answered as expected",
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
