"""Find which integers a model takes, by trying them on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Signature
from modelyard.exporter.arguments import flatten
from modelyard.handlers.backends import torch_dtype
from modelyard.handlers.probes import Probe, example_sizes, is_mask, make_inputs

# Tried in this order as the bound of an integer input's values, after the sizes of the model's
# embedding tables: a vocabulary, bytes, a flag.
_INTEGER_BOUNDS = (1000, 256, 100, 10, 2)


def find_bounds(model: nn.Module, signature: Signature) -> dict[str, int]:
    """Find for each integer input the largest bound whose values give finite outputs.

    Args:
        model: on the CPU.
        signature: the inputs as this model takes them.
    """
    below: dict[str, int] = {}
    sizes = example_sizes(signature)
    tables = {
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    }
    tried = (*sorted(tables, reverse=True), *_INTEGER_BOUNDS)
    for place, spec in enumerate(signature.inputs):
        kind = torch_dtype(spec.dtype)
        if kind.is_floating_point or kind is torch.bool:
            continue
        inputs = list(make_inputs(signature, Probe("zeros", sizes), below))
        bounds = [bound for bound in tried if bound - 1 <= torch.iinfo(kind).max]
        if is_mask(spec):
            bounds = [2]
        below[spec.name] = bounds[-1]
        for bound in bounds:
            inputs[place] = torch.full_like(inputs[place], bound - 1)
            if _gives_finite(model, inputs):
                below[spec.name] = bound
                break
    return below


def _gives_finite(model: nn.Module, inputs: Sequence[Tensor]) -> bool:
    try:
        with torch.no_grad():
            outputs = flatten(model(*(tensor.clone() for tensor in inputs)))
    # The model is the author's code and may refuse a value in any way.
    except Exception:
        return False
    return all(bool(value.isfinite().all()) for value in outputs.values())
