"""Tensors by name: what a body holds, and what it may not."""

from __future__ import annotations

import contextlib
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from modelyard_client.tensors import BF16, LENGTH_HEADER

from modelyard.handlers.errors import BadInput
from modelyard.handlers.tensors import DTYPES, NotSayable, datatype_of, read_request, write_answer

ENDS: dict[str, list[Any]] = {
    "BOOL": [True, False],
    **{
        f"{sign}INT{bits}": [low, 1, high]
        for bits in (8, 16, 32, 64)
        for sign, low, high in (
            ("", -(1 << bits - 1), (1 << bits - 1) - 1), ("U", 0, (1 << bits) - 1))
    },
    "FP16": [65504.0, -0.5],
    "FP32": [0.1, -1.5, 3.4028234663852886e38, 1.401298464324817e-45],
    "FP64": [0.1, 5e-324],
    "BF16": [1.0, -2.5],
    "BYTES": ["héllo", "", 'q"\n'],
}  # fmt: skip


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def tensor(datatype: str, data: Any, shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
    shape = [len(data)] if shape is None else shape
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data, **more}


def test_the_ends_are_of_every_datatype() -> None:
    assert set(ENDS) == {*DTYPES, "BYTES"}


@pytest.mark.parametrize("datatype", ENDS)
@pytest.mark.parametrize("is_binary", [False, True])
def test_every_datatype_comes_back_as_it_was(datatype: str, is_binary: bool) -> None:
    request = read_request(body(tensor(datatype, ENDS[datatype])))
    assert datatype_of(request.inputs["x"]) == datatype
    asked = read_request(
        body(tensor(datatype, ENDS[datatype]), parameters={"binary_data_output": is_binary}, id="a")
    )
    answer, headers = write_answer(asked, request.inputs, "m", "1")
    assert (LENGTH_HEADER in headers) == is_binary
    head = json.loads(answer[: int(headers[LENGTH_HEADER])] if is_binary else answer)
    assert (head["model_name"], head["model_version"], head["id"]) == ("m", "1", "a")
    if not is_binary:
        (output,) = head["outputs"]
        if datatype == "FP32":
            assert np.array_equal(np.array(output["data"], "f4"), np.array(ENDS[datatype], "f4"))
        else:
            assert output["data"] == ENDS[datatype]
        return
    again = read_request(
        json.dumps({"inputs": head["outputs"]}).encode() + answer[int(headers[LENGTH_HEADER]) :],
        str(len(json.dumps({"inputs": head["outputs"]}))),
    )
    assert again.datatypes == {"x": datatype}
    first, second = request.inputs["x"], again.inputs["x"]
    same = torch.equal(first, second) if datatype == BF16 else np.array_equal(first, second)
    assert same


def test_lists_may_be_nested_in_any_way_that_has_the_values() -> None:
    for data in ([[1, 2], [3, 4]], [1, 2, 3, 4], [[1, 2, 3, 4]]):
        found = read_request(body(tensor("INT8", data, [2, 2]))).inputs["x"]
        assert found.tolist() == [[1, 2], [3, 4]]
    assert read_request(body(tensor("FP32", [], [0, 16]))).inputs["x"].shape == (0, 16)
    assert read_request(body(tensor("INT64", [7], []))).inputs["x"].shape == ()


