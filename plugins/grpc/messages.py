"""Messages of inference ↔ the form that the Open Inference Protocol has by HTTP.

A request becomes JSON with binary tensors behind it (`handlers.tensors`), so that it takes the way
of every other request. What comes raw is answered raw, what comes as typed contents is answered so.
"""

from __future__ import annotations

import array
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from google.protobuf.message import DecodeError
from grpc import StatusCode

from modelyard.plugins.grpc.fields import begin_bytes, cut_out
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Failure
from modelyard.serve.api.events import LENGTH_HEADER
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import NORMAL, PREDICT, Reply, Stream, Target
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.front.begin import class_of, unpack_headers

REQUEST, RESPONSE = "inference.ModelInferRequest", "inference.ModelInferResponse"
ID, RAW_INPUT, RAW_OUTPUT, INFER_RESPONSE = 3, 7, 6, 2
"""Numbers of fields: of a request and its answer, of a request, of an answer, of a stream's."""
ELSEWHERE = "shared_memory_region"
"""Parameter of a tensor whose bytes are not in the message; with others whose names begin so."""
CACHED_BYTES = 1 << 11
"""Most bytes, beside its tensors, of a request or an answer whose reading is cached: what is longer
is read each time."""


class _Contents(NamedTuple):
    """Where a datatype's values stand in a message, and what they are in memory."""

    field: str
    code: str
    """Type code of `array`; none for BYTES."""


CONTENTS: Mapping[str, _Contents] = {
    "BOOL": _Contents("bool_contents", "b"),
    "INT8": _Contents("int_contents", "b"),
    "INT16": _Contents("int_contents", "h"),
    "INT32": _Contents("int_contents", "i"),
    "INT64": _Contents("int64_contents", "q"),
    "UINT8": _Contents("uint_contents", "B"),
    "UINT16": _Contents("uint_contents", "H"),
    "UINT32": _Contents("uint_contents", "I"),
    "UINT64": _Contents("uint64_contents", "Q"),
    "FP32": _Contents("fp32_contents", "f"),
    "FP64": _Contents("fp64_contents", "d"),
    "BYTES": _Contents("bytes_contents", ""),
}
"""FP16 and BF16 come raw only."""
MOST_DIMS, MOST_PARAMETERS, MOST_TEXTS, MOST_WHOLE = 32, 256, 200_000, 1 << 19
"""Most dimensions of one tensor, parameters of one map, texts of one tensor of BYTES as typed
contents, whole numbers of one: while a request is read here nobody else is answered."""
_WIDTHS = {"fp32_contents": 4, "fp64_contents": 8, "bool_contents": 1}
"""Bytes of a value of the fields that have in a message the form that they have in memory."""
_FIELDS = frozenset(each.field for each in CONTENTS.values())


def parse(name: str, data: bytes) -> Any:
    """Return a message of bytes.

    Raises:
        Failure: they are not one.
    """
    try:
        return message(name).FromString(data)
    except DecodeError as error:
        raise not_a(name, error) from error


def not_a(name: str, error: Exception) -> Failure:
    """Return what is said of bytes that are not a message."""
    return _wrong(f"the message is not a {name}: {error}")


def _wrong(text: str) -> Failure:
    return Failure(StatusCode.INVALID_ARGUMENT, text)


class Asked(NamedTuple):
    """What a request says beside its id and its raw tensors."""

    target: Target
    head: bytes
    """The JSON, as it has it by HTTP."""
    headers: Sequence[bytes]
    tail: Sequence[bytes]
    """Typed contents as bytes."""
    rows: int
    timeout_s: float
    priority: int
    is_raw: bool
    """Whether the answer is to be raw."""


def read_request(data: bytes) -> tuple[Asked, bytes, Sequence[Buffer]]:
    """Return what a ModelInferRequest says, its id, and the bytes behind its JSON, uncopied.

    Raises:
        Failure: it is none; raw and typed contents are mixed, or typed ones stand in another
            type's field.
    """
    try:
        rest, cut = cut_out(data, (ID, RAW_INPUT))
        id = next((str(value, "utf-8") for number, value in reversed(cut) if number == ID), "")
    except ValueError as error:
        raise not_a(REQUEST, error) from error
    raw = [value for number, value in cut if number == RAW_INPUT]
    read = _read if len(rest) > CACHED_BYTES else _read_again
    asked = read(rest, tuple(map(len, raw)))
    return asked, id.encode(), raw or asked.tail


def _read(rest: bytes, sizes: tuple[int, ...]) -> Asked:
    """Return what a request says whose raw tensors have these sizes."""
    request = parse(REQUEST, rest)
    elsewhere = sum(ELSEWHERE in each.parameters for each in request.inputs)
    if sizes and len(sizes) + elsewhere != len(request.inputs):
        raise _wrong(
            f"{len(sizes)} raw_input_contents for {len(request.inputs) - elsewhere} inputs; "
            "expected as many",
        )
    inputs, tail, raw = [], [], iter(sizes)
    for each in request.inputs:
        if len(each.shape) > MOST_DIMS:
            raise _wrong(
                f'input "{each.name}" has {len(each.shape)} dimensions; at most {MOST_DIMS} are '
                "taken",
            )
        if sizes and each.HasField("contents"):
            raise _wrong(
                f'input "{each.name}" has contents beside raw_input_contents; expected one of them',
            )
        own = _parameters(each.parameters)
        if ELSEWHERE not in own:
            if not sizes:
                tail.append(_to_raw(each))
            own["binary_data_size"] = next(raw) if sizes else len(tail[-1])
        inputs.append({
            "name": each.name, "datatype": each.datatype, "shape": list(each.shape),
            "parameters": own,
        })  # fmt: skip
    parameters = _parameters(request.parameters)
    head: dict[str, Any] = {
        "inputs": inputs, "parameters": parameters | {"binary_data_output": True}
    }  # fmt: skip
    if request.outputs:
        head["outputs"] = [
            {"name": each.name, "parameters": _parameters(each.parameters) | {"binary_data": True}}
            for each in request.outputs
        ]
    body = orjson.dumps(head)
    first = request.inputs[0].shape[:1] if request.inputs else ()
    timeout_us, priority = parameters.get("timeout", 0), parameters.get("priority", 0)
    return Asked(
        Target(PREDICT, [request.model_name, request.model_version], wire.KSERVE | wire.TENSORS),
        body,
        (LENGTH_HEADER, b"%d" % len(body)),
        tail,
        max(1, min(*first, wire.MOST_ROWS)) if first else 1,
        timeout_us / 1e6 if type(timeout_us) is int and timeout_us > 0 else math.inf,
        class_of(priority) if type(priority) is int else NORMAL,
        bool(sizes) or not any(each.HasField("contents") for each in request.inputs),
    )


