"""Values that data has and a model may not expect: where an artifact differs is a stated limit.

Beside the cases in which it must agree, an artifact is compared on NaN, on floats up to ±100 and up
to ±10,000, on rows of a mask that let nothing through or are padded on the left, and on integers
below and far above those that the model was found to take. Where it differs, or answers what the
checkpoint refuses, its signature says so, and a request that holds such values is answered 400.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.signature import Signature, TensorSpec
from modelyard.archiver.values import Limits
from modelyard.base.scale import Scale, one_place
from modelyard.exporter.errors import ModelError, ParityError
from modelyard.exporter.prove.checker import Checker
from modelyard.exporter.prove.reference import Case, Reference
from modelyard.exporter.prove.traits import Tensors
from modelyard.handlers.models.backends import torch_dtype
from modelyard.handlers.proof.agree import Rule, allowance, compare
from modelyard.handlers.proof.probes import LARGE, Probe, make_case

_NAN, _CLOSED, _PADDED = "NaN", "masked everywhere", "padded on the left"
_BELOW, _ABOVE = "integers below", "integers above"
_UP_TO = (100.0, 1e4)
KINDS = (_NAN, *(f"±{end:g}" for end in _UP_TO), _CLOSED, _PADDED, _BELOW, _ABOVE)
_FLAGS = {_NAN: "nan", _CLOSED: "closed", _PADDED: "padded"}
_NOT_TRIED = "little was tried, or samples alone"
_ENDS = "on a CUDA device an index that is none ends all that a process does there"
_HALVINGS = 5
_HOLES = 0.1
_AT_ENDS = 0.7
# Far above what is usual, and what the integers of each width still hold.
_FAR = {torch.int64: 2**40, torch.int32: 2**30}


@dataclass(frozen=True)
class Unusual:
    """What an artifact does on values that nobody promised."""

    limits: Mapping[str, Limits] = field(default_factory=dict)
    """Input → values for which the artifact differs."""
    agrees: Sequence[str] = ()
    """Kinds of values on which it agrees."""
    untried: Mapping[str, str] = field(default_factory=dict)
    """Kind of values → why nothing is known of them."""

    def to_json(self) -> dict[str, object]:
        """Return the form that the report holds."""
        differs = {name: str(limits) for name, limits in self.limits.items()}
        return {"agrees": list(self.agrees), "differs": differs, "untried": dict(self.untried)}


class _Unknown(Exception):
    """Why nothing can be said of a kind of values."""


def find_limits(
    checker: Checker, reopen: Callable[[], None], reference: Reference, rules: Sequence[Rule]
) -> Unusual:
    """Compare an artifact that agrees with the checkpoint on unusual values.

    Args:
        checker: the process in which it is open.
        reopen: opens it again.
        reference: the checkpoint's outputs.
        rules: rule of each output.
    """
    trial = _Trial(checker, reopen, reference, rules)
    takers = {kind: list(_takers(kind, reference.signature)) for kind in KINDS}
    tried = [kind for kind in KINDS if takers[kind]]
    untried = {"infinity": "it is not tried"} if takers[_NAN] else {}
    if reference.plan.extent in ("none", "quick"):
        return Unusual(untried=untried | dict.fromkeys(tried, _NOT_TRIED))
    if reference.example[0].is_cuda:
        untried |= {kind: _ENDS for kind in tried if kind in (_BELOW, _ABOVE)}
        tried = [kind for kind in tried if kind not in untried]
    limits = {spec.name: Limits() for spec in reference.signature.inputs}
    agrees: list[str] = []
    for kind in tried:
        try:
            names = [name for name in takers[kind] if limits[name].high is None]
            if not names:
                continue
            if trial.agrees(kind, names):
                agrees.append(kind)
                continue
            alone = [name for name in names if len(names) > 1 and not trial.seems(kind, [name])]
            for name in alone or names:
                limits[name] = trial.narrowed(limits[name], kind, name)
        except _Unknown as error:
            untried[kind] = str(error)
    stated = {name: each for name, each in limits.items() if each != Limits()}
    return Unusual(stated, agrees, untried)


def with_limits(signature: Signature, limits: Mapping[str, Limits]) -> Signature:
    """Return a signature whose inputs state the limits of their names."""
    inputs = (replace(spec, limits=limits.get(spec.name)) for spec in signature.inputs)
    return replace(signature, inputs=tuple(inputs))


def _takers(kind: str, signature: Signature) -> Iterator[str]:
    """Yield the inputs that such values can be given to: those whose values nobody stated."""
    for spec in signature.inputs:
        is_mask = spec.open_value is not None
        if kind in (_CLOSED, _PADDED):
            fits = is_mask and len(spec.shape) > 1 and str(spec.values or "=0..1") == "=0..1"
        elif kind in (_BELOW, _ABOVE):
            is_signed = spec.dtype.startswith("int") or (kind == _ABOVE and "int" in spec.dtype)
            fits = is_signed and not is_mask and spec.values is None
        else:
            fits = spec.is_float and spec.values is None
        if fits:
            yield spec.name


@dataclass(frozen=True)
class _Trial:
    """One artifact beside its checkpoint; the fields are the arguments of `find_limits`."""

    checker: Checker
    reopen: Callable[[], None]
    reference: Reference
    rules: Sequence[Rule]

    @property
    def tried(self) -> Signature:
        return self.reference.signature.with_values(self.reference.found)

    def agrees(self, kind: str, names: Sequence[str]) -> bool:
        """Return whether the artifact answers as the checkpoint where these inputs hold a kind.

        Raises:
            _Unknown: nothing can be said.
        """
        case, probe = f"{kind} in {', '.join(names)}", Probe(kind, self._sizes(kind))
        inputs = self._inputs(probe, names)
        try:
            outputs = self.reference.cases.outputs(case, probe, inputs)
        except ModelError as error:
            try:
                self.checker.run(case, inputs)
            except ParityError:
                raise _Unknown("neither the checkpoint nor the artifact takes them") from error
            return False
        scales = [
            _widened(scale, each, kind)
            for scale, each in zip(self.reference.cases.scales.of(), outputs, strict=True)
        ]
        try:
            found = self.checker.run_alike(case, inputs, self.tried.outputs, outputs)
        except ParityError:  # the process may have ended with it
            self.reopen()
            return False
        measured = []
        for spec, rule, wanted, got, scale in zip(
            self.tried.outputs, self.rules, outputs, found, scales, strict=True
        ):
            closed = self._closed(spec, wanted, inputs)
            read = got if closed is None else torch.where(closed, wanted, got)
            measured.append(compare(wanted, read, rule.tolerance, scale))
        pairs = list(zip(self.rules, measured, strict=True))
        if all(rule.agrees(rule.merge([each])) for rule, each in pairs):
            return True
        is_judged_alone = self.reference.is_lowered or any(rule.is_quantized for rule in self.rules)
        if not is_judged_alone and all(math.isfinite(each["scaled"]) for each in measured):
            moved = self.reference.cases.moves(Case(probe, inputs, outputs), scales)
            if all(
                each["scaled"] <= max(rule.tolerance, allowance(rule, kind, by) or 0.0)
                for (rule, each), by in zip(pairs, moved, strict=True)
            ):
                raise _Unknown(
                    "the checkpoint's own answer moves when its sums are rounded otherwise"
                )
        return False

    def _closed(self, output: TensorSpec, given: Tensor, inputs: Tensors) -> Tensor | None:
        """Return the positions of an output that a mask says nobody reads."""
        for spec, tensor in zip(self.tried.inputs, inputs, strict=True):
            if spec.open_value is not None and spec.shape == output.shape[:2]:
                return (tensor != spec.open_value).reshape(*tensor.shape, *[1] * (given.ndim - 2))
        return None

    def seems(self, kind: str, names: Sequence[str]) -> bool:
        """Return `agrees`; not where nothing can be said."""
        try:
            return self.agrees(kind, names)
        except _Unknown:
            return False

    def narrowed(self, limits: Limits, kind: str, name: str) -> Limits:
        """Return the limits of an input that differs for a kind of values."""
        if kind in _FLAGS:
            return replace(limits, **{_FLAGS[kind]: True})
        if kind in (_BELOW, _ABOVE):
            largest = {each: dim.max for each, dim in self.tried.dims.items()}
            values = next(spec.values for spec in self.tried.inputs if spec.name == name)
            assert values is not None, "integers without stated values were tried"
            low, high = values.ends(largest)
            return replace(limits, low=low) if kind == _BELOW else replace(limits, high=high)
        end = self._reach(name, float(kind[1:]))
        return replace(limits, low=-end, high=end)

    def _reach(self, name: str, differs: float) -> float:
        """Return the largest magnitude, of some that are tried, up to which it agrees."""
        agrees = max(end for end in (LARGE, *_UP_TO) if end < differs)
        for _ in range(_HALVINGS):
            middle = float(f"{math.sqrt(agrees * differs):.2g}")
            if self.seems(f"±{middle:g}", [name]):
                agrees = middle
            else:
                differs = middle
        return agrees

    def _sizes(self, kind: str) -> dict[str, int]:
        batch, dims = self.tried.batch, self.tried.dims
        least = 4 if kind in (_CLOSED, _PADDED) else 0
        return {name: dim.at_least(2 if dim == batch else least) for name, dim in dims.items()}

    def _inputs(self, probe: Probe, names: Sequence[str]) -> Tensors:
        """Make random inputs, and the kind's values of those that are named."""
        made = make_case(self.tried, Probe("random", probe.sizes))
        generator = torch.Generator().manual_seed(crc32(probe.kind.encode()))
        return tuple(
            _changed(spec, each, probe.kind, generator) if spec.name in names else each
            for spec, each in zip(self.tried.inputs, made, strict=True)
        )


