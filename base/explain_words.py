"""What an explanation says of itself, in words and numbers that people read."""

from collections.abc import Mapping
from typing import Any

Answer = Mapping[str, Any]
"""The fields of an explanation, as JSON has them."""

EXACT = 1e-5
"""Shares up to this are rounding, of float32 at least."""

PALE_FROM = 0.01
"""Share of all sizes that is unsure, from which on it is said."""


def number(value: float) -> str:
    """Return three digits of a number: 1234, 12.3, 0.00123."""
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value + 0.0:.3g}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    """Return a number with its sign, but for 0."""
    return f"+{number(value)}" if value > 0 else number(value)


def percent(part: float) -> str:
    """Return a share: 3.1 %, 100 %, 1190 %."""
    value = 100 * part
    return f"{value:.2g} %" if value < 99.5 else f"{float(f'{value:.3g}'):.0f} %"


def chance(probability: float) -> str:
    """Return a probability: 0.998, < 0.001, > 0.999."""
    text = f"{probability:.3f}"
    if text == "0.000" and probability > 0:
        return "< 0.001"
    return "> 0.999" if text == "1.000" and probability < 1 else text


def share(off: float) -> str:
    """Return how far off something is."""
    return "exact" if off <= EXACT else percent(off)


def question(answer: Answer) -> str:
    """Return what is explained: a label is asked for a reason, a number for what makes it."""
    label = answer["label"]
    if answer.get("probability") is not None:
        return f"Why “{label}”?"
    name = answer.get("output_name")
    return f"{name or 'output'} “{label}”"


def baseline(answer: Answer) -> str:
    """Return what an input is compared with."""
    means = answer.get("baseline_means")
    return f"{answer['baseline']}: {means}" if means else str(answer["baseline"])


def way(answer: Answer) -> str:
    """Return where the output came from, and how far."""
    name = "output" if answer.get("probability") is None else answer["output"]
    return (
        f"{name} from {number(answer['f_baseline'])} (baseline {baseline(answer)}) to "
        f"{number(answer['f_input'])}"
    )


def shares(answer: Answer, sums: tuple[float, float]) -> str:
    """Return what speaks for and against the target, behind the way that the output went.

    Args:
        answer: its fields.
        sums: what speaks for the target and what speaks against it, each added up.
    """
    positive, negative = sums
    said = f"{signed(positive)} for, {signed(negative)} against"
    if answer["convergence_delta"] is None:
        return f"{way(answer)}; {said}, which need not add up to that"
    return f"{way(answer)}: {said}"


def error(answer: Answer) -> str:
    """Return how far off the values are, empty where nobody knows."""
    off = answer.get("error")
    if off is None:
        return ""
    return "exact" if off <= EXACT else f"error {percent(off)}"


def delta(answer: Answer) -> str:
    """Return how far off their sum is, empty where a method promises none."""
    off = answer.get("relative_delta")
    if off is None:
        return ""
    return "adds up exactly" if off <= EXACT else f"sum off by {percent(off)}"


def made(answer: Answer) -> str:
    """Return how it was made and how far off it is, in one line."""
    return " · ".join(filter(None, (method(answer), error(answer), delta(answer))))


def notes(answer: Answer, sums: tuple[float, float], thing: str, unsure: float = 0.0) -> list[str]:
    """Return what a reader has to know before believing it, a sentence each.

    Args:
        answer: its fields.
        sums: what speaks for the target and what speaks against it, each added up.
        thing: what has an attribution: a pixel, a word.
        unsure: share of all sizes that is below its own error, and drawn pale.
    """
    found = list(answer.get("warnings", ()))
    found += [answer[name]["summary"] for name in ("check", "change") if answer.get(name)]
    if not any(sums):
        found.append(f"no {thing} changes this output")
    elif answer.get("tolerance_met") is False:
        seen = error(answer) or "error unknown"
        found.append(
            f"less sure than asked for: {seen}, {percent(answer['tolerance'])} were to be met; "
            "allow more points"
        )
    if unsure >= PALE_FROM:
        found.append(f"pale is what is below its own error: {percent(unsure)} of all")
    return found


def method(answer: Answer) -> str:
    """Return how it was made: the method, its layer, and at how many points the model was asked."""
    name = answer["method"].replace("_", " ")
    layer = f" of {answer['layer']}" if answer.get("layer") else ""
    steps = answer["n_steps"]
    return f"{name}{layer}" + (f", {steps} points" if steps > 1 else "")


def model(answer: Answer) -> str:
    """Return which model version it is."""
    return f"{answer.get('model', '')} {answer.get('version', '')}".strip()
