"""What runs an artifact, each by a program of its own in an environment of its own.

A *runner* is a file of `runners/` that imports nothing of ours. It reads tasks, a line of JSON
each:

    {"artifact": path, "format": "onnx" | "pt2" | "torchscript",
     "cases": path of a safetensors file: tensors named CASE/INPUT, as "0/image",
     "out": path of the safetensors file that it writes: tensors named CASE/OUTPUT,
     "every_value": whether CASE/VALUE of what is computed in between is written too, in the order
                    in which it is computed,
     "options": {"inputs": names in the model's order, "outputs": the same, "threads": count, …}}

An ONNX file that is run with `every_value` has its values in between as further outputs already.
What `__metadata__` of `out` holds are texts: versions by the library's name, `seconds` that the
model took, and perhaps `values`: JSON of value → [operator, layer]. Each task is answered by a line
of stdout: empty, or one sentence that says why it failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNNERS = Path(__file__).parent / "runners"


@dataclass(frozen=True)
class Runtime:
    """What runs artifacts of some formats."""

    name: str
    """What a line of an archive says. A server believes lines about `onnxruntime` and `torch`."""
    formats: tuple[str, ...]
    program: str
    """File of `RUNNERS`."""
    package: str = ""
    """What `--with` names it by; its version is the runtime's."""
    requirements: tuple[str, ...] = ()
    """What pip installs beside what `--with` gives."""
    command: tuple[str, ...] = ("{python}", "-s")
    """What the program follows; `{python}` is the environment's interpreter."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of every task."""


ONNXRUNTIME = Runtime("onnxruntime", ("onnx",), "on_onnxruntime.py", "onnxruntime", ("numpy",))
TORCH = Runtime("torch", ("pt2", "torchscript"), "on_torch.py", "torch", ("numpy",))
"""Native code of AOTInductor is compiled for one torch, which alone loads it."""

HERE: Mapping[str, Runtime] = {
    format: runtime for runtime in (ONNXRUNTIME, TORCH) for format in runtime.formats
}
"""Format → what runs it in a server: everything else is compared with that, as it is here."""
RUNTIMES: Mapping[str, Runtime] = {each.name: each for each in (ONNXRUNTIME, TORCH)}