_read_again = lru_cache(256)(_read)
"""Cache of what is read: all but the tensors and the id of one client's requests is the same, most
of the time."""


def _parameters(given: Any) -> dict[str, Any]:
    """Return parameters as JSON has them; what the tensors' form says itself is left out."""
    if len(given) > MOST_PARAMETERS:
        raise _wrong(
            f"{len(given)} parameters of one kind; at most {MOST_PARAMETERS} are taken",
        )
    found = {
        name: getattr(value, chosen)
        for name, value in given.items()
        if (chosen := value.WhichOneof("parameter_choice"))
    }
    for name in ("binary_data_size", "binary_data", "binary_data_output"):
        found.pop(name, None)
    return found


def _to_raw(tensor: Any) -> bytes:
    """Return typed contents as bytes."""
    kind = CONTENTS.get(tensor.datatype)
    where = f'input "{tensor.name}"'
    if kind is None:
        raise _wrong(
            f"{where} is {tensor.datatype[:40]!r}, which has no typed contents; send it in "
            f"raw_input_contents, or one of {', '.join(CONTENTS)}",
        )
    for field, _ in tensor.contents.ListFields():
        if field.name != kind.field:
            raise _wrong(
                f"{where} is {tensor.datatype} with {field.name}; expected {kind.field}",
            )
    values = getattr(tensor.contents, kind.field)
    if width := _WIDTHS.get(kind.field):
        tensor.contents.DiscardUnknownFields()
        return bytes(tensor.contents.SerializeToString())[-width * len(values) :]
    if len(values) > (most := MOST_WHOLE if kind.code else MOST_TEXTS):
        raise _wrong(
            f"{where} has {len(values)} {kind.field}; at most {most} are taken, send it in "
            "raw_input_contents",
        )
    if not kind.code:
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    try:
        return array.array(kind.code, values).tobytes()
    except OverflowError as error:
        raise _wrong(f"{where} has numbers beyond {tensor.datatype}") from error


def write_answer(reply: Reply, is_raw: bool, id: bytes) -> bytes:
    """Return a worker's answer as a ModelInferResponse.

    Raises:
        Failure: it holds no tensors, as of a handler behind an envelope.
    """
    length = _head_length(reply.headers)
    if isinstance(reply.body, Stream) or length is None:
        raise Failure(
            StatusCode.UNIMPLEMENTED,
            "this model does not answer with tensors: its handler reads bodies through an envelope",
        )
    view = memoryview(reply.body)
    describe = _describe if length > CACHED_BYTES else _describe_again
    described, sizes, has_fields = describe(bytes(view[:length]))
    own = begin_bytes(ID, len(id)) + id if id else b""
    if not is_raw and has_fields:
        return _with_contents(described, view[length:], sizes) + own
    parts: list[Buffer] = [described, own]
    at = length
    for size in sizes:
        parts += (begin_bytes(RAW_OUTPUT, size), view[at : at + size])
        at += size
    return b"".join(parts)


@lru_cache(64)
def _head_length(headers: bytes) -> int | None:
    found = dict(unpack_headers(headers)).get(LENGTH_HEADER)
    return None if found is None else int(found)


def _describe(head: bytes) -> tuple[bytes, tuple[int, ...], bool]:
    """Return an answer without its tensors, their sizes, and whether each has typed contents."""
    found = orjson.loads(head)
    answer = message(RESPONSE)(
        model_name=found["model_name"], model_version=found["model_version"]
    )  # fmt: skip
    for each in found["outputs"]:
        answer.outputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
    # One that lies elsewhere has none, and an empty entry among the raw contents, as in Triton.
    sizes = tuple(
        each.get("parameters", {}).get("binary_data_size", 0) for each in found["outputs"]
    )
    has_fields = all(each["datatype"] in CONTENTS for each in found["outputs"])
    return answer.SerializeToString(), sizes, has_fields


_describe_again = lru_cache(256)(_describe)


def _with_contents(described: bytes, tail: memoryview, sizes: Sequence[int]) -> bytes:
    """Return an answer with its tensors as typed contents."""
    answer = message(RESPONSE).FromString(described)
    at = 0
    for tensor, size in zip(answer.outputs, sizes, strict=True):
        _put_contents(tensor, bytes(tail[at : at + size]))
        at += size
    return bytes(answer.SerializeToString())


def _put_contents(tensor: Any, data: bytes) -> None:
    kind = CONTENTS[tensor.datatype]
    values = getattr(tensor.contents, kind.field)
    if kind.code:
        numbers = array.array(kind.code, data)
        values.extend(map(bool, numbers) if tensor.datatype == "BOOL" else numbers)
        return
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        values.append(data[at + 4 : end])
        at = end
