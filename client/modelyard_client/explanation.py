"""An explanation as a program uses it: its numbers as arrays, and in a notebook its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from modelyard_client.errors import BadAnswer, ClientError, numpy
from modelyard_client.retries import Answer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Attributions = NDArray[np.float32] | dict[str, NDArray[np.float32]]
"""In the shape of the model's input without the batch; with several inputs, by name."""


@dataclass(frozen=True)
class Explanation:
    """What made a model answer as it did."""

    attributions: Attributions | None
    """None of a photograph, which is answered by `regions` unless `regions=False` was asked for."""
    errors: Attributions | None
    """How far off each may be, where that was asked for."""
    method: str
    target: Any
    """An index, or a place in the output."""
    label: str | None
    probability: float | None
    error: float | None
    """How far off the attributions are, as a share of their size."""
    convergence_delta: float | None
    tolerance_met: bool | None
    warnings: tuple[str, ...]
    """What to know before believing it."""
    fields: Mapping[str, Any]
    """Everything else that the answer says, by its name there: `f_input`, `tokens`, `features` …"""
    version: str = ""
    """The version of the model that was explained."""
    request_id: str = ""
    """The id by which the server's log knows the request."""
    draw: Callable[[str], Answer] | None = field(default=None, repr=False, compare=False)
    """Asks the server for it once more, as `html` or `png`. It keeps what was sent."""

    @property
    def array(self) -> NDArray[np.float32]:
        """The attributions of a model of one input.

        Raises:
            ValueError: it has several, which are in `attributions` by name; or it is a photograph.
        """
        if self.attributions is None:
            raise ValueError("a photograph has regions; ask with regions=False for its pixels")
        if isinstance(self.attributions, dict):
            names = ", ".join(self.attributions)
            raise ValueError(f"this model has several inputs, {names}; see attributions[NAME]")
        return self.attributions

    @cached_property
    def regions(self) -> Mapping[str, Any] | None:
        """The regions of a photograph as the answer has them; `labels` is an array (H, W) here."""
        found = self.fields.get("regions")
        if found is None:
            return None
        np = numpy()
        height, width = found["size"]
        labels = np.repeat(found["labels"], found["counts"]).reshape(width, height).T
        return {name: each for name, each in found.items() if name != "counts"} | {"labels": labels}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "draw": None}  # a copy elsewhere has no server to ask

    def _repr_html_(self) -> str | None:
        """Return the server's page of it, in a frame where it reaches nothing of the notebook."""
        try:
            page = self._page
        except ClientError as error:
            return f"<pre>{escape(f'{self.label}, by {self.method}; not drawn: {error}')}</pre>"
        return page and (
            '<iframe sandbox="allow-scripts" style="width: 100%; height: 32rem; border: 0; '
            f'resize: vertical" srcdoc="{escape(page)}"></iframe>'
        )

    def _repr_png_(self) -> bytes | None:
        """Return the server's picture of it; None of what has a page alone, as a text."""
        with suppress(ClientError):
            return self._picture
        return None

    @cached_property
    def _page(self) -> str | None:
        return self.draw and self.draw("html").body.decode()

    @cached_property
    def _picture(self) -> bytes | None:
        return self.draw and self.draw("png").body


def read_explanations(content: Any) -> list[Explanation]:
    """Return the explanations of an answer, one for each output and target that was asked for.

    Raises:
        BadAnswer: it holds none.
    """
    if not isinstance(content, dict):
        raise BadAnswer("the answer is not an explanation: it is not a JSON object")
    common = {name: value for name, value in content.items() if name != "explanations"}
    several = content.get("explanations")
    parts = several if isinstance(several, list) else [{}]
    return [_read({**common, **part}) for part in parts if isinstance(part, dict)]


def _read(found: dict[str, Any]) -> Explanation:
    fields = dict(found)
    try:
        return Explanation(
            attributions=_arrays(fields.pop("attributions")) if "regions" not in fields else None,
            errors=_arrays(errors) if (errors := fields.pop("errors", None)) is not None else None,
            method=str(fields.pop("method")),
            target=fields.pop("target"),
            label=fields.pop("label", None),
            probability=fields.pop("probability", None),
            error=fields.pop("error", None),
            convergence_delta=fields.pop("convergence_delta", None),
            tolerance_met=fields.pop("tolerance_met", None),
            warnings=tuple(fields.pop("warnings", ())),
            fields=fields,
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise BadAnswer(f"the answer is not an explanation of ours: {reason}") from error


def _arrays(found: Any) -> Attributions:
    np = numpy()

    arrays: Attributions
    if isinstance(found, dict):
        arrays = {str(name): np.asarray(each, np.float32) for name, each in found.items()}
    else:
        arrays = np.asarray(found, np.float32)
    return arrays
