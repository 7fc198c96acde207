"""Inputs of a model that says nothing of them: which layer takes an argument, and what runs.

The layers say channels, features and tokens. The sizes of pictures and the like are tried, on
tensors without values, which costs next to nothing, and what is found once on values.
"""

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from torch import fx, nn

from modelyard.exporter.arguments import flatten, read_inputs, take_inputs
from modelyard.handlers.proof.probes import Probe, make_inputs

SIZES = (224, 32, 28, 64, 8, 16, 96, 128, 256, 299, 384, 512)
"""Usual sizes of a picture, the likeliest first."""
LENGTHS = (128, 64, 32, 16, 100, 256, 512, 1000, 1024, 4000, 16000)
"""Usual lengths of a signal."""
_ALL_SIZES = (*SIZES, *(size for size in range(1, 129) if size not in SIZES))
_MOST_TRIED = 300
_TOKENS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PLACES = ("depth", "height", "width")
_NORMS: Mapping[type[Any], Sequence[str]] = {
    nn.BatchNorm1d: (),
    nn.BatchNorm2d: _PLACES[1:],
    nn.BatchNorm3d: _PLACES,
}
_RESHAPES = frozenset(("flatten", "view", "reshape"))


@dataclass(frozen=True)
class Found:
    """Inputs that a model runs with."""

    inputs: tuple[str, ...]
    """As `--input` is written."""
    is_only: bool
    """Whether its layers leave no other choice, and no other usual size runs."""


@dataclass(frozen=True)
class Taken:
    """What takes an argument of forward() first."""

    layer: nn.Module
    is_reshaped: bool
    """Whether it takes what the argument is flattened to."""

    @property
    def rank(self) -> int | None:
        """How many dims the argument has; None where that varies."""
        varies = self.is_reshaped or isinstance(self.layer, nn.Linear | nn.BatchNorm1d)
        return None if varies else len(_dims(self.layer))


def needed_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments that forward() cannot do without; its first, of none."""
    parameters = inspect.signature(model.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in parameters if p.kind not in variable]
    needed = [p.name for p in named if p.default is p.empty]
    return needed or [p.name for p in named][:1] or ["x"]


def guess_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return an input for each argument that forward() needs; SIZES where nothing tells them."""
    taken = first_layers(model)
    return tuple(f"{name}:{_shown(taken.get(name))}" for name in needed_arguments(model))


def find_inputs(model: nn.Module) -> Found | None:
    """Return inputs that a model in eval mode on the CPU runs with; None where none was found."""
    taken = first_layers(model)
    names = needed_arguments(model)
    tried = product(*(_candidates(name, taken.get(name), _ALL_SIZES) for name in names))
    usual = list(
        islice(product(*(_candidates(name, taken.get(name), SIZES) for name in names)), _MOST_TRIED)
    )
    empty = copy.deepcopy(model).to("meta")
    first = next((each for each in islice(tried, _MOST_TRIED) if runs(empty, each)), None)
    if first is None:  # of a forward() that looks at values, say
        empty, first = model, next((each for each in usual if runs(model, each)), None)
    if first is None or not runs(model, first):
        return None
    is_told = not any(each.is_reshaped for each in taken.values())
    # Another reading of a layer is not another size: a Linear takes rows of rows, too.
    others = [each for each in usual if each != first and _sizeless(each) == _sizeless(first)]
    return Found(first, is_told and not any(runs(empty, each) for each in others))


def picture_input(model: nn.Module, size: tuple[int, int]) -> str | None:
    """Write the input of a model of pictures (width, height); None of one of something else."""
    (name, *others), taken = needed_arguments(model), first_layers(model)
    layer = taken[name].layer if name in taken and not others else None
    if not isinstance(layer, nn.Conv2d) or layer.in_channels not in (1, 3):
        return None
    return f"{name}:float32[batch,{layer.in_channels},{size[1]},{size[0]}]"


def _sizeless(texts: Sequence[str]) -> list[str]:
    return [re.sub(r"\d+", "", text) for text in texts]