def _changed(spec: TensorSpec, tensor: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Return what an input holds of a kind of values, from a random one."""
    if kind == _NAN:
        holes = torch.rand(tensor.shape, generator=generator) < _HOLES
        rows = holes.reshape(len(tensor) if tensor.ndim else 1, -1)
        rows[:, rows.shape[1] // 2 : rows.shape[1] // 2 + 1] = True
        return tensor.masked_fill(holes, math.nan)
    if kind in (_CLOSED, _PADDED):
        assert spec.open_value is not None
        length = tensor.shape[-1]
        rows = torch.arange(len(tensor)).reshape(-1, *[1] * (tensor.ndim - 1))
        # The first row alone is closed; each row is padded by another number of positions.
        closed = (rows == 0) * length if kind == _CLOSED else 1 + rows % max(1, length - 1)
        is_open = (torch.arange(length) >= closed).expand(tensor.shape)
        return torch.where(is_open, spec.open_value, 1 - spec.open_value).to(tensor.dtype)
    if kind == _BELOW:
        return -1 - tensor
    if kind == _ABOVE:
        far = _FAR.get(tensor.dtype)
        return torch.iinfo(tensor.dtype).max - tensor if far is None else tensor + far
    values = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1
    values = torch.where(values.abs() > _AT_ENDS, values.sign(), values)
    return (values * float(kind[1:])).to(torch_dtype(spec.dtype))


def _widened(scale: Scale, output: Tensor, kind: str) -> Scale:
    """Return the scale of an output of values that may be far larger than usual."""
    if kind in _FLAGS:
        return scale
    own = one_place(output.double().numpy())
    return replace(scale, spread=np.maximum(scale.spread, own.spread.max(initial=0.0)))
