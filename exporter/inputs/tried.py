"""Inputs of a model that says nothing of them: which layer takes an argument, and what runs.

The layers say channels, features and tokens. The sizes of pictures and the like are tried, on
tensors without values, which costs next to nothing, and what is found once on values.

Integers are tried on what `probes` makes of a range: its ends, and random values between, since
what fills a tensor with one number may mean nothing (a graph's edges that all are loops). Ranges
end at the sizes of the model's embedding tables, at usual numbers, and at the sizes of the dims.
"""

import copy
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, fx, nn

from modelyard.archiver.signature import Dim, Signature, TensorSpec, ends_of
from modelyard.archiver.values import End, Values
from modelyard.exporter.arguments import flatten, needed_arguments, read_inputs, take_inputs
from modelyard.exporter.errors import ModelError, cause
from modelyard.handlers.proof.agree import split
from modelyard.handlers.proof.probes import Probe, example_sizes, make_inputs

SIZES = (224, 32, 28, 64, 8, 16, 96, 128, 256, 299, 384, 512)
"""Usual sizes of a picture, the likeliest first."""
LENGTHS = (128, 64, 32, 16, 100, 256, 512, 1000, 1024, 4000, 16000)
"""Usual lengths of a signal."""
_ALL_SIZES = (*SIZES, *(size for size in range(1, 129) if size not in SIZES))
_MOST_TRIED = 300
_TOKENS = (nn.Embedding, nn.EmbeddingBag)
_PLACES = ("depth", "height", "width")
_DIMS: Mapping[type[Any], Callable[[Any], Sequence[str]]] = {
    **dict.fromkeys(_TOKENS, lambda _: ["batch", "length"]),
    nn.Linear: lambda layer: ["batch", str(layer.in_features)],
    nn.Conv1d: lambda layer: ["batch", str(layer.in_channels), "length"],
    nn.Conv2d: lambda layer: ["batch", str(layer.in_channels), *_PLACES[1:]],
    nn.Conv3d: lambda layer: ["batch", str(layer.in_channels), *_PLACES],
    nn.BatchNorm1d: lambda layer: ["batch", str(layer.num_features)],
    nn.BatchNorm2d: lambda layer: ["batch", str(layer.num_features), *_PLACES[1:]],
    nn.BatchNorm3d: lambda layer: ["batch", str(layer.num_features), *_PLACES],
    nn.LayerNorm: lambda layer: ["batch", *map(str, layer.normalized_shape)],
    nn.MultiheadAttention: lambda layer: _sequence(layer, layer.embed_dim),
    nn.TransformerEncoderLayer: lambda layer: _sequence(layer.self_attn, layer.linear1.in_features),
    nn.TransformerEncoder: lambda layer: _dims(layer.layers[0]),
    nn.RNNBase: lambda layer: _sequence(layer, layer.input_size),
}
"""Layer → the dims of what it takes; named ones but `batch` are of any size."""
_VOLUMES = (16, 32, 64, 8)
"""Usual sizes of a volume, whose cost grows with the third power."""
_SPANS = ("length=2..32", "length=8..32", "length=32..64")
_RESHAPES = frozenset(("flatten", "view", "reshape"))
# The first integers above a range: a vocabulary, bytes; and what nearly every model takes.
_USUAL = (1000, 256, 100)
_SMALL = (10, 2)
_KINDS = ("zeros", "large", "random")
_RANGES_SHOWN = 8


@dataclass(frozen=True)
class TriedInputs:
    """Inputs that a model runs with."""

    texts: tuple[str, ...]
    """Every input as `--input` is written."""
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


