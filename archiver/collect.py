"""The files given to `modelyard archive` → a plan: what is packed under which name."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from modelyard.archiver import explanations
from modelyard.archiver.choose import AUTO, LABELS, Choice, choose
from modelyard.archiver.entry_point import EntryPoint, parse_handler
from modelyard.archiver.errors import CannotArchive, WrongUsage
from modelyard.archiver.example import TOLERANCE, content_type, parse_example
from modelyard.archiver.explanations import Asked
from modelyard.archiver.handler_files import FEATURES_FILE, LABELS_FILE
from modelyard.archiver.labels import doubled_labels
from modelyard.archiver.manifest import ARCHIVER_VERSION, Explain, Golden, Manifest, Seal
from modelyard.archiver.model_config import keys_without_effect, parse_model_config, unknown_keys
from modelyard.archiver.reference import read_requests
from modelyard.archiver.report import Report, difference, read_report
from modelyard.archiver.requirements import Resolved, resolve
from modelyard.archiver.source_checks import source_warnings
from modelyard.archiver.untrusted import names
from modelyard.archiver.untrusted.container import MAX_ENTRIES
from modelyard.archiver.untrusted.json import format_json

# Formats that give gradients: they explain themselves and others.
DIFFERENTIABLE_FORMATS = ("pt2", "torchscript")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Part:
    """One file to pack."""

    name: str
    """Its path inside the archive."""
    source: Path | bytes
    role: str
    sha256: str | None = None
    """What it must be, if that is known; checked while it is copied."""
    vouched_by: str = "its report describes"
    """Who says so, to end the sentence "it is not the file that …"."""
    hashed_as: tuple[int, ...] | None = None
    """Its `identity` when `sha256` was found to be its own."""

    @property
    def label(self) -> str:
        """What the author knows it by."""
        return str(self.source) if isinstance(self.source, Path) else self.name

    def is_of(self, file: Path | bytes) -> bool:
        """Return whether this file is packed by it."""
        return (
            isinstance(self.source, Path) and isinstance(file, Path) and self.source.samefile(file)
        )

    @property
    def size_bytes(self) -> int:
        """How large it is now."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.stat().st_size

    @property
    def identity(self) -> tuple[int, ...] | None:
        """What changes with the file's content, however it is written to; None for bytes."""
        if isinstance(self.source, bytes):
            return None
        status = self.source.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return (status.st_dev, status.st_ino, status.st_size, *times)


@dataclass(frozen=True)
class Plan:
    """Everything that goes into an archive, checked as far as possible without reading it all."""

    manifest: Manifest
    """Manifest without the digests, which are known when the files were copied."""
    parts: tuple[Part, ...]
    """Sorted by name; without the manifest."""
    warnings: tuple[str, ...] = ()
    choice: Choice | None = None
    """How the handler and the files of the checkpoint's folder were chosen, where they were."""
    unanswered: tuple[Golden, ...] = ()
    """Golden requests whose expected answer the dry run records; its part is still missing."""
    reference: Path | None = None
    """Requests whose reasons the dry run averages; that part is still missing too."""
    explained: tuple[Asked, ...] = ()
    """Requests whose explanations the dry run measures."""
    certificate: bool | None = None
    """Whether it has to give a certificate of them; None leaves that to what it sees."""

    def read(self, name: str) -> bytes:
        """Return the content of a part.

        Raises:
            KeyError: there is none of this name.
        """
        for part in self.parts:
            if part.name == name:
                return part.source if isinstance(part.source, bytes) else part.source.read_bytes()
        raise KeyError(name)

    def rehearsed(
        self,
        answers: Mapping[str, bytes],
        digests: Mapping[str, str],
        identities: Mapping[str, tuple[int, ...] | None],
    ) -> "Plan":
        """Return the plan with what the dry run answered; its files must stay what they were.

        Args:
            answers: files of golden answers, of the reference and of explanations, by name.
            digests: SHA-256 of every file that the dry run saw, by name.
            identities: identities of the same files, from before they were read.
        """
        looked_at: set[str] = set()
        if certificate := answers.get(names.EXPLANATIONS_NAME):
            looked_at = {
                each.file for each in explanations.parse_explanations(certificate).requests
            }
        parts = [
            replace(
                part,
                sha256=digests[part.name],
                hashed_as=identities[part.name],
                vouched_by=part.vouched_by if part.sha256 else "the dry run saw",
            )
            for part in self.parts
            if part.name not in answers
            and (part.name in looked_at or not part.name.startswith(explanations.ROWS_FOLDER))
        ]
        roles = {
            names.REFERENCE_NAME: "reference",
            names.EXPLANATIONS_NAME: "certificate of explanations",
        }
        parts += [
            Part(name, data, roles.get(name, "golden answer")) for name, data in answers.items()
        ]
        return replace(self, parts=_sorted(parts), unanswered=(), reference=None)


