"""The first submodule at which an artifact leaves the checkpoint's model."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.report import TOLERANCES
from modelyard.exporter.arguments import own_name
from modelyard.exporter.errors import cause
from modelyard.exporter.formats.to_exported_program import quiet
from modelyard.exporter.prove.reference import Case, Reference, raised
from modelyard.handlers.proof.agree import compare

_Seen = dict[str, tuple[Any, Any]]
"""Submodule → (its inputs, its output) in one run, in the order in which they finish."""


def first_difference(artifact: Path, format: str, reference: Reference, case: Case) -> str:
    """Name the submodule whose output differs first, or say why none can be named.

    Submodules inside others finish first, so that the innermost is named.
    """
    finder = _FINDERS.get(format)
    if finder is None:
        return f"where it first differs cannot be had: {format} keeps no submodules"
    try:
        eager = _run_eager(reference, case)
        values = reference.model.state_dict().values()
        dtypes = (each.dtype for each in values if each.is_floating_point())
        most = first_tolerance(next(dtypes, torch.float32))
        for name, difference in finder(artifact, eager, case):
            if difference > most:
                kind = _kind(reference.original, name)
                return f'the first submodule that differs is "{name}"{kind}, by {difference:.1e}'
    # A doctored or half-supported file fails in the loader or the interpreter of its format.
    except Exception as error:
        return f"where it first differs cannot be had: {cause(error)}"
    return "no single submodule differs, only the model as a whole"


def first_tolerance(dtype: torch.dtype) -> float:
    """Return above what a value inside a model is where its outputs start to differ."""
    # Rounding that is within the tolerance at the end is much less at its start.
    return TOLERANCES.get(str(dtype).removeprefix("torch."), 1e-4) / 10


def _kind(model: nn.Module, name: str) -> str:
    kinds = (type(part).__name__ for full, part in model.named_modules() if own_name(full) == name)
    return next((f" ({kind})" for kind in kinds), "")


def _run_eager(reference: Reference, case: Case) -> _Seen:
    """Run the checkpoint's model on the CPU, and keep what goes through each submodule."""
    model = reference.original.cpu()
    with _hooked(model) as seen, torch.no_grad():
        model(*(value.clone() for value in raised(case.inputs, reference.is_lowered)))
    return seen


@contextmanager
def _hooked(model: nn.Module) -> Iterator[_Seen]:
    seen: _Seen = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        seen.setdefault(name, (inputs, output))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if own := own_name(name):
                hook = module.register_forward_hook(functools.partial(keep, own))
                stack.callback(hook.remove)
        yield seen


def _in_program(artifact: Path, eager: _Seen, case: Case) -> Iterator[tuple[str, float]]:
    """Yield back the program's module tree, and hook that too."""
    with quiet(), artifact.open("rb") as file:
        module = torch.export.unflatten(torch.export.load(file))
    with _hooked(module) as seen, torch.no_grad():
        module(*(value.clone() for value in case.inputs))
    for name, (_, output) in eager.items():
        if name in seen:
            yield name, _apart(output, seen[name][1])


def _in_script(artifact: Path, eager: _Seen, case: Case) -> Iterator[tuple[str, float]]:
    """Call each scripted submodule on what the eager one was given."""
    with quiet():
        script = torch.jit.load(str(artifact), map_location="cpu")  # type: ignore[no-untyped-call]
    script.eval()
    scripted = {own_name(name): module for name, module in script.named_modules()}
    for name, (inputs, output) in eager.items():
        if name not in scripted or not all(isinstance(value, Tensor) for value in inputs):
            continue
        with torch.no_grad():
            found = scripted[name](*(value.to(_dtype(script, value)) for value in inputs))
        yield name, _apart(output, found)


def _dtype(module: nn.Module, value: Tensor) -> torch.dtype:
    """Return the dtype that an artifact, of a lower precision perhaps, takes such a value in."""
    floats = [tensor.dtype for tensor in module.parameters() if tensor.is_floating_point()]
    return floats[0] if floats and value.is_floating_point() else value.dtype


def _in_onnx(artifact: Path, eager: _Seen, case: Case) -> Iterator[tuple[str, float]]:
    """Ask onnxruntime for what the last node of each submodule gives."""
    import onnx
    import onnxruntime

    model = onnx.load(artifact)
    last = _last_outputs(model.graph.node)
    wanted = {name: last[name] for name in eager if name in last}
    expose(model, wanted.values())
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]
    feed = {name: value.numpy() for name, value in zip(names, case.inputs, strict=True)}
    found = session.run(list(wanted.values()), feed) if wanted else []
    for name, value in zip(wanted, found, strict=True):
        yield name, _apart(eager[name][1], torch.from_numpy(value))


def expose(model: Any, values: Iterable[str]) -> None:
    """Make values of an ONNX model's graph further outputs of it."""
    import onnx

    known = {value.name for value in model.graph.output}
    for value in dict.fromkeys(values):
        if value not in known:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(value))


def _last_outputs(nodes: Any) -> Mapping[str, str]:
    """Find for each submodule the value that its last node gives."""
    last: dict[str, str] = {}
    for node in nodes:
        scopes = {entry.key: entry.value for entry in node.metadata_props}.get(_SCOPES, "[]")
        # A Python list of names, the last of which is the operator's own.
        for scope in [part.strip("[]'\" ") for part in scopes.split(",")][:-1]:
            if own_name(scope):
                last[own_name(scope)] = node.output[0]
    return last


def _apart(expected: Any, found: Any) -> float:
    """Measure two outputs of a submodule; those of other shapes are compared by the whole later."""
    if isinstance(expected, tuple | list) and expected:
        first = found[0] if isinstance(found, tuple | list) and found else found
        return _apart(expected[0], first)
    are_tensors = isinstance(expected, Tensor) and isinstance(found, Tensor)
    if not are_tensors or expected.shape != found.shape:
        return 0.0
    return float(compare(expected, found.to(expected.device))["scaled"])


_SCOPES = "pkg.torch.onnx.name_scopes"
_FINDERS: Mapping[str, Callable[[Path, _Seen, Case], Iterator[tuple[str, float]]]] = {
    "pt2": _in_program,
    "onnx": _in_onnx,
    "torchscript": _in_script,
}
