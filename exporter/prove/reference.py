"""Run the checkpoint's model eagerly: what every artifact must reproduce."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import (
    DTYPES,
    VIEWS,
    Batching,
    Dim,
    Signature,
    Size,
    TensorSpec,
    ends_of,
)
from modelyard.archiver.values import Values
from modelyard.exporter.arguments import choose_outputs, flatten, give_outputs, own_name, pick
from modelyard.exporter.errors import ModelError, UsageError, cause
from modelyard.exporter.formats.from_onnx import file_of
from modelyard.exporter.inputs import (
    Sample,
    advice,
    choose_example,
    find_values,
    regroup,
    two_batches,
    why_no_rows,
)
from modelyard.exporter.prove.probabilities import find_probabilities
from modelyard.exporter.prove.sensitivity import measure_sensitivity
from modelyard.exporter.prove.watch import (
    Counted,
    Watched,
    count,
    in_train_mode,
    plain_tensors,
    watch,
)
from modelyard.handlers.models.backends import dtype_name, torch_dtype, type_name
from modelyard.handlers.proof.agree import compare, full_precision, split
from modelyard.handlers.proof.bounds import Bounds
from modelyard.handlers.proof.plan import (
    GFLOP_PER_OPERATOR,
    ONLY_SAMPLES,
    Plan,
    end_sizes,
    fit_growth,
    plan,
)
from modelyard.handlers.proof.probes import Probe, example_sizes, make_case, make_inputs

Tensors = tuple[Tensor, ...]

# Of the checkpoint's outputs, of all cases together: most models' are below it, and run once.
KEPT_BYTES = 64 * 2**20

# Rows that share a batch; as the tolerance of float32: a kernel may add in another order for
# another batch size.
_ROWS = 3
_ROW_TOLERANCE = 1e-4

Run = Callable[[Probe, Tensors], Tensors]
"""A model as it is compared: a probe's tensors in, tensors out, in eval mode, no gradients."""


@dataclass(frozen=True)
class Case:
    """One probe, its inputs and what the checkpoint gives for them; all on the CPU.

    Where the artifact is of a lower precision, the inputs are too (each a value that both hold
    exactly), and the outputs are those of the checkpoint in float32.
    """

    probe: Probe
    inputs: Tensors
    outputs: Tensors


class _Kept:
    """What the checkpoint gives for cases: up to `KEPT_BYTES` are kept, others computed again.

    Args:
        run: the checkpoint's model.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._outputs: dict[object, Tensors] = {}
        self._free_bytes = KEPT_BYTES

    def outputs(self, case: object, probe: Probe, inputs: Tensors) -> Tensors:
        """Return what a case gives; what is equal for two calls has to be the same case."""
        outputs = self._outputs.get(case)
        if outputs is None:
            outputs = self._run(probe, inputs)
            size_bytes = sum(tensor.nbytes for tensor in outputs)
            if size_bytes <= self._free_bytes:
                self._free_bytes -= size_bytes
                self._outputs[case] = outputs
        return outputs


class Cases(Sequence[Case]):
    """Every probe and sample with what the checkpoint gives for it, made anew whenever it is read.

    By its place: a loop over the cases would hold one while it makes the next.

    Args:
        signature: of the inputs, with the values of integers.
        probes: whose inputs are made.
        samples: whose inputs are a file's.
        run: the checkpoint's model.
        kept: what it gave already, by the text of the probe.
    """

    def __init__(
        self,
        signature: Signature,
        probes: Sequence[Probe],
        samples: Sequence[Sample],
        run: Run,
        kept: _Kept,
    ) -> None:
        self.probes = (*probes, *(Probe("sample", sample.sizes) for sample in samples))
        self._inputs = [
            *(functools.partial(make_case, signature, probe) for probe in probes),
            *(functools.partial(_lowered, sample, signature) for sample in samples),
        ]
        self._run = run
        self._kept = kept
        self._names = [*map(str, probes), *range(len(samples))]
        self._moved: dict[int, list[float]] = {}

    def __len__(self) -> int:
        return len(self.probes)

    @overload
    def __getitem__(self, place: int) -> Case: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Case]: ...
    def __getitem__(self, place: int | slice) -> Case | Sequence[Case]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        probe, inputs = self.probes[place], self._inputs[place]()
        return Case(probe, inputs, self._kept.outputs(self._names[place], probe, inputs))

    def sensitivity(self, place: int) -> list[float]:
        """Return per output how far it moves when the model's sums are rounded otherwise."""
        if place not in self._moved:
            case = self[place]
            run = functools.partial(self._run, case.probe)
            try:
                self._moved[place] = measure_sensitivity(run, case.inputs, case.outputs)
            # Some models do not run where their operators are disturbed.
            except ModelError:
                self._moved[place] = [0.0] * len(case.outputs)
        return self._moved[place]


