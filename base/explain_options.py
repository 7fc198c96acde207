"""The options of an explanation: query parameters of the API, options of `modelyard explain`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from modelyard.base.plugins import registered


class WrongOption(ValueError):
    """There is no such option, or it does not take the value; the message says what it takes."""


class Option(NamedTuple):
    """What a value is read as on a command line, what it means, and what it may be."""

    type: type[str | int | float | bool]
    text: str
    choices: tuple[str, ...] = ()
    """All that it may be; empty where that is not a list."""
    limits: tuple[int, int] | None = None
    """Lowest and highest value of a whole number."""
    examples: tuple[str, ...] = ()
    """Some of what it may be, where that is not a list."""


EXPLAIN_OPTIONS: Mapping[str, Option] = {
    "method": Option(
        str,
        "How it is explained; integrated_gradients without it, tree_shap of trees.",
        ("integrated_gradients", "feature_ablation", "occlusion", *registered("methods")),
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
    "budget_ms": Option(
        int,
        "Milliseconds within which points or draws are added, from the first one on.",
        limits=(1, 600_000),
    ),
    "n_samples": Option(int, "Random points, drawn exactly.", limits=(1, 20_000)),
    "max_samples": Option(int, "Where adding random points ends.", limits=(2, 20_000)),
    "noise": Option(float, "Standard deviation, as a share of what a value varies by."),
    "window": Option(int, "Side of what is replaced at once.", limits=(1, 1024)),
    "stride": Option(int, "By which windows move.", limits=(1, 1024)),
    "layer": Option(
        str, "Where the methods of layers and Grad-CAM look, as the checkpoint names it."
    ),
    "seed": Option(int, "Of everything random.", limits=(0, 2**32 - 1)),
    "internal_batch_size": Option(
        int, "Points that share a pass; by memory without it.", limits=(1, 1024)
    ),
    "aggregate": Option(
        str, "Whether an image's channels or a token's embedding are summed.", ("none", "sum")
    ),
    "format": Option(
        str,
        "What is answered: numbers, a picture, a page, a transparent picture to lay over the one "
        "that was sent, or numbers in NumPy's file format. The Accept header asks for them too.",
        ("json", "png", "html", "overlay", "npy"),
    ),
    "errors": Option(bool, "`true` adds how far off each value may be."),
    "check": Option(
        bool, "`true` says how far the output falls without the top tenth of the features."
    ),
    "quality": Option(bool, "`true` measures infidelity, sensitivity and curves of removal too."),
    "change": Option(
        bool, "`true` looks for the smallest change of the row that makes the prediction `against`."
    ),
}


def read_option(name: str, text: str) -> str | int | float | bool:
    """Read a value as a query spells it.

    Raises:
        WrongOption: its message states what is allowed.
    """
    option = EXPLAIN_OPTIONS.get(name)
    if option is None:
        known = ", ".join(EXPLAIN_OPTIONS)
        raise WrongOption(f'unknown parameter "{name}"; expected some of {known}')
    if option.type is bool:
        return _one_of(name, text, ("true", "false")) == "true"
    if option.type is float:
        return _share(name, text)
    if option.limits is not None:
        return _whole(name, text, *option.limits)
    if name == "baseline":
        is_file = text.startswith("file:") and text != "file:"
        return text if is_file else _one_of(name, text, (*option.examples, "file:NAME"))
    return _one_of(name, text, option.choices) if option.choices else text


def check_query(pairs: Iterable[tuple[str, str]]) -> None:
    """Refuse what no explanation of ours takes, before anything is waited for.

    Args:
        pairs: pairs of a query, in its order.

    Raises:
        WrongOption: as `read_option`, or an option is there twice.
    """
    seen = set()
    for name, text in pairs:
        read_option(name, text)
        if name in seen:
            raise WrongOption(f"{name} is given twice; expected it once")
        seen.add(name)


def _one_of(name: str, text: str, allowed: Sequence[str]) -> str:
    if text not in allowed:
        raise WrongOption(f'{name} is "{text}"; expected one of {", ".join(allowed)}')
    return text


def _whole(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and low <= int(text) <= high):
        raise WrongOption(f'{name} is "{text}"; expected a whole number from {low} to {high}')
    return int(text)


def _share(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise WrongOption(f'{name} is "{text}"; expected a number above 0 and at most 1')
    return value
