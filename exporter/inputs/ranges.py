"""Find which integers a model takes, by trying them on the CPU, where nobody said which.

Tried on what `probes` makes of a range: its ends, and random values between, since what fills a
tensor with one number may mean nothing (a graph's edges that all are loops). Ranges end at the
sizes of the model's embedding tables, at usual numbers, and at the sizes of the inputs' dims.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, Signature, TensorSpec, ends_of
from modelyard.archiver.values import End, Values
from modelyard.exporter.arguments import flatten
from modelyard.exporter.errors import ModelError, cause
from modelyard.handlers.proof.agree import split
from modelyard.handlers.proof.probes import Probe, example_sizes, is_mask, make_inputs

# The first integers above a range: a vocabulary, bytes; and what nearly every model takes.
_USUAL = (1000, 256, 100)
_SMALL = (10, 2)
_KINDS = ("zeros", "large", "random")
_SHOWN = 8


def find_values(model: nn.Module, signature: Signature) -> dict[str, Values]:
    """Find for each integer input without stated values the widest range that the model takes.

    An output that is not finite where zeros give a finite one counts as refused.

    Args:
        model: on the CPU.
        signature: the inputs as this model takes them.

    Raises:
        ModelError: every range fails for one input; says which were tried, and what to write.
    """
    found = {spec.name: _below(2) for spec in signature.inputs if _is_open(spec) and is_mask(spec)}
    unknown = [spec for spec in signature.inputs if _is_open(spec) and not is_mask(spec)]
    if not unknown:
        return found
    for number in (0, 1):
        found |= {spec.name: Values(End(number), End(number)) for spec in unknown}
        trial = _Trial(model, signature.with_values(found))
        if trial.probes:
            break
    else:  # whatever stops the model, it is not one input's range: the first probe will say
        return found | {spec.name: _below(2) for spec in unknown}
    tables = _table_sizes(model)
    for spec in unknown:
        tried: list[Values] = []
        for values in _candidates(spec, signature, tables):
            tried.append(values)
            if trial.takes(signature.with_values({**found, spec.name: values})):
                found[spec.name] = values
                break
        else:
            raise ModelError(_refusal(spec, signature, tried, trial.error))
    return found


def advice(signature: Signature) -> str:
    """Return what to write about integers of which nobody said which they are; empty for none."""
    for spec in signature.inputs:
        if _is_open(spec) and not is_mask(spec):
            return f", or the integers it takes, as in {_example(spec, signature)}"
    return ""


class _Trial:
    """The sizes at which the model takes a first signature, and whether it takes others there."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        self.model = model
        self.error: Exception | None = None
        """What the model raised last."""
        self.probes: list[tuple[Probe, bool]] = []
        """Sizes to try, and whether outputs must be finite."""
        # Its own sizes say whether a size is too large for the model, whatever the integers.
        for sizes in _sizes(signature):
            outputs = self._run(signature, Probe("zeros", sizes))
            if outputs is not None:
                must = _is_finite(outputs)
                kinds = _KINDS if not self.probes else ("random",)
                self.probes += [(Probe(kind, sizes), must) for kind in kinds]
            del outputs  # they may be large

    def takes(self, signature: Signature) -> bool:
        for probe, must_be_finite in self.probes:
            outputs = self._run(signature, probe)
            if outputs is None or (must_be_finite and not _is_finite(outputs)):
                return False
        return True

    def _run(self, signature: Signature, probe: Probe) -> list[Tensor] | None:
        try:
            with torch.no_grad():
                return list(flatten(self.model(*make_inputs(signature, probe, seed=1))).values())
        # The model is the author's code and may refuse a value in any way.
        except Exception as error:
            self.error = error
            return None


def _sizes(signature: Signature) -> list[dict[str, int]]:
    """Return the sizes to try integers at, the cheapest first: the ends of ranges among them."""
    batch, dims = signature.batch, signature.dims
    largest = {name: dim.at_least(2) if dim == batch else dim.max for name, dim in dims.items()}
    smallest = {name: dim.min for name, dim in dims.items()}
    each = [smallest, example_sizes(signature), largest]
    return [sizes for place, sizes in enumerate(each) if sizes not in each[:place]]


def _candidates(spec: TensorSpec, signature: Signature, tables: Sequence[int]) -> Iterator[Values]:
    """Yield ranges for an input: those with more numbers first, from 0 and then from 1."""
    dims = ends_of(signature.dims)
    names = _dims_by_likelihood(spec, signature)
    values = [_below(bound) for bound in (*tables, *_USUAL)]
    values += [Values(End(0), End(-1, name)) for name in names]
    values += [_below(bound) for bound in _SMALL]
    values += [Values(End(1), End(bound)) for bound in _USUAL]
    values += [Values(End(1), End(0, name)) for name in names]
    values += [Values(End(1), End(bound)) for bound in _SMALL]
    return (each for each in dict.fromkeys(values) if each.problem(spec.dtype, dims) is None)


def _dims_by_likelihood(spec: TensorSpec, signature: Signature) -> list[str]:
    """Return the dims that an input's integers may point into: its own last, the batch behind."""
    own = {size.name for size in spec.shape if isinstance(size, Dim)}
    dims = signature.dims
    return sorted(dims, key=lambda name: (name in own, dims[name] == signature.batch))


def _refusal(
    spec: TensorSpec, signature: Signature, tried: Sequence[Values], error: Exception | None
) -> str:
    shown = ", ".join(str(values).lstrip("=") for values in tried[:_SHOWN])
    more = f" and {len(tried) - _SHOWN} more" if len(tried) > _SHOWN else ""
    said = f": {cause(error)}" if error else ""
    return (
        f'the model takes no range of integers that was tried as input "{spec.name}" ({shown}'
        f"{more}){said}; say which it takes, as in {_example(spec, signature)}"
    )


def _example(spec: TensorSpec, signature: Signature) -> str:
    """Write an input with values that it might take, and how to do without any that is made up."""
    names = (name for name, dim in signature.dims.items() if dim not in spec.shape)
    high = next((End(-1, name) for name in names), End(_USUAL[0] - 1))
    stated = replace(spec, values=Values(End(0), high))
    return f"--input '{stated}', or compare on real inputs alone: --sample FILE --sample-only"


def _below(bound: int) -> Values:
    return Values(End(0), End(bound - 1))


def _is_open(spec: TensorSpec) -> bool:
    """Return whether an input is of integers, and nobody said of which."""
    return "int" in spec.dtype and spec.values is None


def _table_sizes(model: nn.Module) -> list[int]:
    """Return how many rows the model's embedding tables have, the largest number first."""
    kinds = nn.Embedding | nn.EmbeddingBag
    tables = {one.num_embeddings for one in model.modules() if isinstance(one, kinds)}
    return sorted(tables, reverse=True)


def _is_finite(outputs: Sequence[Tensor]) -> bool:
    return all(bool(part.isfinite().all()) for value in outputs for part in split(value))