@dataclass(frozen=True)
class _Seen:
    """What is remembered of one output of one case."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_finite: bool


@dataclass(frozen=True)
class Reference:
    """What is known of a model once it has run."""

    signature: Signature
    example: Tensors
    """Inputs to trace with, on the model's device."""
    cases: Cases
    plan: Plan
    original: nn.Module
    """The checkpoint's model, on its device; in float32 where a dtype was asked for."""
    model: nn.Module
    """The one to export: `original`, in the dtype that was asked for."""
    found: Mapping[str, Values]
    """For each integer input without stated values, those that the model was found to take."""
    samples: tuple[Sample, ...] = ()
    is_lowered: bool = False
    """Whether `model` computes in another dtype than the checkpoint's."""
    is_double: bool = False
    """Whether all that it computes is float64, so that its outputs are good to that."""
    keys: tuple[str, ...] = ()
    """The way to each output inside what the checkpoint's own model gives."""
    probabilities: Mapping[str, bool] = field(default_factory=dict)
    """Output → whether its numbers are probabilities already, where that could be found out."""
    warnings: tuple[str, ...] = ()
    """What the author may want to change, in a sentence each."""

    @property
    def compared_with(self) -> str:
        """Name what the artifact is compared with."""
        if file_of(self.original) is not None:
            return "the file as it stands, not optimised"
        return "the checkpoint in float32" if self.is_lowered else "the checkpoint"


