"""Save an ONNX model as onnxruntime optimises it, with weights that processes map, and try it.

    python shared_onnx.py MODEL FOLDER [EXAMPLES.npz]

Runs as a script in a process of its own, because onnxruntime ends the process that computes with a
file it cannot read as laid out. It imports neither torch nor modelyard, which would take longer
than what it does. FOLDER holds `optimized.onnx` and `optimized.weights` afterwards; it exits with 0
only if the model computes from them, bit for bit, what it computes from MODEL. Its last line on
stderr says why not.
"""

import ctypes
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

OPTIMIZED = "optimized.onnx"
_WEIGHTS = "optimized.weights"
_SETTINGS = {
    "optimized_model_external_initializers_file_name": _WEIGHTS,
    "optimized_model_external_initializers_min_size_in_bytes": "1024",
    # Kernels reorder weights for their own use, into memory of their own: not if the file has them.
    "save_external_prepacked_constant_initializers": "1",
}
# Bytes; kernels load a cache line at once, and end the process on any other address.
_ALIGNMENT = 64
_PLACE = re.compile(r"\|(\d+);(\d+)")  # of a reordered copy: kernel|offset;length;checksum|…
_SIZES = (2, 1, 8, 32, 64, 224)  # of free dimensions, where nobody gives an example
_DTYPES = {"float": "float32", "double": "float64"}  # others are called as numpy calls them
_PR_SET_PDEATHSIG = 1

Feed = dict[str, np.ndarray]


def main(model: Path, folder: Path, examples: Path | None) -> None:
    """Make the files and compare; exit with the reason where they must not be used."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the worker that waits for this
    options = _options()
    options.optimized_model_filepath = str(folder / OPTIMIZED)
    for key, value in _SETTINGS.items():
        options.add_session_config_entry(f"session.{key}", value)
    plain = _start(model, options)
    align(folder)
    options = _options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    mapped = _start(folder / OPTIMIZED, options)
    refusal, tried = "", 0
    for feed in _given(plain, examples) if examples else _made(plain):
        try:
            expected = plain.run(None, feed)
        # onnxruntime's errors have no base of their own; the next size may fit.
        except Exception as error:
            refusal = str(error).partition("\n")[0]
            continue
        tried += 1
        found = mapped.run(None, feed)
        if not _equal(expected, found) and _equal(expected, plain.run(None, feed)):
            sys.exit("it computes other values from them mapped")
        if tried == 2:  # texts of 224 words in batches of 224 would last for hours
            break
    if not tried:
        sys.exit(f"no input to try them with: {refusal}")


def align(folder: Path) -> None:
    """Lay each weight of an optimised model, and each reordered copy, where kernels may read it."""
    model = onnx.load(folder / OPTIMIZED, load_external_data=False)
    if not any(offset % _ALIGNMENT for offset in _offsets(model.graph)):
        return
    draft = folder / "aligned"
    places: dict[tuple[int, int], int] = {}
    with (folder / _WEIGHTS).open("rb") as source, draft.open("wb") as target:

        def move(offset: int, length: int) -> int:
            if (offset, length) not in places:
                target.write(bytes(-target.tell() % _ALIGNMENT))
                places[offset, length] = target.tell()
                source.seek(offset)
                target.write(source.read(length))
            return places[offset, length]

        for tensor in _tensors(model.graph):
            entries = {entry.key: entry for entry in tensor.external_data}
            if "offset" not in entries:
                continue
            length = int(entries["length"].value)
            entries["offset"].value = str(move(int(entries["offset"].value), length))
            for key, entry in entries.items():
                if key.startswith("prepacked_"):
                    entry.value = _PLACE.sub(
                        lambda found: f"|{move(int(found[1]), int(found[2]))};{found[2]}",
                        entry.value,
                    )
    draft.replace(folder / _WEIGHTS)
    (folder / OPTIMIZED).write_bytes(model.SerializeToString())


def _offsets(graph: Any) -> Iterator[int]:
    """Yield where each weight, and each reordered copy, begins."""
    for tensor in _tensors(graph):
        for entry in tensor.external_data:
            if entry.key == "offset":
                yield int(entry.value)
            elif entry.key.startswith("prepacked_"):
                yield from (int(offset) for offset, _ in _PLACE.findall(entry.value))


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _tensors(inner)


def _options() -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


def _start(path: Path, options: Any) -> Any:
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _given(session: Any, examples: Path) -> Iterator[Feed]:
    """Yield the examples of a file: arrays named by number of the example and of the input."""
    names = [node.name for node in session.get_inputs()]
    with np.load(examples) as arrays:
        for example in range(len(arrays.files) // max(len(names), 1)):
            yield {name: arrays[f"{example}_{i}"] for i, name in enumerate(names)}


def _made(session: Any) -> Iterator[Feed]:
    """Yield inputs made up by what the model says of them, every free dimension of one size."""
    random = np.random.default_rng(0)
    for size in _SIZES:
        feed = {}
        for node in session.get_inputs():
            shape = [each if isinstance(each, int) else size for each in node.shape]
            name = node.type.removeprefix("tensor(").removesuffix(")")
            kind = np.dtype(_DTYPES.get(name, name))
            is_float = kind.kind == "f"
            values = random.standard_normal(shape) if is_float else np.zeros(shape)
            feed[node.name] = values.astype(kind)
        yield feed


def _equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
