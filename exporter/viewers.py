"""Artifact → a graph viewer of somebody else, where it is installed; on this machine only."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from modelyard.exporter.errors import UsageError
from modelyard.handlers.backends import detect_format
from modelyard.handlers.program.check import load_program

_HERE = "127.0.0.1"


def open_netron(artifact: Path, *, browse: bool = True) -> str:
    """Serve an artifact in Netron until this process ends; give the page's address.

    Raises:
        UsageError: Netron is not installed.
    """
    _require("netron", "netron", "Netron")
    import netron

    host, port = netron.start(str(artifact), address=(_HERE, 0), browse=browse)
    return f"http://{host}:{port}"


def open_model_explorer(artifact: Path) -> None:
    """Show an artifact in Model Explorer until that ends.

    It cannot show sizes that vary, so it gets a copy of an exported program with fixed ones.

    Raises:
        UsageError: Model Explorer is not installed, or the format is one that it cannot show.
    """
    _require("model_explorer", "ai-edge-model-explorer", "Model Explorer")
    import model_explorer  # type: ignore[import-not-found]

    format = detect_format(artifact)
    config = model_explorer.config()
    if format == "onnx":
        config.add_model_from_path(str(artifact))
    elif format == "pt2":
        config.add_model_from_pytorch(artifact.name, with_fixed_shapes(artifact))
    else:
        raise UsageError(f"Model Explorer cannot show {format}; expected pt2 or onnx")
    model_explorer.visualize_from_config(config, host=_HERE)


def with_fixed_shapes(artifact: Path) -> torch.export.ExportedProgram:
    """Trace an exported program anew with one size for each dynamic dimension.

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
    """Make a value of the type that a placeholder was traced with, at a size of two."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size if isinstance(size, int) else 2 for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _require(module: str, package: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UsageError(
            f"{name} is not installed; expected the package {package}: pip install {package}"
        )