def observe(
    model: nn.Module,
    inputs: Signature,
    output_names: Sequence[str],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    samples: Sequence[Sample] = (),
    quick: bool = False,
    sample_only: bool = False,
) -> Reference:
    """Run `model` (eval mode, on the CPU) on every probe and sample, on `device`, where it stays.

    Args:
        model: takes one tensor per input, by place.
        inputs: as the checkpoint's model takes them.
        output_names: as `choose_outputs` takes them.
        device: where to run.
        dtype: what weights and floating-point inputs become in the artifact; None keeps them.
        samples: real inputs, compared beside the probes.
        quick: try few probes.
        sample_only: make nothing up: trace with a sample, compare on samples alone.

    Raises:
        ModelError: the model cannot take an input, gives something else than tensors, gives
            different values for the same input, stays in train mode, or overflows in `dtype`.
        UsageError: the output names are neither the model's nor as many as its outputs.
    """
    _check_eval_mode(model)
    original = model if dtype is None else model.float()
    signature = inputs if dtype is None else inputs.in_precision(dtype_name(dtype))
    _check_values(signature)
    # Integers out of range are an error on the CPU; on CUDA they end the process.
    raised = inputs if dtype is None else inputs.in_precision("float32")
    found = {} if sample_only else find_values(original, raised)
    tried = signature.with_values(found)
    original.to(device)
    with full_precision(device):
        if sample_only:
            chosen_sample = choose_example(samples, signature)
            example_probe = Probe("sample", chosen_sample.sizes)
            example = _to(_lowered(chosen_sample, signature), device)
        else:
            example_probe = Probe("random", example_sizes(signature))
            example = _to(make_inputs(tried, example_probe), device)
        call = (signature, example_probe, _raised(example, dtype))
        output = _call(original, *call)
        chosen_outputs = choose_outputs(output, output_names, [i.name for i in signature.inputs])
        original = give_outputs(original, signature, chosen_outputs, output)
        named, output = chosen_outputs.names, pick(output, chosen_outputs.keys)
        watched = watch(original, _raised(example, dtype))
        again = flatten(_call(original, *call))
        unsteady = _unsteady(watched, example_probe.sizes)
        _check_repeats(named, flatten(output), again, unsteady)
        lowered = _lower(original, dtype)
        if lowered is not original:
            output = _call(lowered, signature, example_probe, example)

        def run(probe: Probe, tensors: Tensors) -> Tensors:
            return _outputs(original, signature, probe, tensors, dtype)

        kept = _Kept(run)
        chosen = ONLY_SAMPLES if sample_only else _plan(kept, original, tried, quick=quick)
        compared = regroup(samples, signature) if sample_only else samples
        cases = Cases(tried, chosen.probes, compared, run, kept)
        bounds = {name: Bounds() for name in named}
        seen = []
        for place in range(len(cases)):
            case = cases[place]
            seen.append(_remember(case))
            for name, given in zip(named, case.outputs, strict=True):
                bounds[name].see(given)
        probabilities = find_probabilities(
            bounds, signature, functools.partial(run, example_probe), example
        )
        outputs = tuple(
            _describe(name, [case[place] for case in seen], cases.probes, signature.dims)
            for place, name in enumerate(named)
        )
        batching = find_batching(
            functools.partial(run, example_probe),
            replace(tried, outputs=outputs),
            watched.batch_norm,
            _two_batches(tried, samples if sample_only else ()),
            are_chosen=bool(output_names),
        )
    dtypes = [dtype_name(value.dtype) for value in flatten(output).values()]
    outputs = tuple(
        replace(spec, dtype=kind, view=view if VIEWS.get(view) == kind else "")
        for spec, kind, view in zip(outputs, dtypes, chosen_outputs.views, strict=True)
    )
    return Reference(
        signature=replace(signature, outputs=outputs, batching=batching),
        example=example,
        cases=cases,
        plan=chosen,
        original=original,
        model=lowered,
        found=found,
        samples=tuple(samples),
        is_lowered=lowered is not original,
        is_double=lowered is original and watched.precisions == {torch.float64},
        keys=chosen_outputs.keys,
        probabilities=probabilities,
        warnings=(
            *chosen_outputs.notes,
            *watched.warnings(),
            *_plain_tensor_warnings(original),
            *([_only_samples(cases.probes)] if sample_only else []),
        ),
    )


def _check_values(signature: Signature) -> None:
    """Refuse stated values that a lower precision does not hold."""
    for spec in signature.inputs:
        if spec.values and (problem := spec.values.problem(spec.dtype, ends_of(signature.dims))):
            raise UsageError(f'--dtype: the values of input "{spec.name}": {problem}')


def _only_samples(probes: Sequence[Probe]) -> str:
    count = len(probes)
    return (
        f"compared on samples alone, {count} case{'s' if count > 1 else ''}: what the artifact "
        "does on other values and sizes is not proven, and `modelyard verify` has no samples to "
        "repeat it"
    )


def _check_eval_mode(model: nn.Module) -> None:
    if left := in_train_mode(model):
        raise ModelError(
            f"{', '.join(left[:5])} stay in train mode after model.eval(), and in an artifact "
            "would drop values or use the statistics of the batch; expected eval mode: remove the "
            "train() that the class overrides or calls"
        )


def _plain_tensor_warnings(model: nn.Module) -> list[str]:
    return [
        f'"{name}" is a tensor outside the state dict, so its value is the class\'s and not the '
        "checkpoint's; register_buffer() would keep it in both"
        for name in plain_tensors(model)
    ]


