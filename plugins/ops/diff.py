"""Compare what two archives answer to the same requests, on this machine."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.example import TOLERANCE, content_type
from modelyard.archiver.manifest import Golden
from modelyard.archiver.read import Archive
from modelyard.archiver.replay import UNPACKED, replay
from modelyard.base.answers import Scales, compare_numbers, is_top_k, pair_up

FOLDER = "requests-compared"
"""Name of the folder, in each unpacked archive, that gets the requests of both."""
_ANSWER_CHARS = 40


@dataclass(frozen=True)
class Compared:
    """One request and what both archives make of it."""

    request: str
    old: str
    new: str
    """The answers in a few words: the first label with its share, or the JSON's beginning."""
    scaled: float
    """Largest difference of a number over its unit; infinite where the answers are not alike."""
    difference: str
    """Where that is, with both values; "" where nothing differs."""
    relabelled: bool
    """Whether both are classifications, and the first label is another."""
    refused: bool
    """Whether neither gave an answer, but the same error."""


@dataclass(frozen=True)
class Difference:
    """What differs between the answers of two archives."""

    requests: tuple[Compared, ...]
    tolerance: float

    @property
    def differing(self) -> tuple[Compared, ...]:
        """Requests with another first label, or answers further apart than the tolerance."""
        return tuple(
            each for each in self.requests if each.relabelled or not each.scaled <= self.tolerance
        )

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold: an infinite difference is null."""
        requests = [
            asdict(each)
            | {"scaled": None if math.isinf(each.scaled) else each.scaled}
            | {"differs": each in self.differing}
            for each in self.requests
        ]
        return {
            "requests": requests,
            "tolerance": self.tolerance,
            "differing": len(self.differing),
            "summary": self.summary(),
        }

    def summary(self) -> str:
        """Return one sentence."""
        other = len(self.differing)
        apart = max((each.scaled for each in self.requests), default=0.0)
        agree = f"{len(self.requests) - other} of {len(self.requests)} answers agree"
        labels = sum(each.relabelled for each in self.requests)
        refused = sum(each.refused for each in self.requests)
        return (
            f"{agree} within {self.tolerance:g}; the largest difference is {apart:.2g}; "
            f"{labels or 'none'} with another first label"
            + (f"; {refused} refused by both" if refused else "")
        )


def diff_archives(
    old: Archive,
    new: Archive,
    *,
    requests: Sequence[Path] = (),
    tolerance: float = TOLERANCE,
    device: str = "auto",
) -> Difference:
    """Ask two open archives, each in a worker of its own, and compare their answers.

    Asked are the golden requests of both and `requests`, whose type their names say. A number's
    difference is measured by its own scale, learnt from the old archive's answers, or by the number
    itself where these are fewer than eight (`modelyard.base.answers`).

    Raises:
        CannotArchive: a request's file cannot be read.
        DoesNotRun: an archive does not load; the message is the worker's own.
    """
    asked = _collect(old, new, requests)
    answers = [_answer(archive, asked, device) for archive in (old, new)]
    scales = Scales()
    for answer, problem in answers[0]:
        if problem is None:
            scales.see(answer)
    compared = [
        _compare(golden.request, one, other, scales)
        for (golden, _), one, other in zip(asked, *answers, strict=True)
    ]
    return Difference(tuple(compared), tolerance)


_Asked = tuple[Golden, bytes]
_Answer = tuple[Any, str | None]


def _collect(old: Archive, new: Archive, requests: Sequence[Path]) -> list[_Asked]:
    """Return each request once, however many archives and files hold it."""
    found: dict[tuple[str, str], _Asked] = {}

    def add(name: str, kind: str, content: bytes) -> None:
        key = kind, hashlib.sha256(content).hexdigest()
        found.setdefault(key, (Golden(name, kind, "", TOLERANCE), content))

    for archive in (old, new):
        for golden in archive.manifest.modelyard.golden if archive.manifest.modelyard else ():
            name = Path(golden.request).name
            add(name, golden.content_type, archive.read(golden.request))
    for file in requests:
        try:
            add(file.name, content_type(file.name), file.read_bytes())
        except OSError as error:
            raise CannotArchive(f"request {file}: {error.strerror}") from error
    return list(found.values())


def _answer(archive: Archive, asked: Sequence[_Asked], device: str) -> list[_Answer]:
    """Return an archive's answers, each with what is wrong about it, if anything is."""
    seal = archive.manifest.modelyard
    if seal is None:
        raise CannotArchive(
            f"{archive.path.name} holds no digests, so nobody knows whether it is what was packed; "
            "write it with `modelyard archive`"
        )
    with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
        folder = Path(name) / UNPACKED
        archive.unpack(folder)
        (folder / FOLDER).mkdir()
        golden = []
        for number, (each, content) in enumerate(asked):
            file = f"{FOLDER}/{number}"
            (folder / file).write_bytes(content)
            golden.append(replace(each, request=file))
        manifest = replace(archive.manifest, modelyard=replace(seal, golden=tuple(golden)))
        done = replay(folder, manifest, unanswered=golden, record=False, device=device)
    return [(each.answer, each.difference) for each in done.golden]


def _compare(request: str, old: _Answer, new: _Answer, scales: Scales) -> Compared:
    shown = (_in_short(*old), _in_short(*new))
    if old[1] or new[1]:
        # Without the place in the handler's code, which any edit moves.
        errors = [re.sub(r" \([^()]*\)$", "", problem or "") for _, problem in (old, new)]
        same = errors[0] == errors[1]
        told = "" if same else "one is an error, or another error"
        return Compared(request, *shown, 0.0 if same else math.inf, told, False, same)
    labels = [_first_label(answer) for answer, _ in (old, new)]
    relabelled = None not in labels and labels[0] != labels[1]
    other, groups = pair_up(old[0], new[0])
    if other is not None:
        place = f"{other.place}: {_cut(other.expected)} → {_cut(other.got)}"
        return Compared(request, *shown, math.inf, place, relabelled, False)
    apart = compare_numbers(groups, scales)
    worst = apart.worst
    place = f"{worst.place}: {worst.expected:.6g} → {worst.got:.6g}" if worst else ""
    return Compared(request, *shown, apart.scaled, place, relabelled, False)


def _in_short(answer: Any, problem: str | None) -> str:
    if problem is not None:
        return _cut(problem)
    if (label := _first_label(answer)) is not None:
        return f"{label} ({answer[label]:.4g})"
    return _cut(answer)


def _first_label(answer: Any) -> str | None:
    return next(iter(answer)) if isinstance(answer, dict) and is_top_k(answer) else None


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _ANSWER_CHARS else f"{text[: _ANSWER_CHARS - 1]}…"