def guess_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return an input for each argument that forward() needs; SIZES where nothing tells them."""
    taken = first_layers(model)
    return tuple(f"{name}:{_shown(taken.get(name))}" for name in _leaves(model))


def find_inputs(model: nn.Module) -> TriedInputs | None:
    """Return inputs that a model in eval mode on the CPU runs with; None where none was found."""
    taken = first_layers(model)
    names = _leaves(model)
    tried, usual = (
        list(islice(product(*(_candidates(model, name, taken, sizes) for name in names)), count))
        for sizes, count in ((_ALL_SIZES, 2 * _MOST_TRIED), (SIZES, _MOST_TRIED))
    )
    empty = copy.deepcopy(model).to("meta")
    first = next((each for each in tried if runs(empty, each) and runs(model, each)), None)
    if first is None:  # of a forward() that looks at values, say
        empty, first = model, next((each for each in usual if runs(model, each)), None)
    if first is None:
        return None
    is_told = not any(each.is_reshaped for each in taken.values())
    is_told &= all(name in taken or "mask" in name for name in names)
    # Another reading of a layer is not another size: a Linear takes rows of rows, too.
    others = [
        each
        for each in usual
        if _sizeless(each) == _sizeless(first) and _spanless(each) != _spanless(first)
    ]
    return TriedInputs(first, is_told and not any(runs(empty, each) for each in others))


def picture_input(model: nn.Module, size: tuple[int, int]) -> str | None:
    """Write the input of a model of pictures (width, height); None of one of something else."""
    (name, *others), taken = needed_arguments(model), first_layers(model)
    layer = taken[name].layer if name in taken and not others else None
    if not isinstance(layer, nn.Conv2d) or layer.in_channels not in (1, 3):
        return None
    return f"{name}:float32[batch,{layer.in_channels},{size[1]},{size[0]}]"


def _sizeless(texts: Sequence[str]) -> list[str]:
    return [re.sub(r"\d+", "", text) for text in texts]


def _spanless(texts: Sequence[str]) -> list[str]:
    return [re.sub(r"=\d+\.\.\d+", "", text) for text in texts]


def first_layers(model: nn.Module) -> dict[str, Taken]:
    """Return what takes each tensor of forward()'s arguments first, as far as can be seen."""
    names = needed_arguments(model)
    if _dims(model):
        return {names[0]: Taken(model, is_reshaped=False)}
    graph = _traced(model)
    if graph is None:  # then the first argument goes into the first layer
        layer = next((part for part in model.modules() if _dims(part)), None)
        return {names[0]: Taken(layer, is_reshaped=False)} if layer is not None else {}
    parts = dict(model.named_modules())
    nodes = {name: node for argument in names for name, node in _inside(model, graph, argument)}
    reached = {name: _reached(node, parts) for name, node in nodes.items()}
    return {name: taken for name, taken in reached.items() if taken is not None}


def _traced(model: nn.Module) -> fx.Graph | None:
    try:
        return fx.symbolic_trace(model).graph
    # Of a forward() that branches, say.
    except Exception:
        return None


def _leaves(model: nn.Module) -> list[str]:
    """Return the tensors that forward() needs: its arguments, or the parts of lists and dicts."""
    graph, names = _traced(model), needed_arguments(model)
    if graph is None:
        return names
    return [
        leaf for name in names for leaf in dict(_inside(model, graph, name)) or (name,)
    ]  # fmt: skip


def _inside(model: nn.Module, graph: fx.Graph, name: str) -> Iterator[tuple[str, fx.Node]]:
    """Yield an argument, or what forward() takes out of it by a key, with the nodes of a trace."""
    node = next((n for n in graph.nodes if n.op == "placeholder" and n.target == name), None)
    if node is None:
        return
    keys = [user.args[1] for user in node.users if user.target is operator.getitem]
    text = str(inspect.signature(model.forward).parameters[name].annotation).lower()
    is_list = text.startswith(("list", "tuple", "typing.list", "typing.tuple", "collections.abc"))
    if keys and len(keys) == len(node.users) and (
        all(isinstance(key, str) for key in keys)
        or (is_list and all(type(key) is int and key >= 0 for key in keys))
    ):  # fmt: skip
        for user, key in zip(node.users, keys, strict=True):
            yield f"{name}.{key}", user
    else:
        yield name, node


def _reached(node: fx.Node, parts: Mapping[str, nn.Module]) -> Taken | None:
    """Follow a value to the nearest layer; not beyond what joins it with another."""
    waiting = [(user, False) for user in node.users]
    seen = set(node.users)
    while waiting:
        user, is_reshaped = waiting.pop(0)
        layer = parts[str(user.target)] if user.op == "call_module" else None
        if layer is not None and _dims(layer):
            return Taken(layer, is_reshaped)
        is_alone = sum(each.op != "get_attr" for each in user.all_input_nodes) == 1
        if is_alone or _is_reshaped(user, seen | {node}):
            name = getattr(user.target, "__name__", str(user.target))
            is_reshaped |= isinstance(layer, nn.Flatten) or name in _RESHAPES
            waiting += [(each, is_reshaped) for each in user.users if each not in seen]
            seen.update(user.users)
    return None


def _is_reshaped(user: fx.Node, seen: Collection[fx.Node]) -> bool:
    """Return whether a node is a view of a value that is followed, of sizes that it has."""
    name = getattr(user.target, "__name__", str(user.target))
    return name in _RESHAPES and all(each in seen for each in user.all_input_nodes[:1])


def _sequence(layer: Any, features: int) -> Sequence[str]:
    return [*(("batch", "length") if layer.batch_first else ("length", "batch")), str(features)]


def _dims(layer: nn.Module) -> Sequence[str]:
    """Return the dims of what a layer takes; nothing of one that may take anything."""
    return next((dims(layer) for kind, dims in _DIMS.items() if isinstance(layer, kind)), ())


