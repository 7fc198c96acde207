"""Whether a candidate's answer to a request means the same as the live version's.

Numbers agree within what the certificates of both archives state, by the rule of an export
(`handlers.agree`): the largest difference of a row over its largest value, where that is above 1.
Whole numbers, texts and structure are the same. A quantised artifact agrees when its labels do,
and, where an answer has none, when the cosine is 0.99. An answer of top-k labels may end with
another label where both tie within the tolerance.

A candidate runs its author's code: nothing that it answers makes this raise. It runs in a process
that `comparer` starts, which alone has numpy.
"""

from __future__ import annotations

import contextlib
import math
import resource
import socket
import sys
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from modelyard.archiver.untrusted.json import parse_json
from modelyard.base.answers import is_number, json_pairs, row_size
from modelyard.plugins.ops.rollout.answers import (
    LENGTH_HEADER,
    MOST_BYTES,
    SAME,
    Answer,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
    compare_statuses,
)

MOST_JSON_BYTES = 4 << 20
"""Longest JSON of an answer that is read."""
MIN_COSINE = 0.99
"""Cosine of a quantised artifact's answer without labels, as of its outputs in an export."""
_MOST_WORDS = 200
"""Characters of a difference."""
_SHOWN = 4096
"""Bytes in which the first difference of what is not JSON is looked for."""
_LABEL_KEYS = ("label", "labels", "class", "entity")
"""What is a label in an object that says more, such as the box of what a detector found."""
_MOST_MEMORY = 2 << 30
_MOST_DIMS = 32
_FLOATS = {"FP16": "<f2", "BF16": "<u2", "FP32": "<f4", "FP64": "<f8"}
_WHOLE = {
    **{"BOOL": "u1", "UINT8": "u1", "INT8": "i1", "UINT16": "<u2", "INT16": "<i2"},
    **{"UINT32": "<u4", "INT32": "<i4", "UINT64": "<u8", "INT64": "<i8"},
}
"""A datatype → numpy's; BF16 is the upper half of a float."""


def compare(live: Answer, candidate: Answer, tolerance: Tolerance) -> Comparison:
    """Return whether the candidate's answer means what the live version's does.

    Raises:
        NotCompared: the live version's answer is too large, or compressed in a way of its own.
    """
    if (failure := compare_statuses(live.status, candidate.status)) is not None:
        return failure
    if live.is_same(candidate):
        return SAME
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
    tensors, others = (_read_tensors(each.value, each.tail) for each in (before, after))
    if tensors is not None and others is not None:
        if (difference := _shapes_differ(tensors, others)) is not None:
            return _differ(difference)
        return _judge(_tensors_apart(tensors, others, tolerance.scaled), tolerance)
    if len(before.tail) > 0 or len(after.tail) > 0:
        return _differ("tensors: the bytes are not what their JSON says")
    return _judge(_json_apart(before.value, after.value, tolerance.scaled), tolerance)


class _Document(NamedTuple):
    """What an answer says."""

    value: Any
    """What its JSON says, or its text; else its bytes."""
    tail: memoryview = memoryview(b"")
    """What is behind its JSON."""
    is_json: bool = True
    """Whether its value is one that JSON has."""


class Apart(NamedTuple):
    """How far two answers are from each other."""

    scaled: float
    """Largest difference of a row over its largest value, where that is above 1."""
    place: str
    """Where, and what stands there; empty where they are the same."""
    labels_agree: bool | None
    """Whether they name the same labels; None where they name none."""
    cosine: float
    """Cosine between the two as vectors."""


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
    length = answer.headers.get(LENGTH_HEADER, "")
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


# -- tensors -------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """One output of an answer of the Open Inference Protocol."""

    datatype: str
    values: np.ndarray
    """Values in its shape; texts are objects."""

    @property
    def is_ranked(self) -> bool:
        """Whether its rows along the last dimension have a largest value that means something."""
        shape = self.values.shape
        return self.datatype in _FLOATS and len(shape) > 1 and shape[-1] > 1


