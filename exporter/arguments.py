"""forward()'s arguments ↔ one tensor per input: nested, keyword and reordered ones.

An artifact takes one tensor per `--input`, in that order, and gives tensors. Where forward() wants
them otherwise, a graph of one call around the model puts them in their place. It is an fx graph,
since torch.export, TorchScript and eager Python all take one as they take the author's class.
"""

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from modelyard.archiver.signature import Signature, TensorSpec, parse_inputs
from modelyard.exporter.errors import ModelError, UsageError

WRAPPED = "model"
"""The attribute under which the author's model stands inside the call."""

_Tree = dict[str, Any]
"""One argument: a spec, or a tree of them by key."""


def read_inputs(texts: Sequence[str]) -> Signature:
    """Read every `--input` of one model.

    Raises:
        UsageError: names the input, the part of it that is wrong, and what was expected there.
    """
    try:
        return parse_inputs(texts)
    except ValueError as error:
        raise UsageError(str(error)) from error


def take_inputs(model: nn.Module, signature: Signature) -> nn.Module:
    """Return a module that takes the signature's inputs by place: `model` itself where it does.

    An input whose name is one of forward()'s parameters goes to that parameter; any other goes by
    its place.

    Raises:
        UsageError: two inputs for one parameter, a parameter without one, or keys with gaps.
    """
    trees = _trees(signature.inputs)
    by_place, by_name = _places(model, list(trees))
    if not by_name and all(isinstance(tree, TensorSpec) for tree in trees.values()):
        return model
    graph = Graph()
    values = {spec.name: graph.placeholder(spec.name, Tensor) for spec in signature.inputs}
    hints = _hints(model, by_place, by_name)
    built = {root: _build(tree, root, values, hints.get(root)) for root, tree in trees.items()}
    called = graph.call_module(
        WRAPPED, tuple(built[root] for root in by_place), {root: built[root] for root in by_name}
    )
    graph.output(called)
    return GraphModule({WRAPPED: model}, graph).train(model.training)


def give_tensors(model: nn.Module, signature: Signature) -> nn.Module:
    """Wrap a model whose output torch could not load elsewhere, so that it gives a plain tuple."""
    graph = Graph()
    values = tuple(graph.placeholder(spec.name, Tensor) for spec in signature.inputs)
    graph.output(graph.call_function(_tuple_of, (graph.call_module(WRAPPED, values),)))
    return GraphModule({WRAPPED: model}, graph).train(model.training)


def own_name(name: str) -> str:
    """Return a submodule's name inside the author's model from its name inside the wrappers."""
    while name == WRAPPED or name.startswith(f"{WRAPPED}."):
        name = name[len(WRAPPED) + 1 :]
    return name


def flatten(output: Any) -> dict[str, Tensor]:
    """Return a model's output as named tensors; the name is empty where the model gives none.

    Raises:
        ModelError: something in it is not a tensor, tuple, list, dict or dataclass; None is
            left out.
    """
    found: dict[str, Tensor] = {}
    if not _gather("", output, found) or not found:
        raise ModelError(
            f"forward() gives {_described(output)}; expected a tensor, or a tuple or dict of "
            "tensors: wrap the model in one that gives it"
        )
    return found


def is_plain(output: Any) -> bool:
    """Return whether every format can hold the output: tensors in built-in containers only."""
    if isinstance(output, Tensor):
        return True
    if type(output) is dict:
        return all(isinstance(value, Tensor) for value in output.values())
    return type(output) in (tuple, list) and all(isinstance(value, Tensor) for value in output)


def _tuple_of(output: Any) -> tuple[Tensor, ...]:
    return tuple(flatten(output).values())


def _gather(name: str, output: Any, found: dict[str, Tensor]) -> bool:
    """Collect tensors under the way to them; False where something else is met."""
    if isinstance(output, Tensor):
        found[name] = output
        return True
    items: list[tuple[str, Any]]
    if isinstance(output, Mapping):
        if not all(isinstance(key, str) for key in output):
            return False
        items = list(output.items())
    elif isinstance(output, tuple | list):
        keys = getattr(output, "_fields", range(len(output)))  # a named tuple has names
        items = [(str(key), value) for key, value in zip(keys, output, strict=True)]
    elif is_dataclass(output):
        items = [(field.name, getattr(output, field.name)) for field in fields(output)]
    else:
        return False
    return all(
        _gather(f"{name}_{key}" if name else key, value, found)
        for key, value in items
        if value is not None
    )