def first_layers(model: nn.Module) -> dict[str, Taken]:
    """Return what takes each argument of forward() first, as far as can be seen."""
    names = needed_arguments(model)
    if _dims(model):
        return {names[0]: Taken(model, is_reshaped=False)}
    try:
        graph = fx.symbolic_trace(model).graph
    # Of a forward() that branches, say; then the first argument goes into the first layer.
    except Exception:
        layer = next((part for part in model.modules() if _dims(part)), None)
        return {names[0]: Taken(layer, is_reshaped=False)} if layer is not None else {}
    parts = dict(model.named_modules())
    nodes = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    reached = {name: _reached(nodes[name], parts) for name in names if name in nodes}
    return {name: taken for name, taken in reached.items() if taken is not None}


def _reached(node: fx.Node, parts: Mapping[str, nn.Module]) -> Taken | None:
    """Follow a value to the nearest layer; not beyond what joins it with another."""
    waiting = [(user, False) for user in node.users]
    seen = set(node.users)
    while waiting:
        user, is_reshaped = waiting.pop(0)
        layer = parts[str(user.target)] if user.op == "call_module" else None
        if layer is not None and _dims(layer):
            return Taken(layer, is_reshaped)
        if len(user.all_input_nodes) == 1:
            name = getattr(user.target, "__name__", str(user.target))
            is_reshaped |= isinstance(layer, nn.Flatten) or name in _RESHAPES
            waiting += [(each, is_reshaped) for each in user.users if each not in seen]
            seen.update(user.users)
    return None


def _dims(layer: nn.Module) -> list[str]:
    """Return the dims of what a layer takes; named ones but `batch` are of any size. Else none."""
    if isinstance(layer, _TOKENS):
        return ["batch", "length"]
    if isinstance(layer, nn.Linear):
        return ["batch", str(layer.in_features)]
    if isinstance(layer, _CONVOLUTIONS):
        places = len(layer.kernel_size)
        own = ["length"] if places == 1 else _PLACES[-places:]
        return ["batch", str(layer.in_channels), *own]
    for norm, places_of in _NORMS.items():
        if isinstance(layer, norm):
            return ["batch", str(layer.num_features), *places_of]
    if isinstance(layer, nn.RNNBase):
        order = ["batch", "length"] if layer.batch_first else ["length", "batch"]
        return [*order, str(layer.input_size)]
    return []


def _shown(taken: Taken | None) -> str:
    """Write what an argument is for a person to fill in."""
    if taken is None:
        return "float32[batch,SIZES]"
    dtype = "int64" if isinstance(taken.layer, _TOKENS) else "float32"
    return f"{dtype}[{','.join(_dims(taken.layer))}]"


def _candidates(name: str, taken: Taken | None, sizes: Sequence[int]) -> Iterator[str]:
    """Write what an argument may be, the likeliest first; nothing where no layer says it."""
    if taken is None:
        if "mask" in name:
            for dtype in ("int64", "bool", "float32"):
                yield f"{name}:{dtype}[batch,length=2..32]"
        return
    layer, dims = taken.layer, _dims(taken.layer)
    if isinstance(layer, _TOKENS):
        yield f"{name}:int64[batch,length=2..32]<{layer.num_embeddings}"
        yield f"{name}:int64[batch]<{layer.num_embeddings}"
    elif isinstance(layer, nn.BatchNorm1d):
        yield f"{name}:float32[{','.join(dims)}]"
        yield f"{name}:float32[{','.join(dims)},length=2..32]"
    elif isinstance(layer, nn.Linear):
        yield f"{name}:float32[{','.join(dims)}]"
        yield f"{name}:float32[batch,length=2..32,{dims[-1]}]"
    elif isinstance(layer, nn.RNNBase):
        yield f"{name}:float32[{','.join(dims)}]".replace("length", "length=2..32")
    else:
        for size in LENGTHS if dims[-1] == "length" else sizes:
            yield f"{name}:float32[{','.join([*dims[:2], *[str(size)] * len(dims[2:])])}]"


def runs(model: nn.Module, texts: Sequence[str]) -> bool:
    """Return whether the model gives tensors for these inputs, in two sizes of every dim."""
    try:
        device = next(model.parameters()).device
        signature = read_inputs(texts)
        called = take_inputs(model, signature)
        for place in (2, 3):
            sizes = {name: dim.at_least(place) for name, dim in signature.dims.items()}
            inputs = make_inputs(signature, Probe("random", sizes))
            with torch.no_grad():
                if not flatten(called(*(tensor.to(device, copy=True) for tensor in inputs))):
                    return False
    # The model is the author's code, and this is not what it takes.
    except Exception:
        return False
    return True
