"""Messages by their bytes: what is cut out of them."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from modelyard.plugins.grpc.fields import begin_bytes, cut_out, encode_number
from modelyard.plugins.grpc.messages import ID, RAW_INPUT
from modelyard.plugins.grpc.protos import message


def request(*raw: bytes) -> Any:
    made = message("inference.ModelInferRequest")(model_name="digits", id="an id")
    made.parameters["timeout"].int64_param = -1  # a varint of ten bytes
    made.inputs.add(name="x" * 200, datatype="FP32", shape=[1, 300, -1])
    made.raw_input_contents.extend(raw)
    return made


def test_fields_are_cut_out() -> None:
    chance = random.Random(0)
    whole = request(chance.randbytes(1000), b"", chance.randbytes(130))
    data = whole.SerializeToString()
    rest, found = cut_out(data, (ID, RAW_INPUT))
    assert found == [
        (ID, b"an id"), *((RAW_INPUT, raw) for raw in whole.raw_input_contents)
    ]  # fmt: skip
    assert all(value.obj is data for _, value in found)  # not copied
    left = type(whole).FromString(rest)
    assert (left.id, list(left.raw_input_contents)) == ("", [])
    left.id = whole.id
    left.raw_input_contents.extend(whole.raw_input_contents)
    assert left == whole
    for end in range(len(data) - 1):
        with contextlib.suppress(ValueError):
            cut_out(data[:end], (ID, RAW_INPUT))


@pytest.mark.parametrize(
    "data",
    [
        b"\x3a\x05abc",  # 5 bytes, of which 3 are there
        b"\x3a",
        b"\x0d\0\0",
        b"\x80" * 11,
        b"\x13\x14",  # a group
        b"\x3a" + b"\xff" * 9 + b"\x01",
        b"\x3a\0" * 5000,  # each costs time of the one thread that answers
        b"\x50\x01" * 5000,
    ],
)
def test_what_is_not_a_message(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"field|number"):
        cut_out(data, (ID, RAW_INPUT))


def test_what_is_written_is_read() -> None:
    for size in (0, 127, 128, 1 << 14, 1 << 21, 1 << 35):
        assert encode_number(size)[-1] < 0x80
    answer = message("inference.ModelInferResponse")
    data = begin_bytes(3, 300) + b"x" * 300
    assert answer.FromString(data) == answer(id="x" * 300)