def _plan(kept: _Kept, model: nn.Module, tried: Signature, *, quick: bool) -> Plan:
    """Choose what to try, by what runs at both ends of every dim take.

    Args:
        kept: gets what they give: they are cases, too.
        model: whose weights are used at least once for each row; recurrent layers are not counted.
        tried: inputs, with the values of integers.
        quick: as `observe`.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    batch = tried.batch.name if isinstance(tried.batch, Dim) else None
    gflop, size_bytes = [], []
    for sizes in end_sizes(tried):
        probe = Probe("random", sizes)
        inputs = make_case(tried, probe)
        try:
            with count() as counted:
                outputs = kept.outputs(str(probe), probe, inputs)
        # Some models do not run where operators are counted.
        except ModelError:
            counted, outputs = Counted(), kept.outputs(str(probe), probe, inputs)
        arithmetic = max(counted.gflop, 2e-9 * weights * sizes.get(batch or "", 1))
        gflop.append(arithmetic + GFLOP_PER_OPERATOR * counted.operators)
        size_bytes.append(float(sum(tensor.nbytes for tensor in (*inputs, *outputs))))
        del outputs
    return plan(tried, fit_growth(gflop, tried), fit_growth(size_bytes, tried), quick=quick)


def _lower(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy the model into `dtype`; refuse weights that it cannot hold."""
    if dtype in (None, torch.float32):
        return model
    assert dtype is not None
    largest = torch.finfo(dtype).max
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            peak = value[value.isfinite()].abs().max().item() if value.isfinite().any() else 0.0
            if peak > largest:
                raise ModelError(
                    f'weight "{own_name(name)}" holds {peak:.3g}, and {dtype_name(dtype)} ends at '
                    f"{largest:g}: it would overflow to Inf; use --dtype bf16, or keep fp32"
                )
    return copy.deepcopy(model).to(dtype)


def _raised(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Return the inputs as the checkpoint's model takes them: the same values in float32."""
    if dtype is None:
        return tensors
    return tuple(value.float() if value.is_floating_point() else value for value in tensors)


def _lowered(sample: Sample, signature: Signature) -> Tensors:
    return tuple(
        value.to(torch_dtype(spec.dtype))
        for value, spec in zip(sample.inputs, signature.inputs, strict=True)
    )


def _call(model: nn.Module, signature: Signature, probe: Probe, inputs: Tensors) -> Any:
    """Run the model on copies: it may write into its input."""
    try:
        with torch.no_grad():
            return model(*(tensor.clone() for tensor in inputs))
    # The model is the author's code and may fail in any way.
    except Exception as error:
        shown = ", ".join(
            f'"{spec.name}" {type_name(tensor)}'
            for spec, tensor in zip(signature.inputs, inputs, strict=True)
        )
        raise ModelError(
            f"the model cannot take input {shown} at {probe}: {cause(error)}; "
            "change --input to what forward() expects: dtype, shape, range of a dim"
            f"{advice(signature)}"
        ) from error


def _outputs(
    model: nn.Module,
    signature: Signature,
    probe: Probe,
    inputs: Tensors,
    dtype: torch.dtype | None,
) -> Tensors:
    """Run the checkpoint's model, on its own device, and give its outputs on the CPU."""
    device = next((value.device for value in model.state_dict().values()), torch.device("cpu"))
    with full_precision(device):
        output = _call(model, signature, probe, _to(_raised(inputs, dtype), device))
    return tuple(_alone(tensor.cpu()) for tensor in flatten(output).values())


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that keeps no larger one in memory, whose part it is."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _check_repeats(
    names: Sequence[str],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    unsteady: str,
) -> None:
    """Refuse a model that gives two answers to one input: there is nothing to agree with."""
    if len(first) != len(second):
        raise ModelError(
            f"the model gives {len(first)} outputs in one run and {len(second)} in the next on one "
            f"input; expected the same: {unsteady}"
        )
    for name, one, two in zip(names, first.values(), second.values(), strict=True):
        if one.shape != two.shape or one.dtype != two.dtype:
            raise ModelError(
                f'output "{name}" is {type_name(one)} in one run and {type_name(two)} in the next '
                f"on one input; expected the same: {unsteady}"
            )
        # CUDA may add in another order each time; a CPU with a fixed number of threads does not.
        allowed = 1e-5 if one.is_cuda else 0.0
        if not torch.allclose(one, two, rtol=0.0, atol=allowed, equal_nan=True):
            apart = (one.double() - two.double()).abs().max().item()
            raise ModelError(
                f'output "{name}" differs by {apart:.1e} between two runs on one input; expected '
                f"the same values: {unsteady}"
            )


