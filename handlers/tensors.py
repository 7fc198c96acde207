"""The Open Inference Protocol's tensors: a body → arrays by name → a body.

https://github.com/kserve/open-inference-protocol, with its extensions for binary data and
classification, which are Triton's. The same form carries what comes by gRPC.

Nothing is allocated for a shape that the bytes of the request do not fill, and no number is
guessed at: what a datatype does not hold is refused.
"""

import binascii
import math
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from modelyard_client import tensors as wire
from modelyard_client.tensors import BF16, BYTES
from modelyard_client.tensors import from_bytes as bytes_to_array
from modelyard_client.tensors import to_bytes as array_to_bytes

from modelyard.archiver.signature import OIP_DATATYPES
from modelyard.handlers.body import parse_strictly
from modelyard.handlers.errors import BadInput, HandlerError

DTYPES = {oip: name for name, oip in OIP_DATATYPES.items()}
"""A datatype → torch's name of it; BYTES has none."""
BASE64 = "base64"
"""`content_type` among the parameters of BYTES whose texts are base64; MLServer's."""
MOST_VALUES = 1 << 31
"""Most values that an empty tensor may have, were it not empty: its other sizes say what a model
may make of it."""
Array = Any
"""numpy's array, of objects for BYTES; torch's tensor for BF16, which numpy does not know."""


@dataclass(frozen=True)
class Wanted:
    """An output that a request asks for.

    Args:
        is_binary: None where it does not say.
        classes: how many of the largest values, with their labels, in place of all; 0 for all.
    """

    name: str
    is_binary: bool | None = None
    classes: int = 0


@dataclass(frozen=True)
class TensorRequest:
    """What a request holds.

    Args:
        id: None where it names none.
        inputs: inputs by name, in their order.
        datatypes: datatypes of the inputs.
        wanted: outputs, None for all.
        is_binary: whether outputs that do not say otherwise are binary.
    """

    inputs: Mapping[str, Array]
    datatypes: Mapping[str, str]
    id: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    wanted: Sequence[Wanted] | None = None
    is_binary: bool = False


# -- reading -------------------------------------------------------------------------------------


def read_request(
    body: bytes | bytearray, header_length: str | None = None, encoding: str = "",
    most_bytes: int = 1 << 31,
) -> TensorRequest:  # fmt: skip
    """Read a request.

    Args:
        body: JSON, or JSON and behind it the bytes of tensors.
        header_length: the value of `LENGTH_HEADER`.
        encoding: encoding of Content-Encoding: gzip, deflate, or nothing.
        most_bytes: most bytes of the body without it.

    Raises:
        BadInput: it is not one; the message names the field.
    """
    body = _without_encoding(body, encoding, most_bytes)
    length = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdigit() or len(header_length) > 18:
            raise BadInput(
                f"{wire.LENGTH_HEADER} is {header_length[:40]!r}; expected a number of bytes"
            )
        length = int(header_length)
        if length > len(body):
            raise BadInput(f"{wire.LENGTH_HEADER} is {length}; the body has {len(body)} bytes")
        if length == 0:
            raise BadInput(
                f"{wire.LENGTH_HEADER} is 0; expected JSON that names the inputs before their bytes"
            )
    try:
        head = parse_strictly(body if length == len(body) else body[:length], "the JSON")
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise BadInput(f"the body holds {_kind(head)}; expected an object with inputs")
    tail = memoryview(body)[length:] if header_length is not None else None
    return _read(head, tail)


