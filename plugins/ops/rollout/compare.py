"""Whether a candidate's answer to a request means the same as the live version's.

Numbers agree within what the certificates of both archives state, each measured by its own unit,
which is learnt from what the live version has answered (`modelyard.base.answers`); until enough is
learnt, numbers that are not equal are not compared. Whole numbers, texts and structure are the
same. A quantised artifact's labels are the same, and its numbers are as far off, taken together, as
its certificate measured. An answer of top-k labels may end with another label where both tie within
the tolerance. JSON in lines, CSV and npy are compared by what they say.

A candidate runs its author's code: nothing that it answers makes this raise. It runs in a process
that `comparer` starts, which alone has numpy.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import resource
import socket
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from modelyard_client.tensors import BF16, BYTES, MOST_DIMS, NUMPY, as_objects, from_bytes

from modelyard.archiver.untrusted.json import parse_json
from modelyard.base.answers import (
    ENOUGH,
    Scales,
    compare_numbers,
    is_number,
    is_top_k,
    measure,
    pair_up,
)
from modelyard.plugins.ops.rollout.comparer import (
    LENGTH_HEADER,
    MOST_BYTES,
    SAME,
    Answer,
    Comparison,
    NotCompared,
    Tolerance,
    Verdict,
    answer_of,
    compare_statuses,
)
from modelyard.serve.dataplane.call import Reply

MOST_JSON_BYTES = 4 << 20
"""Longest JSON of an answer that is read."""
_MOST_WORDS = 200
"""Characters of a difference."""
_SHOWN = 4096
"""Bytes in which the first difference of what is not JSON is looked for."""
_LABEL_KEYS = ("label", "labels", "class", "entity")
"""What is a label in an object that says more, such as the box of what a detector found."""
_MANY = 32
"""Answers until which a spread may by chance be half of what it is, or less: one time in 600 from
eight answers, never seen from 16."""
_MOST_MEMORY = 2 << 30
_FLOATS = {BF16, *(name for name, dtype in NUMPY.items() if dtype.kind == "f")}
_WHOLE = NUMPY.keys() - _FLOATS
_NAMES = {dtype: name for name, dtype in NUMPY.items()}


def compare(
    live: Answer, candidate: Answer, tolerance: Tolerance, scales: Scales | None = None
) -> Comparison:
    """Return whether the candidate's answer means what the live version's does.

    Args:
        live: the live version's.
        candidate: the candidate's.
        tolerance: how far they may be apart.
        scales: learns from the live version's answers; without it numbers measure themselves.

    Raises:
        NotCompared: the live version's answer is too large, or compressed in a way of its own; or
            numbers differ whose scale is not known yet.
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
    if before.kind != after.kind or before.kind == "bytes":
        return _differ(_describe(before, after))
    try:
        with np.errstate(all="ignore"):
            if scales is not None:
                _learn(before, scales)
            return _judge(_apart(before, after, tolerance, scales), tolerance, scales)
    except RecursionError:
        return _differ("answer: nested deeper than it can be compared")


def _apart(
    before: _Document, after: _Document, tolerance: Tolerance, scales: Scales | None
) -> Apart:
    """Compare what two answers say."""
    tensors, others = (_read_tensors(each.value, each.tail) for each in (before, after))
    if tensors is not None and others is not None:
        if (difference := _shapes_differ(tensors, others)) is not None:
            return Apart(math.inf, difference, None)
        found = _tensors_apart(tensors, others, tolerance.scaled, scales)
        beside = _json_apart(_beside(before.value), _beside(after.value), tolerance, scales)
        return beside if beside.scaled > found.scaled else found
    if len(before.tail) > 0 or len(after.tail) > 0:
        return Apart(math.inf, "tensors: the bytes are not what their JSON says", None)
    return _json_apart(before.value, after.value, tolerance, scales)


