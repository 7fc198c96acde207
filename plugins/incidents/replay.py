"""Run the batches of incidents again, and say how the answers compare with those of then."""

from __future__ import annotations

import hashlib
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modelyard.archiver.errors import ArchiveNotFound, NothingCompared, RefusedArchive, WrongUsage
from modelyard.archiver.example import TOLERANCE
from modelyard.archiver.read import Archive, open_archive
from modelyard.archiver.replay import UNPACKED, answer_again
from modelyard.archiver.untrusted.json import parse_json
from modelyard.base.answers import json_difference
from modelyard.plugins.incidents.file import MOST_BYTES, Incident, Request, this_machine
from modelyard.serve.control.store import list_archives

Verdict = Literal["same", "within", "differs"]


@dataclass(frozen=True)
class Compared:
    """One answer of the batch, then and now."""

    id: str
    verdict: Verdict
    """`same`: bit for bit; `within` the tolerance of the archive's golden requests."""
    text: str
    """How it differs; empty where it does not."""


@dataclass(frozen=True)
class Outcome:
    """What came of running a batch again."""

    answers: Sequence[Compared]
    place: int
    elsewhere: Sequence[str]
    """What is otherwise on this machine; bits may only differ where something is."""
    lacking: Sequence[str]
    """Walls that did not stand around it."""

    @property
    def verdict(self) -> Verdict:
        """The worst of the answers; on the same machine nothing but the same bits will do."""
        found = {each.verdict for each in self.answers}
        if "differs" in found or ("within" in found and not self.elsewhere):
            return "differs"
        return "within" if "within" in found else "same"

    def to_json(self) -> dict[str, Any]:
        """Return it as the command prints it."""
        return {"verdict": self.verdict, **asdict(self)}


def replay_incidents(
    incidents: Sequence[Incident],
    *,
    archive: Path | None,
    store: Path,
    files: Sequence[Path] = (),
    device: str | None = None,
) -> list[Outcome]:
    """Answer the batches of incidents again, in the process and behind the walls of a worker.

    Those of one archive, that ran alike, are answered by one process.

    Args:
        archive: the archive; None looks for it in the store, by its digest.
        files: requests and answers that the incidents' files lack, told apart by their digests.
        device: where they run; None takes that of then.

    Raises:
        ArchiveError: it is another archive, or does not run.
        NothingCompared: a request is missing, or no answer of then is known.
    """
    read = _by_digest(files)
    groups: dict[str, list[Incident]] = {}
    whole = [
        replace(each, batch=[_complete(request, read) for request in each.batch])
        for each in incidents
    ]
    for at, each in enumerate(whole):
        if each.has_steps:  # who joined while it ran is not known
            each = whole[at] = replace(each, batch=[each.batch[each.place]], place=0)
        _check(each)
        key = repr((each.archive, sorted(each.load.items()), each.threads, each.device))
        groups.setdefault(key, []).append(each)
    found: dict[int, Outcome] = {}
    for group in groups.values():
        found |= zip(map(id, group), _run(group, archive, store, device), strict=True)
    return [found[id(each)] for each in whole]


def _run(
    group: Sequence[Incident], archive: Path | None, store: Path, device: str | None
) -> Iterator[Outcome]:
    first = group[0]
    with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
        folder = Path(name) / UNPACKED
        with _open(first, archive, store, Path(name)) as opened:
            seal, manifest = opened.manifest.modelyard, opened.manifest
            opened.unpack(folder)
        found = answer_again(
            folder,
            manifest,
            [[_as_frame(request) for request in each.batch] for each in group],
            load={key: value for key, value in first.load.items() if value is not None},
            threads=first.threads,
            device=device or first.device,
        )
    tolerance = max((each.tolerance for each in (seal.golden if seal else ())), default=TOLERANCE)
    here = {**this_machine(), "device": found["device"]}
    for each, batch in zip(group, found["batches"], strict=True):
        then = {**each.machine, "device": each.device}
        elsewhere = [
            f"{name}: {then.get(name, 'none')} then, {here.get(name, 'none')} here"
            for name in sorted({*here, *then})
            if here.get(name) != then.get(name)
        ]
        pairs = zip(each.batch, batch, strict=True)
        answers = [_compare(request, now, tolerance) for request, now in pairs]
        yield Outcome(answers, each.place, elsewhere, found["lacking"])


def _by_digest(files: Iterable[Path]) -> Mapping[str, bytes]:
    read: dict[str, bytes] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                data = opened.read(MOST_BYTES)
        except OSError as error:
            raise WrongUsage(f"--body: cannot read {file}: {error.strerror}") from error
        read[hashlib.sha256(data).hexdigest()] = data
    return read


def _complete(request: Request, read: Mapping[str, bytes]) -> Request:
    body = request.body if request.body is not None else read.get(request.sha256)
    answer = request.answer if request.answer is not None else read.get(request.answer_sha256 or "")
    return replace(request, body=body, answer=answer)


def _check(incident: Incident) -> None:
    """Refuse what cannot be run again, or compared."""
    if dialect := incident.load.get("dialect"):
        raise NothingCompared(f"it was answered by the {dialect} drop-in, which replays nothing")
    missing = [f"{each.sha256} ({each.id})" for each in incident.batch if each.body is None]
    if missing:
        raise NothingCompared(
            "the file has no requests, only their digests (incident_inputs was off); give each "
            "with --body FILE",
            missing,
        )
    if incident.batch[incident.place].answer_sha256 is None:
        raise NothingCompared(f"the answer {incident.id} was streamed, and has no digest")


def _open(incident: Incident, archive: Path | None, store: Path, staging: Path) -> Archive:
    """Open the archive that has the incident's digest.

    Raises:
        RefusedArchive: it has another one.
        ArchiveNotFound: the store has none with it.
    """
    files = [archive] if archive is not None else [store / name for name in list_archives(store)]
    for file in files:
        opened = open_archive(file, staging=staging)
        if opened.digest == incident.archive:
            return opened
        opened.close()
        if archive is not None:
            raise RefusedArchive(
                f"{archive} is another archive: its digest is {opened.digest}, and the incident is "
                f"of {incident.model} {incident.version} with {incident.archive}"
            )
    raise ArchiveNotFound(
        f"none of the {len(files)} archives in {store} has the digest {incident.archive} of "
        f"{incident.model} {incident.version}; name it with --archive FILE"
    )


def _as_frame(request: Request) -> dict[str, Any]:
    head, body = (b64encode(data or b"").decode() for data in (request.head, request.body))
    return {"head": head, "body": body, "flags": request.flags, "rows": request.rows}


def _compare(then: Request, now: Mapping[str, Any], tolerance: float) -> Compared:
    body = b64decode(now["body"])
    if now["status"] != then.status:
        text = f"status {then.status} then, {now['status']} now"
        return Compared(then.id, "differs", text)
    if hashlib.sha256(body).hexdigest() == then.answer_sha256:
        return Compared(then.id, "same", "")
    if then.answer_sha256 is None:
        return Compared(then.id, "same", "its answer was streamed and is not compared")
    text = "its bits differ"
    if not then.is_whole:
        text += "; the file lacks headers of its request"
    if then.answer is None:
        text += "; by how much needs the answer of then: give it with --body FILE"
        return Compared(then.id, "differs", text)
    try:
        difference = json_difference(parse_json(body), parse_json(then.answer), tolerance)
    except ValueError:  # a picture, say
        difference = "its answer is not JSON"
    if difference:
        return Compared(then.id, "differs", f"{text}: {difference}")
    return Compared(then.id, "within", f"{text}; numbers agree within {tolerance:g}")
