"""An operator that computes without looking → the one that looks first, and computes the same."""

import operator

import torch
from torch.fx import GraphModule, Node

from modelyard.handlers.errors import LoadError

REPLACED = frozenset({"aten._native_batch_norm_legit_no_training.default"})
"""What decomposed programs call, and `use_checked` takes out."""

_LEGIT = torch.ops.aten._native_batch_norm_legit_no_training.default
_CHECKED = torch.ops.aten.batch_norm.default


def use_checked(program: torch.export.ExportedProgram) -> None:
    """Replace the operators of `REPLACED` in a program just loaded.

    The batch normalisation of decomposed programs reads as many numbers of its statistics as the
    input has channels, however few there are; `batch_norm` compares them first.

    Raises:
        LoadError: the program uses what inference does not compute.
    """
    for part in program.graph_module.modules():
        if isinstance(part, GraphModule):
            found = [node for node in part.graph.nodes if node.target is _LEGIT]
            for node in found:
                _replace(node)
            if found:
                part.recompile()


def _replace(node: Node) -> None:
    with node.graph.inserting_before(node):
        *tensors, momentum, eps = node.args
        checked = node.graph.call_function(_CHECKED, (*tensors, False, momentum, eps, False))
    checked.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in list(node.users):
        if user.target is not operator.getitem or (user.args[1] != 0 and user.users):
            raise LoadError(
                f'"{node.name}" gives more than inference computes; export it in evaluation mode'
            )
        user.replace_all_uses_with(checked)
        node.graph.erase_node(user)
        checked._rename(user.name)
    node.graph.erase_node(node)
