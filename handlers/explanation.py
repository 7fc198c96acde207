"""A batch and what each of its requests asks for → one explanation per request."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handlers.attribution import METHODS, Attribution, ExplainOptions, class_outputs
from handlers.backends import Artifact, DynamicDim
from handlers.errors import BadInput, HandlerError

CHUNK_ROWS = 8
"""Rows × steps per pass: more gains little and holds more memory."""

SHOWN_LABELS = 10


@dataclass(frozen=True)
class Explanation:
    """Why one input led to one output; numbers as in `Attribution`."""

    options: ExplainOptions
    target: int
    label: str
    probability: float
    """Softmax of the outputs at the target."""
    f_input: float
    f_baseline: float
    sum_attributions: float
    convergence_delta: float
    n_steps: int
    tolerance_met: bool
    attributions: Tensor
    """(*S), on the device that made it."""

    @property
    def relative_delta(self) -> float | None:
        """|delta| as a share of |f(input) − f(baseline)|; None where those are equal."""
        difference = abs(self.f_input - self.f_baseline)
        return abs(self.convergence_delta) / difference if difference else None

    def as_json(self) -> dict[str, Any]:
        """Give the answer's fields; every number is finite."""
        return {
            "method": self.options.method,
            "target": self.target,
            "label": self.label,
            "baseline": self.options.baseline,
            "f_input": self.f_input,
            "f_baseline": self.f_baseline,
            "sum_attributions": self.sum_attributions,
            "convergence_delta": self.convergence_delta,
            "n_steps": self.n_steps,
            "tolerance": self.options.tolerance,
            "tolerance_met": self.tolerance_met,
            "shape": list(self.attributions.shape),
            "attributions": self.attributions.tolist(),
        }


def explain_batch(
    explainer: Artifact,
    inputs: Tensor,
    options: Sequence[ExplainOptions],
    *,
    label: Callable[[int], str],
    baseline: Callable[[str, Tensor], Tensor],
) -> list[Explanation]:
    """Explain inputs (N, *S), one request each; requests that ask for the same share passes.

    Args:
        explainer: a differentiable artifact.
        inputs: as the artifact takes them, on its device.
        options: one per request.
        label: output index → its name.
        baseline: name and inputs → the baseline (1, *S).

    Raises:
        BadInput: a target or baseline that this model does not have.
        NoGradients: see `handlers.attribution`.
    """
    chunk_rows = _chunk_rows(explainer)
    outputs = class_outputs(explainer, inputs, chunk_rows)
    targets = [
        _resolve_target(option.target, row, label)
        for option, row in zip(options, outputs, strict=True)
    ]
    explanations: dict[int, Explanation] = {}
    for rows in _groups(options):
        asked = options[rows[0]]
        attribution = METHODS[asked.method](
            explainer,
            inputs[rows],
            baseline(asked.baseline, inputs).to(inputs),
            torch.tensor([targets[row] for row in rows], device=inputs.device),
            n_steps=asked.n_steps,
            tolerance=asked.tolerance,
            chunk_rows=chunk_rows,
        )
        for place, row in enumerate(rows):
            target = targets[row]
            explanations[row] = Explanation(
                options=options[row],
                target=target,
                label=label(target),
                probability=float(outputs[row].double().softmax(0)[target]),
                **_row(attribution, place),
            )
    return [explanations[row] for row in range(len(options))]


def _row(attribution: Attribution, place: int) -> dict[str, Any]:
    numbers = {
        "f_input": float(attribution.f_input[place]),
        "f_baseline": float(attribution.f_baseline[place]),
        "sum_attributions": float(attribution.sums[place]),
        "convergence_delta": float(attribution.delta[place]),
    }
    wrong = ", ".join(f"{k} = {v}" for k, v in numbers.items() if not math.isfinite(v))
    if wrong:
        raise HandlerError(f"{wrong}; an explanation needs finite outputs and gradients")
    return numbers | {
        "n_steps": int(attribution.n_steps[place]),
        "tolerance_met": bool(attribution.tolerance_met[place]),
        "attributions": attribution.attributions[place],
    }


def _groups(options: Sequence[ExplainOptions]) -> list[list[int]]:
    """Gather the requests that one call of a method can answer together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, option in enumerate(options):
        key = (option.method, option.n_steps, option.tolerance, option.baseline)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _resolve_target(target: str, outputs: Tensor, label: Callable[[int], str]) -> int:
    """Find the output that a request means by an index, a label, or "predicted"."""
    if target == "predicted":
        return int(outputs.argmax())
    count = len(outputs)
    if target.isascii() and target.isdigit() and len(target) <= 9 and int(target) < count:
        return int(target)
    names = [label(index) for index in range(count)]
    if target in names:
        return names.index(target)
    shown = ", ".join(names[:SHOWN_LABELS]) + (", …" if count > SHOWN_LABELS else "")
    raise BadInput(
        f'target is "{target}"; expected predicted, an index from 0 to {count - 1}, '
        f"or a label: {shown}"
    )


def _chunk_rows(explainer: Artifact) -> int:
    """Give how many rows share a pass: no more than the explainer takes at once."""
    shape = explainer.inputs[0].shape
    rows = shape[0] if shape else None
    most = rows.high if isinstance(rows, DynamicDim) else rows
    return CHUNK_ROWS if most is None else min(CHUNK_ROWS, most)
