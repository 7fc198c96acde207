"""An exported program (`.pt2`) from elsewhere → a module, so that it is exported as any model."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree

from modelyard.exporter.errors import CheckpointError, ModelError, cause
from modelyard.exporter.formats.to_exported_program import free_names
from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.grammar import ANY
from modelyard.handlers.models.backends import load_on


def open_program(path: Path, trust: bool = False) -> nn.Module:
    """Return a program's module, which takes one tensor per input, by place, and can be in eval().

    Its own check of its inputs is left out: it refuses a batch of one where torch took its lower
    limit of two for granted. What is proven is what the program computes.

    Raises:
        CheckpointError: loading it could run code.
        ModelError: this torch cannot load it, as where it uses operators of a library.
    """
    try:
        program = load_on(path, torch.device("cpu"), trusted=(ANY,) if trust else ())
    except UnsafeProgram as error:
        raise CheckpointError(str(error)) from error
    # torch's loader fails in many ways on programs of other versions.
    except Exception as error:
        raise ModelError(
            f'"{path.name}" cannot be loaded by torch {torch.__version__}: {cause(error)}; export '
            "its checkpoint with this torch"
        ) from error
    free_names(program)
    module = program.module(check_guards=False)
    assert isinstance(module, GraphModule)
    for name in ("train", "eval"):  # replaced by ones that only raise
        vars(module).pop(name, None)
    _keep_constants(module)
    _take_tensors(module)
    return module


def _take_tensors(module: GraphModule) -> None:
    """Let forward() take the program's tensors one by one, out of the dicts that held them."""
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    codegen = module.graph._codegen
    assert isinstance(codegen, torch.fx.graph._PyTreeCodeGen)
    codegen.pytree_info = codegen.pytree_info._replace(
        orig_args=names, in_spec=_pytree.tree_structure((tuple(names), {}))
    )
    module.recompile()


def _keep_constants(module: nn.Module) -> None:
    """Make buffers of the tensors that forward() was traced with: they are the program's own."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor):
                delattr(part, name)
                part.register_buffer(name, value)
