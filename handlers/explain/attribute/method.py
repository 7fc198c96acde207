"""The seam of attribution methods, and of measures of what they made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from modelyard.archiver.explanations import Asked, Explanations
from modelyard.archiver.reference import Range
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    Tensors,
)
from modelyard.handlers.explain.attribute.cut import Cut
from modelyard.handlers.models.backends import Artifact

if TYPE_CHECKING:
    from modelyard.handlers.explain.request.targets import ExplainedModel

Shapes = tuple[tuple[int, ...], ...]

StandIn = Callable[["ExplainedModel"], "ExplainedModel"]

Groups = Sequence[Tensor | None]
"""Number of the group that each value of an input is of, (*S) int64 from 0 in their order: words,
categories. None where values have places in dimensions instead; empty where all have."""


STEPS = ("n_steps", "tolerance", "max_steps", "budget_ms", "errors")
"""Options of a method that adds steps until it is sure."""


@dataclass(frozen=True)
class Windows:
    """What of one explanation's inputs is replaced at once."""

    shapes: Shapes
    """One size for each dimension of a row, or a number of groups; one of these per input."""
    groups: Groups


@dataclass(frozen=True)
class Method:
    """How to answer a request, and what may be asked with it."""

    run: Callable[..., Attribution]
    """Called with the request and those of `options` that are given."""
    options: tuple[str, ...] = ()
    """Fields of `ExplainOptions` that it takes besides those that all methods take."""
    needs_gradients: bool = True
    uses_baseline: bool = False
    multiplies: bool = True
    """Attributions are shares of the output, not slopes."""
    has_signs: bool = True
    """A negative attribution speaks against the target."""
    adds_up: bool = False
    """Promises that attributions sum to f(input) − f(baseline), as far as steps or draws allow."""
    needs_windows: bool = False
    """Replaces windows of the input: it is given the fields of `Windows`."""
    cut: Callable[[Artifact, str], Cut] | None = None
    """Takes a model apart behind the layer of a name, whose output is explained."""
    looks_at_layer: bool = False
    """Asks that layer about the inputs instead: it is given `at_layer`."""
    watches: bool = False
    """Watches what the model calls, which a compiled module does not show."""
    repeats: bool = False
    """Every value of a window has what belongs to the window as a whole."""
    is_random: bool = False
    """Runs for each request by itself, so that its seed alone decides over the answer."""
    takes_sets: bool = False
    """Explains a mean over baselines, of which there may be several."""
    stand_in: StandIn | None = None
    """Returns what it explains of a model; it is given the `artifact` of that."""
    suits: Callable[[Artifact, str | None], bool] | None = None
    """Whether an output by its name, of an artifact without gradients, is explained by it unless a
    request names another method."""


@dataclass(frozen=True)
class Choice:
    """A feature of a row, and what it could be."""

    name: str
    start: int
    """The first of its columns in the model's input (N, F)."""
    end: int
    value: Any = None
    """The value that was sent; None for the number in its column."""
    texts: Sequence[str] = ()
    """All that a category can be."""
    range: Range | None = None
    """Where its number lies in the reference."""
    encode: Callable[[Any], Sequence[float]] = lambda value: (value,)
    """A value → its columns."""


@dataclass(frozen=True)
class Result:
    """One explanation, and what it was made with."""

    request: AttributionRequest
    """A request of this explanation alone."""
    attributions: Tensors
    """(1, *S) per input."""
    method: Method
    settings: Mapping[str, Any]
    """The method was called with these; steps are fixed."""
    windows: Windows
    """The least ones that could be, for methods without windows."""
    seed: int
    version: "ExplainedModel"
    """The model that predicts."""
    row: int
    """Index of the request in its batch."""
    against: Any = None
    """The target that it is compared with."""


class Measurement(NamedTuple):
    """What an answer says under the name of a measure, and sentences that warn of it."""

    fields: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


class Measure(Protocol):
    """Says how good an explanation is; asked for by the option of its name."""

    def __call__(self, result: Result) -> Measurement:
        """Measure one.

        Raises:
            BadInput: it does not apply.
        """


def group_of(groups: Groups, which: int) -> Tensor | None:
    """Return the groups of one of the inputs, None where its values stand alone."""
    return groups[which] if groups else None


@dataclass(frozen=True)
class AskedRequest:
    """A request of an archive, whose explanation is to be judged."""

    asked: Asked
    explain: Callable[[Mapping[str, str]], Any]
    """Options → what the archive answers, as JSON has it, by the handler's own `explain`.

    It raises `BadInput` where that is an error."""
    inputs: Callable[[], Tensors]
    """Has the handler make what the model takes, so that it knows the request as its latest."""


class Certifier(Protocol):
    """Measures the explanations of an archive; registered under `modelyard.certifiers`."""

    def __call__(
        self, handler: Any, requests: Sequence[AskedRequest], budget_s: float
    ) -> Explanations:
        """Look at as many of the requests as there is time for.

        Raises:
            NotMeasured: nothing can be said; the message is a phrase that gives the reason.
        """
