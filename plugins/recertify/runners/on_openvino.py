"""Run the cases of tasks on OpenVINO.

It runs in an environment of its own and imports nothing of Modelyard; `runtimes` says what it
reads and writes. Options: `precision`, that of float32 numbers inside, and `threads`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
from tensors import Cases, main

VERSION = openvino.__version__.partition("-")[0]


def run(task: Any, cases: Cases) -> tuple[Cases, dict[str, str]]:
    """Return what the file's outputs are; values in between are among them where it has them so."""
    options = task["options"]
    settings = {
        # Its own choice is bfloat16 where the processor has that: other answers.
        "INFERENCE_PRECISION_HINT": options.get("precision", "f32"),
        "INFERENCE_NUM_THREADS": options.get("threads", 1),
    }
    compiled = openvino.Core().compile_model(task["artifact"], "CPU", settings)
    request = compiled.create_infer_request()
    # An input that the graph does not use may be none here.
    inputs = [name for port in compiled.inputs for name in port.names]
    found: Cases = {}
    began = time.perf_counter()
    for case, given in cases.items():
        feed = {name: value for name, value in given.items() if name in inputs}
        # Two outputs that are one value are one port, with both names.
        values = {
            name: np.array(value)
            for port, value in request.infer(feed).items()
            for name in port.names
        }
        found[case] = {name: values[name] for name in options["outputs"] if name in values}
    told = {
        "openvino": VERSION,
        "numpy": np.__version__,
        "seconds": f"{time.perf_counter() - began:.6f}",
    }
    return found, told


if __name__ == "__main__":
    main(run, f"openvino {VERSION}")
