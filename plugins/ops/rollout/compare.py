"""Whether a candidate's answer to a request means the same as the live version's.

Numbers agree within what the certificates of both archives state, by the rule of an export
(`handlers.agree`): the largest difference of a row over its largest value, where that is above 1.
Whole numbers, texts and structure are the same. A quantised artifact agrees when its labels do,
and, where an answer has none, when the cosine is 0.99. An answer of top-k labels may end with
another label where both tie within the tolerance.

A candidate runs its author's code: nothing that it answers makes this raise. Large answers take
long, some 0.4 us a byte of JSON: `comparer` compares them where nobody waits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import joint_tolerance, parse_report
from modelyard.archiver.untrusted.json import parse_json
from modelyard.base.answers import is_number, json_pairs, row_size
from modelyard.plugins.ops.rollout.numbers import (
    Apart,
    read_tensors,
    shapes_differ,
    tensors_apart,
)
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import Reply, Stream
from modelyard.serve.dataplane.wire import Payload

MOST_BYTES = 16 << 20
"""Of an answer that is compared otherwise than byte by byte."""
MOST_JSON_BYTES = 4 << 20
"""Of its JSON."""
MIN_COSINE = 0.99
"""Of a quantised artifact's answer without labels, as of its outputs in an export."""
DEFAULT_TOLERANCE = 1e-4
"""Of an archive whose certificate states none: that of float32."""
_MOST_WORDS = 200
"""Characters of a difference."""
_SHOWN = 4096
"""Bytes in which the first difference of what is not JSON is looked for."""
_LABEL_KEYS = ("label", "labels", "class", "entity")
"""What is a label in an object that says more, such as the box of what a detector found."""
_LENGTH_HEADER = "inference-header-content-length"


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


class Answer(NamedTuple):
    """An answer as a worker sent it, or the error that there was instead."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Payload


@dataclass(frozen=True)
class Tolerance:
    """How far two answers may be apart that mean the same."""

    scaled: float = DEFAULT_TOLERANCE
    """Largest difference of a number over the largest of its row, where that is above 1."""
    is_quantized: bool = False
    """One of the two approximates: labels, or the cosine, decide."""


@dataclass(frozen=True)
class Comparison:
    """What was found."""

    verdict: Verdict
    labels_agree: bool | None
    """True where the answers are the same; None where they name no label and rank nothing, or have
    not the same structure."""
    difference: str | None = None
    """In words; None where they are equal."""
    scaled: float = 0.0
    """The largest scaled difference; infinite where no tolerance would help."""

    @property
    def agrees(self) -> bool:
        """Whether a client would take one for the other."""
        return self.verdict in (Verdict.EQUAL, Verdict.WITHIN_TOLERANCE)


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
        manifest: as its JSON has it; None where there is none.
    """
    name = ((manifest or {}).get("modelyard") or {}).get("report")
    if not name:
        return Tolerance()
    try:
        parity = parse_report((folder / name).read_bytes(), Path(name)).parity
    except (CannotArchive, OSError):
        return Tolerance()
    if parity is None:
        return Tolerance()
    largest = max(parity.tolerances.values(), default=DEFAULT_TOLERANCE)
    return Tolerance(largest, parity.is_quantized)


def both(one: Tolerance, other: Tolerance) -> Tolerance:
    """Return how far the answers of two archives may be apart, each as far from its checkpoint."""
    scaled = joint_tolerance(one.scaled, other.scaled)
    return Tolerance(scaled, one.is_quantized or other.is_quantized)


def compare(live: Answer, candidate: Answer, tolerance: Tolerance) -> Comparison:
    """Return whether the candidate's answer means what the live version's does.

    Raises:
        NotCompared: the live version's answer is too large, or compressed in a way of its own.
    """
    if (failure := _compare_statuses(live.status, candidate.status)) is not None:
        return failure
    if _forms(live) == _forms(candidate) and live.body == candidate.body:
        return Comparison(Verdict.EQUAL, labels_agree=True)
    before = _read(_decompressed(live))
    try:
        after = _read(_decompressed(candidate))
    except NotCompared:  # what the live version has sent can be read
        return _differ(f"answer: expected {len(live.body)} bytes, got {len(candidate.body)}")
    if not before.is_json or not after.is_json:
        return _differ(_describe(before, after))
    try:
        return _compare_documents(before, after, tolerance)
    except RecursionError:
        return _differ("answer: nested deeper than it can be compared")


