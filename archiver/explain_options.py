"""The options of an explanation: query parameters of the API, options of `modelyard explain`."""

from collections.abc import Mapping
from typing import NamedTuple


class Option(NamedTuple):
    """What a value is read as on a command line, and what it means."""

    type: type[str | int | float | bool]
    text: str


EXPLAIN_OPTIONS: Mapping[str, Option] = {
    "method": Option(
        str,
        "integrated_gradients (default), layer_integrated_gradients, saliency, input_x_gradient, "
        "smoothgrad, gradient_shap, occlusion, feature_ablation or kernel_shap.",
    ),
    "target": Option(str, "Class index, label, `predicted`, `top-3`, or a place such as `3,7`."),
    "output": Option(str, "What of the target: `logit` (default) or `probability`."),
    "baseline": Option(
        str, "zero, black, white, mean, blur, noise, pad, or `file:NAME` of the archive."
    ),
    "n_steps": Option(int, "Points between baseline and input, used exactly."),
    "tolerance": Option(float, "Largest error; steps or draws are added until it is met."),
    "max_steps": Option(int, "Where adding steps ends."),
    "n_samples": Option(int, "Random points, drawn exactly."),
    "max_samples": Option(int, "Where adding random points ends."),
    "noise": Option(float, "Standard deviation, as a share of the input's range."),
    "window": Option(int, "Side of what is replaced at once."),
    "stride": Option(int, "By which windows move."),
    "layer": Option(str, "Where layer_integrated_gradients looks, as the checkpoint names it."),
    "seed": Option(int, "Of everything random."),
    "internal_batch_size": Option(int, "Points that share a pass; by memory without it."),
    "aggregate": Option(str, "`none`, or `sum` over an image's channels or a token's embedding."),
    "format": Option(str, "json, png or html; the Accept header asks for them too."),
    "errors": Option(bool, "`true` adds how far off each value may be."),
    "quality": Option(bool, "`true` measures infidelity and sensitivity too."),
}
