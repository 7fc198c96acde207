"""Run the cases of tasks on torch.

It runs in an environment of its own and imports nothing of Modelyard; `runtimes` says what it
reads and writes. The file is one that was judged: torch.export.load trusts what it is given.
Options: `inputs` and `outputs`, their names in the model's order, and `threads`.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensors import Array, Cases, main

with suppress(ImportError):  # what loading a program imports: once, not in each fork
    import torch._export.serde.serialize


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor of an array, which stays as it is."""
    if array.dtype == "V2":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return an array of a tensor's values as they are now."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().copy().view("V2")
    return tensor.numpy().copy()


def tensors_of(given: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a model or a node gives, in their order."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        yield from tensors_of(list(given.values()))
    elif isinstance(given, (tuple, list)):
        for each in given:
            yield from tensors_of(each)


class Watched(torch.fx.Interpreter):
    """Keeps what each node of a program gives, and what it is."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.seen: dict[str, Array] = {}
        self.told: dict[str, list[str]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node as it is."""
        result = super().run_node(n)
        if n.op == "call_function":
            for place, value in enumerate(tensors_of(result)):
                name = f"{n.name}.{place}" if place else n.name
                self.seen[name] = to_numpy(value)
                scopes = list((n.meta.get("nn_module_stack") or {"": ("",)}).values())
                self.told[name] = [str(n.target), str(scopes[-1][0])]
        return result


def run(task: Any, cases: Cases) -> tuple[Cases, dict[str, str]]:
    """Return what the program's outputs are, and each of its nodes where `every_value` says so."""
    options: dict[str, Any] = task["options"]
    told: dict[str, list[str]] = {}
    module: Any = None
    if task["format"] == "pt2":
        with Path(task["artifact"]).open(
            "rb"
        ) as file:  # not by its path, whose suffix would matter
            module = torch.export.load(file).module()
    elif task["every_value"]:
        raise ValueError(f"{task['format']} shows no values between its operators")
    else:
        load: Any = torch.jit.load
        module = load(task["artifact"], map_location="cpu").eval()
    torch.set_num_threads(options.get("threads", 1))
    found: Cases = {}
    began = time.perf_counter()
    with torch.no_grad():
        for case, given in cases.items():
            inputs = [to_torch(given[name]) for name in options["inputs"]]
            watched = Watched(module) if task["every_value"] else None
            outputs = watched.run(*inputs) if watched else module(*inputs)
            found[case] = dict(watched.seen) if watched else {}
            named = zip(options["outputs"], map(to_numpy, tensors_of(outputs)), strict=True)
            found[case].update(named)
            told.update(watched.told if watched else {})
    return found, {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "seconds": f"{time.perf_counter() - began:.6f}",
        "values": json.dumps(told),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(run, f"torch {torch.__version__}")
