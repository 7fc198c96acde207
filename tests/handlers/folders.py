"""Handlers of folders that look like unpacked archives, without a worker."""

from __future__ import annotations

import functools
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, parse_inputs
from modelyard.handlers import BaseHandler, Context

Handler = TypeVar("Handler", bound=BaseHandler)


class Tensors(nn.Module):
    """A model of transformers, called in order; its outputs of these names as a tuple."""

    def __init__(self, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self.outputs = model.eval(), tuple(inputs), tuple(outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.inputs, tensors, strict=True)))
        return tuple(found[name] for name in self.outputs)


def save_program(module: nn.Module, inputs: Sequence[str], path: Path) -> None:
    """Export a program for inputs written as `--input` has them, and their signature beside it."""
    signature = parse_inputs(inputs)
    dims = {name: torch.export.Dim(name, min=dim.min, max=dim.max)
            for name, dim in signature.dims.items()}  # fmt: skip
    sizes = {name: min(dim.max, 5 * dim.min + 2) for name, dim in signature.dims.items()}
    example = tuple(
        torch.ones(spec.sizes(sizes), dtype=getattr(torch, spec.dtype)) for spec in signature.inputs
    )
    shapes: tuple[Any, ...] = tuple(
        {at: dims[size.name] for at, size in enumerate(spec.shape) if isinstance(size, Dim)}
        for spec in signature.inputs
    )
    with torch.no_grad():
        program = torch.export.export(
            module.eval(), example,
            dynamic_shapes=(shapes,) if isinstance(module, Tensors) else shapes,
        )  # fmt: skip
    torch.export.save(program, path)
    path.with_suffix(".signature").write_text(json.dumps(signature.to_json()))


def load(
    make: type[Handler],
    folder: Path,
    artifact: str = "model.pt2",
    config: dict[str, Any] | None = None,
    batch_size: int = 1,
) -> Handler:
    """Return an initialised handler of a folder."""
    signature = json.loads((folder / artifact).with_suffix(".signature").read_text())
    manifest = {"model": {"serializedFile": artifact}, "modelyard": {"signature": signature}}
    settings = {"handler": config or {}}
    context = Context(
        "model", str(folder), manifest, batch_size=batch_size, model_yaml_config=settings
    )
    context.reset(["id-0"])
    handler = make()
    handler.initialize(context)
    return handler


_LOADED: dict[tuple[object, ...], Any] = {}


def loaded(make: type[Handler], folder: Path, config: dict[str, Any] | None = None) -> Handler:
    """Return a handler of a folder that others were given too: leave it as it is."""
    key = (make, folder, json.dumps(config))
    if key not in _LOADED:
        _LOADED[key] = load(make, folder, config=config)
    found: Handler = _LOADED[key]
    return found


def ask(handler: BaseHandler, *bodies: Any, headers: dict[str, str] | None = None) -> list[Any]:
    """Return the answers to a batch of bodies."""
    context = handler.context
    context.reset([f"id-{at}" for at in range(len(bodies))], [headers or {}] * len(bodies))
    return handler.handle([{"body": body} for body in bodies], context)


def explain(handler: BaseHandler, body: Any, **query: str) -> Any:
    """Return the explanation of one body."""
    handler.context.reset(["id-0"], queries=[query])
    (answer,) = handler.explain([{"body": body}], handler.context)
    return answer


@functools.cache
def least_program() -> bytes:
    """Return a program that gives back what it gets: large ones take most of a second to load."""
    file = io.BytesIO()
    torch.export.save(torch.export.export(nn.Identity(), (torch.ones(1),)), file)
    return file.getvalue()


def lightened(folder: Path, to: Path) -> Path:
    """Return a copy with that program, for what is refused before a model is asked."""
    copied(folder, to)
    (to / "model.pt2").write_bytes(least_program())
    return to


def copied(folder: Path, to: Path) -> Path:
    """Return a copy that a test may change."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to