def _beside(document: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer says beside its tensors' values and which version gave it."""
    outputs = [
        {
            **each,
            "data": None,
            "parameters": {**stated, "binary_data_size": None}
            if isinstance(stated := each.get("parameters", {}), dict)
            else stated,
        }
        for each in document["outputs"]
    ]
    return {**document, "outputs": outputs, "id": None, "model_version": None}


def _learn(before: _Document, scales: Scales) -> None:
    """Learn from an answer of the live version."""
    tensors = _read_tensors(before.value, before.tail)
    scales.see(before.value if tensors is None else None)
    for name, tensor in (tensors or {}).items():
        if tensor.datatype in _FLOATS:
            scales.learn(name, tensor.values.astype("f8"))


class _Document(NamedTuple):
    """What an answer says."""

    value: Any
    """What its JSON says, or its text; else its bytes."""
    tail: memoryview = memoryview(b"")
    """What is behind its JSON."""
    kind: str = ""
    """The type of what its value was read from; `bytes` where nothing was."""


class Apart(NamedTuple):
    """How far two answers are from each other."""

    scaled: float
    """Largest difference of a number over its unit; infinite where anything else differs."""
    place: str
    """Where, and what stands there; empty where they are the same."""
    labels_agree: bool | None
    """Whether they name the same labels; None where they name none."""
    error: float = math.inf
    """Largest root mean square, over groups of numbers, of the differences over their sizes."""


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
    if not reader.eof or reader.unused_data:  # clients fail at the first and read the second, too
        return answer
    return answer._replace(body=body)


def _read(answer: Answer) -> _Document:
    """Read an answer's JSON and what is behind it, its lines, its array or its text."""
    length = answer.headers.get(LENGTH_HEADER, "")
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    view = memoryview(answer.body)
    as_bytes = _Document(bytes(view[:_SHOWN]), view, "bytes")
    if length and not (length.isascii() and length.isdigit() and len(length) < 18):
        return as_bytes
    head = view[: int(length)] if length else view
    read = None if length else _READERS.get(kind)
    is_json = kind == "application/json" or kind.endswith("+json")
    if not length and read is None and not kind.startswith("text/") and not is_json:
        return as_bytes
    if len(head) > MOST_JSON_BYTES or len(view) > MOST_BYTES:
        raise NotCompared("too large")
    try:
        if read is not None:
            return _Document(read(bytes(head)), kind=kind)
        return _Document(_parse(bytes(head)), view[len(head) :], kind)
    except ValueError:
        try:
            text = kind.startswith("text/")
            return _Document(str(head, "utf-8"), kind=kind) if text else as_bytes
        except UnicodeDecodeError:
            return as_bytes


def _parse(text: bytes) -> Any:
    """Read JSON, and NaN and infinities, which many write and JSON does not have.

    Raises:
        ValueError: it is neither.
    """
    try:
        return parse_json(text, fast=orjson.loads)
    except ValueError:
        if b"NaN" not in text and b"Infinity" not in text:
            raise
        return json.loads(text)


def _read_cell(cell: str) -> Any:
    if not cell:
        return None
    with contextlib.suppress(ValueError):
        number = float(cell)
        value = orjson.loads(cell) if math.isfinite(number) else number
        if is_number(value):  # 007 is a text, and so is 1_000
            return value
    return cell


def _read_npy(data: bytes) -> Any:
    """Read an array as an answer of the Open Inference Protocol has it."""
    array = np.load(io.BytesIO(data), allow_pickle=False)
    name = _NAMES.get(array.dtype.newbyteorder("="), "")
    return {
        "outputs": [
            {"name": "array", "datatype": name, "shape": list(array.shape), "data": array.tolist()}
        ]
    }


_READERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("application/x-ndjson", "application/jsonl", "application/jsonlines"),
                    lambda text: [_parse(line) for line in text.splitlines() if line.strip()]),
    "text/csv": lambda text: [
        list(map(_read_cell, row)) for row in csv.reader(io.StringIO(text.decode()))
    ],
    "application/x-npy": _read_npy,
}  # fmt: skip
"""Content type → what reads it, or raises ValueError."""


def _describe(before: _Document, after: _Document) -> str:
    """Return how two answers differ of which one at least could not be read."""
    if before.kind != after.kind:
        return f"answer: expected {before.kind}, got {after.kind}"
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


