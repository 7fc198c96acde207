"""A device on the CPU whose streams run late, in any order that their events allow.

What a CUDA device might do, this does for some seed: a stream that nobody waits for falls behind,
and memory that is written too early or let go too soon gives wrong answers.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelyard.handlers.backends import Output

POISON = 0xFF
"""In every byte of new memory: NaN as floats."""


class Mark:
    """One recording of an event."""

    is_done = False


class Event:
    """As torch.cuda.Event: an event that was never recorded has passed."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.mark = Mark()
        self.mark.is_done = True

    def record(self, stream: Stream) -> None:
        mark = self.mark = Mark()
        stream.steps.append(lambda: setattr(mark, "is_done", True))

    def query(self) -> bool:
        self._device.run_some()
        return self.mark.is_done

    def synchronize(self) -> None:
        mark = self.mark
        while not mark.is_done:
            assert self._device.step(), "waiting for what will never come"


class Stream:
    def __init__(self) -> None:
        self.steps: deque[Callable[[], object] | Mark] = deque()

    def wait_event(self, event: Event) -> None:
        self.steps.append(event.mark)

    def step(self) -> bool:
        """Take the next step, if there is one and nothing holds it up."""
        if not self.steps:
            return False
        step = self.steps[0]
        if isinstance(step, Mark):
            if not step.is_done:
                return False
        else:
            with torch.inference_mode():
                step()
        self.steps.popleft()
        return True


class LazyDevice:
    """A `modelyard.handlers.cuda.Device`.

    Args:
        seed: of the order in which streams get on.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self.copy_in, self.compute, self.copy_out = Stream(), Stream(), Stream()
        self.allocations = 0

    def host_memory(self, size_bytes: int) -> Tensor:
        self.allocations += 1
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    memory = host_memory

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        output = self._outputs.get(id(source))
        if output is None or output() is not source:  # ids are given again
            stream.steps.append(lambda: target.copy_(source))
            return

        def fetch() -> None:
            alive = output()
            assert alive is not None, "the output was let go before it was copied"
            target.copy_(alive)

        stream.steps.append(fetch)

    def run(self, call: Callable[[], Any]) -> Any:
        """Return poisoned outputs at once; the call itself, and its values, come later."""
        outputs = call()
        places = [] if outputs is None else _flat(outputs)
        for place in places:
            place.fill_(float("nan") if place.is_floating_point() else 0)
        references = [weakref.ref(place) for place in places]
        self._outputs = {key: each for key, each in self._outputs.items() if each() is not None}
        self._outputs |= {id(place): weakref.ref(place) for place in places}

        def compute() -> None:
            found = call()
            for reference, value in zip(
                references, () if found is None else _flat(found), strict=True
            ):
                if (place := reference()) is not None:
                    place.copy_(value)

        self.compute.steps.append(compute)
        return outputs

    def event(self) -> Event:
        return Event(self)

    def record_graph(self, call: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        outputs = call()

        def replay() -> None:
            for place, value in zip(_flat(outputs), _flat(call()), strict=True):
                place.copy_(value)

        return replay, outputs

    def synchronize(self) -> None:
        while self.step():
            pass
        assert not any(stream.steps for stream in self._streams), "streams wait for each other"

    def run_some(self) -> None:
        for _ in range(self._random.randrange(4)):
            self.step()

    def step(self) -> bool:
        """Let one stream, any one that can, take a step."""
        streams = self._streams
        self._random.shuffle(streams)
        return any(stream.step() for stream in streams)

    @property
    def _streams(self) -> list[Stream]:
        return [self.copy_in, self.compute, self.copy_out]


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