def _without_encoding(body: bytes | bytearray, encoding: str, most_bytes: int) -> bytes | bytearray:
    """Return a body as it was before gzip or deflate."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise BadInput(f"Content-Encoding is {encoding[:40]}; expected gzip, deflate or identity")
    reader = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        data = reader.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise BadInput(f"the body is not {encoding}: {error}") from error
    if len(data) > most_bytes:
        raise BadInput(f"the body has more than {most_bytes} bytes without {encoding}")
    if not reader.eof:
        raise BadInput(f"the body ends before its {encoding} does")
    return data


def _read(head: Mapping[str, Any], tail: memoryview | None) -> TensorRequest:
    parameters = _parameters(head, "the request")
    for name in parameters:
        if name.startswith("sequence_") and parameters[name]:
            raise BadInput(f"the parameter {name} is not supported: requests stand for themselves")
    given = head.get("inputs")
    if not isinstance(given, list) or not given:
        raise BadInput(f"inputs is {_kind(given) if given != [] else 'empty'}; expected tensors")
    inputs: dict[str, Array] = {}
    datatypes: dict[str, str] = {}
    at = 0
    for each in given:
        name = _name(each, "an input has no name; expected name, datatype, shape and data")
        where = f'input "{name}"'
        if name in inputs:
            raise BadInput(f"{where} is given twice")
        own = _parameters(each, where)
        datatype, shape = _datatype(each, where), _shape(each, where)
        datatypes[name] = datatype
        if (size := own.get("binary_data_size")) is None:
            inputs[name] = _from_json(each.get("data"), datatype, shape, own, where)
            continue
        if "data" in each and each["data"] is not None:
            raise BadInput(f"{where} has data and binary_data_size; expected one of them")
        if type(size) is not int or size < 0:
            raise BadInput(f"{where} has the binary_data_size {size!r}; expected a number of bytes")
        if tail is None or at + size > len(tail):
            there = 0 if tail is None else len(tail) - at
            raise BadInput(
                f"{where} has {size} bytes by its binary_data_size; {there} are left behind the "
                f"JSON, whose length is the header {wire.LENGTH_HEADER}"
            )
        inputs[name] = from_bytes(tail[at : at + size], datatype, shape, where)
        at += size
    if tail is not None and at < len(tail):
        raise BadInput(f"{len(tail) - at} bytes are left behind the last tensor")
    id = head.get("id")
    if id is not None and not isinstance(id, str):
        raise BadInput(f"id is {_kind(id)}; expected text")
    is_binary = _flag(parameters, "binary_data_output", "the request") or False
    return TensorRequest(inputs, datatypes, id, parameters, _wanted(head), is_binary)


def _wanted(head: Mapping[str, Any]) -> list[Wanted] | None:
    outputs = head.get("outputs")
    if not outputs:
        return None
    if not isinstance(outputs, list):
        raise BadInput(f"outputs is {_kind(outputs)}; expected a list of objects with a name")
    wanted: list[Wanted] = []
    for each in outputs:
        name = _name(each, "an output that is asked for has no name")
        where = f'output "{name}"'
        if any(name == other.name for other in wanted):
            raise BadInput(f"{where} is asked for twice")
        own = _parameters(each, where)
        classes = own.get("classification", 0)
        if type(classes) is not int or classes < 0:
            raise BadInput(f"{where} has the classification {classes!r}; expected how many classes")
        wanted.append(Wanted(name, _flag(own, "binary_data", where), classes))
    return wanted


def _parameters(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    value = given.get("parameters")
    if value is not None and not isinstance(value, dict):
        raise BadInput(f"parameters of {where} is {_kind(value)}; expected an object")
    if value and any(name.startswith("shared_memory_") for name in value):
        raise BadInput(f"{where} is to be in shared memory, which is not supported; send and take "
                       "values as bytes (binary_data)")  # fmt: skip
    return value or {}


def _flag(given: Mapping[str, Any], name: str, where: str) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadInput(f"{name} of {where} is {_kind(value)}; expected true or false")
    return value


def _name(given: Any, lacks: str) -> str:
    """Return the name of a tensor; `lacks` is the message about one that has none."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise BadInput(lacks)
    return str(given["name"])


def _datatype(given: Mapping[str, Any], where: str) -> str:
    datatype = given.get("datatype")
    if not isinstance(datatype, str) or (datatype not in DTYPES and datatype != BYTES):
        raise BadInput(
            f"{where} has the datatype {str(datatype)[:40]!r}; expected one of "
            f"{', '.join([*sorted(DTYPES), BYTES])}"
        )
    return datatype


def _shape(given: Mapping[str, Any], where: str) -> tuple[int, ...]:
    shape = given.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > wire.MOST_DIMS
        or not all(type(size) is int and size >= 0 for size in shape)
        or (0 in shape and math.prod(size or 1 for size in shape) > MOST_VALUES)
    ):
        raise BadInput(
            f"{where} has the shape {str(shape)[:100]}; expected a list of at most "
            f"{wire.MOST_DIMS} sizes, 0 or more"
        )
    return tuple(shape)


