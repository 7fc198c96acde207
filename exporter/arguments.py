"""forward()'s arguments and outputs ↔ one tensor each: nested, keyword, reordered, complex ones.

An artifact takes one tensor per `--input`, in that order, and gives tensors. Where forward() does
otherwise, a graph of one call around the model puts them in their place. It is an fx graph, since
torch.export, TorchScript and eager Python all take one as they take the author's class.
"""

import inspect
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from modelyard.archiver.signature import Signature, TensorSpec, parse_inputs
from modelyard.exporter.errors import ModelError, UsageError

WRAPPED = "wrapped_model"
"""The attribute under which the author's model stands inside the call; no author's own name."""

_PARTS_SHOWN = 12
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = inspect.Parameter.KEYWORD_ONLY

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


def take_submodule(model: nn.Module, path: str) -> nn.Module:
    """Return a part of the model, to export that alone.

    Args:
        model: the whole.
        path: its name in `model.named_modules()`, such as `encoder.layers.0`.

    Raises:
        UsageError: there is no such part, or it is a container that cannot be called.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules())
    found = modules.get(path)
    if found is None:
        keys = path.split(".")
        starts = [".".join(keys[:length]) for length in range(len(keys))]
        *_, known = [start for start in starts if start in modules]
        inside = f'"{known}" has' if known else f"{type(model).__name__} has"
        names = [name for name, _ in modules[known].named_children()]
        raise UsageError(
            f'--submodule "{path}" is not a part of the model; {inside} '
            f"{', '.join(names[:_PARTS_SHOWN]) or 'no parts'}"
            f"{' …' if len(names) > _PARTS_SHOWN else ''}"
        )
    if isinstance(found, nn.ModuleList | nn.ModuleDict):
        raise UsageError(
            f'--submodule "{path}" is a {type(found).__name__} without forward(); name a part of it'
        )
    return found


def take_inputs(model: nn.Module, signature: Signature) -> nn.Module:
    """Return a module that takes the signature's inputs by place: `model` itself where it does.

    An input whose name is one of forward()'s parameters goes to that parameter; any other goes by
    its place.

    Raises:
        UsageError: two inputs for one parameter, a parameter without one, or keys with gaps.
    """
    trees = _trees(signature.inputs)
    by_place, by_name = _places(model, list(trees))
    is_flat = all(isinstance(tree, TensorSpec) and not tree.view for tree in trees.values())
    if not by_name and is_flat:
        return model
    graph = Graph()
    given = [graph.placeholder(spec.name, Tensor) for spec in signature.inputs]
    values = {
        spec.name: graph.call_function(torch.view_as_complex, (value,)) if spec.view else value
        for spec, value in zip(signature.inputs, given, strict=True)
    }
    hints = _hints(model, by_place, by_name)
    built = {root: _build(tree, root, values, hints.get(root)) for root, tree in trees.items()}
    called = graph.call_module(
        WRAPPED, tuple(built[root] for root in by_place), {root: built[root] for root in by_name}
    )
    graph.output(called)
    return GraphModule({WRAPPED: model}, graph).train(model.training)


def goes_elsewhere(model: nn.Module, signature: Signature) -> list[str]:
    """Return a line for each input that goes by its place to an argument of another name."""
    roots = list(_trees(signature.inputs))
    takes = _names(model, *_BY_PLACE)
    by_place, _ = _places(model, roots)
    return [
        f'input "{root}" goes to the argument "{name}" of forward(), by its place; the artifact '
        f'calls it "{root}"'
        for root, name in zip(by_place, takes, strict=False)
        if root != name
    ]


class NotTensor:
    """An output of a file that is not a tensor of numbers, of which nothing but that is known."""

    def __init__(self, kind: str, *, is_needed: bool = True) -> None:
        self.kind = kind
        self.is_needed = is_needed
        """Whether what it holds is in no other output, so that a person has to choose."""


@dataclass(frozen=True)
class Outputs:
    """The tensors that an artifact gives, of those that forward() gives, in order."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    """The way to each inside the output, as `flatten` joins it."""
    views: tuple[str, ...]
    """The dtype of each that is complex, whose real view the artifact gives; else empty."""
    notes: tuple[str, ...] = ()
    """What is left out though nobody said so."""


def choose_outputs(
    output: Any, names: Sequence[str], inputs: Collection[str] = frozenset()
) -> Outputs:
    """Find what the artifact gives, and what each is called.

    Args:
        output: what forward() gives.
        names: `--output`. Those of the model's own outputs keep just these, in this order; as many
            new ones as there are outputs rename them all, in the model's order; none keeps all.
        inputs: names that are taken: an output that the model calls so gets "_output" behind it.

    Raises:
        ModelError: something that is kept is not a tensor.
        UsageError: the names are neither.
    """
    found = list(_leaves(output))
    leaves = {"_".join(way): value for way, value in found}
    if len(leaves) < len(found):
        raise ModelError(
            f"forward() gives {_described(output)}, two of one name; expected other keys"
        )
    tensors = {key: value for key, value in leaves.items() if isinstance(value, Tensor)}
    called = {key: _output_name(key) for key in tensors}
    own = {f"{name}_output" if name in inputs else name: key for key, name in called.items()}
    chosen = _keep(names, own, leaves) if names else own
    # With names, what is not named is not looked at: a cache of keys and values, say.
    others = {} if names else {key: leaf for key, leaf in leaves.items() if key not in tensors}
    if not chosen or not all(map(_may_go, others.values())):
        raise ModelError(_refusal(output, own, others))
    dtypes = [str(tensors[key].dtype).removeprefix("torch.") for key in chosen.values()]
    return Outputs(
        names=tuple(chosen),
        keys=tuple(chosen.values()),
        views=tuple(dtype if "complex" in dtype else "" for dtype in dtypes),
        notes=tuple(
            f'output "{_output_name(key)}" is left out: it is '
            f"{'' if isinstance(value, NotTensor) else f'{value!r:.40}, '}{_described(value)}, and "
            "an artifact gives tensors of numbers"
            for key, value in others.items()
        ),
    )


def give_outputs(model: nn.Module, signature: Signature, outputs: Outputs, given: Any) -> nn.Module:
    """Return a module that gives the chosen outputs: `model` itself where it gives just them.

    Args:
        model: takes the signature's inputs by place.
        signature: names them.
        outputs: chosen from what it gives.
        given: what it gave.
    """
    if _is_plain(given) and tuple(flatten(given)) == outputs.keys and not any(outputs.views):
        return model
    graph = Graph()
    values = tuple(graph.placeholder(spec.name, Tensor) for spec in signature.inputs)
    called = graph.call_module(WRAPPED, values)
    graph.output(graph.call_function(pick, (called, outputs.keys)))
    return GraphModule({WRAPPED: model}, graph).train(model.training)


def own_name(name: str) -> str:
    """Return a name inside the author's model from the name inside the calls around it."""
    return ".".join(part for part in name.split(".") if part.partition("@")[0] != WRAPPED)


