"""Weights of ordinary size for networks whose fresh ones answer next to nothing.

A fresh network may make 1e-14 of any input, or nearly the same of all: an artifact that answers
zeros would then be taken for right. Such a network is drawn anew: each layer that has weights gives
numbers of variance 1, as D. Mishkin and J. Matas, All you need is a good init, ICLR 2016, have it.
Before that each batch norm gets the statistics of what it reads, which is often enough.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

SMALL = 1e-2
"""Largest number of an output that is too small; below a tenth of it, any wrong would be right."""
ALIKE = 1e-3
"""Share of an output's largest number by which its rows have to differ."""
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_Run = Callable[[], Sequence[Tensor]]


def says_nothing(outputs: Sequence[Tensor]) -> bool:
    """Return whether the first output is next to zero, or next to the same for every row."""
    first = next((each for each in outputs if each.is_floating_point() and each.numel() > 1), None)
    if first is None:
        return False
    values = first.double().nan_to_num()
    largest = float(values.abs().max())
    apart = float((values - values[:1]).abs().max()) if len(values) > 1 else largest
    return largest < SMALL or apart < ALIKE * largest


@torch.no_grad()
def draw_anew(model: nn.Module, run: _Run) -> bool:
    """Draw a model's weights anew if its outputs say nothing; return whether they did.

    Args:
        model: in eval mode.
        run: gives the outputs for random inputs of several rows.
    """
    if not says_nothing(run()):
        return False
    _run_with(model, run, nn.modules.batchnorm._BatchNorm, _learn)
    if says_nothing(run()):
        _run_with(model, run, _LAYERS, _scale)
    return True


def _run_with(model: nn.Module, run: _Run, kinds: Any, change: Callable[..., Any]) -> None:
    """Run the model once, and change each layer of some kinds when it is called first."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, kinds):
                waiting = [module]
                hook = functools.partial(_once, waiting, change)
                stack.callback(module.register_forward_hook(hook).remove)
        run()


def _once(waiting: list[nn.Module], change: Callable[..., Any], *args: Any) -> Any:
    return change(waiting.pop(), *args[1:]) if waiting else None


def _scale(module: Any, _: object, output: Any) -> Any:
    by = float(output.double().std()) if isinstance(output, Tensor) else 0.0
    if not 0 < by < math.inf:
        return None
    module.weight.div_(by)
    if module.bias is not None:
        module.bias.div_(by)
    return output / by


def _learn(module: Any, inputs: tuple[Tensor, ...], _: object) -> Any:
    if module.running_mean is None:
        return None
    values = inputs[0].transpose(0, 1).flatten(1)
    module.running_mean.copy_(values.mean(1))
    # One for all channels: 1 over the variance of a channel that is still would make noise.
    module.running_var.fill_(float(values.var(1).mean()))
    return module(*inputs)
