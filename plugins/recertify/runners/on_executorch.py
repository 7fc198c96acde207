"""Run the cases of tasks on ExecuTorch.

It runs in an environment of its own and imports nothing of Modelyard; `runtimes` says what it
reads and writes. The program is lowered for XNNPACK first, as for a phone: what is not among its
operators runs on ExecuTorch's portable ones.
"""

from __future__ import annotations

import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from tensors import Cases, main


def run(task: Any, cases: Cases) -> tuple[Cases, dict[str, str]]:
    """Return the program's outputs; a lowered program keeps no values in between."""
    options = task["options"]
    if task["every_value"]:
        raise ValueError("a lowered program keeps no values between its operators")
    with Path(task["artifact"]).open("rb") as file:  # by its path, a suffix would be judged
        program = torch.export.load(file)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    lowered = lowered.to_executorch()
    method = Runtime.get().load_program(lowered.buffer).load_method("forward")
    found: Cases = {}
    began = time.perf_counter()
    for case, given in cases.items():
        # Copies: ExecuTorch reads them as they lie, and a read-only array is none for torch.
        inputs = [torch.from_numpy(given[name].copy()) for name in options["inputs"]]
        values = [value.numpy().copy() for value in method.execute(inputs)]
        found[case] = dict(zip(options["outputs"], values, strict=True))
    told = {
        "executorch": version("executorch"),
        "torch": torch.__version__,
        "seconds": f"{time.perf_counter() - began:.6f}",
    }
    return found, told


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(run, f"executorch {version('executorch')}")