def _judge(apart: Apart, tolerance: Tolerance, scales: Scales | None) -> Comparison:
    """Return what a difference means.

    Raises:
        NotCompared: numbers differ whose scale is not known yet.
    """
    if not apart.scaled:  # another order of keys, another way to write a number
        return Comparison(Verdict.EQUAL, labels_agree=True)
    size, most, has_labels = apart.scaled, tolerance.scaled, True
    if tolerance.is_quantized:
        size, most, has_labels = apart.error, tolerance.error, apart.labels_agree is not False
    agrees = has_labels and size <= most
    if not agrees and scales and apart.error < math.inf and apart.labels_agree is not False:
        is_near = size <= 2 * most and scales.answers < _MANY
        if is_near or scales.answers < ENOUGH:
            raise NotCompared("the scale of the numbers is not learnt yet")
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
        if name in found or not are_sizes or len(shape) > MOST_DIMS:
            return None
        data = each.get("data")
        if "data" not in each:
            parameters = each.get("parameters")
            size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
            if type(size) is not int or not 0 <= size <= len(tail) - at:
                return None
            data, at = tail[at : at + size], at + size
        try:
            found[name] = _Tensor(datatype, _values(datatype, tuple(shape), data))
        except (ValueError, OverflowError, KeyError):
            return None
    return found if at == len(tail) else None


def _values(datatype: str, shape: tuple[int, ...], data: Any) -> np.ndarray:
    """Return the values of a tensor in its shape.

    Raises:
        ValueError, OverflowError, KeyError: they are not as many or as large as it says.
    """
    if isinstance(data, memoryview):
        if datatype != BF16:
            return from_bytes(data, datatype, shape, "it")
        halves = from_bytes(data, "UINT16", shape, "it")  # of floats, the upper ones
        return (halves.astype("<u4") << 16).view("<f4")
    values = _flat(data)
    if datatype == BYTES:
        return as_objects(values, shape)
    are_numbers = {type(value) for value in values} <= {int, bool}
    if not are_numbers and (datatype in _WHOLE or not all(map(is_number, values))):
        raise ValueError("its data are not numbers")
    return np.array(values, "f8" if datatype in _FLOATS else NUMPY[datatype]).reshape(shape)


def _flat(data: Any) -> list[Any]:
    """Return the values of lists as deep as JSON is nested."""
    if not isinstance(data, list):
        raise ValueError("its data are not a list")
    while data and all(isinstance(each, list) for each in data):
        if len(set(map(len, data))) > 1:
            raise ValueError("its lists are of several lengths")
        data = [value for each in data for value in each]
    return list(data)


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
    live: Mapping[str, _Tensor],
    candidate: Mapping[str, _Tensor],
    tolerance: float,
    scales: Scales | None,
) -> Apart:
    """Compare all outputs; both answers have the same names, datatypes and shapes."""
    found = [
        _texts_apart(name, tensor.values.flat, candidate[name].values.flat)
        if tensor.datatype == "BYTES"
        else _numbers_apart(name, tensor, candidate[name].values, tolerance, scales)
        for name, tensor in live.items()
    ]
    labels = [each.labels_agree for each in found if each.labels_agree is not None]
    worst = max(found, key=lambda each: each.scaled)
    error = max(each.error for each in found)
    return Apart(worst.scaled, worst.place, all(labels) if labels else None, error)


def _texts_apart(name: str, live: Any, candidate: Any) -> Apart:
    """Compare texts: equal, or `value:index:label` of a classification, whose values may differ."""
    largest, error, place = 0.0, 0.0, ""
    labels_agree = True
    for at, (expected, got) in enumerate(zip(live, candidate, strict=True)):
        if expected == got:
            continue
        before, after = _class(expected), _class(got)
        if before is None or after is None or before[1] != after[1]:
            labels_agree = False
            scaled = math.inf
        else:
            scaled = compare_numbers(pair_up([before[0]], [after[0]])[1]).scaled
            error = max(error, scaled)
        if scaled > largest:
            largest, place = scaled, f"output {name}[{at}]: expected {expected!r}, got {got!r}"
    return Apart(largest, place, labels_agree, error if labels_agree else math.inf)


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


def _numbers_apart(
    name: str,
    live: _Tensor,
    candidate: np.ndarray,
    tolerance: float,
    scales: Scales | None,
) -> Apart:
    labels_agree = True if live.is_ranked else None
    own = live.values
    if not own.size:
        return Apart(0.0, "", labels_agree, 0.0)
    if live.datatype in _WHOLE:
        scaled = errors = np.where(own == candidate, 0.0, math.inf)
    else:
        expected, got = own.astype("f8"), candidate.astype("f8")
        scale = scales.of(name, expected) if scales is not None else None
        scaled, errors = measure(expected, got, scale)
        if live.is_ranked:
            # NaN is the largest, as torch and numpy have it.
            ranks = [np.where(np.isnan(each), np.inf, each) for each in (expected, got)]
            at = np.stack([each.argmax(-1) for each in ranks], -1)
            tops = np.take_along_axis(ranks[0], at, -1)
            with np.errstate(invalid="ignore"):
                lead = np.nan_to_num(tops[..., 0] - tops[..., 1])
            finite = np.where(np.isfinite(expected), expected, 0.0)
            units = np.abs(finite) if scale is None else scale.units(finite)
            ties = tolerance * np.take_along_axis(units, at, -1).sum(-1)
            labels_agree = bool(((at[..., 0] == at[..., 1]) | (lead <= ties)).all())
    largest, place = int(scaled.argmax()), ""
    if scaled.flat[largest]:
        pair = f"expected {own.flat[largest].item()}, got {candidate.flat[largest].item()}"
        place = f"output {name}[{largest}]: {pair}"
    error = math.sqrt(float(np.square(errors).mean()))
    return Apart(float(scaled.flat[largest]), place, labels_agree, error)