def test_numbers_by_their_names_of_another_encoding() -> None:
    plain = body(tensor("INT8", [1]), id=None, parameters=None, outputs=None, zzz=1)
    for encoding, encoded in (
        ("", plain), ("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain))
    ):  # fmt: skip
        assert read_request(encoded, encoding=encoding).inputs["x"].tolist() == [1]
    with pytest.raises(BadInput, match="is br; expected gzip"):
        read_request(plain, encoding="br")
    with pytest.raises(BadInput, match="not gzip"):
        read_request(plain, encoding="gzip")
    with pytest.raises(BadInput, match="ends before"):
        read_request(gzip.compress(plain)[:-9], encoding="gzip")
    with pytest.raises(BadInput, match="more than 1000 bytes"):
        read_request(gzip.compress(b" " * 10_000), encoding="gzip", most_bytes=1000)


REFUSED: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{nope", "not JSON"),
    (b"[1]", "expected an object"),
    (b'{"id": "1"}', "missing or null"),
    (b'{"inputs": []}', "inputs is empty"),
    (body({**tensor("INT8", [1]), "parameters": {"shared_memory_region": "r"}}), "shared memory"),
    (body(tensor("INT8", [1]), outputs=[{"name": "y", "parameters": {
        "shared_memory_region": "r", "shared_memory_byte_size": 80}}]), "shared memory"),
    (body({"datatype": "FP32"}), "no name"),
    (body(tensor("INT8", [1]), tensor("INT8", [1])), "given twice"),
    (body(tensor("FLOAT", [1])), "datatype 'FLOAT'"),
    (body(tensor("int32", [1])), "datatype 'int32'"),
    (body(tensor("INT8", [1], [-1])), "the shape"),
    (body(tensor("INT8", [1], [1.5])), "the shape"),  # type: ignore[list-item]
    (body(tensor("INT8", [1], [1] * 33)), "at most 32"),
    (body(tensor("INT8", [1], [1 << 40, 1 << 40])), "1 values; its shape"),
    (body(tensor("INT8", [], [0, 1 << 62, 8])), "the shape"),
    (body(tensor("BF16", [], [0, 1 << 63])), "the shape"),
    (body(tensor("INT8", [1, 2], [1])), "2 values"),
    (body(tensor("INT8", None, [1])), "missing or null as data"),
    (body(tensor("INT8", [[1], [2, 3]], [3])), "unequal length"),
    (body(tensor("INT8", [128])), "beyond INT8"),
    (body(tensor("INT32", [1 << 40])), "beyond INT32"),
    (body(tensor("UINT64", [1 << 64])), "fractional numbers, or larger"),
    (body(tensor("UINT8", [-1])), "beyond UINT8"),
    (body(tensor("INT32", [1.5])), "fractional"),
    (body(tensor("INT32", ["1"])), "something else than numbers"),
    (body(tensor("INT32", [None])), "something else than numbers"),
    (body(tensor("INT32", [True])), "true and false"),
    (body(tensor("FP32", [True])), "true and false"),
    (body(tensor("FP32", [1e39])), "beyond FP32"),
    (body(tensor("FP16", [1e5])), "beyond FP16"),
    (body(tensor("BF16", [3.4e38 * 1.01])), "beyond BF16"),
    (b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [NaN]}]}', "JSON"),
    (body(tensor("BOOL", [2])), "true and false"),
    (body(tensor("BYTES", [1])), "something else than text"),
    (body(tensor("BYTES", ["!"], parameters={"content_type": "base64"})), "not base64"),
    (body(tensor("BYTES", ["a"], [2])), "1 values"),
    (body(tensor("INT8", [1]), id=1), "id is a number"),
    (body(tensor("INT8", [1]), parameters=[1]), "parameters of the request"),
    (body(tensor("INT8", [1]), parameters={"sequence_id": 3}), "sequence_id is not supported"),
    (body(tensor("INT8", [1]), parameters={"binary_data_output": 1}), "true or false"),
    (body(tensor("INT8", [1]), outputs={"name": "y"}), "outputs is an object"),
    (body(tensor("INT8", [1]), outputs=[{}]), "no name"),
    (body(tensor("INT8", [1]), outputs=[{"name": "y"}, {"name": "y"}]), "asked for twice"),
    (body(tensor("INT8", [1]), outputs=[{"name": "y", "parameters": {"classification": -1}}]),
     "how many classes"),
    (b'{"inputs": ' + b"[" * 2000, "JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "reason"), REFUSED)
def test_what_is_no_request_is_refused_by_its_reason(sent: bytes, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_request(sent)


def binary(size: Any, tail: bytes, datatype: str = "INT16", **more: Any) -> tuple[bytes, str]:
    given = {"name": "x", "datatype": datatype, "shape": [2], "parameters": {
        "binary_data_size": size}, **more}  # fmt: skip
    head = body(given)
    return head + tail, str(len(head))


def test_bytes_behind_the_json_are_not_copied() -> None:
    sent, length = binary(4, b"\1\0\2\0")
    owned = bytearray(sent)
    found = read_request(owned, length).inputs["x"]
    assert found.tolist() == [1, 2]
    owned[-2] = 3
    assert found.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (binary(4, b"\1\0\2"), "3 are left behind"),
        (binary(4, b"\1\0\2\0\0"), "1 bytes are left"),
        (binary(2, b"\1\0"), "2 bytes; INT16 of shape"),
        (binary(-4, b""), "binary_data_size -4"),
        (binary(True, b"\0"), "binary_data_size True"),
        (binary(4, b"\1\0\2\0", data=[1, 2]), "data and binary_data_size"),
        (binary(6, b"\1\0\0\0a\0", "BYTES"), "element"),
        (binary(9, b"\xff\xff\xff\xff12345", "BYTES"), "element of 4294967295"),
        (binary(5, b"\1\0\0\0a", "BYTES"), "has not 2 elements"),
        (binary(2, b"\2\0", "BOOL"), "other than 0 and 1"),
        ((b"{}", "x"), "expected a number of bytes"),
        ((b"{}", "-1"), "expected a number of bytes"),
        ((b"{}", "3"), "the body has 2 bytes"),
        ((b"{}", "0"), "expected JSON that names the inputs"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(sent: tuple[bytes, str], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        read_request(*sent)


@pytest.mark.parametrize("datatype", ["UINT8", "BF16", "BYTES"])
@pytest.mark.parametrize("shape", [[1 << 31], [1 << 20, 1 << 20], [1 << 20, 0], [0, 1 << 40]])
def test_nothing_is_allocated_for_a_shape_alone(datatype: str, shape: list[int]) -> None:
    given = {"name": "x", "datatype": datatype, "shape": shape}
    head = body({**given, "parameters": {"binary_data_size": 0}})
    tracemalloc.start()
    for sent, length in ((body({**given, "data": []}), None), (head, str(len(head)))):
        with contextlib.suppress(BadInput):
            assert 0 in read_request(sent, length).inputs["x"].shape
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_classes_come_with_their_values_and_labels() -> None:
    asked = read_request(
        body(tensor("INT8", [1]), outputs=[{"name": "y", "parameters": {"classification": 2}}])
    )
    scores = np.array([[0.5, 2.0, 1.0], [3.0, 1.0, 2.0]], np.float32)
    answer, _ = write_answer(asked, {"y": scores}, "m", "1", {"1": "cat"})
    (output,) = json.loads(answer)["outputs"]
    assert output == {
        "name": "y", "shape": [2, 2], "datatype": "BYTES",
        "data": ["2.0:1:cat", "1.0:2", "3.0:0", "2.0:2"],
    }  # fmt: skip


def test_what_json_has_no_word_for() -> None:
    asked = read_request(body(tensor("INT8", [1])))
    with pytest.raises(NotSayable, match=r"NaN or Infinity.*binary_data"):
        write_answer(asked, {"y": np.array([np.inf], np.float32)}, "m", "1")
    texts = np.array([b"\xff"], dtype=object)
    (output,) = json.loads(write_answer(asked, {"y": texts}, "m", "1")[0])["outputs"]
    assert (output["data"], output["parameters"]) == (["/w=="], {"content_type": "base64"})