def _shown(taken: Taken | None) -> str:
    """Write what an argument is for a person to fill in."""
    if taken is None:
        return "float32[batch,SIZES]"
    dtype = "int64" if isinstance(taken.layer, _TOKENS) else "float32"
    return f"{dtype}[{','.join(_dims(taken.layer))}]"


def _candidates(
    model: nn.Module, name: str, layers: Mapping[str, Taken], sizes: Sequence[int]
) -> Iterator[str]:
    """Write what an argument may be, the likeliest first."""
    taken = layers.get(name)
    if taken is None:
        yield from _of_unknown(model, name)
        return
    layer, dims = taken.layer, _dims(taken.layer)
    rows = f"{name}:float32[{','.join(dims)}]"
    if isinstance(layer, _TOKENS):
        for span in _SPANS:
            yield f"{name}:int64[batch,{span}]<{layer.num_embeddings}"
        yield f"{name}:int64[batch]<{layer.num_embeddings}"
        tables = _table_sizes(model)  # a column for each, say
        yield f"{name}:int64[batch,{len(tables)}]<{tables[-1]}"
    elif isinstance(layer, nn.BatchNorm1d):
        yield rows
        yield rows.replace("]", ",length=2..32]")
    elif isinstance(layer, nn.Linear | nn.LayerNorm):
        if len(_leaves(model)) == 1 or isinstance(layer, nn.Linear):
            yield rows
        for length in (*_SPANS[:1], *_lengths(model)):
            yield rows.replace("[batch,", f"[batch,{length},")
        yield rows
    elif "length" in dims and not isinstance(layer, nn.Conv1d):
        yield rows.replace("length", _SPANS[0])
        yield from (rows.replace("length", str(length)) for length in _lengths(model))
    else:
        if isinstance(layer, nn.Conv3d):
            sizes = _VOLUMES
        for size in LENGTHS if dims[-1] == "length" else sizes:
            yield f"{name}:float32[{','.join([*dims[:2], *[str(size)] * len(dims[2:])])}]"
        if dims[1] == "1":  # forward() may add the channel
            for size in LENGTHS if dims[-1] == "length" else SIZES:
                yield f"{name}:float32[{','.join(['batch', *[str(size)] * len(dims[2:])])}]"


def _of_unknown(model: nn.Module, name: str) -> Iterator[str]:
    """Write what an argument may be that no layer takes alone: a mask, edges, features."""
    if "mask" in name:
        yield from (f"{name}:{dtype}[batch,length=2..32]" for dtype in ("int64", "bool", "float32"))
    if "edge" in name or "adj" in name:
        yield f"{name}:int64[2,edges=2..32]<batch"
    # What a layer takes beside the vectors of the tables, or with those of one of them.
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    vectors = [part.embedding_dim for part in model.modules() if isinstance(part, nn.Embedding)]
    widths = [layer.in_features - taken for layer in layers for taken in (sum(vectors), 0)]
    yield from dict.fromkeys(f"{name}:float32[batch,{width}]" for width in widths if width > 0)
    yield f"{name}:float32[batch]"


def _lengths(model: nn.Module) -> list[str]:
    """Return lengths that a table of places may fix: the sizes of parameters outside of layers."""
    tables = [each for part in model.modules() if not _dims(part)
              for each in part.parameters(recurse=False)]  # fmt: skip
    return list(dict.fromkeys(str(size) for table in tables for size in table.shape if size > 1))


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


# -- integers: which a model takes ----------------------------------------------------------------


def find_values(model: nn.Module, signature: Signature) -> dict[str, Values]:
    """Find for each integer input without stated values the widest range that the model takes.

    An output that is not finite where zeros give a finite one counts as refused.

    Args:
        model: on the CPU.
        signature: the inputs as this model takes them.

    Raises:
        ModelError: every range fails for one input; says which were tried, and what to write.
    """
    unstated = [spec for spec in signature.inputs if _is_open(spec)]
    found = {spec.name: _below(2) for spec in unstated if spec.open_value is not None}
    unknown = [spec for spec in unstated if spec.open_value is None]
    if not unknown:
        return found
    for number in (0, 1):
        found |= {spec.name: Values(End(number), End(number)) for spec in unknown}
        trial = _Trial(model, signature.with_values(found))
        if trial.probes:
            break
    else:  # whatever stops the model, it is not one input's range: the first probe will say
        return found | {spec.name: _below(2) for spec in unknown}
    tables = _table_sizes(model)
    for spec in unknown:
        tried: list[Values] = []
        for values in _ranges(spec, signature, tables):
            tried.append(values)
            if trial.takes(signature.with_values({**found, spec.name: values})):
                found[spec.name] = values
                break
        else:
            raise ModelError(_refusal(spec, signature, tried, trial.error))
    return found


