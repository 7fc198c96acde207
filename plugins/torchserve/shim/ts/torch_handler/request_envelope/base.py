"""What every envelope has."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modelyard.handlers.context import Context


class BaseEnvelope(ABC):
    """Takes requests apart before a handler, and puts its answers together.

    Args:
        handle_fn: the handler's entry point.
    """

    takes_tensors = False
    """Whether it reads and writes the JSON of the Open Inference Protocol itself."""

    def __init__(self, handle_fn: Callable[[Any, Any], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch; a call without data, which initialises functions, passes through."""
        self.context = context
        results = self._handle_fn(self.parse_input(data) if data else data, context)
        return self.format_output(results) if results else results

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Return the handler's rows for these requests."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Return one answer per request for what the handler returned."""


def document(row: Mapping[str, Any]) -> Any:
    """Return a request's JSON, parsed; a row that has neither data nor body is the document itself.

    Raises:
        ValueError: the body is not valid JSON.
    """
    value = row.get("data") or row.get("body") or row
    return json.loads(value) if isinstance(value, bytes | bytearray | str) else value


def split(answers: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Cut the handler's answers into those of each request.

    Raises:
        ValueError: the handler returned another number of answers than it had rows.
    """
    if len(answers) != sum(lengths):
        raise ValueError(
            f"the handler gave {len(answers)} answers to {sum(lengths)} rows of {len(lengths)} "
            "requests; expected one per row"
        )
    rows = iter(answers)
    return [[next(rows) for _ in range(length)] for length in lengths]
