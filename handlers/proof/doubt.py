"""Whether it is known what a model's numbers are, before an archive that takes them for logits."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from modelyard.archiver.signature import Signature
from modelyard.handlers.base import Classifier, Inputs
from modelyard.handlers.models.backends import Output, as_output, as_tuple, main_output
from modelyard.handlers.proof.bounds import LEAST_ROWS, Bounds
from modelyard.handlers.proof.probes import Probe, make_inputs

_SCALES = (1.0, -1.0, 0.1, -4.0, 4.0, 1e2, -1e2, 1e4)
_WAYS_OUT = (
    "say `handler: {output_kind: probabilities}` in model-config.yaml, or output_kind: logits if "
    "they are not probabilities"
)


def doubt(handler: Classifier, seen: Sequence[Inputs]) -> str | None:
    """Return why a handler must not take a model's numbers for logits unasked; None where it may.

    It may where the archive says what they are, or a number is below 0 or above 1. What is tried
    are the examples' inputs, made weaker and stronger, and without examples made-up ones.

    Args:
        handler: loaded.
        seen: inputs of the examples' calls.
    """
    if handler.knows_kind or handler.output_kind != "logits":
        return None
    bounds = Bounds()
    for inputs in _variants(seen) if seen else _made_up(handler):
        try:
            output: Output = handler.inference(inputs)
        # Whatever the model raises on values that nobody sends says nothing.
        except Exception:
            continue
        bounds.see(main_output(output))
    if bounds.are_others:
        return None
    if bounds.is_enough:
        sums = " that add up to 1" if bounds.are_shares else ""
        return (
            f"the model gives numbers between 0 and 1{sums} whatever it reads, and the handler "
            f"would take them for logits: {_WAYS_OUT}"
        )
    return (
        "nothing says whether the model's numbers are logits or probabilities already, which "
        f"`modelyard export` finds out: give an --example, or {_WAYS_OUT}"
    )


def _variants(seen: Sequence[Inputs]) -> Iterator[Inputs]:
    for inputs in seen:
        tensors = as_tuple(inputs)
        has_floats = any(map(Tensor.is_floating_point, tensors))
        for scale in _SCALES if has_floats else _SCALES[:1]:
            yield as_output([t * scale if t.is_floating_point() else t for t in tensors])


def _made_up(handler: Classifier) -> Iterator[Inputs]:
    """Yield inputs of the sizes that the artifact states; none where it states too little."""
    signature = handler.report.tried if handler.report else Signature(handler.inputs)
    if not signature.inputs or not all(spec.dtype for spec in signature.inputs):
        return
    sizes = {name: dim.at_least(2) for name, dim in signature.dims.items()}
    for seed in range(LEAST_ROWS):
        for kind in ("random", "large", "negative"):
            yield as_output(make_inputs(signature, Probe(kind, sizes), seed=seed))
