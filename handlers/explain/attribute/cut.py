"""A model → what leads to one of its layers, and what follows from the layer's output.

Token ids cannot be varied by a little, their embeddings can: so a text model is cut behind its
embedding, and explained from there on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from modelyard.handlers.errors import NoGradients
from modelyard.handlers.models.backends import Artifact, Output

KEPT_CUTS = 8
"""Copying a large graph takes a tenth of a second, so the latest cuts are kept."""


@dataclass(frozen=True)
class Cut:
    """A model in two parts."""

    front: Callable[..., Tensor]
    """Inputs → the layer's output (N, *S)."""
    back: Callable[..., Output]
    """The layer's output, then all inputs → the model's outputs.

    What follows a layer may work in place, as ReLUs do: it gets a copy, and `front` gives one."""


@lru_cache(maxsize=KEPT_CUTS)
def cut_at_embedding(artifact: Artifact, place: int) -> Cut:
    """Cut a model where the ids in input `place` have become vectors (N, L, E).

    Raises:
        NoGradients: there is no such place, or more than one.
    """
    module = artifact.module
    if isinstance(module, fx.GraphModule):
        return cut_graph(module, _embedding_node(module, place))
    if isinstance(module, torch.jit.ScriptModule):
        return _cut_script(module, place)
    if module is None:
        raise NoGradients(f"a {artifact.format} artifact has no embedding that could be cut at")
    return cut_module(module, _embedding_module(module))


# --- exported programs ---------------------------------------------------------------------------


def _embedding_node(module: fx.GraphModule, place: int) -> fx.Node:
    """Find the lookup of a table by an input's ids, as they came or in another shape or dtype."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = [
        node
        for node in module.graph.nodes
        if node.target is torch.ops.aten.embedding.default
        and _origin(node.args[1]) is placeholders[place]
    ]
    return cast("fx.Node", _the_one(found))


def _origin(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function" and node.all_input_nodes:
        if len(node.all_input_nodes) > 1:
            break
        node = node.all_input_nodes[0]
    return node


def cut_graph(module: fx.GraphModule, node: fx.Node) -> Cut:
    """Cut an exported program behind a node."""
    copies: dict[fx.Node, fx.Node] = {}
    front = fx.Graph()
    front.graph_copy(module.graph, copies)
    with front.inserting_after(copies[node]):
        found = front.call_function(torch.ops.aten.clone.default, (copies[node],))
    front.output(found)
    copies = {}
    back = fx.Graph()
    back.output(back.graph_copy(module.graph, copies))
    with back.inserting_before(next(iter(back.nodes))):
        point = back.placeholder("cut_here")
        copy = back.call_function(torch.ops.aten.clone.default, (point,))
    copies[node].replace_all_uses_with(copy)
    return Cut(_compiled(module, front), _compiled(module, back))


def _compiled(module: fx.GraphModule, graph: fx.Graph) -> Callable[..., Any]:
    # A new module: the one given keeps a hook that checks inputs against its own signature.
    part = fx.GraphModule(module, graph)
    part.graph.eliminate_dead_code()
    part.recompile()
    return part.forward


# --- TorchScript ---------------------------------------------------------------------------------


def _cut_script(module: torch.jit.ScriptModule, place: int) -> Cut:
    graph = _frozen_graph(module)
    node = _script_embedding(graph, place)
    front = graph.copy()
    for _ in list(front.outputs()):
        front.eraseOutput(0)
    front.registerOutput(_script_embedding(front, place).output())
    point = graph.addInput("cut_here")
    point.setType(node.output().type())
    node.output().replaceAllUsesWith(point)
    before, after = _script_function("front", front), _script_function("back", graph)
    return Cut(before, lambda point, *inputs: after(*inputs, point))


def _frozen_graph(module: torch.jit.ScriptModule) -> Any:
    """Inline a module: no submodules, the weights as constants, no input for the module itself."""
    frozen = torch._C._freeze_module(module._c, preserveParameters=False)
    graph = frozen._get_method("forward").graph.copy()
    torch._C._jit_pass_inline(graph)
    torch._C._jit_pass_dce(graph)
    graph.eraseInput(0)
    return graph


def _script_embedding(graph: Any, place: int) -> Any:
    ids = list(graph.inputs())[place].debugName()
    found = [
        node
        for node in graph.findAllNodes("aten::embedding", recurse=False)
        if _script_origin(list(node.inputs())[1]) == ids
    ]
    return _the_one(found)


def _script_origin(value: Any) -> str:
    while value.node().kind() in ("aten::to", "aten::long", "aten::view", "aten::reshape"):
        value = next(value.node().inputs())
    return str(value.debugName())


def _script_function(name: str, graph: Any) -> Callable[..., Any]:
    torch._C._jit_pass_dce(graph)
    return cast("Callable[..., Any]", torch._C._create_function_from_graph(name, graph))


# --- modules -------------------------------------------------------------------------------------


def _embedding_module(module: nn.Module) -> nn.Module:
    found = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    if len(found) > 1:  # position and type tables follow the words' table, and are smaller
        most = max(each.num_embeddings for each in found)
        found = [each for each in found if each.num_embeddings == most]
    return cast("nn.Module", _the_one(found))


def cut_module(module: nn.Module, layer: nn.Module) -> Cut:
    """Cut a module behind one of those inside it."""

    def front(*inputs: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = layer.register_forward_hook(
            lambda _module, _inputs, output: kept.append(output.clone())
        )
        try:
            module(*inputs)
        finally:
            handle.remove()
        return kept[0]

    def back(point: Tensor, *inputs: Tensor) -> Output:
        handle = layer.register_forward_hook(lambda _module, _inputs, _output: point.clone())
        try:
            return cast("Output", module(*inputs))
        finally:
            handle.remove()

    return Cut(front, back)


def _the_one(found: Sequence[Any]) -> Any:
    if len(found) != 1:
        raise NoGradients(
            f"the model looks its token ids up in {len(found)} tables; expected one embedding to "
            "begin at: choose a method without gradients, as occlusion"
        )
    return found[0]
