"""What an archive says of itself, for people to look at. None of it runs.

An open archive's names, sizes and digests are checked already. Here it is read by size: what is
longer than a page can show is named, and left where it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard.archiver.errors import ArchiveError, NotTrusted
from modelyard.archiver.explanations import MAX_BYTES, Explanations, parse_explanations
from modelyard.archiver.manifest import Golden
from modelyard.archiver.read import Archive
from modelyard.archiver.report import Report, parse_report
from modelyard.archiver.signing import Trust, claimed_key, find_signer
from modelyard.archiver.untrusted.json import Fields, parse_json
from modelyard.archiver.untrusted.names import EXPLANATIONS_NAME, SBOM_NAME, SIGNING_NAME

MOST_GOLDEN = 50
"""Golden requests that are shown."""
MOST_GOLDEN_BYTES = 1 << 20
"""Most bytes of all requests that are kept with a certificate, to be looked at and sent again."""
MOST_EXPECTED_BYTES = 8 << 10
"""Most bytes of the answer to one of them."""
MAX_REPORT_BYTES = 1 << 20
MAX_SBOM_BYTES = 16 << 20
MOST_COMPONENTS = 500
MOST_CHARACTERS = 200
"""Most characters of a name in a bill of materials."""


@dataclass(frozen=True)
class GoldenCase:
    """A golden request, and what a worker must answer to it."""

    golden: Golden
    size_bytes: int
    request: bytes | None
    """None where it is too long to be kept."""
    expected: str
    """Answer that its file has; empty where that is too long to be shown."""

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.golden.request.rpartition("/")[2]


@dataclass(frozen=True)
class Signer:
    """Who signed an archive, as far as that was looked at."""

    state: str
    """`trusted`, `unchecked`, `refused` or `none`."""
    text: str


@dataclass(frozen=True)
class Component:
    """A line of the bill of materials."""

    kind: str
    """Kind as CycloneDX has it: `library`, `file`, `application` …"""
    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class Certificate:
    """Where an archive comes from, what was proven of it, and what is inside."""

    file: str
    kind: str
    """Its container: zip, gzip'ed tar or folder."""
    size_bytes: int
    digest: str
    is_sealed: bool
    """Whether its manifest holds the digests of its files."""
    report: Report | None
    twin: Report | None
    """Report of the artifact that explains, where that is another one."""
    golden: tuple[GoldenCase, ...]
    golden_count: int
    signer: Signer
    components: tuple[Component, ...]
    component_count: int
    explanations: Explanations | None = None
    """What was measured of its explanations; None where it has no certificate of them."""
    problems: tuple[str, ...] = field(default=())
    """What could not be read, a sentence each."""


def read_certificate(archive: Archive, trust: Trust | None = None) -> Certificate:
    """Return what an open archive says of itself.

    Args:
        archive: open, so that its digests agree with its files.
        trust: the keys that are trusted here; None where nobody said.
    """
    problems: list[str] = []
    sizes = {file.name: file.size_bytes for file in archive.files}
    seal = archive.manifest.modelyard
    report = twin = None
    if seal is not None and seal.report:
        report = _report(archive, seal.report, sizes, problems)
    if seal is not None and seal.explain and seal.explain.report != seal.report:
        twin = _report(archive, seal.explain.report, sizes, problems)
    components, count = _components(archive, sizes, problems)
    return Certificate(
        file=archive.path.name,
        kind=archive.kind,
        size_bytes=sum(sizes.values()),
        digest=archive.digest,
        is_sealed=seal is not None,
        report=report,
        twin=twin,
        golden=_golden(archive, seal.golden if seal else (), sizes),
        golden_count=len(seal.golden) if seal else 0,
        signer=_signer(archive, trust),
        components=components,
        component_count=count,
        explanations=_explanations(archive, sizes, problems),
        problems=tuple(problems),
    )


def _report(
    archive: Archive, name: str, sizes: Mapping[str, int], problems: list[str]
) -> Report | None:
    if sizes[name] > MAX_REPORT_BYTES:
        problems.append(f"{name}: {sizes[name]} bytes; at most {MAX_REPORT_BYTES} are read")
        return None
    try:
        return parse_report(archive.read(name), Path(name))
    except ArchiveError as error:
        problems.append(str(error))
        return None


def _explanations(
    archive: Archive, sizes: Mapping[str, int], problems: list[str]
) -> Explanations | None:
    if sizes.get(EXPLANATIONS_NAME, MAX_BYTES + 1) <= MAX_BYTES:
        try:
            return parse_explanations(archive.read(EXPLANATIONS_NAME))
        except ValueError as error:
            problems.append(f"{EXPLANATIONS_NAME}: {error}")
    return None


def _golden(
    archive: Archive, golden: tuple[Golden, ...], sizes: Mapping[str, int]
) -> tuple[GoldenCase, ...]:
    cases, left = [], MOST_GOLDEN_BYTES
    for each in golden[:MOST_GOLDEN]:
        size, expected = sizes[each.request], sizes[each.expected]
        request = archive.read(each.request) if size <= left else None
        left -= len(request or b"")
        said = archive.read(each.expected) if expected <= MOST_EXPECTED_BYTES else b""
        cases.append(GoldenCase(each, size, request, said.decode("utf-8", "replace").strip()))
    return tuple(cases)


def _signer(archive: Archive, trust: Trust | None) -> Signer:
    if SIGNING_NAME not in archive.names:
        return Signer("none", "not signed")
    try:
        if trust is not None:
            return Signer("trusted", f"signed by the trusted key {find_signer(archive, trust)}")
        claimed = claimed_key(archive)
    except NotTrusted as error:
        return Signer("refused", str(error))
    return Signer(
        "unchecked",
        f"says that the key {claimed[:12]}… signed it; this server was given no trusted keys to "
        "check that with",
    )


def _components(
    archive: Archive, sizes: Mapping[str, int], problems: list[str]
) -> tuple[tuple[Component, ...], int]:
    """Return what is shown of the bill of materials, files last, and how much there is."""
    if SBOM_NAME not in sizes:
        return (), 0
    if sizes[SBOM_NAME] > MAX_SBOM_BYTES:
        problems.append(f"{SBOM_NAME}: {sizes[SBOM_NAME]} bytes; at most {MAX_SBOM_BYTES} are read")
        return (), 0
    wrong: list[str] = []
    try:
        fields = Fields(parse_json(archive.read(SBOM_NAME)), "", wrong)
    except ValueError as error:
        problems.append(f"{SBOM_NAME}: {error}")
        return (), 0
    listed = fields.objects("components")
    found = [_component(each) for each in listed[:MOST_COMPONENTS]]
    if wrong:
        problems.append(f"{SBOM_NAME}: {'; '.join(wrong[:3])}")
    return tuple(sorted(found, key=lambda each: each.kind == "file")), len(listed)


def _component(fields: Fields) -> Component:
    hashes: list[Any] = fields.items("hashes") if "hashes" in fields.values else []
    contents = [each.get("content") for each in hashes if isinstance(each, dict)]
    digest = next((each for each in contents if isinstance(each, str)), "")
    said = fields.text("type"), fields.text("name"), fields.text_or_none("version") or "", digest
    return Component(*(text[:MOST_CHARACTERS] for text in said))