def _from_json(
    data: Any, datatype: str, shape: tuple[int, ...], parameters: Mapping[str, Any], where: str
) -> Array:
    """Return an array of nested or flat lists, in the order of rows."""
    if not isinstance(data, list):
        raise BadInput(f"{where} has {_kind(data)} as data; expected a list")
    count = math.prod(shape)
    if datatype == BYTES:
        return _texts(data, shape, parameters, where)
    try:
        found = np.array(data, None if data else wire.NUMPY.get(datatype, np.float32)).reshape(-1)
        if found.dtype.kind == "f" and datatype == "UINT64":  # as numpy reads 1 and 2 ** 64 - 1
            exact = np.array(data, dtype=object).reshape(-1)
            if all(type(value) is int for value in exact):
                found = exact.astype(np.uint64)
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{where} has lists of unequal length as data") from error
    if found.size != count:
        raise BadInput(f"{where} has {found.size} values; its shape {list(shape)} holds {count}")
    if found.size and found.dtype.kind not in "biuf":
        raise BadInput(f"{where} has something else than numbers as data; expected {datatype}")
    return _cast(found, datatype, where).reshape(shape)


def _cast(found: np.ndarray, datatype: str, where: str) -> Array:
    """Return numbers as a datatype that holds them."""
    wanted = wire.NUMPY.get(datatype, np.dtype(np.float32))
    kind = found.dtype.kind
    if wanted.kind == "b":
        if kind != "b" and not (kind in "iu" and np.isin(found, (0, 1)).all()):
            raise BadInput(f"{where} has numbers as data; expected true and false")
        return found.astype(wanted)
    if (kind == "b" or (kind == "f" and wanted.kind in "iu")) and found.size:
        seen = "true and false" if kind == "b" else "fractional numbers, or larger ones"
        raise BadInput(f"{where} has {seen} as data; expected {datatype}")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if found.size and (int(found.min()) < limits.min or int(found.max()) > limits.max):
            raise BadInput(f"{where} has numbers beyond {datatype}")
        return found.astype(wanted)
    with np.errstate(over="ignore"):
        numbers = found.astype(wanted)
    if datatype == BF16:
        import torch

        rounded = torch.from_numpy(numbers).to(torch.bfloat16)
        if bool(torch.isfinite(rounded).all()):
            return rounded
    elif np.isfinite(numbers).all():
        return numbers
    raise BadInput(f"{where} has numbers beyond {datatype}")


def _texts(
    data: list[Any], shape: tuple[int, ...], parameters: Mapping[str, Any], where: str
) -> np.ndarray:
    """Return an array of bytes, of texts or of base64."""
    flat = data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(part, list) for part in flat):
            raise BadInput(f"{where} has lists of unequal depth as data")
        flat = [value for part in flat for value in part]
    if len(flat) != math.prod(shape):
        raise BadInput(
            f"{where} has {len(flat)} values; its shape {list(shape)} holds {math.prod(shape)}"
        )
    if not all(isinstance(value, str) for value in flat):
        raise BadInput(f"{where} has something else than text as data; expected {BYTES}")
    values: list[bytes]
    if parameters.get("content_type") == BASE64:
        try:
            values = [b64decode(value, validate=True) for value in flat]
        except (binascii.Error, ValueError) as error:
            raise BadInput(f"{where} has text that is not base64: {error}") from error
    else:
        values = [value.encode("utf-8", "surrogatepass") for value in flat]
    return wire.as_objects(values, shape)


def from_bytes(data: memoryview, datatype: str, shape: tuple[int, ...], where: str) -> Array:
    """Return an array over bytes, which are not copied: little-endian, in the order of rows.

    Raises:
        BadInput: there are more or fewer than the shape holds; it begins with `where`.
    """
    try:
        found = bytes_to_array(data, "UINT16" if datatype == BF16 else datatype, shape, where)
    except ValueError as error:
        raise BadInput(str(error).replace("UINT16", datatype)) from error
    if datatype == BF16:
        import torch

        return torch.from_numpy(found.view(np.int16).copy()).view(torch.bfloat16)
    return found