def _unsteady(watched: Watched, sizes: Mapping[str, int]) -> str:
    """Return what to change so that a model repeats.

    Args:
        watched: what it did on the example.
        sizes: of the example's dims.
    """
    for operator, drawn in watched.random.items():
        if "dropout" in operator or "bernoulli" in operator:
            return f"remove what is random in forward(){drawn.place}: {operator}"
        names = {size: name for name, size in sizes.items()}
        dims = ",".join(str(names.get(size, size)) for size in drawn.shape)
        return (
            f"forward() draws random numbers{drawn.place} ({operator}); take them as an argument "
            f"instead, noise for example, and add --input 'noise:{drawn.dtype}[{dims}]', so that "
            "who calls the artifact draws them, from a seed of their own"
        )
    return (
        "remove what is random in forward() (dropout with training=True, torch.rand) or what it "
        "remembers from call to call"
    )


def _remember(case: Case) -> tuple[_Seen, ...]:
    return tuple(
        _Seen(tensor.dtype, tuple(tensor.shape), _has_finite(tensor)) for tensor in case.outputs
    )


def _has_finite(tensor: Tensor) -> bool:
    return any(bool(part.isfinite().any()) for part in split(tensor))


def _describe(
    name: str, seen: Sequence[_Seen], probes: Sequence[Probe], dims: Mapping[str, Dim]
) -> TensorSpec:
    """Find an output's dtype and shape, and which input dim each varying size follows."""
    kinds = sorted({f"{dtype_name(case.dtype)} with {len(case.shape)} dims" for case in seen})
    dtype = dtype_name(seen[0].dtype)
    if len(kinds) > 1 or dtype not in DTYPES:
        raise ModelError(
            f'output "{name}" is {" or ".join(kinds)}; expected one of {", ".join(DTYPES)} '
            "and the same number of dims for every input"
        )
    if not any(case.has_finite for case in seen):
        raise ModelError(
            f'output "{name}" has no finite value on any of {len(seen)} inputs, so '
            "nothing can be compared; look for NaN in the checkpoint's weights"
        )
    axes = zip(*(case.shape for case in seen), strict=True)
    shape = tuple(
        _describe_axis(f"{name}_{axis}", sizes, probes, dims) for axis, sizes in enumerate(axes)
    )
    return TensorSpec(name, dtype, shape)


def _describe_axis(
    name: str, sizes: Sequence[int], probes: Sequence[Probe], dims: Mapping[str, Dim]
) -> Size:
    if len(set(sizes)) == 1:
        return sizes[0]
    for dim in dims.values():
        if list(sizes) == [probe.sizes[dim.name] for probe in probes]:
            return dim
    return Dim(name)


def _to(tensors: Tensors, device: torch.device) -> Tensors:
    return tuple(tensor.to(device) for tensor in tensors)


# -- whether requests may share a batch: each row's output must depend on that row alone ---------


