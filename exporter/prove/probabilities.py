"""Which outputs of a checkpoint are probabilities already, by all that it gave in the cases."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from modelyard.archiver.signature import Signature
from modelyard.exporter.errors import ModelError
from modelyard.handlers.proof.bounds import Bounds

STRONG = 1e4
"""By how much floats of an input are made larger: what no sigmoid bounds leaves 0 to 1 then."""


def find_probabilities(
    bounds: Mapping[str, Bounds],
    signature: Signature,
    run: Callable[[tuple[Tensor, ...]], Sequence[Tensor]],
    example: tuple[Tensor, ...],
) -> dict[str, bool]:
    """Return for each output whether its numbers are probabilities; not those that nobody knows.

    Rows that add up to 1 are such. So are numbers between 0 and 1, where they stay there however
    large the floats become that the model reads.

    Args:
        bounds: of the outputs, after all cases.
        signature: the inputs.
        run: the model.
        example: inputs of one case.
    """
    known = {name: each for name, each in bounds.items() if each.is_enough}
    open_questions = [
        name for name, each in known.items() if each.are_chances and not each.are_shares
    ]
    found = {name: each.are_shares for name, each in known.items()}
    if open_questions:
        strong = tuple(
            tensor * STRONG if spec.is_float and spec.values is None else tensor
            for spec, tensor in zip(signature.inputs, example, strict=True)
        )
        is_stronger = any(a is not b for a, b in zip(strong, example, strict=True))
        try:
            given = dict(zip(bounds, run(strong), strict=True)) if is_stronger else {}
        except ModelError:
            given = {}
        for name in open_questions:
            if name in given:
                known[name].see(given[name])
                found[name] = known[name].are_chances
            else:
                del found[name]
    return found