def _kind(value: Any) -> str:
    """Return what a JSON value is, for messages."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false",
             type(None): "missing or null"}  # fmt: skip
    return kinds.get(type(value), "a number")


def as_document(request: TensorRequest) -> dict[str, Any]:
    """Return a request as JSON has it, all of its tensors flat lists, BYTES as base64."""
    inputs = []
    for name, value in request.inputs.items():
        datatype = request.datatypes[name]
        if datatype == BYTES:
            data = [b64encode(each).decode() for each in value.reshape(-1)]
        else:
            data = (value.float() if datatype == BF16 else value).reshape(-1).tolist()
        inputs.append(
            {"name": name, "datatype": datatype, "shape": list(value.shape), "data": data}
        )
    return {"inputs": inputs} if request.id is None else {"id": request.id, "inputs": inputs}


def read_document(outputs: Sequence[Any]) -> dict[str, Array]:
    """Return the tensors of an answer's JSON by name; what is not text counts as its JSON in BYTES.

    Raises:
        BadInput: it is none.
    """
    found: dict[str, Array] = {}
    for each in outputs:
        name = _name(each, "an output has no name; expected name, datatype, shape and data")
        where = f'output "{name}"'
        datatype, shape, data = _datatype(each, where), _shape(each, where), each.get("data")
        if datatype == BYTES and isinstance(data, list):
            data = [one if isinstance(one, str) else orjson.dumps(one).decode() for one in data]
        found[name] = _from_json(data, datatype, shape, each.get("parameters") or {}, where)
    return found


# -- writing -------------------------------------------------------------------------------------


class NotSayable(HandlerError):
    """An output that the asked form has no way to say."""


def _as_numpy(value: Array, datatype: str) -> np.ndarray:
    array: np.ndarray = value
    if datatype == BF16:
        import torch

        array = value.contiguous().view(torch.int16).numpy()
    return array


def datatype_of(value: Array) -> str:
    """Return the datatype of an array, or of torch's tensor."""
    name = str(value.dtype).removeprefix("torch.")
    return BYTES if name == "object" else OIP_DATATYPES[name]


def write_answer(
    request: TensorRequest, outputs: Mapping[str, Array], model: str, version: str,
    labels: Mapping[str, str] | None = None,
) -> tuple[bytes, dict[str, str]]:  # fmt: skip
    """Return body and headers of an answer.

    Args:
        outputs: outputs by name; those that `request` asks for are among them.
        labels: index of a class → its name.

    Raises:
        NotSayable: a number that JSON has no word for.
    """
    wanted = request.wanted or [Wanted(name) for name in outputs]
    tail: list[bytes | memoryview] = []
    described = []
    for each in wanted:
        value = outputs[each.name]
        if each.classes:
            value = _classes(value, each.classes, labels or {})
        datatype = datatype_of(value)
        tensor: dict[str, Any] = {
            "name": each.name, "shape": list(value.shape), "datatype": datatype
        }  # fmt: skip
        is_binary = request.is_binary if each.is_binary is None else each.is_binary
        if is_binary:
            data = array_to_bytes(_as_numpy(value, datatype), datatype)
            tensor["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        elif datatype == BYTES:
            tensor |= _texts_to_json(value)
        else:
            tensor["data"] = _to_json(value, datatype, each.name)
        described.append(tensor)
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        answer["id"] = request.id
    answer["outputs"] = described
    head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return head, {"content-type": "application/json"}
    return b"".join((head, *tail)), {
        "content-type": wire.OCTETS,
        wire.LENGTH_HEADER: str(len(head)),
    }


def _texts_to_json(value: Array) -> dict[str, Any]:
    """Return bytes as text, or all of them as base64 where some are not UTF-8, and say so."""
    flat = value.reshape(-1)
    try:
        return {"data": [each.decode() for each in flat]}
    except UnicodeDecodeError:
        data = [b64encode(each).decode() for each in flat]
        return {"data": data, "parameters": {"content_type": BASE64}}


def _to_json(value: Array, datatype: str, name: str) -> np.ndarray:
    flat = (value.float().numpy() if datatype == BF16 else value).reshape(-1)
    if flat.dtype.kind != "f" or not flat.size:
        return np.ascontiguousarray(flat)
    if not np.isfinite(flat).all():
        raise NotSayable(
            f'output "{name}" holds NaN or Infinity, which JSON has no word for; ask for it with '
            "binary_data: true"
        )
    # The shortest text that is this float32 may be far from it for who reads float64, where few
    # digits are left.
    tiny = np.finfo(flat.dtype).tiny
    if ((np.abs(flat) < tiny) & (flat != 0)).any():
        flat = flat.astype(np.float64)
    return np.ascontiguousarray(flat)


def _classes(value: Array, count: int, labels: Mapping[str, str]) -> np.ndarray:
    """Return `value:index[:label]` of the largest of each row, (rows, count)."""
    numbers = value.float().numpy() if datatype_of(value) == BF16 else value
    if numbers.dtype == object or not numbers.size:
        raise BadInput("classification is asked of an output that has no numbers to compare")
    rows = numbers.reshape(len(numbers), -1) if numbers.ndim > 1 else numbers.reshape(1, -1)
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    texts = [
        f"{row[at]}:{at}" + (f":{labels[str(at)]}" if str(at) in labels else "")
        for row, places in zip(rows, order, strict=True)
        for at in places
    ]
    shape = order.shape if numbers.ndim > 1 else order.shape[1:]
    return wire.as_objects([text.encode() for text in texts], shape)
