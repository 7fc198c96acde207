"""Changes of what is around a model that golden requests ought to notice, made on purpose."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from modelyard.handlers.base import BaseHandler

_NOISE = 1e-3
"""Share of a weight's own spread by which it is moved."""


class Mutation(NamedTuple):
    """One change of a handler."""

    name: str
    changes: Mapping[str, Any]
    """Attributes of the handler → what they are meanwhile."""
    example: str
    """What a golden request must have to notice it, to follow "add an example"."""


@contextmanager
def mutated(handler: "BaseHandler", mutation: Mutation) -> Iterator[None]:
    """Change a handler meanwhile."""
    own = {name: vars(handler).get(name, handler) for name in mutation.changes}
    vars(handler).update(mutation.changes)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is handler:  # it had none of its own
                del vars(handler)[name]
            else:
                setattr(handler, name, value)


def mutations(handler: "BaseHandler") -> Iterator[Mutation]:
    """Yield every change; one holds until the next is asked for."""
    with _weights_moved(handler) as weights:
        if weights is not None:
            yield weights
    yield from handler.mutations()


@contextmanager
def _weights_moved(handler: "BaseHandler") -> Iterator[Mutation | None]:
    """Give a mutation whose model has every weight moved; None where that cannot be done.

    A weight moves by a thousandth of the spread of its tensor, in a direction drawn from a seed.
    """
    advice = "with an expected answer, or export a twin (--explain-artifact)"
    artifact = handler.model
    module = getattr(artifact, "module", None)
    generator = torch.Generator().manual_seed(0)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        spread = tensor.std() if tensor.numel() > 1 else tensor.abs()
        return tensor + _NOISE * spread * noise

    if module is not None:
        with torch.no_grad():
            weights = [each for each in module.state_dict().values() if each.is_floating_point()]
            before = [each.clone() for each in weights]
            for each in weights:
                each.copy_(moved(each))
            try:
                yield Mutation("weights", {}, advice)
            finally:
                for each, old in zip(weights, before, strict=True):
                    each.copy_(old)
    elif getattr(artifact, "format", "") == "onnx" and Path(handler.model_pt_path).is_file():
        from modelyard.handlers.models.backends import open_artifact

        with tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
            file = Path(folder) / Path(handler.model_pt_path).name
            if not _move_onnx(Path(handler.model_pt_path), file, moved):
                yield None
                return
            other = open_artifact(file, "onnx", str(artifact.device))
            yield Mutation("weights", {"model": other}, advice)
    else:
        yield None


def _move_onnx(source: Path, target: Path, moved: Any) -> bool:
    """Write a model whose weights are moved; return whether it has any of its own."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(source)
    count = 0
    for weight in model.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            values = torch.from_numpy(numpy_helper.to_array(weight).copy())
            weight.CopyFrom(numpy_helper.from_array(moved(values).numpy(), weight.name))
            count += 1
    if count:
        onnx.save(model, target)
    return count > 0
