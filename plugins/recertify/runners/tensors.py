"""Files of a task's tensors, read and written by numpy alone; a bfloat16 is two opaque bytes.

The format is that of safetensors: eight bytes of the header's length, little-endian, a header in
JSON, the data.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Cases = dict[str, dict[str, Array]]
"""Case → name → values."""
Run = Callable[[Any, Cases], "tuple[Cases, dict[str, str]]"]

DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "|V2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip


def read(file: str) -> Cases:
    """Return the tensors of a file."""
    data = Path(file).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    cases: Cases = {}
    for name, told in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = (start + each for each in told["data_offsets"])
            flat = np.frombuffer(data[first:last], DTYPES[told["dtype"]])
            case, _, own = name.partition("/")
            cases.setdefault(case, {})[own] = flat.reshape(told["shape"])
    return cases


def write(file: str, cases: Cases, metadata: Mapping[str, str]) -> None:
    """Write tensors in the order of the dicts, and texts by name."""
    codes = {np.dtype(kind): code for code, kind in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    flat = {f"{case}/{name}": array for case, own in cases.items() for name, array in own.items()}
    for name, array in flat.items():
        place = [end, end + array.nbytes]
        header[name] = {
            "dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": place
        }  # fmt: skip
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(file).open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in flat.values():
            out.write(array.tobytes())


def main(run: Run, library: str) -> None:
    """Run tasks, a line of JSON each, and answer each by a line: why it failed, or nothing.

    Each runs in a fork of this process, which has the library already: none sees another's memory.

    Args:
        run: takes the task and its cases; returns what each gave, and what is told of the run.
        library: what runs it, and its version.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # for what libraries print
        for line in sys.stdin:
            if not (child := os.fork()):
                print(_run(run, library, json.loads(line)), file=answers, flush=True)
                os._exit(0)
            if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
                print(f"{library}: the process ended with {code}", file=answers, flush=True)


def _run(run: Run, library: str, task: Any) -> str:
    try:
        write(task["out"], *run(task, read(task["cases"])))
    # A library raises whatever its parsers and kernels raise: each means that it does not run here.
    except Exception as error:
        said = " ".join(str(error).split())
        # OpenVINO's, in onnxruntime too: the operator stands behind the places in its sources.
        said = said.rpartition("detailed log:")[2].strip()[:500]
        return f"{library}: {said or type(error).__name__}"
    return ""
