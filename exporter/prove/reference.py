"""Run the checkpoint's model eagerly: what every artifact must reproduce."""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.signature import DTYPES, VIEWS, Dim, Signature, Size, TensorSpec, ends_of
from modelyard.archiver.values import Values
from modelyard.base.scale import Scale
from modelyard.exporter.arguments import choose_outputs, flatten, give_outputs, own_name, pick
from modelyard.exporter.errors import ModelError, UsageError, cause
from modelyard.exporter.formats.from_onnx import file_of
from modelyard.exporter.inputs.samples import Sample, choose_example, regroup, rows_of, take_rows
from modelyard.exporter.inputs.tried import advice, find_values
from modelyard.exporter.prove.traits import Rows, Tensors, find_probabilities
from modelyard.exporter.prove.watch import (
    Counted,
    Watched,
    count,
    in_train_mode,
    measure_sensitivity,
    plain_tensors,
    watch,
)
from modelyard.handlers.models.backends import dtype_name, set_precision, torch_dtype, type_name
from modelyard.handlers.proof.agree import ORDINARY_KINDS, OutputScales, compare, rule_for, split
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

# Of the checkpoint's outputs, of all cases together: most models' are below it, and run once.
KEPT_BYTES = 64 * 2**20


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


class Cases:
    """Every probe and sample with what the checkpoint gives for it, made anew whenever it is read.

    By its place: a loop over the cases would hold one while it makes the next. Of the checkpoint's
    outputs, `KEPT_BYTES` are kept and others computed again.

    Args:
        signature: the inputs, with the values of integers.
        run: the checkpoint's model.
    """

    def __init__(self, signature: Signature, run: Run) -> None:
        self.run = run
        self._signature = signature
        self._made: list[tuple[Probe, object, Callable[[], Tensors]]] = []
        """A probe, what the case goes by, and what makes its inputs, for each."""
        self._outputs: dict[object, Tensors] = {}
        self._free_bytes = KEPT_BYTES
        self._moved: dict[int, list[float]] = {}
        self.why: Callable[[Mapping[str, int]], str] = lambda sizes: ""
        """Sizes → the guard of the trace that does not hold there; empty where all do."""
        self.scales = OutputScales()
        """Scales of the outputs, once all cases have run."""

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The sizes and the kind of values of each case."""
        return tuple(probe for probe, *_ in self._made)

    def add(self, probes: Iterable[Probe], samples: Iterable[Sample] = ()) -> None:
        """Try these: probes, whose inputs are made, and samples, whose inputs are a file's."""
        made, signature = self._made, self._signature
        for probe in probes:
            made.append((probe, str(probe), functools.partial(make_case, signature, probe)))
        for sample in samples:
            probe, make = Probe("sample", sample.sizes), functools.partial(_lowered, sample)
            made.append((probe, len(made), functools.partial(make, signature)))

    def add_sizes(self, probes: Iterable[Probe]) -> None:
        """Try these too, unless their sizes are tried already."""
        known = [probe.sizes for probe in self.probes if probe.kind in ORDINARY_KINDS]
        self.add(probe for probe in probes if probe.sizes not in known)

    def __iter__(self) -> Iterator[Case]:
        return map(self.__getitem__, range(len(self._made)))

    def __getitem__(self, place: int) -> Case:
        probe, name, make = self._made[place]
        inputs = make()
        return Case(probe, inputs, self.outputs(name, probe, inputs))

    def outputs(self, case: object, probe: Probe, inputs: Tensors) -> Tensors:
        """Return what the checkpoint gives; what is equal for two calls has to be the same case."""
        outputs = self._outputs.get(case)
        if outputs is None:
            outputs = self.run(probe, inputs)
            size_bytes = sum(tensor.nbytes for tensor in outputs)
            if size_bytes <= self._free_bytes:
                self._free_bytes -= size_bytes
                self._outputs[case] = outputs
        return outputs

    def sensitivity(self, place: int) -> list[float]:
        """Return per output how far it moves when the model's sums are rounded otherwise."""
        if place not in self._moved:
            case = self[place]
            self._moved[place] = self.moves(case, self.scales.of(case.probe.kind))
        return self._moved[place]

    def moves(self, case: Case, scales: Sequence[Scale]) -> list[float]:
        """Return the same of any case; 0 where the model does not run when it is disturbed."""
        run = functools.partial(self.run, case.probe)
        try:
            return measure_sensitivity(run, case.inputs, case.outputs, scales)
        except ModelError:
            return [0.0] * len(case.outputs)


