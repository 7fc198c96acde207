"""Overlap the steps of a handler on the parts of a batch."""

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

HANDLER_METHODS = ("preprocess", "inference", "postprocess")

# One micro-batch that is done: its index, what a step raised, and its answers.
_Done = tuple[int, BaseException | None, Any]
# One on its way: the queue for its answers, its index, and its data.
_Part = tuple[SimpleQueue[_Done], int, Any]


class MicroBatching:
    """A handler's `handle`, which splits the batch and runs the three steps in threads.

    While one micro-batch is computed, the next one is prepared. In a handler:

        def __init__(self):
            super().__init__()
            self.handle = MicroBatching(self, micro_batch_size=4)

    Args:
        parent_handler: has `preprocess`, `inference` and `postprocess`, each of one argument.
        micro_batch_size: requests in one micro-batch.
        parallelism: step → number of its threads; 1 where it is not named.
    """

    def __init__(
        self,
        parent_handler: Any,
        micro_batch_size: int = 1,
        parallelism: Mapping[str, int] | None = None,
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_groups: dict[str, list[threading.Thread]] = {c: [] for c in HANDLER_METHODS}
        self._parallelism: dict[str, int] = {}
        self._queues: dict[str, SimpleQueue[_Part | None]] = {
            step: SimpleQueue() for step in HANDLER_METHODS
        }
        self._local = threading.local()
        self.parallelism = dict(parallelism or {})

    @property
    def parallelism(self) -> dict[str, int]:
        """Step → number of its threads, as far as it was set."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        for step, count in parallelism.items():
            if step not in HANDLER_METHODS or not isinstance(count, int) or count < 1:
                raise ValueError(
                    f"parallelism is {dict(parallelism)}; expected a number of threads from 1 for "
                    f"some of {', '.join(HANDLER_METHODS)}"
                )
        self._parallelism.update(parallelism)
        for step, group in self.thread_groups.items():
            self._resize(step, group, self._parallelism.get(step, 1))

    def shutdown(self) -> None:
        """End the threads, after what they are at."""
        for step, group in self.thread_groups.items():
            threads = list(group)
            self._resize(step, group, 0)
            for thread in threads:
                thread.join()

    def get_micro_batch_idx(self) -> int | None:
        """Return to a step which micro-batch it is at; None outside of a step."""
        return getattr(self._local, "micro_batch_idx", None)

    def handle(self, data: Sequence[Any]) -> list[Any]:
        """Run the steps on all of `data`; return the answers in its order.

        Raises:
            Exception: what the first failed micro-batch raised.
        """
        answers: SimpleQueue[_Done] = SimpleQueue()
        begins = range(0, len(data), self.micro_batch_size)
        for index, begin in enumerate(begins):
            part = data[begin : begin + self.micro_batch_size]
            self._queues["preprocess"].put((answers, index, part))
        done = sorted((answers.get() for _ in begins), key=lambda part: part[0])
        for _, error, _ in done:
            if error is not None:
                raise error
        return [answer for _, _, part in done for answer in part]

    def __call__(self, data: Sequence[Any], context: Any) -> list[Any]:
        """Answer a batch as `BaseHandler.handle` does."""
        answers: list[Any] = self.handler._handle(data, context, self._answer)
        return answers

    def _answer(self, data: Sequence[Any]) -> Any:
        handler = self.handler
        if handler._is_explain():
            return handler.explain_handle(handler.preprocess(data), data)
        return self.handle(data)

    def _resize(self, step: str, group: list[threading.Thread], count: int) -> None:
        """Start threads, or end as many as are too many; they are all alike."""
        at = HANDLER_METHODS.index(step)
        following = self._queues[HANDLER_METHODS[at + 1]] if step != HANDLER_METHODS[-1] else None
        while len(group) < count:
            run = getattr(self.handler, step)
            arguments = (run, self._queues[step], following, self._local)
            thread = threading.Thread(target=_work, args=arguments, name=step, daemon=True)
            thread.start()
            group.append(thread)
        for _ in range(len(group) - count):
            self._queues[step].put(None)
            group.pop()


def _work(
    run: Callable[[Any], Any],
    parts: SimpleQueue[_Part | None],
    following: SimpleQueue[_Part | None] | None,
    local: threading.local,
) -> None:
    """Take micro-batches until there is None; a failed one skips the steps that follow."""
    while (part := parts.get()) is not None:
        answers, local.micro_batch_idx, data = part
        try:
            result = run(data)
        except BaseException as error:
            answers.put((local.micro_batch_idx, error, None))
            continue
        if following is None:
            answers.put((local.micro_batch_idx, None, result))
        else:
            following.put((answers, local.micro_batch_idx, result))