def find_batching(
    run: Callable[[Tensors], Tensors],
    signature: Signature,
    batch_norm: Sequence[str],
    batches: tuple[Tensors, Tensors] | None,
    *,
    are_chosen: bool = False,
) -> Batching:
    """Compare a row inside batches of different neighbours, and alone.

    Args:
        run: the checkpoint's model.
        signature: inputs and outputs.
        batch_norm: places that normalise by the batch, which explain why rows mix.
        batches: two of one size, in which no row is the same; None where samples have none.
        are_chosen: whether the outputs are those that were asked for: else others may do.
    """
    batch = signature.batch
    if not isinstance(batch, Dim):
        name = signature.inputs[0].name
        return Batching(False, f'the first dim of input "{name}" is fixed to {batch}')
    for spec in signature.inputs:
        if reason := why_no_rows(spec, batch):
            return Batching(False, reason)

    def refused(reasons: Mapping[str, str]) -> Batching:
        others = [spec.name for spec in signature.outputs if spec.name not in reasons]
        keep = "" if are_chosen else "".join(f" --output {name}" for name in others)
        return Batching(False, next(iter(reasons.values())) + (f"; try{keep}" if keep else ""))

    if shapes := _shapes_apart(signature, batch):
        return refused(shapes)
    if batches is None:
        return Batching(
            False, "no two rows of the samples could change places, so whether rows mix is unknown"
        )
    mixed: dict[str, str] = {}
    for name, apart, how in _row_differences(run, signature, batch, *batches):
        if not apart <= _ROW_TOLERANCE:
            why = (
                f"; batch-norm uses the statistics of its batch{batch_norm[0]}"
                if batch_norm
                else ""
            )
            amount = f"by {apart:.1e}" if math.isfinite(apart) else "its shape or becomes NaN"
            mixed.setdefault(name, f'a row of output "{name}" changes {amount} {how}{why}')
    if mixed:
        return refused(mixed)
    return Batching(True, "a row gives the same alone and beside any other rows")


def _shapes_apart(signature: Signature, batch: Dim) -> dict[str, str]:
    """Return which outputs do not hold one row per request, and why."""
    reasons = {}
    for spec in signature.outputs:
        if not spec.shape or spec.shape[0] != batch:
            reasons[spec.name] = (
                f'output "{spec.name}" has no dim "{batch.name}" in front, so no row per request'
            )
        elif batch in spec.shape[1:]:
            reasons[spec.name] = f'output "{spec.name}" has rows as long as the batch'
    return reasons


def _two_batches(signature: Signature, samples: Sequence[Sample]) -> tuple[Tensors, Tensors] | None:
    """Return two batches of one size and of other rows: made up, or of samples where there are."""
    batch = signature.batch
    if not isinstance(batch, Dim):
        return None
    size = batch.at_least(_ROWS)
    if samples:
        pair = two_batches(samples, signature, size)
        return pair and (_lowered(pair[0], signature), _lowered(pair[1], signature))
    probe = Probe("random", {**example_sizes(signature), batch.name: size})
    return make_inputs(signature, probe, seed=1), make_inputs(signature, probe, seed=2)


def _row_differences(
    run: Callable[[Tensors], Tensors],
    signature: Signature,
    batch: Dim,
    rows: Tensors,
    others: Tensors,
) -> list[tuple[str, float, str]]:
    """Measure per output how much one row changes: (output, scaled difference, when)."""
    alone = run(rows)
    differences: list[tuple[str, float, str]] = []
    for row in (0, len(rows[0]) - 1):
        mixed = run(tuple(_replace_others(a, b, row) for a, b in zip(rows, others, strict=True)))
        differences += _measure(
            signature.outputs, alone, mixed, row, "with the other rows of its batch"
        )
    if batch.min == 1:
        single = run(tuple(tensor[:1] for tensor in rows))
        differences += _measure(signature.outputs, alone, single, 0, "between alone and in a batch")
    return differences


def _measure(
    specs: Sequence[TensorSpec],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    row: int,
    how: str,
) -> list[tuple[str, float, str]]:
    return [
        (spec.name, float(compare(one[row : row + 1], two[row : row + 1])["scaled"]), how)
        for spec, one, two in zip(specs, before, after, strict=True)
    ]


def _replace_others(tensor: Tensor, others: Tensor, row: int) -> Tensor:
    """Keep one row of `tensor` and take all others from `others`."""
    mixed = others.clone()
    mixed[row] = tensor[row]
    return mixed
