"""The options of an explanation: query parameters of the API, options of `modelyard explain`."""

from collections.abc import Mapping
from typing import NamedTuple


class Option(NamedTuple):
    """What a value is read as on a command line, what it means, and what it may be."""

    type: type[str | int | float | bool]
    text: str
    choices: tuple[str, ...] = ()
    """All that it may be; empty where that is not a list."""
    limits: tuple[int, int] | None = None
    """Of a whole number: the lowest and the highest."""
    examples: tuple[str, ...] = ()
    """Some of what it may be, where that is not a list."""


EXPLAIN_OPTIONS: Mapping[str, Option] = {
    "method": Option(
        str,
        "How it is explained; integrated_gradients without it.",
        (
            *("integrated_gradients", "layer_integrated_gradients", "saliency"),
            *("input_x_gradient", "smoothgrad", "gradient_shap", "occlusion"),
            *("feature_ablation", "kernel_shap"),
        ),
    ),
    "output_name": Option(
        str, "Which output of the model; several with commas between. That of predictions without."
    ),
    "target": Option(
        str,
        "Class index, label, `predicted`, `top-3`, a place such as `3,7`, or `sum:LABEL`, all "
        "numbers of a class in the region.",
        examples=("predicted", "top-2", "top-3", "0", "sum:0"),
    ),
    "against": Option(
        str, "Another target: why the one and not the other is explained.", examples=("1",)
    ),
    "region": Option(
        str,
        "Where in the output: `START,END`, `LEFT,TOP,RIGHT,BOTTOM`, `predicted`, or a mask as a "
        "segmentation answers.",
        examples=("predicted", "0,5", "0,0,32,32"),
    ),
    "output": Option(
        str,
        "What of the target; logit, the model's own number, without it.",
        ("logit", "probability"),
    ),
    "baseline": Option(
        str,
        "zero, black, white, mean, blur, noise, pad, or `file:NAME` of the archive.",
        examples=("zero", "black", "white", "mean", "blur", "noise", "pad"),
    ),
    "n_steps": Option(int, "Points between baseline and input, used exactly.", limits=(1, 1000)),
    "tolerance": Option(float, "Largest error; steps or draws are added until it is met."),
    "max_steps": Option(int, "Where adding steps ends.", limits=(10, 7290)),
    "n_samples": Option(int, "Random points, drawn exactly.", limits=(1, 20_000)),
    "max_samples": Option(int, "Where adding random points ends.", limits=(2, 20_000)),
    "noise": Option(float, "Standard deviation, as a share of the input's range."),
    "window": Option(int, "Side of what is replaced at once.", limits=(1, 1024)),
    "stride": Option(int, "By which windows move.", limits=(1, 1024)),
    "layer": Option(str, "Where layer_integrated_gradients looks, as the checkpoint names it."),
    "seed": Option(int, "Of everything random.", limits=(0, 2**32 - 1)),
    "internal_batch_size": Option(
        int, "Points that share a pass; by memory without it.", limits=(1, 1024)
    ),
    "aggregate": Option(
        str, "Whether an image's channels or a token's embedding are summed.", ("none", "sum")
    ),
    "format": Option(
        str,
        "What is answered: numbers, a picture or a page. The Accept header asks for them too.",
        ("json", "png", "html"),
    ),
    "errors": Option(bool, "`true` adds how far off each value may be."),
    "check": Option(
        bool, "`true` says how far the output falls without the top tenth of the features."
    ),
    "quality": Option(bool, "`true` measures infidelity, sensitivity and curves of removal too."),
}
