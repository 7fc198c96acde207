"""What runs artifacts elsewhere than in a server: `--runtime NAME[==VERSION]` → an environment.

A row of `OTHERS` is all that a runtime needs, but for its runner. The name begins with the library,
whose version the runner tells.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelyard.archiver.errors import WrongUsage
from modelyard.archiver.proven import installed_version
from modelyard.plugins.recertify.environments import HERE_PYTHON, Environment, planned
from modelyard.plugins.recertify.runtimes import ONNXRUNTIME, TORCH, Runtime


@dataclass(frozen=True)
class Other:
    """A runtime, and what is installed for it."""

    runtime: Runtime
    version: str = ""
    """That of its package, unless another is asked for; the one that is here, where it is empty."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Programs of the machine that it needs, and the package of Debian that has them."""


class NodeEnvironment(Environment):
    """A folder of npm's, with a link to the `node` that runs what lies in it."""

    def commands(self) -> list[list[str]]:
        """Return what makes it, one after the other."""
        # No package's own script runs: what is downloaded is only read, behind walls.
        install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix"]
        packages = [text.replace("==", "@") for text in self.requirements]
        return [
            ["mkdir", "-p", str(self.python.parent)],
            ["ln", "-s", str(self.base), str(self.python)],
            [*install, str(self.python.parents[1]), *packages],
        ]


def _emulated(name: str, processor: str) -> Other:
    """Return onnxruntime on an emulated processor, which lacks instructions of this one."""
    command = ("qemu-x86_64-static", "-cpu", processor, *ONNXRUNTIME.command)
    return Other(
        replace(ONNXRUNTIME, name=name, command=command),
        programs={"qemu-x86_64-static": "qemu-user-static"},
    )


OTHERS = {
    each.runtime.name: each
    for each in (
        Other(
            Runtime("onnxruntime-web", ("onnx",), "on_onnxruntime_web.mjs", "onnxruntime-web",
                    command=("{python}",)),
            "1.30.0", {"node": "nodejs", "npm": "npm"},
        ),
        Other(Runtime("openvino", ("onnx",), "on_openvino.py", "openvino", ("numpy",)), "2026.4.1"),
        Other(
            replace(ONNXRUNTIME, name="onnxruntime:openvino", package="onnxruntime-openvino",
                    options={"providers": ["OpenVINOExecutionProvider"]}), "1.24.1",
        ),
        _emulated("onnxruntime:no-avx512", "max"),  # QEMU knows AVX2, and nothing newer
        _emulated("onnxruntime:no-avx", "Nehalem"),
        Other(replace(TORCH, name="torch:no-avx", command=(
            "env", "ATEN_CPU_CAPABILITY=default", "DNNL_MAX_CPU_ISA=SSE41", *TORCH.command))),
        Other(Runtime("executorch", ("pt2",), "on_executorch.py", "executorch",
                      ("numpy", "torch==2.13.0")), "1.5.1"),
    )
}  # fmt: skip


def plan(text: str, python: Path | None = None) -> Environment:
    """Return the environment that `--runtime` asks for, which is not made.

    Args:
        text: a name of `OTHERS`, perhaps with `==VERSION`.
        python: another interpreter than this process's.

    Raises:
        WrongUsage: no such runtime, or the machine lacks a program that it needs.
    """
    name, _, version = text.partition("==")
    if name not in OTHERS:
        raise WrongUsage(f"--runtime {text}: expected one of {', '.join(OTHERS)}")
    other = OTHERS[name]
    for program, package in other.programs.items():
        if shutil.which(program) is None:
            raise WrongUsage(f"--runtime {name} needs {program}: apt-get install {package}")
    runtime = other.runtime
    first = shutil.which(runtime.command[0]) or runtime.command[0]
    runtime = replace(runtime, command=(first, *runtime.command[1:]))
    version = version or other.version or installed_version(runtime.package).partition("+")[0]
    given = (f"{runtime.package}=={version}",)
    if "node" not in other.programs:
        return replace(planned(given, python or HERE_PYTHON, (runtime,)), name=text)
    node = Path(shutil.which("node") or "node")
    made = planned(given, node, (runtime,))
    return NodeEnvironment(text, made.runtimes, made.python.with_name("node"), given, node)