_Seen = tuple[str, tuple[int, ...], bool]
"""What is remembered of one output of one case: its dtype, its shape, whether it is finite."""


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
    """Integer input without stated values → those that the model was found to take."""
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
    rows: Rows | None = None
    """What finds out of an artifact whether its rows keep apart."""

    def run(self, sample: Sample) -> Tensors:
        """Return what the checkpoint gives for a sample."""
        return self.cases.run(Probe("sample", sample.sizes), _lowered(sample, self.signature))

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
        inputs: what the checkpoint's model takes.
        output_names: names for `choose_outputs`.
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
    in_float32 = inputs if dtype is None else inputs.in_precision("float32")
    found = {} if sample_only else find_values(original, in_float32)
    tried = signature.with_values(found)
    original.to(device)
    with set_precision(device):
        if sample_only:
            chosen_sample = choose_example(samples, signature)
            example_probe = Probe("sample", chosen_sample.sizes)
            example = _to(_lowered(chosen_sample, signature), device)
        else:
            example_probe = Probe("random", example_sizes(signature))
            example = _to(make_inputs(tried, example_probe), device)
        call = (signature, example_probe, raised(example, dtype is not None))
        output = _call(original, *call)
        chosen_outputs = choose_outputs(output, output_names, [i.name for i in signature.inputs])
        original = give_outputs(original, signature, chosen_outputs, output)
        named, output = chosen_outputs.names, pick(output, chosen_outputs.keys)
        watched = watch(original, raised(example, dtype is not None))
        again = flatten(_call(original, *call))
        unsteady = _unsteady(watched, example_probe.sizes)
        moves = _check_repeats(named, flatten(output), again, unsteady)
        lowered = _lower(original, dtype)
        if lowered is not original:
            output = _call(lowered, signature, example_probe, example)

        def run(probe: Probe, tensors: Tensors) -> Tensors:
            values = original.state_dict().values()
            place = next((value.device for value in values), torch.device("cpu"))
            with set_precision(place):
                given = _to(raised(tensors, dtype is not None), place)
                found = flatten(_call(original, signature, probe, given)).values()
            # None may keep a larger tensor in memory, whose part it is.
            return tuple(
                each.clone() if each.untyped_storage().nbytes() > each.nbytes else each
                for each in (tensor.cpu() for tensor in found)
            )

        run_example = functools.partial(run, example_probe)
        cases = Cases(tried, run)
        chosen = ONLY_SAMPLES if sample_only else _plan(cases, original, tried, quick=quick)
        cases.add(chosen.probes, regroup(samples, signature) if sample_only else samples)
        bounds = {name: Bounds() for name in named}
        seen = []
        for case in cases:
            seen.append([_remember(tensor) for tensor in case.outputs])
            for name, given in zip(named, case.outputs, strict=True):
                bounds[name].see(given)
            cases.scales.see(case.probe.kind, case.outputs)
        probabilities = find_probabilities(bounds, signature, run_example, example)
        outputs = tuple(
            _describe(name, [case[place] for case in seen], cases.probes, signature.dims)
            for place, name in enumerate(named)
        )
        gflop = _gflop_of_a_row(chosen, tried.batch, functools.partial(run_example, example))
    dtypes = [dtype_name(value.dtype) for value in flatten(output).values()]
    outputs = tuple(
        replace(spec, dtype=kind, view=view if VIEWS.get(view) == kind else "")
        for spec, kind, view in zip(outputs, dtypes, chosen_outputs.views, strict=True)
    )
    return Reference(
        signature=replace(signature, outputs=outputs),
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
            *moves,
            *watched.warnings(),
            *(
                f'"{name}" is a tensor outside the state dict, so its value is that of the class, '
                "not the checkpoint's; register_buffer() would keep it in both"
                for name in plain_tensors(original)
            ),
            *([_only_samples(cases.probes)] if sample_only else []),
        ),
        rows=Rows(
            replace(tried, outputs=outputs),
            watched.batch_norm,
            _batches(tried, samples if sample_only else ()),
            cases.scales.of(),
            gflop,
            lambda: cases.sensitivity(
                max(i for i, each in enumerate(cases.probes) if each.kind in ORDINARY_KINDS)
            ),
            are_chosen=bool(output_names),
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


def _plan(cases: Cases, model: nn.Module, tried: Signature, *, quick: bool) -> Plan:
    """Choose what to try, by what runs at both ends of every dim take.

    Args:
        cases: keeps what they give: these will be among them.
        model: model whose weights are used at least once for each row; recurrent layers are not
            counted.
        tried: inputs, with the values of integers.
        quick: whether to try few probes.
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    batch = tried.batch.name if isinstance(tried.batch, Dim) else None
    gflop, size_bytes = [], []
    for sizes in end_sizes(tried):
        probe = Probe("random", sizes)
        inputs = make_case(tried, probe)
        try:
            with count() as counted:
                outputs = cases.outputs(str(probe), probe, inputs)
        # Some models do not run where operators are counted.
        except ModelError:
            counted, outputs = Counted(), cases.outputs(str(probe), probe, inputs)
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
        if isinstance(value, Tensor) and value.is_floating_point() and value.isfinite().any():
            peak = value[value.isfinite()].abs().max().item()
            if peak > largest:
                raise ModelError(
                    f'weight "{own_name(name)}" holds {peak:.3g}, and {dtype_name(dtype)} ends at '
                    f"{largest:g}: it would overflow to Inf; use --dtype bf16, or keep fp32"
                )
    return copy.deepcopy(model).to(dtype)


def raised(tensors: Tensors, is_lowered: bool) -> Tensors:
    """Return the inputs as the checkpoint's model takes them: the same values in float32."""
    if not is_lowered:
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


def _check_repeats(
    names: Sequence[str], first: Mapping[str, Tensor], second: Mapping[str, Tensor], unsteady: str
) -> list[str]:
    """Refuse a model that gives two answers to one input: there is nothing to agree with.

    Returns:
        which outputs move, by less than an artifact may be apart.
    """
    moves = []
    differ = "in the next on one input; expected the same: " + unsteady
    if len(first) != len(second):
        seen = f"the model gives {len(first)} outputs in one run and {len(second)}"
        raise ModelError(f"{seen} {differ}")
    for name, one, two in zip(names, first.values(), second.values(), strict=True):
        if one.shape != two.shape or one.dtype != two.dtype:
            seen = f'output "{name}" is {type_name(one)} in one run and {type_name(two)}'
            raise ModelError(f"{seen} {differ}")
        found = compare(one.cpu(), two.cpu())
        if found["scaled"] > rule_for(dtype_name(one.dtype)).tolerance:
            raise ModelError(
                f'output "{name}" differs by {found["max_abs"]:.1e} between two runs on one input; '
                f"expected the same values: {unsteady}"
            )
        if found["max_abs"]:
            moves.append(
                f'output "{name}" moves by {found["max_abs"]:.1e} between two runs on one input, '
                "which is within the tolerance"
            )
    return moves


def _unsteady(watched: Watched, sizes: Mapping[str, int]) -> str:
    """Return what to change so that a model repeats.

    Args:
        watched: what it did on the example.
        sizes: those of the example's dims.
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
    for (what, place), name in watched.reads.items():
        return f"forward() reads {what}{place} ({name}); take that as an input"
    for each in watched.kept:
        return f"forward() changes {each} in every call; take it as an input and give it back"
    return (
        "remove what is random in forward() (dropout with training=True, torch.rand) or what it "
        "remembers from call to call"
    )


def _remember(tensor: Tensor) -> _Seen:
    has_finite = any(bool(part.isfinite().any()) for part in split(tensor))
    return dtype_name(tensor.dtype), tuple(tensor.shape), has_finite


def _describe(
    name: str, seen: Sequence[_Seen], probes: Sequence[Probe], dims: Mapping[str, Dim]
) -> TensorSpec:
    """Find an output's dtype and shape, and which input dim each varying size follows."""
    kinds = sorted({f"{dtype} with {len(shape)} dims" for dtype, shape, _ in seen})
    dtype = seen[0][0]
    if len(kinds) > 1 or dtype not in DTYPES:
        raise ModelError(
            f'output "{name}" is {" or ".join(kinds)}; expected one of {", ".join(DTYPES)} '
            "and the same number of dims for every input"
        )
    if not any(has_finite for *_, has_finite in seen):
        raise ModelError(
            f'output "{name}" has no finite value on any of {len(seen)} inputs, so '
            "nothing can be compared; look for NaN in the checkpoint's weights"
        )
    shape: list[Size] = []
    for axis, sizes in enumerate(zip(*(shape for _, shape, _ in seen), strict=True)):
        same = [dim for dim in dims.values() if sizes == tuple(p.sizes[dim.name] for p in probes)]
        varies = len(set(sizes)) > 1
        shape.append(next(iter(same), Dim(f"{name}_{axis}")) if varies else sizes[0])
    return TensorSpec(name, dtype, tuple(shape))


def _to(tensors: Tensors, device: torch.device) -> Tensors:
    return tuple(tensor.to(device) for tensor in tensors)


def _gflop_of_a_row(plan: Plan, batch: Size | None, run: Callable[[], Tensors]) -> float:
    """Return about how much arithmetic a row takes, of an example where no probe was counted."""
    if plan.probes and isinstance(batch, Dim):
        return plan.gflop / sum(probe.sizes[batch.name] for probe in plan.probes)
    with suppress(ModelError):  # some models do not run where operators are counted
        with count() as counted:
            outputs = run()
        return counted.gflop / max(1, *(len(each) for each in outputs if each.ndim))
    return 0.0


def _batches(
    signature: Signature, samples: Sequence[Sample]
) -> Callable[[int, int], Tensors] | None:
    """Return what gives batches of ordinary rows: made up, or of samples where there are."""
    batch = signature.batch
    if not isinstance(batch, Dim):
        return None
    sizes = example_sizes(signature)
    if not samples:
        return lambda size, number: make_inputs(
            signature, Probe("random", {**sizes, batch.name: size}), seed=1 + number
        )
    if (rows := rows_of(samples, signature)) is None:
        return None
    return lambda size, number: _lowered(take_rows(rows, batch, size, first=number), signature)