def _read_tensors(document: Any, tail: memoryview) -> dict[str, _Tensor] | None:
    """Return the outputs of an answer by name; None where it is not one of the protocol.

    Args:
        document: the JSON of the answer.
        tail: the bytes behind it.
    """
    outputs = document.get("outputs") if isinstance(document, dict) else None
    if not isinstance(outputs, list) or not outputs:
        return None
    found: dict[str, _Tensor] = {}
    at = 0
    for each in outputs:
        match each:
            case {"name": str(name), "datatype": str(datatype), "shape": list(shape)}:
                pass
            case _:
                return None
        are_sizes = all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
        if name in found or not are_sizes or len(shape) > _MOST_DIMS:
            return None
        data = each.get("data")
        if "data" not in each:
            parameters = each.get("parameters")
            size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
            if type(size) is not int or not 0 <= size <= len(tail) - at:
                return None
            data, at = tail[at : at + size], at + size
        try:
            found[name] = _Tensor(
                datatype, _values(datatype, math.prod(shape), data).reshape(shape)
            )
        except (ValueError, OverflowError):
            return None
    return found if at == len(tail) else None


def _values(datatype: str, count: int, data: Any) -> np.ndarray:
    """Return the values of a tensor in a row.

    Raises:
        ValueError, OverflowError: they are not as many or as large as it says.
    """
    kind = (_FLOATS | _WHOLE).get(datatype)
    if datatype == "BYTES":
        found = np.empty(count if count <= MOST_BYTES else 0, object)
        found[:] = _split(data) if isinstance(data, memoryview) else _flat(data)
    elif kind is None:
        raise ValueError(f"the datatype {datatype}")
    elif isinstance(data, memoryview):
        found = np.frombuffer(data, kind)
        if datatype == "BF16":
            found = (found.astype("<u4") << 16).view("<f4")
    else:
        values = _flat(data)
        are_numbers = {type(value) for value in values} <= {int, bool}
        if not are_numbers and (datatype in _WHOLE or not all(map(is_number, values))):
            raise ValueError("its data are not numbers")
        found = np.array(values, "f8" if datatype in _FLOATS else kind)
    if len(found) != count:
        raise ValueError(f"{len(found)} values, and not {count}")
    return found


def _flat(data: Any) -> list[Any]:
    """Return the values of lists as deep as JSON is nested."""
    if not isinstance(data, list):
        raise ValueError("its data are not a list")
    while data and all(isinstance(each, list) for each in data):
        data = [value for each in data for value in each]
    return list(data)


def _split(data: memoryview) -> list[bytes]:
    """Return elements of BYTES: each behind its length, of four bytes."""
    texts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise ValueError("its last element is not whole")
        texts.append(bytes(data[at - size : at]))
    return texts


def _shapes_differ(live: Mapping[str, _Tensor], candidate: Mapping[str, _Tensor]) -> str | None:
    """Return in which of name, datatype and shape two answers differ, or None."""
    if live.keys() != candidate.keys():
        names = (", ".join(list(each)[:10]) for each in (live, candidate))
        return "outputs: expected {}, got {}".format(*names)
    for name, tensor in live.items():
        one, other = (
            f"{each.datatype} of shape {list(each.values.shape)}"
            for each in (tensor, candidate[name])
        )
        if one != other:
            return f"output {name}: expected {one}, got {other}"
    return None


def _tensors_apart(
    live: Mapping[str, _Tensor], candidate: Mapping[str, _Tensor], tolerance: float
) -> Apart:
    """Compare all outputs; both answers have the same names, datatypes and shapes."""
    found = [
        _texts_apart(name, tensor.values.flat, candidate[name].values.flat)
        if tensor.datatype == "BYTES"
        else _numbers_apart(name, tensor, candidate[name].values, tolerance)
        for name, tensor in live.items()
    ]
    labels = [each.labels_agree for each in found if each.labels_agree is not None]
    worst = max(found, key=lambda each: each.scaled)
    cosine = min(each.cosine for each in found)
    return Apart(worst.scaled, worst.place, all(labels) if labels else None, cosine)


