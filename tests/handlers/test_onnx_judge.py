"""ONNX files, honest and doctored: what no runtime is given to read."""

import os
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.onnx_file import MAX_DEPTH, check_onnx
from modelyard.handlers.models.backends import Opening, open_artifact, open_session

ROW = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
OUT = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
Change = Callable[[Any, Path], Any]


def weight(kind: int = TensorProto.FLOAT, **fields: Any) -> Any:
    return TensorProto(name="w", data_type=kind, **fields)


def outside(location: str, **entries: int) -> Any:
    """Return a weight of 16 bytes in another file."""
    tensor = weight(dims=[1, 4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def model(*weights: Any, node: Any = None, **more: Any) -> Any:
    """Return a model that adds a weight of its own to its input."""
    own = weights or [numpy_helper.from_array(np.ones((1, 4), np.float32), "w")]
    graph = helper.make_graph(
        [node or helper.make_node("Add", ["x", "w"], ["y"])], "g", [ROW], [OUT], list(own)
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, **more)


def constant(value: Any) -> Any:
    return model(node=helper.make_node("Constant", [], ["y"], value=value))


def of_type(kind: int, values: list[Any]) -> Any:
    return constant(helper.make_tensor("c", kind, [3], values))


def nested(depth: int, leaf: Any = None) -> Any:
    """Return a model of conditions in conditions."""
    nodes = [leaf or helper.make_node("Identity", ["x"], ["y"])]
    other = helper.make_graph(nodes, "other", [], [OUT])
    for level in range(depth):
        inner = helper.make_graph(nodes, f"g{level}", [], [OUT])
        nodes = [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other)]
    flag = numpy_helper.from_array(np.array(True), "c")
    return model(flag, node=nodes[0])


def functions(count: int, times: int, last: str = "Identity", last_domain: str = "") -> Any:
    """Return a model of functions, each of which calls the next several times."""
    made = []
    for i in range(count):
        is_last = i == count - 1
        call = (last, last_domain) if is_last else (f"f{i + 1}", "own")
        nodes = [helper.make_node(call[0], ["x"], ["y"], domain=call[1]) for _ in range(times)]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        made.append(helper.make_function("own", f"f{i}", ["x"], ["y"], nodes, opsets))
    return model(node=helper.make_node("f0", ["x"], ["y"], domain="own"), functions=made)


def sparse(*dims: int) -> Any:
    values = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("i", TensorProto.INT64, [1, len(dims)], [0] * len(dims))
    found = model()
    del found.graph.initializer[:]
    found.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, dims))
    return found