def _described(output: Any) -> str:
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, tuple | list):
        items = list(enumerate(output))
    inside = ", ".join(f"{key}: {type(value).__name__}" for key, value in items)
    return f"a {type(output).__name__}{f' of {inside}' if inside else ''}"


def _trees(specs: Sequence[TensorSpec]) -> dict[str, TensorSpec | _Tree]:
    """Gather the inputs by the argument that they stand in, in the order of first mention."""
    trees: dict[str, TensorSpec | _Tree] = {}
    for spec in specs:
        root, *keys = (spec.path or spec.name).split(".")
        tree: dict[str, Any] = trees
        for key, below in zip((root, *keys), keys, strict=False):
            tree = tree.setdefault(key, {})
            if not isinstance(tree, dict):
                raise UsageError(f'--input "{spec}": "{key}" is a tensor and holds "{below}"')
        last = keys[-1] if keys else root
        if last in tree:
            raise UsageError(f'--input "{spec}" names what another input is inside of')
        tree[last] = spec
    return trees


def _build(tree: TensorSpec | _Tree, way: str, values: Mapping[str, Any], hint: Any) -> Any:
    """Put the graph's values in the containers that forward() takes them in."""
    if isinstance(tree, TensorSpec):
        return values[tree.name]
    inner = typing.get_args(hint)
    if not any(key.isdecimal() for key in tree):
        below = inner[-1] if inner else None
        return {key: _build(part, f"{way}.{key}", values, below) for key, part in tree.items()}
    places = [str(place) for place in range(len(tree))]
    if sorted(tree) != sorted(places):
        raise UsageError(
            f'--input "{way}.…" gives {", ".join(tree)}; a tuple or list needs 0, 1, 2 … without '
            "a gap, and a dict takes no numbers"
        )
    as_list = typing.get_origin(hint) is list
    parts = [_build(tree[place], f"{way}.{place}", values, None) for place in places]
    return parts if as_list else tuple(parts)


def _places(model: nn.Module, roots: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those given by place and those given by name."""
    parameters = inspect.signature(model.forward).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    by_name_only = _names(model, inspect.Parameter.KEYWORD_ONLY)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        named = [root for root in roots if root in by_name_only]
        return [root for root in roots if root not in named], named
    takes = _names(
        model, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    fits = [
        place < len(takes) and root not in [*takes[:place], *takes[place + 1 :], *by_name_only]
        for place, root in enumerate(roots)
    ]
    first_named = fits.index(False) if False in fits else len(roots)
    by_place, by_name = list(roots[:first_named]), list(roots[first_named:])
    known = {*takes[first_named:], *by_name_only}
    misplaced = inspect.Parameter.VAR_KEYWORD not in kinds and set(by_name) - known
    filled = {*takes[:first_named], *by_name}
    if misplaced or set(by_name) & set(takes[:first_named]) or _required(model) - filled:
        raise UsageError(
            f"--input gives {', '.join(roots)}, and forward() takes {', '.join(parameters)}; "
            "expected one input for each of its arguments that has no default, by its name or in "
            "its own place"
        )
    return by_place, by_name


def _names(model: nn.Module, *kinds: Any) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _required(model: nn.Module) -> set[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in variable
    }


def _hints(model: nn.Module, by_place: Sequence[str], by_name: Sequence[str]) -> dict[str, Any]:
    """Return the annotation of the parameter that each argument goes to, where there is one."""
    try:
        annotations = typing.get_type_hints(model.forward)
    # An annotation may name what is not there at run time.
    except Exception:
        return {}
    parameters = list(inspect.signature(model.forward).parameters)
    placed = dict(zip(by_place, parameters, strict=False))
    return {root: annotations.get(placed.get(root, root)) for root in (*by_place, *by_name)}
