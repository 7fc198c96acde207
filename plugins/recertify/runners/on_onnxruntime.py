"""Run the cases of tasks on onnxruntime.

It runs in an environment of its own and imports nothing of Modelyard; `runtimes` says what it
reads and writes. Options: `providers`, by default the CPU's, and `threads`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import onnxruntime
from tensors import Cases, main


def run(task: Any, cases: Cases) -> tuple[Cases, dict[str, str]]:
    """Return what the file's outputs are; values in between are among them where it has them so."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task["options"].get("threads", 1)
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    providers = task["options"].get("providers", ["CPUExecutionProvider"])
    session = onnxruntime.InferenceSession(task["artifact"], options, providers=providers)
    inputs = [node.name for node in session.get_inputs()]
    outputs = [node.name for node in session.get_outputs()]
    found: Cases = {}
    began = time.perf_counter()
    for case, given in cases.items():
        values = session.run(outputs, {name: given[name] for name in inputs})
        found[case] = dict(zip(outputs, map(np.asarray, values), strict=True))
    told = {
        "onnxruntime": onnxruntime.__version__,
        "numpy": np.__version__,
        "providers": ",".join(session.get_providers()),
        "seconds": f"{time.perf_counter() - began:.6f}",
    }
    return found, told


if __name__ == "__main__":
    main(run, f"onnxruntime {onnxruntime.__version__}")
