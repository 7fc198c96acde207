"""Requests that are answered in steps, several at once, and join and leave between steps."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from modelyard.handlers.context import Context


class Part(NamedTuple):
    """What a step gives of one answer."""

    request: int
    value: Any
    """What a handler may return: of a streamed answer a piece of text."""
    is_last: bool
    content_type: str | None = None
    """Content type of the whole answer, where the value's type does not say it."""


class Steps(ABC):
    """A handler whose requests take many short calls of its model, as the tokens of a text do.

    A worker lets requests join as they come, up to the batch size, and calls `step` as long as
    there are any. Requests that nobody waits for any more leave before the next step. What is no
    worker calls `handle` as with any handler.
    """

    @abstractmethod
    def join(self, request: int, row: Mapping[str, Any], headers: Mapping[str, Any]) -> None:
        """Take a request in.

        Args:
            request: a number of its own among those that have joined.
            row: its body, as `handle` gets it.
            headers: headers of the request, found in any case.

        Raises:
            BadInput: it cannot be used; the others go on.
        """

    @abstractmethod
    def step(self) -> list[Part]:
        """Take one step of those that have joined, and return what it gives.

        What it raises ends all of them, and the handler is empty again.
        """

    @abstractmethod
    def leave(self, requests: Collection[int]) -> None:
        """Forget these requests, where they are still there."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no request is there."""

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """Answer a batch of requests together; a streamed answer comes as one text."""
        answers: list[Any] = [""] * len(data)
        try:
            for index, row in enumerate(data):
                self.join(index, row, context.get_all_request_header(index))
            while not self.is_idle:
                context.check_cancelled()
                for part in self.step():
                    is_text = isinstance(part.value, str)
                    answers[part.request] = (
                        answers[part.request] + part.value if is_text else part.value
                    )
                    if part.content_type is not None:
                        context.set_response_content_type(part.request, part.content_type)
        finally:
            self.leave(range(len(data)))
        return answers