@dataclass(frozen=True)
class ArchiveRequest:
    """What somebody wants to have in an archive."""

    name: str
    """The model's name, by the rule of `check_name`."""
    version: str = "1.0"
    """The model's version, by the rule of `check_version`."""
    artifact: Path | None = None
    """An exported file; `<artifact>.report.json` beside it is packed too."""
    handler: str = AUTO
    """A built-in handler's name, `FILE.py` or `FILE.py:Class`; `auto` chooses a built-in one by the
    artifact's report."""
    explain_artifact: Path | None = None
    """A differentiable twin; by default the artifact, or for formats without gradients the `.pt2`
    of the same stem beside it."""
    extra_files: Sequence[Path] = ()
    """Files that are packed under their base names."""
    config_file: Path | None = None
    """The model's YAML configuration."""
    examples: Sequence[str] = ()
    """`FILE=EXPECTED`, as `7.png=7`; `FILE` alone records what the handler answers, which needs the
    dry run."""
    requirements_file: Path | None = None
    """What the handler imports, as pip reads it; pinned now, with pip."""
    wheels_dir: Path | None = None
    """Folder of its wheels, to travel inside; nothing is downloaded then."""
    source_folder: Path | None = None
    """The checkpoint's folder, from which a built-in handler's files are packed (tokenizer,
    processor, labels); `auto` finds it where the report names it."""
    reference: Path | None = None
    """Requests whose explanations are what live ones are compared with: a JSON list of bodies, or a
    folder of files; needs the dry run."""
    certificate: bool | None = None
    """Whether explanations are measured in the dry run, on golden requests and on rows of the
    reference, which are packed for that; None does so on golden requests alone, where there are
    enough."""


def plan_archive(request: ArchiveRequest) -> Plan:
    """Find, name and check the files.

    Raises:
        BadName: the name or version breaks the rule.
        CannotArchive: something is missing or does not fit; holds all problems.
    """
    names.check_name(request.name)
    names.check_version(request.version)
    collector = _Collector()
    report = explain = choice = None
    artifact, handler = request.artifact, request.handler
    if artifact is not None:
        report = collector.add_artifact(artifact)
        explain = collector.add_twin(artifact, report, request.explain_artifact)
    else:
        _check_alone(request)
    if handler == AUTO or request.source_folder is not None:
        packed = {file.name for file in request.extra_files}
        folder = request.source_folder
        choice = collector.attempt(lambda: choose(handler, report, folder, packed, artifact))
        for file in choice.files if choice else ():
            collector.add_file(file, "file of the checkpoint's folder")
    known = choice.handler if choice else handler
    entry_point = None if known == AUTO else collector.add_handler(known)
    for file in request.extra_files:
        collector.add_file(file, "extra file")
    collector.add_config(request.config_file)
    collector.add_stated(report, known == "tabular")
    collector.check_labels(is_own=entry_point is None or entry_point.file is not None)
    golden = collector.add_examples(request.examples)
    if request.reference is not None and not request.reference.exists():
        what = f"reference {request.reference}"
        collector.problems.append(f"{what}: there is no such file or folder")
    explained = collector.add_explained(golden, request)
    resolved = collector.add_requirements(request.requirements_file, request.wheels_dir)
    created = collector.attempt(created_on)
    parts = collector.checked_parts(has_reference=request.reference is not None)
    if collector.problems or entry_point is None:
        raise CannotArchive(f"cannot archive {request.name}", collector.problems)
    manifest = Manifest(
        model_name=request.name,
        model_version=request.version,
        handler=entry_point.recorded,
        serialized_file=_name(artifact),
        requirements_file=_name(request.requirements_file),
        config_file=_name(request.config_file),
        created_on=created,
        archiver_version=ARCHIVER_VERSION,
        modelyard=Seal(
            digests={},
            report=report.path.name if report else None,
            signature=report.signature if report else None,
            explain=explain,
            golden=golden,
            requirements=tuple(map(str, resolved.pins)),
        ),
    )
    every = [part.name for part in parts]
    sources = source_warnings(every, _python_sources(parts), resolved.pins)
    warnings = (*collector.warnings, *sources)
    unanswered = tuple(collector.unanswered)
    return Plan(
        manifest, parts, warnings, choice, unanswered, request.reference, explained,
        request.certificate,
    )  # fmt: skip


