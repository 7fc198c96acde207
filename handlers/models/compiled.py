"""What `model-config.yaml` may ask for beside running an artifact as it is.

    pt2: {compile: {enable: true, backend: inductor, mode: max-autotune}}
    onnx: {tensorrt: true}

The first compiles a pt2 artifact with `torch.compile` when a worker loads it; `backend` and `mode`
are torch's, and the backend `tensorrt` is Torch-TensorRT's. The compiled program is run beside the
artifact and judged by the rule of every artifact before it answers anybody. Explanations go through
the artifact itself. The second lets ONNX Runtime's TensorRT provider run an ONNX artifact.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from modelyard.base.nearest import did_you_mean
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import Artifact, dtype_name
from modelyard.handlers.proof.agree import compare, disagreement, rule_for
from modelyard.handlers.proof.agree import run as run_in_full

_OPTIONS = ("backend", "mode")
_TENSORRT = ("tensorrt", "torch_tensorrt")
_FORM = "pt2: {compile: {enable: true, backend: inductor, mode: default}}"


def compile_options(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read `pt2.compile` of model-config.yaml: what `torch.compile` is given; None where it is off.

    Raises:
        LoadError: it has another form.
    """
    section = config.get("pt2")
    if section is None:
        return None
    stated = section.get("compile") if isinstance(section, dict) else None
    near = _near(section, ("compile",)) or _near(stated, ("enable", *_OPTIONS))
    if (
        near
        or not isinstance(stated, dict)
        or not isinstance(stated.get("enable"), bool)
        or set(section) != {"compile"}
    ):
        raise LoadError(f"pt2 in model-config.yaml is {section!r}; expected as in {_FORM}{near}")
    options = {name: value for name, value in stated.items() if name != "enable"}
    for name, value in options.items():
        if name not in _OPTIONS or not isinstance(value, str):
            raise LoadError(
                f"pt2.compile.{name} in model-config.yaml is {value!r}; expected as in {_FORM}"
            )
    return options if stated["enable"] else None


def runs_on_tensorrt(config: Mapping[str, Any]) -> bool:
    """Read `onnx.tensorrt` of model-config.yaml.

    Raises:
        LoadError: it is not true or false, or `onnx` holds something else.
    """
    section = config.get("onnx", {})
    wanted = section.get("tensorrt", False) if isinstance(section, dict) else None
    if not isinstance(wanted, bool) or set(section) - {"tensorrt"}:
        raise LoadError(
            f"onnx in model-config.yaml is {section!r}; expected onnx: {{tensorrt: true}}"
            + _near(section, ("tensorrt",))
        )
    return wanted


def _near(section: Any, known: Sequence[str]) -> str:
    """Return what is likely meant by the first key that is unknown, for messages."""
    unknown = [key for key in section if key not in known] if isinstance(section, dict) else []
    return did_you_mean(str(unknown[0]), known) if unknown else ""


def compile_artifact(
    artifact: Artifact, options: Mapping[str, Any], examples: Iterable[Sequence[Tensor]]
) -> Artifact:
    """Compile a pt2 artifact, for every size of its dynamic dimensions.

    Args:
        artifact: stays as it is, and explains.
        options: `torch.compile`'s.
        examples: inputs of the sizes to compile for, on which both must agree.

    Raises:
        LoadError: it is not a pt2 artifact, cannot be compiled here, or gives something else then.
    """
    if artifact.format != "pt2" or artifact.module is None:
        raise LoadError(
            f"pt2.compile in model-config.yaml: the artifact is {artifact.format}; expected pt2, "
            "as `modelyard export --format pt2` writes it"
        )
    if options.get("backend") in _TENSORRT:
        _need_tensorrt(artifact.device)
    try:
        run = torch.compile(artifact.module, dynamic=True, **options)
        compiled = Artifact(artifact.format, run, artifact.inputs, artifact.device)
        compiled.file = artifact.file
        measured = [_measure(artifact, compiled, inputs) for inputs in examples]
    except LoadError:
        raise
    # A backend fails in whatever way it likes: no compiler, an operator that it does not have.
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise LoadError(
            f"torch.compile({dict(options)}) fails: {type(error).__name__}: {first}; leave "
            "pt2.compile out of model-config.yaml, or ask `modelyard doctor` for the compiler"
        ) from error
    for output, case in enumerate(measured):
        if case is not None:
            raise LoadError(
                f"what torch.compile makes differs from the artifact: {case} ({output})"
            )
    return compiled


def _measure(artifact: Artifact, compiled: Artifact, inputs: Sequence[Tensor]) -> str | None:
    """Run both on the same inputs; return how they differ, None where they agree."""
    sizes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    with torch.inference_mode():  # as requests will be answered: another mode compiles again
        pairs = zip(run_in_full(artifact, inputs), run_in_full(compiled, inputs), strict=True)
    for place, (expected, found) in enumerate(pairs):
        rule = rule_for(dtype_name(expected.dtype))
        case = compare(expected, found, rule.tolerance)
        if text := disagreement(str(place), rule, [case], [f"inputs {sizes}"]):
            return text
    return None


def _need_tensorrt(device: torch.device) -> None:
    """Import Torch-TensorRT, which makes its backend known to torch."""
    if device.type != "cuda":
        raise LoadError("TensorRT needs a CUDA device, and this worker runs on the CPU")
    try:
        import_module("torch_tensorrt")
    except ImportError as error:
        raise LoadError(
            "the backend tensorrt needs Torch-TensorRT: pip install torch-tensorrt"
        ) from error
