"""Arrays by name ↔ the Open Inference Protocol with the bytes of tensors behind its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from modelyard_client.errors import BadAnswer

if TYPE_CHECKING:  # and httpx with it, which whoever only reads and writes tensors does not need
    from modelyard_client.retries import Answer, Outputs

LENGTH_HEADER = "inference-header-content-length"
"""How many bytes of JSON stand before the tensors, in requests and answers with binary ones."""
OCTETS = "application/octet-stream"
BYTES, BF16 = "BYTES", "BF16"
MOST_DIMS = 32
NUMPY = {
    "BOOL": np.dtype("bool"),
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}
"""A datatype of the protocol → numpy's; BYTES are objects, and BF16 is unknown to numpy."""
_DATATYPES = {dtype: name for name, dtype in NUMPY.items()} | {np.dtype(object): BYTES}

Arrays = Mapping[str, ArrayLike]


def write_request(inputs: Arrays, outputs: Sequence[str] | None) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request for a model's outputs, as bytes.

    Args:
        inputs: inputs by name; texts and bytes become BYTES.
        outputs: which, in which order; None for all.

    Raises:
        TypeError: the protocol has no such dtype.
    """
    described, tail = [], []
    for name, given in inputs.items():
        array = _as_bytes(np.asarray(given))
        try:
            datatype = _DATATYPES[array.dtype]
        except KeyError:
            raise TypeError(
                f'input "{name}" is of dtype {array.dtype}; expected numbers, bool, bytes or text'
            ) from None
        data = to_bytes(array, datatype)
        tail.append(data)
        described.append({
            "name": name, "datatype": datatype, "shape": list(array.shape),
            "parameters": {"binary_data_size": len(data)},
        })  # fmt: skip
    head: dict[str, Any] = {"inputs": described, "parameters": {"binary_data_output": True}}
    if outputs is not None:
        head["outputs"] = [{"name": name} for name in outputs]
    text = orjson.dumps(head)
    return text + b"".join(tail), {LENGTH_HEADER: str(len(text)), "Content-Type": OCTETS}


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of texts as one of bytes, and any other in this machine's byte order."""
    if array.dtype.kind not in "SUO":
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    found = np.empty(array.shape, object)
    for place, value in np.ndenumerate(array):
        if not isinstance(value, str | bytes):
            raise TypeError(
                f"an array of objects holds {type(value).__name__}; expected bytes or text"
            )
        found[place] = value.encode() if isinstance(value, str) else bytes(value)
    return found


def read_outputs(answer: Answer) -> Outputs:
    """Return a model's outputs.

    Raises:
        BadAnswer: it is not an answer of the protocol, or its bytes are not those that it states.
    """
    try:
        length = int(answer.headers.get(LENGTH_HEADER, len(answer.body)))
        if not 0 <= length <= len(answer.body):
            raise ValueError(f"{LENGTH_HEADER} is {length}, of {len(answer.body)} bytes")
        head = orjson.loads(answer.body[:length])
        tail = memoryview(answer.body)[length:]
        from modelyard_client.retries import Outputs

        outputs = Outputs()
        outputs.version, outputs.request_id = answer.version, answer.request_id
        at = 0
        for each in head["outputs"]:
            size = each["parameters"]["binary_data_size"]
            if type(size) is not int or not 0 <= size <= len(tail) - at:
                raise ValueError(f"{size!r} bytes of {len(tail) - at}")
            outputs[str(each["name"])] = _read(tail[at : at + size], each)
            at += size
        if at < len(tail):
            raise ValueError(f"{len(tail) - at} bytes are left")
    except (ValueError, KeyError, TypeError) as error:
        raise BadAnswer(f"the answer does not hold tensors as bytes: {error}") from error
    return outputs


def _read(data: memoryview, described: Mapping[str, Any]) -> NDArray[Any]:
    shape, datatype = tuple(described["shape"]), described["datatype"]
    if len(shape) > MOST_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {str(shape)[:100]}")
    where = f'output "{described["name"]}"'
    if datatype == BF16:  # which numpy does not know: the upper half of a float32
        halves = from_bytes(data, "UINT16", shape, where)
        wide: NDArray[Any] = halves.astype(np.uint32) << 16
        return wide.view(np.float32)
    found: NDArray[Any] = from_bytes(data, datatype, shape, where)
    return found if datatype == BYTES else found.copy()  # theirs alone, and to write to


def as_objects(values: Sequence[bytes], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of BYTES."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found.reshape(shape)


def from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...], where: str) -> NDArray[Any]:
    """Return an array over bytes, which are not copied: little-endian, in the order of rows.

    Args:
        datatype: any but BF16.

    Raises:
        ValueError: there are more or fewer than the shape holds; it begins with `where`.
    """
    if datatype == BYTES:
        return as_objects(_split(data, math.prod(shape), where), shape)
    expected = math.prod(shape) * NUMPY[datatype].itemsize
    if expected != len(data):
        raise ValueError(
            f"{where} has {len(data)} bytes; {datatype} of shape {list(shape)} has {expected}"
        )
    found = np.frombuffer(data, NUMPY[datatype].newbyteorder("<")).reshape(shape)
    if datatype == "BOOL" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise ValueError(f"{where} has bytes other than 0 and 1; expected BOOL")
    return found


def to_bytes(value: NDArray[Any], datatype: str) -> bytes | memoryview:
    """Return an array's bytes, little-endian, in the order of rows; its own where they lie so."""
    if datatype == BYTES:
        return b"".join(len(each).to_bytes(4, "little") + each for each in value.reshape(-1))
    lined_up = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    return lined_up.reshape(-1).view(np.uint8).data


def _split(data: memoryview, count: int, where: str) -> list[bytes]:
    """Return elements of BYTES: each behind its length, of four bytes."""
    values: list[bytes] = []
    at = 0
    while at < len(data):
        if len(values) == count or at + 4 > len(data):
            break
        length = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + length > len(data):
            raise ValueError(f"{where} has an element of {length} bytes, which end before it")
        values.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    if at < len(data) or len(values) != count:
        raise ValueError(
            f"{where} has not {count} elements in {len(data)} bytes, as its shape says"
        )
    return values
