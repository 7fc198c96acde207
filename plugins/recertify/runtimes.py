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
from dataclasses import dataclass, field, replace
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
    version: str = ""
    """That of its package, unless `--runtime` asks for another; empty for the one that is here."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Programs of the machine that it needs, and the package of Debian that has them."""


ONNXRUNTIME = Runtime("onnxruntime", ("onnx",), "on_onnxruntime.py", "onnxruntime", ("numpy",))
TORCH = Runtime("torch", ("pt2", "torchscript"), "on_torch.py", "torch", ("numpy",))
"""Native code of AOTInductor is compiled for one torch, which alone loads it."""

HERE: Mapping[str, Runtime] = {
    format: runtime for runtime in (ONNXRUNTIME, TORCH) for format in runtime.formats
}
"""Format → what runs it in a server: everything else is compared with that, as it is here."""
RUNTIMES: Mapping[str, Runtime] = {each.name: each for each in (ONNXRUNTIME, TORCH)}

_QEMU, _NODE = {"qemu-x86_64-static": "qemu-user-static"}, {"node": "nodejs", "npm": "npm"}
OTHERS: Mapping[str, Runtime] = {
    each.name: each
    for each in (
        Runtime("onnxruntime-web", ("onnx",), "on_onnxruntime_web.mjs", "onnxruntime-web",
                command=("{python}",), version="1.30.0", programs=_NODE),
        Runtime("openvino", ("onnx",), "on_openvino.py", "openvino", ("numpy",),
                version="2026.4.1"),
        replace(ONNXRUNTIME, name="onnxruntime:openvino", package="onnxruntime-openvino",
                options={"providers": ["OpenVINOExecutionProvider"]}, version="1.24.1"),
        # QEMU knows AVX2, and nothing newer.
        replace(ONNXRUNTIME, name="onnxruntime:no-avx512", programs=_QEMU, command=(
            "qemu-x86_64-static", "-cpu", "max", *ONNXRUNTIME.command)),
        replace(ONNXRUNTIME, name="onnxruntime:no-avx", programs=_QEMU, command=(
            "qemu-x86_64-static", "-cpu", "Nehalem", *ONNXRUNTIME.command)),
        replace(TORCH, name="torch:no-avx", command=(
            "env", "ATEN_CPU_CAPABILITY=default", "DNNL_MAX_CPU_ISA=SSE41", *TORCH.command)),
        Runtime("executorch", ("pt2",), "on_executorch.py", "executorch",
                ("numpy", "torch==2.13.0"), version="1.5.1"),
    )
}  # fmt: skip
"""What `--runtime` takes. A name begins with the library, whose version the runner tells."""