def advice(signature: Signature) -> str:
    """Return what to write about integers of which nobody said which they are; empty for none."""
    for spec in signature.inputs:
        if _is_open(spec) and spec.open_value is None:
            return f", or the integers it takes, as in {_example(spec, signature)}"
    return ""


class _Trial:
    """The sizes at which the model takes a first signature, and whether it takes others there."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        self.model = model
        self.error: Exception | None = None
        """What the model raised last."""
        self.probes: list[tuple[Probe, bool]] = []
        """Sizes to try, and whether outputs must be finite."""
        # Its own sizes say whether a size is too large for the model, whatever the integers.
        for sizes in _trial_sizes(signature):
            outputs = self._run(signature, Probe("zeros", sizes))
            if outputs is not None:
                must = _is_finite(outputs)
                kinds = _KINDS if not self.probes else ("random",)
                self.probes += [(Probe(kind, sizes), must) for kind in kinds]
            del outputs  # they may be large

    def takes(self, signature: Signature) -> bool:
        for probe, must_be_finite in self.probes:
            outputs = self._run(signature, probe)
            if outputs is None or (must_be_finite and not _is_finite(outputs)):
                return False
        return True

    def _run(self, signature: Signature, probe: Probe) -> list[Tensor] | None:
        try:
            with torch.no_grad():
                return list(flatten(self.model(*make_inputs(signature, probe, seed=1))).values())
        # The model is the author's code and may refuse a value in any way.
        except Exception as error:
            self.error = error
            return None


def _trial_sizes(signature: Signature) -> list[dict[str, int]]:
    """Return the sizes to try integers at, the cheapest first: the ends of ranges among them."""
    batch, dims = signature.batch, signature.dims
    largest = {name: dim.at_least(2) if dim == batch else dim.max for name, dim in dims.items()}
    smallest = {name: dim.min for name, dim in dims.items()}
    each = [smallest, example_sizes(signature), largest]
    return [sizes for place, sizes in enumerate(each) if sizes not in each[:place]]


def _ranges(spec: TensorSpec, signature: Signature, tables: Sequence[int]) -> Iterator[Values]:
    """Yield ranges for an input: those with more numbers first, from 0 and then from 1."""
    dims, own = ends_of(signature.dims), {s.name for s in spec.shape if isinstance(s, Dim)}
    # What an input's integers may point into: its own last, the batch behind.
    names = sorted(signature.dims, key=lambda n: (n in own, signature.dims[n] == signature.batch))
    values = [_below(bound) for bound in (*tables, *_USUAL)]
    values += [Values(End(0), End(-1, name)) for name in names]
    values += [_below(bound) for bound in _SMALL]
    values += [Values(End(1), End(bound)) for bound in _USUAL]
    values += [Values(End(1), End(0, name)) for name in names]
    values += [Values(End(1), End(bound)) for bound in _SMALL]
    return (each for each in dict.fromkeys(values) if each.problem(spec.dtype, dims) is None)


def _refusal(
    spec: TensorSpec, signature: Signature, tried: Sequence[Values], error: Exception | None
) -> str:
    shown = ", ".join(str(values).lstrip("=") for values in tried[:_RANGES_SHOWN])
    more = f" and {len(tried) - _RANGES_SHOWN} more" if len(tried) > _RANGES_SHOWN else ""
    said = f": {cause(error)}" if error else ""
    return (
        f'the model takes no range of integers that was tried as input "{spec.name}" ({shown}'
        f"{more}){said}; say which it takes, as in {_example(spec, signature)}"
    )


def _example(spec: TensorSpec, signature: Signature) -> str:
    """Write an input with values that it might take, and how to do without any that is made up."""
    names = (name for name, dim in signature.dims.items() if dim not in spec.shape)
    high = next((End(-1, name) for name in names), End(_USUAL[0] - 1))
    stated = replace(spec, values=Values(End(0), high))
    return f"--input '{stated}', or compare on real inputs alone: --sample FILE --sample-only"


def _below(bound: int) -> Values:
    return Values(End(0), End(bound - 1))


def _is_open(spec: TensorSpec) -> bool:
    """Return whether an input is of integers, and nobody said of which."""
    return "int" in spec.dtype and spec.values is None


def _table_sizes(model: nn.Module) -> list[int]:
    """Return how many rows the model's embedding tables have, the largest number first."""
    kinds = nn.Embedding | nn.EmbeddingBag
    tables = {one.num_embeddings for one in model.modules() if isinstance(one, kinds)}
    return sorted(tables, reverse=True)


def _is_finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(part.isfinite().all()) for value in outputs for part in split(value))
