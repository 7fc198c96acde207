"""What an archive says of itself, for people to look at. None of it runs.

An open archive's names, sizes and digests are checked already. Here it is read by size: what is
longer than a page can show is named, and left where it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from modelyard.archiver.errors import ArchiveError, NotTrusted
from modelyard.archiver.explanations import MAX_BYTES, Explanations, parse_explanations
from modelyard.archiver.handler_files import FEATURES_FILE
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
MAX_FEATURES_BYTES = 1 << 20
MOST_COMPONENTS = 500
MOST_CHARACTERS = 200
"""Most characters of a name in a bill of materials."""

T = TypeVar("T")


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
    features: object = None
    """Features of a table, as JSON; None where it names none that can be read."""
    problems: tuple[str, ...] = ()
    """What could not be read, a sentence each."""


def read_certificate(archive: Archive, trust: Trust | None = None) -> Certificate:
    """Return what an open archive says of itself.

    Args:
        archive: open, so that its digests agree with its files.
        trust: the keys that are trusted here; None where nobody said.
    """
    problems: list[str] = []
    sizes = {file.name: file.size_bytes for file in archive.files}

    def read(
        name: str, most: int, parse: Callable[[bytes], T], wrong: list[str] = problems
    ) -> T | None:
        """Return what a file says; None where there is none, or where that is a problem."""
        if name not in sizes:
            return None
        if sizes[name] > most:
            wrong.append(f"{name}: {sizes[name]} bytes; at most {most} are read")
            return None
        try:
            return parse(archive.read(name))
        except (ArchiveError, ValueError) as error:
            wrong.append(str(error) if isinstance(error, ArchiveError) else f"{name}: {error}")
            return None

    def report(name: str) -> Report | None:
        return read(name, MAX_REPORT_BYTES, lambda data: parse_report(data, Path(name)))

    def components(data: bytes) -> tuple[list[Component], int]:
        wrong: list[str] = []
        listed = Fields(parse_json(data), "", wrong).objects("components")
        shown = sorted(map(_component, listed[:MOST_COMPONENTS]), key=lambda it: it.kind == "file")
        if wrong:
            problems.append(f"{SBOM_NAME}: {'; '.join(wrong[:3])}")
        return shown, len(listed)

    seal = archive.manifest.modelyard
    golden = seal.golden if seal else ()
    own = seal.report if seal and seal.report else ""
    twin = seal.explain.report if seal and seal.explain else ""
    reports = report(own), report(twin) if twin != own else None
    shown, count = read(SBOM_NAME, MAX_SBOM_BYTES, components) or ([], 0)
    return Certificate(
        file=archive.path.name,
        kind=archive.kind,
        size_bytes=sum(sizes.values()),
        digest=archive.digest,
        is_sealed=seal is not None,
        report=reports[0],
        twin=reports[1],
        golden=_golden(archive, golden, sizes),
        golden_count=len(golden),
        signer=_signer(archive, trust),
        components=tuple(shown),
        component_count=count,
        explanations=read(EXPLANATIONS_NAME, MAX_BYTES, parse_explanations),
        # What is wrong with it the handler says when it loads.
        features=read(FEATURES_FILE, MAX_FEATURES_BYTES, parse_json, wrong=[]),
        problems=tuple(problems),
    )


def _golden(
    archive: Archive, golden: tuple[Golden, ...], sizes: dict[str, int]
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


def _component(fields: Fields) -> Component:
    hashes: list[Any] = fields.items("hashes") if "hashes" in fields.values else []
    contents = [each.get("content") for each in hashes if isinstance(each, dict)]
    digest = next((each for each in contents if isinstance(each, str)), "")
    said = fields.text("type"), fields.text("name"), fields.text_or_none("version") or "", digest
    return Component(*(text[:MOST_CHARACTERS] for text in said))
