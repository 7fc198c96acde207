"""The tokens of several generated texts, as they come."""

from collections.abc import Iterator
from typing import Any


class TextIteratorStreamerBatch:
    """Transformers' `TextIteratorStreamer` for a batch: `model.generate(…, streamer=this)`.

    Iterating yields, step by step, a list with {"text": new text} for every row; it ends when the
    first row has no more.

    Args:
        tokenizer: turns tokens into text.
        batch_size: number of rows.
        skip_prompt: leave out the tokens of the prompt.
        timeout: longest wait for new text, in seconds; None waits without limit.
        decode_kwargs: arguments for the tokenizer's `decode`.
    """

    def __init__(
        self,
        tokenizer: Any,
        batch_size: int,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        from transformers import TextIteratorStreamer

        self.batch_size = batch_size
        self.streamers: list[Any] = [
            TextIteratorStreamer(tokenizer, skip_prompt, timeout, **decode_kwargs)
            for _ in range(batch_size)
        ]

    def put(self, value: Any) -> None:
        """Take the next tokens, one row per text.

        Raises:
            ValueError: another number of rows.
        """
        if len(value) != self.batch_size:
            raise ValueError(f"got {len(value)} rows of tokens, expected {self.batch_size}")
        for index, streamer in enumerate(self.streamers):
            streamer.put(value[index : index + 1])

    def end(self) -> None:
        """Report that there are no more tokens."""
        for streamer in self.streamers:
            streamer.end()

    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return self

    def __next__(self) -> list[dict[str, str]]:
        return [{"text": text} for text in map(next, self.streamers)]
