"""What an artifact of lower precision loses, beside what the checkpoint's outputs vary by.

It is measured on ordinary values: the rows of samples that nothing was calibrated on, or what is
made up where there are none. An offset counts for nothing: of temperatures around 300 K that vary
by 2 K, an error of 1 K is half.

Whether samples that a quantisation takes its ranges from look like what the model is for is asked
here, too. Nobody knows the real inputs; but batch-norm keeps the spread that it saw in training,
the bias of a first layer was trained beside its products, and real rows get more than one label.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from modelyard.archiver.signature import Signature
from modelyard.exporter.arguments import flatten, own_name
from modelyard.exporter.inputs.samples import Sample

MAX_LOSS = 0.01
"""Loss above which an artifact is named as outside, and not chosen by `--quantize auto`."""

# Share of a number's size below which it counts as constant: float32 rounds to a hundredth of it.
_CONSTANT = 1e-5
_MOST_PLACES = 1 << 16
_NEVER = 1e100
"""The difference of a number from what is not finite."""
_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Loss:
    """What one output loses over some rows."""

    rows: int
    spread: float
    """Largest less smallest value of the checkpoint, at the place where that is most."""
    error: float
    """Root mean square of the differences, each over the spread of its place."""
    worst: float
    """Largest difference over the spread of its place."""
    r2: float | None
    """Share of the checkpoint's variance that is kept, a mean over the places; None without any."""
    top1_agreement: float | None
    """Share of rows whose largest value is at the same place; None without ranks."""

    @property
    def loss(self) -> float:
        """The larger of the share of other largest values and that of variance lost, up to 1."""
        lost = self.error if self.r2 is None else 1 - self.r2
        moved = 0.0 if self.top1_agreement is None else 1 - self.top1_agreement
        return min(1.0, max(lost, moved))

    def outside(self, most: float = MAX_LOSS) -> str:
        """Return what is lost, where that is more than `most`; else nothing."""
        lost = []
        if self.top1_agreement is not None and 1 - self.top1_agreement > most:
            lost.append(f"another largest value in {1 - self.top1_agreement:.1%} of them")
        if self.r2 is None and self.error > most:
            lost.append(f"nothing varies, and errors are {self.error:.1%} of its size")
        if self.r2 is not None and 1 - self.r2 > most:
            lost.append(
                f"R2 {self.r2:.3f}, errors up to {self.worst:.1%} of a spread of {self.spread:.3g}"
            )
        return ", ".join(lost)


class LossLearner:
    """Learns what one output loses, case by case; of large outputs it keeps a few sums a place.

    A place is one of the last dim, of images a channel; all are one where their number changes.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[_Numbers, ...]] = []
        self._rows = self._ranked = self._same = 0

    def see(self, expected: Tensor, found: Tensor) -> None:
        """Learn from one case; the two have the same shape."""
        self._rows += expected.shape[0] if expected.ndim else 1
        if expected.ndim > 1 and expected.shape[-1] > 1 and expected.is_floating_point():
            same = expected.argmax(-1) == found.argmax(-1)
            self._ranked += same.numel()
            self._same += int(same.sum())
        if not expected.numel():
            return
        one, two = (_by_place(each) for each in (expected, found))
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(np.abs(one - two), nan=_NEVER, posinf=_NEVER).clip(max=_NEVER)
        off = np.where(np.isfinite(one), apart, 0.0)
        one = np.where(np.isfinite(one), one, 0.0)
        middle = one.mean(0)
        self._seen.append(
            (
                np.full(one.shape[1], float(len(one))),
                middle,
                np.square(one - middle).sum(0),
                one.min(0),
                one.max(0),
                np.square(off).sum(0),
                off.max(0),
            )
        )

    def loss(self) -> Loss:
        """Return what is lost over all cases."""
        if len({len(each[0]) for each in self._seen}) > 1:
            # Of places that come and go, all are one.
            self._seen = [_joined(zip(*(part[:, None] for part in each), strict=True))
                          for each in self._seen]  # fmt: skip
        number, _, squares, low, high, off, worst = _joined(self._seen)
        spread = high - low
        size = np.maximum(np.abs(high), np.abs(low))
        varies = spread > _CONSTANT * size
        if not varies.any():
            varies, spread = np.ones_like(varies), np.maximum(size, 1e-30)
            squares = np.full_like(squares, math.nan)
        number, off, worst, spread, squares = (
            each[varies] for each in (number, off, worst, spread, squares)
        )
        r2 = float(np.mean(1 - off / squares))
        return Loss(
            rows=self._rows,
            spread=float(spread.max()),
            error=float(np.sqrt(np.mean(off / number / np.square(spread)))),
            worst=float(np.max(worst / spread)),
            r2=r2 if math.isfinite(r2) else None,
            top1_agreement=self._same / self._ranked if self._ranked else None,
        )


def _by_place(tensor: Tensor) -> _Numbers:
    values = tensor.detach().double()
    if values.ndim > 3:
        values = values.movedim(1, -1)
    places = values.shape[-1] if values.ndim > 1 and values.shape[-1] <= _MOST_PLACES else 1
    return values.reshape(-1, places).numpy()


def _joined(seen: Iterable[Sequence[_Numbers]]) -> tuple[_Numbers, ...]:
    """Return the sums of several parts as those of one, place by place."""
    count, middle, squares, low, high, off, worst = map(np.stack, zip(*seen, strict=True))
    centre = (count * middle).sum(0) / count.sum(0)
    squares = squares.sum(0) + (count * np.square(middle - centre)).sum(0)
    return count.sum(0), centre, squares, low.min(0), high.max(0), off.sum(0), worst.max(0)


# -- whether samples for calibration look like what the model is for -------------------------------

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

    outputs, rows = [], 0
    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, _WEIGHTED | _NORMS):
                hook = module.register_forward_pre_hook(functools.partial(keep, name))
                stack.callback(hook.remove)
        for sample in samples:
            outputs.append(flatten(model(*(tensor.clone() for tensor in sample.inputs))))
            if (rows := rows + sample.rows) >= _ROWS:
                break
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