def flatten(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by the way to each: `logits`, `0`, `states_1`."""
    return {"_".join(way): leaf for way, leaf in _leaves(output) if isinstance(leaf, Tensor)}


_CONSTANTS = (bool, int, float, str)
"""What stands beside tensors as a part of an output and is not a part of an answer."""


def _may_go(value: Any) -> bool:
    return isinstance(value, _CONSTANTS) or (isinstance(value, NotTensor) and not value.is_needed)


def _is_plain(output: Any) -> bool:
    """Return whether every format can hold the output: tensors in built-in containers only."""
    if type(output) not in (dict, tuple, list):
        return isinstance(output, Tensor)
    values = output.values() if isinstance(output, dict) else output
    return all(isinstance(value, Tensor) for value in values)


def pick(output: Any, keys: Sequence[str]) -> tuple[Tensor, ...]:
    """Return the tensors of an output that stand at these ways, complex ones as real views."""
    given = flatten(output)
    return tuple(
        torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        for each in (given[key] for key in keys)
    )


def _keep(
    names: Sequence[str], own: Mapping[str, str], leaves: Mapping[str, Any]
) -> dict[str, str]:
    """Return name → way of what `--output` names."""
    once = len(set(names)) == len(names)
    if once and all(_inside(name, own) for name in names):
        return {one: own[one] for name in names for one in _inside(name, own)}
    moved = [name for name, other in zip(names, own, strict=False) if name in own and name != other]
    if once and len(names) == len(own) and not moved:
        return dict(zip(names, own.values(), strict=True))
    held = [name for name in names if name in leaves and name not in own]
    not_tensor = f'; "{held[0]}" is a {type(leaves[held[0]]).__name__}' if held else ""
    one = len(own) == 1
    raise UsageError(
        f"--output names {', '.join(names)}; the model gives {len(own)} "
        f"output{'' if one else 's'}, {', '.join(own)}{not_tensor}; expected some of these, to "
        f"keep them alone, or {'a new name' if one else 'as many new names, each once'}"
    )


def _inside(name: str, own: Mapping[str, str]) -> list[str]:
    """Return the outputs that a name means: one, or all of the container that has the name."""
    return [name] if name in own else [one for one in own if one.startswith(f"{name}_")]


def _output_name(key: str) -> str:
    """Return what an output is called of which the model says the way only."""
    name = re.sub(r"\W", "_", key)
    return name if name.isidentifier() else f"output_{name}".removesuffix("_")


def _refusal(output: Any, own: Mapping[str, str], others: Mapping[str, Any]) -> str:
    alone = others.get("", output)
    lines = f"forward() gives {_described(alone)}; expected tensors, in tuples, dicts, dataclasses"
    if not own:
        return f"{lines}: wrap the model in one that gives them"
    caches = any("cache" in type(value).__name__.lower() for value in others.values())
    config = ", or build the model without its cache: --model-args '{\"use_cache\": false}'"
    return f"{lines}: keep what is wanted, as --output {next(iter(own))}{config if caches else ''}"


def _leaves(output: Any, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what an output holds under the way to it; None is nothing."""
    parts = _parts(output)
    if parts is None:
        if isinstance(output, Tensor) and (output.is_nested or output.layout != torch.strided):
            yield way, NotTensor("sparse or nested tensor, not a dense one")
        elif output is not None:
            yield way, output
        return
    for key, value in parts:
        yield from _leaves(value, (*way, key))


def _parts(output: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds, by name; None for what is not one."""
    if isinstance(output, Mapping) and all(isinstance(key, str) for key, _ in output.items()):
        return list(output.items())
    if isinstance(output, tuple | list):
        keys = getattr(output, "_fields", range(len(output)))  # a named tuple has names
        return [(str(key), value) for key, value in zip(keys, output, strict=True)]
    if is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name)) for field in fields(output)]
    return None


def _described(output: Any) -> str:
    if isinstance(output, NotTensor):
        return f"a {output.kind}"
    parts = dict(enumerate(output)) if isinstance(output, tuple | list) else output
    inside = ", ".join(
        f"{key}: {value.kind if isinstance(value, NotTensor) else type(value).__name__}"
        for key, value in (parts.items() if isinstance(parts, Mapping) else ())
    )
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
    by_name_only = _names(model, _BY_NAME)
    if _names(model, inspect.Parameter.VAR_POSITIONAL):
        named = [root for root in roots if root in by_name_only]
        return [root for root in roots if root not in named], named
    takes = _names(model, *_BY_PLACE)
    fits = [
        place < len(takes) and root not in [*takes[:place], *takes[place + 1 :], *by_name_only]
        for place, root in enumerate(roots)
    ]
    first_named = fits.index(False) if False in fits else len(roots)
    by_place, by_name = list(roots[:first_named]), list(roots[first_named:])
    known = {*takes[first_named:], *by_name_only}
    misplaced = not _names(model, inspect.Parameter.VAR_KEYWORD) and set(by_name) - known
    filled = {*takes[:first_named], *by_name}
    if misplaced or set(by_name) & set(takes[:first_named]) or set(_required(model)) - filled:
        raise UsageError(
            f"--input gives {', '.join(roots)}, and forward() takes "
            f"{', '.join(inspect.signature(model.forward).parameters)}; "
            "expected one input for each of its arguments that has no default, by its name or in "
            "its own place"
        )
    return by_place, by_name


def _names(model: nn.Module, *kinds: Any) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _required(model: nn.Module) -> list[str]:
    return [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (*_BY_PLACE, _BY_NAME)
    ]


def needed_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments that forward() cannot do without; its first, of none."""
    return _required(model) or _names(model, *_BY_PLACE, _BY_NAME)[:1] or ["x"]


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