def _compare_documents(before: _Document, after: _Document, tolerance: Tolerance) -> Comparison:
    """Compare what two answers say."""
    has_tail = len(before.tail) > 0 or len(after.tail) > 0
    if has_tail or "outputs" in _keys(before) & _keys(after):
        tensors = read_tensors(before.value, before.tail)
        others = read_tensors(after.value, after.tail)
        if tensors is not None and others is not None:
            if (difference := shapes_differ(tensors, others)) is not None:
                return _differ(difference)
            return _judge(tensors_apart(tensors, others, tolerance.scaled), tolerance)
        if has_tail:
            return _differ("tensors: the bytes are not what their JSON says")
    return _judge(_json_apart(before.value, after.value, tolerance.scaled), tolerance)


def _compare_statuses(live: int, candidate: int) -> Comparison | None:
    """Return what two statuses say; None where both are answers."""
    if live < 300 and candidate < 300:
        return None
    said = f"status: expected {live}, got {candidate}"
    if live >= 500:
        return Comparison(Verdict.LIVE_FAILED, None, said, math.inf)
    if candidate >= 500 or live < 300:
        return Comparison(Verdict.CANDIDATE_FAILED, None, said, math.inf)
    if live == candidate:  # the same refusal, in whatever words
        return Comparison(Verdict.EQUAL, None)
    return Comparison(Verdict.DIFFERS, None, said, math.inf)


class _Document(NamedTuple):
    """What an answer says."""

    value: Any
    """Of its JSON, or its text; else its bytes."""
    tail: memoryview = memoryview(b"")
    """What is behind its JSON."""
    is_json: bool = True
    """Whether its value is one that JSON has."""


def _forms(answer: Answer) -> tuple[str, ...]:
    names = ("content-type", "content-encoding", _LENGTH_HEADER)
    return tuple(answer.headers.get(name, "") for name in names)


def _decompressed(answer: Answer) -> Answer:
    """Return an answer as it was before gzip."""
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return answer
    if encoding != "gzip":
        raise NotCompared("compressed")
    reader = zlib.decompressobj(31)
    try:
        body = reader.decompress(answer.body, MOST_JSON_BYTES + 1)
    except zlib.error:
        return answer
    if len(body) > MOST_JSON_BYTES:
        raise NotCompared("too large")
    return answer._replace(body=body)


def _read(answer: Answer) -> _Document:
    """Read an answer's JSON and what is behind it, or its text."""
    length = answer.headers.get(_LENGTH_HEADER, "")
    kind = answer.headers.get("content-type", "")
    view = memoryview(answer.body)
    as_bytes = _Document(bytes(view[:_SHOWN]), view, is_json=False)
    if not length and not kind.startswith(("application/json", "text/")):
        return as_bytes
    if length and not (length.isascii() and length.isdigit() and len(length) < 18):
        return as_bytes
    head = view[: int(length)] if length else view
    if len(head) > MOST_JSON_BYTES or len(view) > MOST_BYTES:
        raise NotCompared("too large")
    try:
        return _Document(parse_json(bytes(head), fast=orjson.loads), view[len(head) :])
    except ValueError:  # NaN, too, which JSON does not have
        try:
            return _Document(str(head, "utf-8")) if kind.startswith("text/") else as_bytes
        except UnicodeDecodeError:
            return as_bytes


def _keys(document: _Document) -> set[str]:
    return set(document.value) if isinstance(document.value, dict) else set()