def _name(file: Path | None) -> str | None:
    return file.name if file else None


def _check_alone(request: ArchiveRequest) -> None:
    """Refuse what needs an artifact, where there is none: a handler of the author's may do without.

    Raises:
        WrongUsage: what is missing, and what to give.
    """
    name, handler = request.name, request.handler
    place = handler.rpartition(":")[0] or handler
    if not place.endswith(".py"):
        if handler != AUTO:
            parse_handler(handler)
        built_in = "" if handler == AUTO else f", which the handler {handler} needs"
        raise WrongUsage(
            f"cannot archive {name}: no --artifact is given{built_in}; give the file that "
            "`modelyard export` wrote, or --handler FILE.py alone for code that needs none"
        )
    twin, folder = request.explain_artifact, request.source_folder
    for option, value in (("--explain-with", twin), ("--from", folder)):
        if value is not None:
            raise WrongUsage(
                f"cannot archive {name}: {option} {value} goes with an --artifact, and none is "
                "given; leave it out, or pack files with --extra-files"
            )


class _Collector:
    """Gathers parts, problems and warnings, so that one run reports all of them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.unanswered: list[Golden] = []

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """Run a step and keep its problems instead of stopping at them, but for wrong usage."""
        try:
            return step()
        except WrongUsage:
            raise
        except CannotArchive as error:
            self.problems.extend(error.problems)
            return None

    def add_file(self, file: Path, role: str, sha256: str | None = None) -> None:
        """Pack a file under its own name; a file given twice is packed once."""
        if not file.exists():
            self.problems.append(f"{role} {file}: there is no such file")
        elif file.is_dir():
            self.problems.append(f"{role} {file} is a folder; name the files in it")
        elif not file.is_file():
            self.problems.append(f"{role} {file} is not a regular file")
        elif not any(part.is_of(file) for part in self.parts):
            self.parts.append(Part(file.name, file, role, sha256))

    def add_artifact(self, artifact: Path) -> Report | None:
        """Pack the artifact and its report."""
        report, is_missing = self._add_with_report(artifact, "artifact", "report")
        if is_missing:
            self.warnings.append(
                f"{artifact.name} has no report beside it: its signature and parity are unknown; "
                "`modelyard export` writes it"
            )
        if report and report.parity and report.parity.extent == "quick":
            self.warnings.append(
                f"{artifact.name} was compared with its checkpoint on few inputs; export it again "
                "without --quick before it is served"
            )
        self.warnings += [
            f'{artifact.name} is refused requests whose "{spec.name}" holds {spec.limits}: it is '
            "known to answer them otherwise than its checkpoint"
            for spec in (report.signature.inputs if report else ())
            if spec.limits
        ]
        return report

    def _add_with_report(self, file: Path, *roles: str) -> tuple[Report | None, bool]:
        """Pack a file and its report, and return that, or that there is none beside it."""
        known = len(self.problems)
        report = self.attempt(lambda: read_report(file))
        self.add_file(file, roles[0], report.artifact_sha256 if report else None)
        if report:
            self.add_file(report.path, roles[1])
        return report, report is None and len(self.problems) == known

    def add_twin(self, artifact: Path, report: Report | None, twin: Path | None) -> Explain | None:
        """Pack what explains the artifact: the artifact itself, or its differentiable twin."""
        if report is None:
            if twin is not None and not self.problems:
                self.problems.append(
                    f"{artifact.name} has no report: whether {twin.name} is the same model "
                    "cannot be known; write both with `modelyard export`"
                )
            return None
        if twin is None and report.signature.has_cache:
            return None  # a text has no label to explain, and a second copy would cost memory
        if twin is None and report.format in DIFFERENTIABLE_FORMATS:
            return Explain(artifact.name, report.path.name)
        twin = twin or self._sibling(artifact)
        if twin is None:
            self.warnings.append(
                f"{artifact.name} ({report.format}) gives no gradients: only methods that take "
                "parts of the input away explain it (kernel_shap, occlusion; tree_shap where it is "
                "trees); for the others export it as pt2 too, into the same folder, or name one "
                "with --explain-with"
            )
            return None
        return self._add_other(artifact, report, twin)

    def add_handler(self, text: str) -> EntryPoint | None:
        """Pack the handler's file, unless it is built in."""
        entry_point = self.attempt(lambda: parse_handler(text))
        if entry_point and entry_point.file:
            self.add_file(entry_point.file, "handler")
        return entry_point

    def add_config(self, file: Path | None) -> None:
        """Pack the configuration, unless a key of it means nothing."""
        if file is None:
            return
        self.add_file(file, "configuration")
        with contextlib.suppress(OSError):  # `add_file` has said why
            try:
                config = parse_model_config(file.read_bytes(), str(file))
            except ValueError as error:
                self.problems.append(str(error))
                return
            self.problems += unknown_keys(config, str(file))
            self.warnings += keys_without_effect(config, str(file))

    def add_stated(self, report: Report | None, is_table: bool) -> None:
        """Pack what the checkpoint calls its classes and columns, where no file has others."""
        have = {part.name for part in self.parts}
        if report and report.labels and not have & set(LABELS):
            self.parts.append(Part(LABELS_FILE, format_json(report.labels), "labels of the report"))
        if is_table and report and report.table and FEATURES_FILE not in have:
            table = format_json(report.table)
            self.parts.append(Part(FEATURES_FILE, table, "columns of the report"))

    def check_labels(self, is_own: bool) -> None:
        """Check the labels that somebody wrote; an author's handler may read them otherwise.

        Args:
            is_own: whether the handler is an author's.
        """
        for part in self.parts:
            if part.name == LABELS_FILE and isinstance(part.source, Path):
                try:
                    problem = doubled_labels(part.source.read_bytes())
                except ValueError as error:
                    problem = str(error)
                if problem:
                    (self.warnings if is_own else self.problems).append(problem)

    def add_examples(self, texts: Iterable[str]) -> tuple[Golden, ...]:
        """Pack each example's request and expected answer, numbered from 0."""
        golden = []
        for i, text in enumerate(texts):
            example = self.attempt(lambda text=text: parse_example(text))  # type: ignore[misc]
            if example is None:
                continue
            request, expected = f"MAR-INF/golden/{i}.request", f"MAR-INF/golden/{i}.expected.json"
            self.parts.append(Part(request, example.request, "golden request"))
            golden.append(Golden(request, example.content_type, expected, TOLERANCE))
            if example.expected is None:
                self.unanswered.append(golden[-1])
            else:
                self.parts.append(Part(expected, example.expected, "golden answer"))
        return tuple(golden)

    def add_explained(self, golden: Sequence[Golden], request: ArchiveRequest) -> tuple[Asked, ...]:
        """Return the requests whose explanations are measured; rows of the reference are packed."""
        if request.certificate is False:
            return ()
        found = [Asked(each.request, each.content_type) for each in golden[: explanations.MOST]]
        if request.certificate and request.reference and request.reference.exists():
            rows, left = _rows(request.reference), explanations.ROWS_BYTES
            for at in explanations.spread(len(rows), explanations.MOST - len(found)):
                name, body = rows[at]
                is_file = isinstance(body, bytearray)
                data = bytes(body) if is_file else format_json(body)
                left -= len(data)
                if left < 0:
                    break
                kind = content_type(name if is_file else "row.json")
                found.append(Asked(f"{explanations.ROWS_FOLDER}/{len(found)}.request", kind))
                self.parts.append(Part(found[-1].file, data, "explained request"))
        return tuple(found)

    def add_requirements(self, file: Path | None, wheels_dir: Path | None) -> Resolved:
        """Pin the handler's requirements; pack them as given, as pinned, and their wheels."""
        nothing = Resolved((), ())
        if file is None:
            if wheels_dir is not None:
                self.problems.append("--wheels needs --requirements, which says what is wanted")
            return nothing
        resolved = self.attempt(lambda: resolve(file, wheels_dir)) or nothing
        if file.is_file():
            self.add_file(file, "requirements")
        if resolved.pins:
            self.parts.append(Part(names.LOCK_NAME, resolved.lock, "pinned requirements"))
        for wheel, pin in zip(resolved.wheels, resolved.pins, strict=False):
            name = f"{names.WHEELS_FOLDER}/{wheel.name}"
            self.parts.append(Part(name, wheel, "wheel", pin.sha256, "pip chose"))
        return resolved

    def checked_parts(self, has_reference: bool) -> tuple[Part, ...]:
        """Return the parts by name; note names that the reader would refuse."""
        for part in self.parts:
            if problem := names.file_name_problem(part.name):
                self.problems.append(f"{part.role} {names.quoted(part.name)}: {problem}")
        later = [golden.expected for golden in self.unanswered] + [
            names.SBOM_NAME,
            names.MANIFEST_NAME,
        ]
        later += [names.EXPLANATIONS_NAME, *([names.REFERENCE_NAME] if has_reference else [])]
        for problem in names.collisions([*(part.name for part in self.parts), *later]):
            self.problems.append(f"{problem}: all files lie in one folder; rename one")
        most = MAX_ENTRIES - len(later) - 1  # and a signature
        if len(self.parts) > most:
            self.problems.append(f"{len(self.parts)} files; an archive holds {most}")
        return _sorted(self.parts)

    def _sibling(self, artifact: Path) -> Path | None:
        twin = artifact.with_name(f"{artifact.stem.removesuffix('.aoti')}.pt2")
        has_report = twin.with_name(f"{twin.name}.report.json").exists()
        return twin if twin != artifact and twin.exists() and has_report else None

    def _add_other(self, artifact: Path, report: Report, twin: Path) -> Explain | None:
        found, is_missing = self._add_with_report(twin, "twin", "twin's report")
        if is_missing:
            self.problems.append(f"twin {twin} has no report; write it with `modelyard export`")
        if found is None:
            return None
        problem = difference(report, found)
        if found.format not in DIFFERENTIABLE_FORMATS:
            formats = " or ".join(DIFFERENTIABLE_FORMATS)
            problem = f"{found.format} gives no gradients; expected {formats}"
        if problem:
            self.problems.append(f"{twin.name} cannot explain {artifact.name}: {problem}")
        return Explain(twin.name, found.path.name)


def _rows(reference: Path) -> Sequence[tuple[str, Any]]:
    """Return the requests of a reference; what is wrong with it, the dry run says."""
    with contextlib.suppress(ValueError, OSError):
        return list(read_requests(reference))
    return ()


def _sorted(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: part.name))


def _python_sources(parts: Iterable[Part]) -> Iterator[tuple[str, bytes]]:
    for part in parts:
        if part.name.endswith(".py") and isinstance(part.source, Path):
            with contextlib.suppress(OSError):
                yield part.name, part.source.read_bytes()


def created_on() -> str:
    """Format SOURCE_DATE_EPOCH as the manifest has it; without it a fixed time, never the clock's.

    Source: https://reproducible-builds.org/specs/source-date-epoch/
    """
    # 315532800 is 1980-01-01, where zip's own times begin.
    text = os.environ.get("SOURCE_DATE_EPOCH", "315532800")
    try:
        return time.strftime("%d/%m/%Y %H:%M:%S", time.gmtime(int(text)))
    except (ValueError, OverflowError, OSError) as error:
        raise CannotArchive(
            f"SOURCE_DATE_EPOCH is {names.quoted(text)}; expected seconds since 1970"
        ) from error
