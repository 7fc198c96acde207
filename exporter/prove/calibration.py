"""Whether samples that a quantisation takes its ranges from look like what the model is for.

Nobody knows the real inputs. But batch-norm keeps the spread that it saw in training, the bias of
a first layer was trained beside its products, and real rows get more than one label.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Signature
from modelyard.exporter.arguments import flatten, own_name
from modelyard.exporter.inputs.samples import Sample

# Rows that are run: enough to see a scale, and few beside what calibration runs itself.
_ROWS = 64
# Factors between scales that differ in more than the choice of rows.
_FAR = 4.0
# Of a first layer, trained on numbers around 1: size of its inputs, and of its products over that
# of its bias, which both are outside of these where samples are ten times too small or too large.
_SMALL, _LARGE = (0.2, 2.0), (4.0, 10.0)
DOUBTFUL = "the samples are doubtful"
_ADVICE = "give --sample what the model gets in use, after the same preprocessing"


def doubts(model: nn.Module, samples: Sequence[Sample], signature: Signature) -> list[str]:
    """Return a sentence for each thing that makes samples unlike what the model was trained on."""
    seen: dict[str, list[Tensor]] = {}

    def keep(name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor):
            seen.setdefault(name, []).append(_shares(module, given[0]))

    handles = [
        module.register_forward_pre_hook(functools.partial(keep, name))
        for name, module in model.named_modules()
        if isinstance(module, _WEIGHTED | _NORMS)
    ]
    outputs, rows = [], 0
    try:
        with torch.no_grad():
            for sample in samples:
                outputs.append(flatten(model(*(tensor.clone() for tensor in sample.inputs))))
                if (rows := rows + sample.rows) >= _ROWS:
                    break
    finally:
        for handle in handles:
            handle.remove()
    found = [
        *_constant(samples, signature),
        *_scales(model, seen, signature),
        *_labels([next(iter(each.values())) for each in outputs]),
    ]
    return [f"{DOUBTFUL}: {text}; {_ADVICE}" for text in found[:2]]


_NORMS = nn.modules.batchnorm._BatchNorm
_WEIGHTED = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def _shares(module: nn.Module, given: Tensor) -> Tensor:
    """Return of a layer's inputs the variance of each channel, or their size and the products'."""
    if isinstance(module, _NORMS):
        return given.transpose(0, 1).flatten(1).var(1, correction=0)
    forward: Callable[[Tensor], Tensor] = type(module).forward.__get__(module)  # without hooks
    bias = module.bias if isinstance(module.bias, Tensor) else torch.zeros(())
    shape = (-1,) if isinstance(module, nn.Linear) else (-1, *[1] * (given.ndim - 2))
    return torch.stack([given.square().mean(), (forward(given) - bias.reshape(shape)).var()])


def _constant(samples: Sequence[Sample], signature: Signature) -> Iterator[str]:
    for spec, *each in zip(signature.inputs, *(sample.inputs for sample in samples), strict=True):
        if not spec.is_float or spec.values:
            continue
        first = each[0].flatten()[0]
        if all(bool((tensor == first).all()) for tensor in each):
            yield f'every number of "{spec.name}" is {first.item():g}'
        elif spec.shape[0] == signature.batch and all(
            bool((tensor == each[0][:1]).all())
            for tensor in each
            if tensor[0].shape == each[0][0].shape
        ):
            yield f'all rows of "{spec.name}" are the same'


def _scales(model: nn.Module, seen: dict[str, list[Tensor]], signature: Signature) -> Iterator[str]:
    """Compare the first layer that knows a scale with what it got; the others follow from it."""
    if not any(spec.is_float and not spec.values for spec in signature.inputs):
        return
    modules = dict(model.named_modules())
    for name in seen:
        module = modules[name]
        if isinstance(module, _NORMS) and module.running_var is not None:
            got = torch.stack(seen[name]).mean(0)
            times = (got / module.running_var.clamp(min=1e-12)).sqrt().median().item()
            if not 1 / _FAR <= times <= _FAR:
                yield (
                    f'the inputs of batch-norm "{own_name(name)}" vary {times:.2g} times as much '
                    "as in training"
                )
            return
    for name in list(seen)[:1]:
        bias = getattr(modules[name], "bias", None)
        if bias is None or not bias.any():
            return
        size, products = torch.stack(seen[name]).mean(0).sqrt().tolist()
        share = products / bias.square().mean().sqrt().item()
        if (size < _SMALL[0] and share < _SMALL[1]) or (size > _LARGE[0] and share > _LARGE[1]):
            yield (
                f'the inputs of the first layer, "{own_name(name)}", are around {size:.2g}, and '
                f"what it makes of them is {share:.2g} times its bias"
            )


def _labels(outputs: Sequence[Tensor]) -> Iterator[str]:
    """Count the labels of a classifier: the rows of one class give no range for the others."""
    if any(each.ndim != 2 or not each.is_floating_point() for each in outputs):
        return
    rows = torch.cat(list(outputs))
    classes = rows.shape[1]
    labels = sorted(set(rows.argmax(1).tolist()))
    if classes > 1 and len(labels) <= max(1, min(classes, len(rows)) // 4):
        yield (
            f"the checkpoint gives {len(rows)} rows only {len(labels)} of {classes} labels, "
            f"{', '.join(map(str, labels[:3]))}"
        )
