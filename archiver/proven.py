"""Whether what runs here was proven: the versions that reports name, beside those that are here.

An artifact that was run again on other versions (`modelyard recertify --write`) is proven on these
too. `MAR-INF/proven.json` says it, a line for each artifact and version:

    {"lines": [{"runtime": "onnxruntime", "version": "1.32.0", "artifact": "digits.onnx",
                "artifact_sha256": …, "verdict": "same bits", "share": 0.0, "cases": 42, …}]}

`share` is the largest difference over what the archive's rule allows. `verdict` may be `within` or
`differs` too: a line is written, and proves nothing, where the answers are others there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.manifest import Manifest
from modelyard.archiver.report import Report, parse_report
from modelyard.archiver.requirements import parse_pin
from modelyard.archiver.untrusted.json import Fields, parse_json
from modelyard.archiver.untrusted.names import PROVEN_NAME

_RUNS = {"onnx": "onnxruntime"}
"""Format → the package that runs it; torch runs all others."""
SAME, WITHIN, DIFFERS = "same bits", "within", "differs"
"""What a line says of an artifact's outputs on other versions."""
MAX_LINES_BYTES = 256 * 1024
Line = Mapping[str, Any]


@dataclass(frozen=True)
class Unproven:
    """Why nobody has proven what runs here."""

    reason: Literal["versions", "no_proof", "another"]
    """`versions`: it was proven, with other versions than those that are here; `another`: something
    else was proven."""
    text: str
    """A sentence, which names both versions."""


def find_unproven(
    manifest: Manifest, read: Callable[[str], bytes], predicts: str | None = None
) -> Unproven | None:
    """Return why nobody has proven what runs here; None where it was proven on these versions.

    Only what ran the proof counts: onnxruntime for ONNX, torch for everything else. Of a version
    like 2.13.0+cpu the part behind the plus, the build, may differ. A line about the same artifact
    and the version that is here counts as the proof does.

    Args:
        manifest: manifest of the archive.
        read: returns the content of one of its files.
        predicts: the artifact, where it is not the manifest's own.
    """
    seal = manifest.modelyard
    own = f"{predicts}.report.json" if predicts else seal and seal.report
    if seal is None or not own:
        return Unproven("no_proof", "no report is in the archive, so nothing was proven of it")
    names = {own: predicts or manifest.serialized_file or ""}
    if seal.explain:
        names.setdefault(seal.explain.report, seal.explain.artifact)
    try:
        reports = [parse_report(read(name), Path(name)) for name in names]
        lines = read_lines(read)
    except (ArchiveError, KeyError, ValueError) as error:
        return Unproven("no_proof", f"its report cannot be read: {error}")
    if reports[0].parity is None:
        return Unproven("no_proof", f"{own} holds no comparison with the checkpoint")
    for report, (name, artifact) in zip(reports, names.items(), strict=True):
        if seal.digests.get(artifact, report.artifact_sha256) != report.artifact_sha256:
            return Unproven("another", f"{name} is the proof of another file than {artifact}")
    if len({report.checkpoint_sha256 for report in reports}) > 1:
        return Unproven("another", f"{' and '.join(names)} are the proofs of two checkpoints")
    pinned = dict(parse_pin(pin).release for pin in seal.requirements)
    found = [find_difference(report, pinned, lines) for report in reports]
    if texts := [text for text in found if text]:
        return Unproven("versions", "; ".join(texts))
    return None


def find_other_versions(manifest: Manifest, read: Callable[[str], bytes]) -> str:
    """Return on which other versions an archive was proven; empty unless that is what it lacks."""
    unproven = find_unproven(manifest, read)
    return unproven.text if unproven and unproven.reason == "versions" else ""


def read_reports(manifest: Manifest, read: Callable[[str], bytes]) -> dict[str, Report]:
    """Return artifact → report: what predicts, then its twin; nothing where none is.

    Raises:
        CannotArchive: a report cannot be read.
    """
    seal, artifact = manifest.modelyard, manifest.serialized_file
    names = {artifact: seal.report} if seal and seal.report and artifact else {}
    if seal and seal.explain and names:
        names.setdefault(seal.explain.artifact, seal.explain.report)
    return {artifact: parse_report(read(name), Path(name)) for artifact, name in names.items()}


def read_lines(read: Callable[[str], bytes]) -> list[Line]:
    """Return what runs on other versions found; nothing where no file says it.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        fields = Fields(parse_json(read(PROVEN_NAME), MAX_LINES_BYTES), PROVEN_NAME)
    except KeyError:
        return []
    lines = fields.objects("lines")
    for line in lines:
        for key in ("runtime", "version", "artifact", "verdict"):
            line.text(key)
        line.sha256("artifact_sha256")
        if line.integer("cases") < 1 or line.number("share") < 0:
            line.wrong("cases", "1 or more, and a share of 0 or more", line.values.get("cases"))
    fields.check()
    return [line.values for line in lines]


def find_difference(report: Report, pinned: Mapping[str, str], lines: Sequence[Line] = ()) -> str:
    """Return how what runs an artifact differs from what proved it; empty where it does not.

    Args:
        report: the artifact's.
        pinned: packages that the archive brings, by name → version.
        lines: what later runs found.
    """
    package = _RUNS.get(report.format, "torch")
    proven = report.versions.get(package, "")
    here = pinned.get(package) or installed_version(package)
    artifact = report.path.name.removesuffix(".report.json")
    about = (package, artifact, report.artifact_sha256, _plain(here))
    again = [
        line["share"] <= {SAME: 0, WITHIN: 1}.get(line["verdict"], -1)
        for line in lines
        if about
        == (*map(line.get, ("runtime", "artifact", "artifact_sha256")), _plain(line["version"]))
    ]
    if _plain(proven) == _plain(here) or (again and all(again)):
        return ""
    return (
        f"{artifact} was proven with {package} {proven or 'of an unknown version'}, and "
        f"{here or 'none'} is here{', where a line says that answers differ' if again else ''}"
    )


def _plain(version: str) -> str:
    return version.partition("+")[0]


def installed_version(package: str) -> str:
    """Return the version of a package, which need not be imported; empty where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def describe_repeated(golden: int, cases: int = 0) -> str:
    """Return what was repeated on this machine and agrees, for behind a semicolon.

    Args:
        golden: golden requests that were answered as expected.
        cases: inputs on which artifact and twin agree.
    """
    counts = ((golden, "golden request"), (cases, "parity case"))
    said = [f"{count} {name}{'s' * (count > 1)}" for count, name in counts if count]
    if not said:
        return "nothing that could be repeated says whether its answers are still the same"
    return f"{' and '.join(said)} agree{'s' * (golden + cases == 1)} on this machine"
