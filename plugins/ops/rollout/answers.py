"""Two answers that are to be compared, and what comparing them finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import ceiling, joint_tolerance, parse_report
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Reply, Stream
from modelyard.serve.dataplane.wire import Payload

MOST_BYTES = 16 << 20
"""Longest answer that is compared otherwise than byte by byte."""
DEFAULT_TOLERANCE = 1e-4
"""Tolerance of an archive whose certificate states none: that of float32."""
MOST_ERROR = 0.15
"""Error of a quantised archive whose certificate states none: the largest that an export takes."""
_ERRORS = 4.0
"""Errors as large as the certificate's that an answer may have: a softmax may enlarge them."""
LENGTH_HEADER = "inference-header-content-length"


class NotCompared(Exception):
    """Two answers that are not compared, and count as neither equal nor different.

    The message is a word or two, which names the reason where they are counted.
    """


class Verdict(StrEnum):
    """What comparing two answers found."""

    EQUAL = "equal"
    WITHIN_TOLERANCE = "within_tolerance"
    DIFFERS = "differs"
    CANDIDATE_FAILED = "candidate_failed"
    LIVE_FAILED = "live_failed"
    BOTH_FAILED = "both_failed"


class Answer(NamedTuple):
    """An answer as a worker sent it, or the error that there was instead."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Payload

    def is_same(self, other: Answer) -> bool:
        """Return whether both say the very same, byte by byte, in the same form."""
        names = ("content-type", "content-encoding", LENGTH_HEADER)
        are_alike = all(self.headers.get(name) == other.headers.get(name) for name in names)
        return self.status < 300 and other.status < 300 and are_alike and self.body == other.body


@dataclass(frozen=True)
class Tolerance:
    """How far two answers may be apart that mean the same."""

    scaled: float = DEFAULT_TOLERANCE
    """Largest difference of a number over its unit."""
    is_quantized: bool = False
    """One of the two approximates: labels are the same, and `error` decides."""
    error: float = MOST_ERROR
    """Largest error of the numbers of an answer, taken together, where one approximates."""
    subject: str = ""
    """Whose answers they are: scales are learnt for each subject alone."""


@dataclass(frozen=True)
class Comparison:
    """What was found."""

    verdict: Verdict
    labels_agree: bool | None
    """True where the answers are the same; None where they name no label and rank nothing, or have
    not the same structure."""
    difference: str | None = None
    """Difference in words; None where they are equal."""
    scaled: float = 0.0
    """The largest scaled difference; infinite where no tolerance would help."""

    @property
    def agrees(self) -> bool:
        """Whether a client would take one for the other."""
        return self.verdict in (Verdict.EQUAL, Verdict.WITHIN_TOLERANCE)


SAME = Comparison(Verdict.EQUAL, labels_agree=True)


def compare_statuses(live: int, candidate: int) -> Comparison | None:
    """Return what two statuses say; None where both are answers."""
    if live == candidate and live < 300:
        return None
    said = f"status: expected {live}, got {candidate}"
    if live >= 500:
        failed = (Verdict.LIVE_FAILED, Verdict.BOTH_FAILED)[candidate >= 500]
        return Comparison(failed, None, said, math.inf)
    if candidate >= 500 or live < 300 <= candidate:
        return Comparison(Verdict.CANDIDATE_FAILED, None, said, math.inf)
    if live == candidate:  # the same refusal, in whatever words
        return Comparison(Verdict.EQUAL, None)
    return Comparison(Verdict.DIFFERS, None, said, math.inf)


def answer_of(reply: Reply) -> Answer:
    """Return a worker's reply as it is compared.

    Raises:
        NotCompared: it is a stream.
    """
    if isinstance(reply.body, Stream):
        raise NotCompared("stream")
    fields = wire.unpack_meta(reply.headers)
    pairs = zip(fields[::2], fields[1::2], strict=False)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in pairs}
    return Answer(reply.status, headers, reply.body)


def read_tolerance(folder: Path, manifest: Mapping[str, Any] | None) -> Tolerance:
    """Return what an unpacked archive's certificate allows.

    Args:
        folder: where the archive is unpacked, its digests checked.
        manifest: manifest as its JSON has it; None where there is none.
    """
    name = ((manifest or {}).get("modelyard") or {}).get("report")
    try:
        report = parse_report((folder / name).read_bytes(), Path(name)) if name else None
    except (CannotArchive, OSError):
        report = None
    parity = None if report is None else report.parity
    if report is None or parity is None:
        return Tolerance()
    stated = [
        min(parity.tolerances[spec.name], ceiling(spec.dtype)) for spec in report.signature.outputs
    ]
    scaled = max(stated, default=DEFAULT_TOLERANCE)
    if not parity.is_quantized:
        return Tolerance(scaled)
    error = _ERRORS * max(parity.errors.values(), default=MOST_ERROR)
    return Tolerance(scaled, is_quantized=True, error=min(MOST_ERROR, error))


def both(one: Tolerance, other: Tolerance, subject: str) -> Tolerance:
    """Return how far the answers of two archives may be apart, each as far from its checkpoint."""
    return Tolerance(
        joint_tolerance(one.scaled, other.scaled),
        one.is_quantized or other.is_quantized,
        min(MOST_ERROR, sum(each.error for each in (one, other) if each.is_quantized)),
        subject,
    )
