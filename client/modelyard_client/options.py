"""The options of an explanation, with their types. docs/explain.md says what each does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

Method = Literal[
    "integrated_gradients",
    "layer_integrated_gradients",
    "layer_grad_cam",
    "guided_grad_cam",
    "deep_lift",
    "saliency",
    "input_x_gradient",
    "smoothgrad",
    "gradient_shap",
    "occlusion",
    "feature_ablation",
    "kernel_shap",
    "tree_shap",
]


class ExplainOptions(TypedDict, total=False):
    """What `explain` may be asked; an option that is None is left out.

    `modelyard.base.explain_options` has the same for the server; a test compares them. `format`
    is not among them: what `explain` returns is made of JSON.
    """

    method: Method | None
    output_name: str | Sequence[str] | None
    target: int | str | Sequence[int] | None
    against: int | str | Sequence[int] | None
    region: str | Sequence[int] | None
    output: Literal["logit", "probability"] | None
    baseline: str | None
    n_steps: int | None
    tolerance: float | None
    max_steps: int | None
    budget_ms: int | None
    n_samples: int | None
    max_samples: int | None
    noise: float | None
    window: int | None
    stride: int | None
    layer: str | None
    seed: int | None
    internal_batch_size: int | None
    aggregate: Literal["none", "sum"] | None
    errors: bool | None
    check: bool | None
    quality: bool | None
    change: bool | None
