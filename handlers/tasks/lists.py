"""A request that holds a list of inputs is answered with the list of their answers."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from modelyard.handlers.base import BaseHandler
from modelyard.handlers.errors import BadInput, InputMismatch

MOST_LISTED = 256
"""Most things in the list of one request."""


class Lists(BaseHandler):
    """Stands before the class that answers one input."""

    listed: str = "row"
    """What messages call one of the list."""

    @abstractmethod
    def read_list(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return the inputs of a request that holds a list of them; None for one input.

        Raises:
            BadInput: it can be neither.
        """

    @abstractmethod
    def check_listed(self, body: Any) -> None:
        """Refuse an input that cannot be read.

        Raises:
            BadInput: why.
        """

    def _run_steps(self, data: Sequence[Mapping[str, Any]]) -> list[Any]:
        lists = [self._each(at, self._read_list, row) for at, row in enumerate(data)]
        if not any(lists):
            return super()._run_steps(data)
        answers = []
        for at, (row, bodies) in enumerate(zip(data, lists, strict=True)):
            if bodies is None:
                answers += super()._run_steps([row])
            else:
                answers.append(self._each(at, self._answer_list, bodies))
        return answers

    def _read_list(self, row: Mapping[str, Any]) -> list[Any] | None:
        """Return the inputs of a list, each of which can be read."""
        bodies = self.read_list(row)
        if bodies is None:
            return None
        if not 0 < len(bodies) <= MOST_LISTED:
            raise BadInput(
                f"the list holds {len(bodies)} {self.listed}s; expected 1 to {MOST_LISTED}"
            )
        for at, body in enumerate(bodies):
            try:
                self.check_listed(body)
            except BadInput as error:
                raise BadInput(f"{self.listed} {at} of the list: {error}") from error
        return bodies

    def _answer_list(self, bodies: Sequence[Any]) -> list[Any]:
        """Answer inputs in batches as large as the server makes them."""
        rows = [{"body": body} for body in bodies]
        most = self.context.system_properties["batch_size"] or 1
        answers: list[Any] = []
        for first in range(0, len(rows), most):
            batch = rows[first : first + most]
            try:
                answers += super()._run_steps(batch)
            except InputMismatch:  # texts of unequal length, and no mask
                answers += [super(Lists, self)._run_steps([row])[0] for row in batch]
        return answers