def _describe(before: _Document, after: _Document) -> str:
    """Return how two answers differ of which one at least is not JSON."""
    if before.is_json != after.is_json:
        words = {True: "JSON", False: "something that is not JSON"}
        return f"answer: expected {words[before.is_json]}, got {words[after.is_json]}"
    sizes = f"expected {len(before.tail)} bytes, got {len(after.tail)}"
    pairs = zip(before.value, after.value, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return f"answer: {sizes}"
    one, other = before.value[place : place + 20], after.value[place : place + 20]
    return f"answer: {sizes}; from byte {place} expected {one!r}, got {other!r}"


def _differ(difference: str) -> Comparison:
    """Return that no tolerance would help."""
    return Comparison(Verdict.DIFFERS, None, difference[:_MOST_WORDS], math.inf)


def _judge(apart: Apart, tolerance: Tolerance) -> Comparison:
    """Return what a difference means."""
    if not apart.scaled:  # another order of keys, another way to write a number
        return Comparison(Verdict.EQUAL, labels_agree=True)
    if not tolerance.is_quantized:
        agrees = apart.scaled <= tolerance.scaled
    elif apart.labels_agree is None:
        agrees = apart.cosine >= MIN_COSINE
    else:
        agrees = apart.labels_agree
    verdict = Verdict.WITHIN_TOLERANCE if agrees else Verdict.DIFFERS
    return Comparison(verdict, apart.labels_agree, apart.place[:_MOST_WORDS], apart.scaled)


# -- JSON ----------------------------------------------------------------------------------------


def _json_apart(live: Any, candidate: Any, tolerance: float) -> Apart:
    """Measure how far two answers in JSON are apart."""
    labels_agree = _labels_agree(live, candidate, tolerance)
    live, candidate = _without_ties(live, candidate, tolerance)
    largest, place = 0.0, ""
    dot = expected_squares = got_squares = 0.0
    for pair in json_pairs(candidate, live):
        if pair.scaled > largest:
            largest, place = pair.scaled, str(pair)[:_MOST_WORDS]
        if is_number(pair.expected) and is_number(pair.got):
            expected, got = float(pair.expected), float(pair.got)
            dot += expected * got
            expected_squares += expected * expected
            got_squares += got * got
    lengths = math.sqrt(expected_squares) * math.sqrt(got_squares)
    cosine = dot / lengths if 0 < lengths < math.inf else 0.0
    return Apart(largest, place, labels_agree, cosine)


def _labels_agree(live: Any, candidate: Any, tolerance: float) -> bool | None:
    """Return whether two answers name the same labels; None where they name none.

    A label is a text, a whole number, the key of the largest number of an object, or the place of
    the largest in a list. Of what ties within the tolerance, either is right.
    """
    if isinstance(live, dict) and isinstance(candidate, dict):
        if _is_ranked(live.values()) and _is_ranked(candidate.values()):
            return _top_agrees(live, candidate, tolerance)
        named = [key for key in _LABEL_KEYS if key in live]
        keys = named or list(live)
        if not all(key in candidate for key in keys):
            return False
        pairs = [(live[key], candidate[key]) for key in keys]
    elif isinstance(live, list) and isinstance(candidate, list):
        if len(live) != len(candidate):
            return False
        if _is_ranked(live) and _is_ranked(candidate):
            by_place, others = dict(enumerate(live)), dict(enumerate(candidate))
            return _top_agrees(by_place, others, tolerance)
        pairs = list(zip(live, candidate, strict=True))
    else:
        if isinstance(live, float) and is_number(candidate):
            return None
        return type(live) is type(candidate) and live == candidate
    found = [_labels_agree(one, other, tolerance) for one, other in pairs]
    said = [agrees for agrees in found if agrees is not None]
    return all(said) if said else None


def _is_ranked(values: Any) -> bool:
    kinds = set(map(type, values))
    return float in kinds and kinds <= {int, float} and len(values) > 1


def _top_agrees(live: dict[Any, float], candidate: dict[Any, float], tolerance: float) -> bool:
    first, other = max(live, key=live.__getitem__), max(candidate, key=candidate.__getitem__)
    if first == other:
        return True
    ties = 2 * tolerance * row_size(list(live.values()))
    return other in live and live[first] - live[other] <= ties


def _without_ties(live: Any, candidate: Any, tolerance: float) -> tuple[Any, Any]:
    """Return both without the last labels of a top-k that only one of them has, where they tie."""
    if isinstance(live, list) and isinstance(candidate, list) and len(live) == len(candidate):
        if not any(isinstance(each, list | dict) for each in live):
            return live, candidate
        pairs = [_without_ties(*each, tolerance) for each in zip(live, candidate, strict=True)]
        return [one for one, _ in pairs], [other for _, other in pairs]
    if not isinstance(live, dict) or not isinstance(candidate, dict):
        return live, candidate
    shared = live.keys() & candidate.keys()
    if len(shared) < len(live) and _is_top_k(live) and _is_top_k(candidate):
        odd = [*_odd(live, shared), *_odd(candidate, shared)]
        lowest = min(*live.values(), *candidate.values())
        ties = 2 * tolerance * row_size(list(live.values()))
        if shared and len(live) == len(candidate) and max(odd) - lowest <= ties:
            return {key: live[key] for key in shared}, {key: candidate[key] for key in shared}
    elif len(shared) == len(live) == len(candidate):
        both = {key: _without_ties(live[key], candidate[key], tolerance) for key in live}
        return {key: one for key, (one, _) in both.items()}, {
            key: other for key, (_, other) in both.items()
        }
    return live, candidate


def _odd(values: dict[str, float], shared: set[str]) -> list[float]:
    return [value for key, value in values.items() if key not in shared]


def _is_top_k(found: dict[str, Any]) -> bool:
    """Return whether an answer is as our classifiers': probabilities, the largest first."""
    values = list(found.values())
    return (
        _is_ranked(values)
        and values == sorted(values, reverse=True)
        and 0 <= values[-1] <= values[0] <= 1
    )