# -- JSON ----------------------------------------------------------------------------------------


def _json_apart(live: Any, candidate: Any, tolerance: Tolerance, scales: Scales | None) -> Apart:
    """Measure how far two answers in JSON are apart."""
    labels_agree = _labels_agree(live, candidate, tolerance.scaled)
    other, groups = pair_up(*_without_ties(live, candidate, tolerance))
    if other is not None:
        return Apart(math.inf, str(other)[:_MOST_WORDS], labels_agree)
    numbers = compare_numbers(groups, scales)
    place = str(numbers.worst)[:_MOST_WORDS] if numbers.worst else ""
    return Apart(numbers.scaled, place, labels_agree, numbers.error)


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
    return other in live and live[first] - live[other] <= 2 * tolerance * abs(live[first])


def _without_ties(live: Any, candidate: Any, tolerance: Tolerance) -> tuple[Any, Any]:
    """Return both with the same labels: the last of a top-k may be others, where they tie."""
    if isinstance(live, list) and isinstance(candidate, list) and len(live) == len(candidate):
        if not any(isinstance(each, list | dict) for each in live):
            return live, candidate
        pairs = [_without_ties(*each, tolerance) for each in zip(live, candidate, strict=True)]
        return [one for one, _ in pairs], [other for _, other in pairs]
    if not isinstance(live, dict) or not isinstance(candidate, dict):
        return live, candidate
    shared = live.keys() & candidate.keys()
    if len(shared) < len(live) and is_top_k(live) and is_top_k(candidate):
        odd = [*_odd(live, shared), *_odd(candidate, shared)]
        lowest, ties = min(*live.values(), *candidate.values()), 2 * tolerance.scaled * max(odd)
        if tolerance.is_quantized:
            ties = 2 * tolerance.error * max(live.values())
        if shared and len(live) == len(candidate) and max(odd) - lowest <= ties:
            return live, {key: candidate.get(key, value) for key, value in live.items()}
    elif len(shared) == len(live) == len(candidate):
        both = {key: _without_ties(live[key], candidate[key], tolerance) for key in live}
        return {key: one for key, (one, _) in both.items()}, {
            key: other for key, (_, other) in both.items()
        }
    return live, candidate


def _odd(values: dict[str, float], shared: set[str]) -> list[float]:
    return [value for key, value in values.items() if key not in shared]


# -- the process ---------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Compare what comes until the server closes its end, which it does when it dies, too.

    Each time it gets a line of JSON and headers and bodies, and answers with a line of JSON.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    with socket.socket(fileno=descriptor) as server, contextlib.suppress(OSError):
        reader = server.makefile("rb")
        subjects: defaultdict[str, Scales] = defaultdict(Scales)
        while line := reader.readline():
            said = orjson.loads(line)
            answers = [
                answer_of(Reply(status, reader.read(headers), reader.read(size)))
                for status, headers, size in said["sides"]
            ]
            tolerances = [Tolerance(**each) for each in said["tolerances"]]
            found = [
                _compared(live, candidate, tolerance, subjects[tolerance.subject])
                for live, candidate, tolerance in zip(
                    answers[::2], answers[1::2], tolerances, strict=True
                )
            ]
            server.sendall(orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE))


def _compared(live: Answer, candidate: Answer, tolerance: Tolerance, scales: Scales) -> Any:
    try:
        return compare(live, candidate, tolerance, scales)
    except NotCompared as reason:
        return {"reason": str(reason)}
    except MemoryError:
        return {"reason": "too large"}


if __name__ == "__main__":
    main(int(sys.argv[1]))
