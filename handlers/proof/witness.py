"""What a model reads and gives for a golden request: recorded with the archive, compared later.

An answer of rounded probabilities does not show whether its model still reads what it read: a
confident classifier says "7" to a picture that was normalised otherwise. Its inputs and its raw
outputs show it.
"""

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelyard.archiver.report import Report
from modelyard.base.scale import Numbers, Scale, one_place
from modelyard.handlers.models.backends import Output, as_tuple, dtype_name, torch_dtype, type_name
from modelyard.handlers.proof.agree import Rule, compare, joint_rules, rule_for

MOST_VALUES = 1 << 14
"""Values of a tensor that are kept: all, or so many at even distances."""
INPUT_TOLERANCE = 1e-4
"""Largest scaled difference of a model's inputs, which decoding alone should not make."""


Call = tuple[Any, Any]
"""Inputs and outputs of one call of a model, as the handler has them."""


def record(calls: Sequence[Call]) -> dict[str, Any] | None:
    """Return the first call as JSON; None where no tensors were seen."""
    tensors = _tensors(calls)
    return tensors and {name: list(map(_record, each)) for name, each in tensors.items()}


def inputs_read(calls: Sequence[Call]) -> list[dict[str, str]]:
    """Return the inputs of the first call as JSON, whole; nothing where no tensors were seen."""
    tensors = _tensors(calls)
    return [
        {"type": type_name(each), "values": b64encode(_bytes(each.detach().cpu())).decode()}
        for each in (tensors["inputs"] if tensors else ())
    ]


def restored(stated: Mapping[str, str]) -> Tensor | None:
    """Return the tensor that was recorded; None where only some of its values were."""
    dtype, _, sizes = stated["type"].rstrip("]").partition("[")
    tensor = torch.empty([int(size) for size in sizes.split(",") if size], dtype=torch_dtype(dtype))
    data = bytearray(b64decode(stated["values"]))
    if len(data) != tensor.nbytes:
        return None
    return torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape) if data else tensor


def describe_difference(
    recorded: Mapping[str, Any], calls: Sequence[Call], report: Report | None
) -> str | None:
    """Return how a model's first call differs from the one that was recorded, or None.

    Args:
        recorded: what `record` returned.
        calls: what the model was seen to do.
        report: report of its export, which says by what its outputs are judged.
    """
    tensors = _tensors(calls)
    if tensors is None:
        return "the handler did not call its model through `inference`, as it did when archived"
    for name, each in tensors.items():
        if len(each) != len(recorded[name]):
            return f"the model has {len(each)} {name}; expected {len(recorded[name])}"
        rules = [Rule(INPUT_TOLERANCE)] * len(each) if name == "inputs" else _rules(report, each)
        for place, stated in enumerate(recorded[name]):
            what = f"{name[:-1]} {place} of the model"
            if difference := _apart(what, stated, each[place], rules[place]):
                return difference
    return None


def _tensors(calls: Sequence[Call]) -> dict[str, tuple[Tensor, ...]] | None:
    """Return the inputs and outputs of the first call; None where they are something else."""
    if not calls:
        return None
    found = dict(zip(("inputs", "outputs"), map(as_tuple, calls[0]), strict=True))
    are_tensors = all(isinstance(one, Tensor) for each in found.values() for one in each)
    return found if are_tensors else None


def nudged(outputs: Output, report: Report | None, seed: int) -> Output:
    """Return outputs moved by as much as the certificate allows, in a direction drawn from a seed.

    What an answer moves by then is what it may differ by elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    given = as_tuple(outputs)
    moved = []
    for tensor, rule in zip(given, _rules(report, given), strict=True):
        if not tensor.is_floating_point() or not tensor.numel():
            moved.append(tensor)
            continue
        numbers = tensor.detach().double().cpu()
        units = torch.from_numpy(_scale(rule, numbers.numpy()).units(numbers.numpy()))
        signs = 2 * torch.randint(0, 2, numbers.shape, generator=generator) - 1
        by = rule.max_error if rule.is_quantized else rule.tolerance
        moved.append((numbers + by * signs * units).to(tensor.dtype).to(tensor.device))
    return moved[0] if isinstance(outputs, Tensor) else tuple(moved)


def _rules(report: Report | None, outputs: Sequence[Tensor]) -> list[Rule]:
    """Return by what each output is judged: two runs of an artifact are two copies of it."""
    parity = report.parity if report else None
    rules = list(joint_rules(parity, parity).values()) if parity else []
    if len(rules) == len(outputs):
        return rules
    return [rule_for(dtype_name(each.dtype)) for each in outputs]


def _scale(rule: Rule, numbers: Numbers) -> Scale:
    fits = rule.scale is not None and rule.scale.fits(numbers.shape)
    return rule.scale if rule.scale is not None and fits else one_place(numbers)


def _record(tensor: Tensor) -> dict[str, Any]:
    values = _values(tensor)
    return {
        "type": type_name(tensor),
        "sha256": hashlib.sha256(_bytes(tensor.detach().cpu())).hexdigest(),
        "values": b64encode(_bytes(values)).decode(),
    }


def _values(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu().flatten()
    return flat[:: -(-len(flat) // MOST_VALUES) or 1].contiguous()


def _bytes(values: Tensor) -> bytes:
    flat = values.flatten().contiguous()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _apart(what: str, stated: Mapping[str, Any], tensor: Tensor, rule: Rule) -> str | None:
    """Return how a tensor differs from what was recorded of it."""
    if (seen := type_name(tensor)) != stated["type"]:
        return f"{what} is {seen}; expected {stated['type']}"
    found = _values(tensor)
    data = bytearray(b64decode(stated["values"]))
    kind = torch_dtype(stated["type"].partition("[")[0])
    if len(data) != found.numel() * kind.itemsize:
        return f"{what} has {found.numel()} values; the archive does not say as many"
    if not data:
        return None
    expected = torch.frombuffer(data, dtype=kind)
    scale = rule.scale
    if scale is not None and scale.fits(tuple(tensor.shape)):
        both = (np.broadcast_to(each, tensor.shape) for each in (scale.centre, scale.spread))
        scale = Scale(*(each.reshape(-1)[:: -(-tensor.numel() // MOST_VALUES)] for each in both))
    measured = rule.merge([compare(expected, found, rule.tolerance, scale)])
    if rule.agrees(measured):
        return None
    share, allowed = measured.scaled, rule.tolerance
    if rule.is_quantized:
        share, allowed = measured.error, rule.max_error
    return (
        f"{what} is {measured.max_abs:.1e} off at most, {share:.1e} of what it varies by; expected "
        f"{allowed:.1e} or less"
    )