def _texts_apart(name: str, live: Any, candidate: Any) -> Apart:
    """Compare texts: equal, or `value:index:label` of a classification, whose values may differ."""
    largest, place = 0.0, ""
    labels_agree = True
    for at, (expected, got) in enumerate(zip(live, candidate, strict=True)):
        if expected == got:
            continue
        before, after = _class(expected), _class(got)
        if before is None or after is None or before[1] != after[1]:
            labels_agree = False
            scaled = math.inf
        else:
            scaled = abs(before[0] - after[0]) / max(1.0, abs(before[0]))
            scaled = scaled if math.isfinite(scaled) else math.inf
        if scaled > largest:
            largest, place = scaled, f"output {name}[{at}]: expected {expected!r}, got {got!r}"
    return Apart(largest, place, labels_agree, 1.0 if labels_agree else 0.0)


def _class(text: Any) -> tuple[float, str] | None:
    """Return value and class of one entry of a classification, which is `value:index[:label]`."""
    if not isinstance(text, str | bytes) or len(text) > 1000:
        return None
    said = text if isinstance(text, str) else text.decode("utf-8", "replace")
    value, colon, of_class = said.partition(":")
    try:
        return (float(value), of_class) if colon and of_class.partition(":")[0].isdigit() else None
    except ValueError:
        return None


def _numbers_apart(name: str, live: _Tensor, candidate: np.ndarray, tolerance: float) -> Apart:
    labels_agree = True if live.is_ranked else None
    if not live.values.size:
        return Apart(0.0, "", labels_agree, 1.0)
    rows = live.values.shape[0] if live.values.ndim > 1 else 1
    own, others = live.values.reshape(rows, -1), candidate.reshape(rows, -1)  # (N, values)
    with np.errstate(all="ignore"):
        expected, got = own.astype("f8"), others.astype("f8")
        is_same = (own == others) | (np.isnan(expected) & np.isnan(got))
        apart = np.abs(got - expected)
        apart[~np.isfinite(apart) | (live.datatype in _WHOLE)] = np.inf
        apart[is_same] = 0.0
        sizes = np.where(np.isfinite(expected), np.abs(expected), 0.0).max(1, initial=1.0)  # (N)
        scaled = apart.max(1) / sizes
        if live.is_ranked:
            # NaN is the largest, as torch and numpy have it.
            ranks = [np.where(np.isnan(each), np.inf, each).reshape(-1, live.values.shape[-1])
                     for each in (expected, got)]  # fmt: skip
            first, other = (each.argmax(1)[:, None] for each in ranks)
            lead = np.take_along_axis(ranks[0], first, 1) - np.take_along_axis(ranks[0], other, 1)
            lead[(first == other) | np.isnan(lead)] = 0.0
            labels_agree = bool((lead.reshape(rows, -1).max(1) <= 2 * tolerance * sizes).all())
        is_finite = np.isfinite(expected) & np.isfinite(got)
        one, two = expected[is_finite], got[is_finite]
        dot, lengths = float(one @ two), float(np.linalg.norm(one) * np.linalg.norm(two))
    row = int(scaled.argmax())
    at, largest = int(apart[row].argmax()), float(scaled[row])
    pair = f"expected {own[row, at].item()}, got {others[row, at].item()}"
    place = f"output {name}[{row * own.shape[1] + at}]: {pair}" if largest else ""
    cosine = min(1.0, dot / lengths) if 0 < lengths < math.inf else float(largest == 0)
    return Apart(largest, place, labels_agree, cosine)


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


# -- the process ---------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Compare what comes until the server closes its end, which it does when it dies, too.

    Each time it gets a line of JSON and two bodies, and answers with a line of JSON.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    with socket.socket(fileno=descriptor) as server, contextlib.suppress(OSError):
        reader = server.makefile("rb")
        while line := reader.readline():
            said = orjson.loads(line)
            live, candidate = (
                Answer(status, headers, reader.read(size))
                for status, headers, size in said["sides"]
            )
            try:
                found: Any = compare(live, candidate, Tolerance(**said["tolerance"]))
            except NotCompared as reason:
                found = {"reason": str(reason)}
            except MemoryError:
                found = {"reason": "too large"}
            server.sendall(orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main(int(sys.argv[1]))