RIGHT: dict[str, Callable[[], Any]] = {
    "a weight": model,
    "a file of weights": lambda: model(outside("weights.bin", offset=16, length=16)),
    "a file of weights in a folder": lambda: model(outside("more/weights.bin")),
    "a link that stays": lambda: model(outside("link.bin")),
    "floats": lambda: model(weight(dims=[1, 4], float_data=[1.0] * 4)),
    "a name of a function": lambda: functions(3, 2),
    "graphs in graphs": lambda: nested(MAX_DEPTH),
    "a sparse weight": lambda: sparse(1, 4),
    "gelu": lambda: model(node=helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")),
    **{
        f"values of type {kind}": partial(of_type, kind, [1, 0, 1])
        for kind in (*range(1, 8), 9, 10, 11, 12, 13, 16, 17, 19, 21, 22)
    },
    "complex values": partial(of_type, TensorProto.COMPLEX64, [1j, 2, 3]),
    "text": partial(of_type, TensorProto.STRING, [b"a", b"b", b"c"]),
    "values as they lie": lambda: constant(numpy_helper.from_array(np.arange(3), "c")),
}

WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "an absolute place": (lambda: model(outside("/etc/passwd")), "outside of its folder"),
    "a place upwards": (lambda: model(outside("../secret.bin")), "outside of its folder"),
    "a place inside and out": (lambda: model(outside("more/../../secret.bin")), "outside of"),
    "a place as on Windows": (lambda: model(outside("..\\secret.bin")), "outside of its folder"),
    "a process's files": (lambda: model(outside("/proc/self/environ")), "outside of its folder"),
    "no place": (lambda: model(outside("")), "outside of its folder"),
    "a place with a NUL": (lambda: model(outside("weights.bin\0.txt")), "outside of its folder"),
    "memory of the process": (lambda: model(outside("*/_ORT_MEM_ADDR_/*", offset=4096)), "w"),
    "a link": (lambda: model(outside("out.bin")), "a link that leaves the folder"),
    "a link of a folder": (lambda: model(outside("up/secret.bin")), "a link that leaves"),
    "a folder": (lambda: model(outside("more")), "is not beside it"),
    "a file that is not there": (lambda: model(outside("none.bin")), "is not beside it"),
    "an end behind the file": (lambda: model(outside("weights.bin", offset=17)), "at 17 of a file"),
    "a place before": (lambda: model(outside("weights.bin", offset=-4)), "at -4 of a file"),
    "another length": (lambda: model(outside("weights.bin", length=8)), "takes 8 bytes of 16"),
    "a far place": (lambda: model(outside("weights.bin", offset=(1 << 64) - 8)), "of a file of 32"),
    "a constant elsewhere": (lambda: constant(outside("../secret.bin")), "outside of its folder"),
    "a constant in a branch": (
        lambda: nested(2, helper.make_node("Constant", [], ["y"], value=outside("../secret.bin"))),
        "outside of its folder",
    ),
    "an operator of a library": (
        lambda: model(node=helper.make_node("Foo", ["x"], ["y"], domain="my.ops")),
        "the operator my.ops.Foo",
    ),
    "an operator that loads another file": (
        lambda: model(node=helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft")),
        "the operator com.microsoft.EPContext",
    ),
    "a library in a function": (
        lambda: functions(2, 1, "Foo", "my.ops"),
        "the operator my.ops.Foo",
    ),
    "a library in a branch": (
        lambda: nested(3, helper.make_node("Foo", ["x"], ["y"], domain="my.ops")),
        "the operator my.ops.Foo",
    ),
    "fewer bytes": (lambda: model(weight(dims=[1, 4], raw_data=bytes(12))), "12 bytes of 16"),
    "more bytes": (lambda: model(weight(dims=[1, 4], raw_data=bytes(20))), "20 bytes of 16"),
    "no bytes": (lambda: model(weight(dims=[1, 64])), "9 bytes for 64 values"),
    "fewer texts": (
        lambda: constant(weight(TensorProto.STRING, dims=[1 << 40], string_data=[b"a"])),
        "bytes for 1099511627776 values",
    ),
    "terabytes": (lambda: model(weight(dims=[1 << 20, 1 << 22], raw_data=b"1234")), "4 bytes of"),
    "sizes that wrap around": (lambda: model(weight(dims=[1 << 32, 1 << 32])), "has sizes"),
    "a size below nothing": (lambda: model(weight(dims=[-1, -4], raw_data=bytes(16))), "has sizes"),
    "a type of nothing": (lambda: model(weight(99, dims=[1], raw_data=b"1")), "type of number 99"),
    "a sparse weight of terabytes": (lambda: sparse(1 << 20, 1 << 22), "elements in memory"),
    "graphs too deep": (lambda: nested(MAX_DEPTH + 1), "more than 16 deep"),
    "a function that calls itself": (lambda: functions(1, 1, "f0", "own"), "more than 1048576"),
    "functions that double": (lambda: functions(40, 2), "more than 1048576 nodes"),
    "nothing": (bytes, "it has no graph"),
    "not a message": (lambda: b"\xff" * 40, "not an ONNX model"),
    "a graph twice": (
        lambda: model().SerializeToString() + model().SerializeToString(),
        "field 7 of its model is there twice",
    ),
    "a field that ends behind": (lambda: model().SerializeToString()[:-3], "not an ONNX model"),
    "a length below nothing": (
        lambda: b"\x12" + b"\xff" * 9 + b"\x01" + model().SerializeToString(),
        "ends behind its message",
    ),
    "a group": (lambda: b"\x3b" + model().SerializeToString(), "not an ONNX model"),
}


def write(made: Any, folder: Path) -> Path:
    """Write a model into a folder with files beside it."""
    own = folder / "model"
    (own / "more").mkdir(parents=True)
    (folder / "secret.bin").write_bytes(b"nobody's to read" * 2)
    for place in ("weights.bin", "more/weights.bin"):
        (own / place).write_bytes(np.ones(8, np.float32).tobytes())
    (own / "link.bin").symlink_to("more/weights.bin")
    (own / "out.bin").symlink_to(folder / "secret.bin")
    (own / "up").symlink_to("..")
    path = own / "model.onnx"
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return path


@pytest.mark.parametrize("kind", RIGHT)
def test_an_honest_file_is_taken(kind: str, tmp_path: Path) -> None:
    assert check_onnx(write(RIGHT[kind](), tmp_path))[0] == []


@pytest.mark.parametrize("kind", WRONG)
def test_a_doctored_file_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, said = WRONG[kind]
    path = write(make(), tmp_path)
    assert said in "; ".join(f"{part}: {problem}" for part, problem in check_onnx(path)[0])
    with pytest.raises(UnsafeProgram, match="refused, and nothing of it was run"):
        open_session(path, Opening(torch.device("cpu")))


def test_every_file_that_onnx_comes_with_is_taken() -> None:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    found = {str(path): check_onnx(path)[0] for path in folder.rglob("*.onnx")}
    assert len(found) > 100
    wrong = [part for findings in found.values() for part, _ in findings]
    assert set(wrong) == {"the operator ai.onnx.preview.training.Gradient"}


def test_weights_take_no_memory(tmp_path: Path) -> None:
    """They are stepped over, not read."""
    size = 1 << 30
    # The weight's field of bytes, a gigabyte long, at the end of all that it lies in.
    inner = weight(dims=[1, size // 4]).SerializeToString() + b"\x4a" + _varint(size)
    graph = b"\x2a" + _varint(len(inner) + size) + inner
    path = tmp_path / "large.onnx"
    path.write_bytes(b"\x08\x09\x3a" + _varint(len(graph) + size) + graph)
    os.truncate(path, path.stat().st_size + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check_onnx(path) == ([], [])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def test_a_file_under_another_suffix_is_what_was_judged(tmp_path: Path) -> None:
    """onnxruntime reads what is called .ort as another format, whatever it holds."""
    path = write(model(), tmp_path)
    renamed = path.rename(path.with_suffix(".ort"))
    assert open_artifact(renamed, "onnx")(torch.ones(1, 4)).tolist() == [[2.0] * 4]  # type: ignore[union-attr]


def mutants(data: bytes, count: int) -> Iterator[bytes]:
    draw = np.random.default_rng(0)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(draw.integers(1, 6)):
            changed[draw.integers(len(changed))] = draw.integers(256)
        yield bytes(changed)


def test_a_damaged_file_is_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    path = write(model(), tmp_path)
    for changed in mutants(nested(3).SerializeToString(), 2000):
        path.write_bytes(changed)
        assert all(isinstance(problem, str) for _, problem in check_onnx(path)[0])
