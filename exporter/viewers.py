"""Artifact → a graph viewer of somebody else, where one is installed; on this machine only."""

import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from modelyard.exporter.errors import ExportError, UsageError
from modelyard.handlers.judge.check import load_program
from modelyard.handlers.models.backends import detect_format

_HERE = "127.0.0.1"


def show_graph(artifact: Path, announce: Callable[[str], None]) -> None:
    """Open an artifact in Netron, else in Model Explorer, until Ctrl-C.

    Raises:
        ExportError: no viewer is installed that shows the format.
        UsageError: the format keeps no graph.
        LoadError: it is not an artifact, or an exported program holds more than a program.
    """
    format = detect_format(artifact)
    if format == "aoti":
        raise UsageError(f"{artifact.name} is native code, which has no graph; look at a pt2 file")
    if importlib.util.find_spec("netron"):
        announce(f"Netron: {start_netron(artifact)} until Ctrl-C")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    elif importlib.util.find_spec("model_explorer") and format != "torchscript":
        _run_model_explorer(artifact, format)
    else:
        raise ExportError(
            f"no viewer of {format} graphs is installed; run `pip install netron`"
            + (", or `pip install ai-edge-model-explorer`" if format != "torchscript" else "")
        )


def start_netron(artifact: Path, *, browse: bool = True) -> str:
    """Serve an artifact in Netron until this process ends; return the page's address."""
    import netron

    host, port = netron.start(str(artifact), address=(_HERE, 0), browse=browse)
    return f"http://{host}:{port}"


def _run_model_explorer(artifact: Path, format: str) -> None:
    import model_explorer  # type: ignore[import-not-found]

    config = model_explorer.config()
    if format == "onnx":
        config.add_model_from_path(str(artifact))
    else:
        config.add_model_from_pytorch(artifact.name, with_fixed_shapes(artifact))
    model_explorer.visualize_from_config(config, host=_HERE)


def with_fixed_shapes(artifact: Path) -> torch.export.ExportedProgram:
    """Trace an exported program anew with sizes of two: Model Explorer cannot show others.

    Raises:
        UnsafeProgram: the file holds more than a program.
    """
    program = load_program(artifact)
    inputs = tuple(
        _example(node.meta["val"])
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    )
    args, kwargs = torch.utils._pytree.tree_unflatten(inputs, program.call_spec.in_spec)
    return torch.export.export(program.module(check_guards=False), args, kwargs)


def _example(value: Any) -> Any:
    """Return a value of the type that a placeholder was traced with, at a size of two."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size if isinstance(size, int) else 2 for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)
