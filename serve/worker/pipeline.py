"""The loop with two batches in flight: one computes on the device while the next one is read.

As in `loop`, a batch takes all that waits, up to the batch size. A second one is launched only
where requests wait while the first computes, so at low load each is answered as soon as it can be.
Everything that does not come in two halves is run by `loop` as ever, with nothing in flight:
explanations, requests that are tried again alone, descriptions, and batches that failed.
"""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelyard.handlers import Context
from modelyard.serve.dataplane import wire
from modelyard.serve.worker import loop
from modelyard.serve.worker.answer import OURS, Answer, Rules, check_outputs
from modelyard.serve.worker.load import Launch, Pending, Service
from modelyard.serve.worker.request import Request

IN_FLIGHT = 2


@dataclass(frozen=True)
class Lane:
    """What a batch in flight has for itself: a context, and what it streams through."""

    context: Context
    chunks: loop.Chunks


@dataclass(frozen=True)
class Flight:
    """A batch that was launched."""

    batch: Sequence[wire.Item]
    answers: dict[int, Answer]
    """Of those that the handler did not see."""
    requests: list[Request]
    pending: Pending
    began: float
    lane: Lane


def run(reader: loop.Reader, service: Service, rules: Rules = OURS) -> None:
    """Serve until the server closes its end (EOFError); `service` must have `launch`."""
    gc.collect()
    gc.freeze()
    assert service.launch is not None
    Pipeline(reader, service, rules, service.launch).run()


class Pipeline:
    """The batches in flight, oldest first, and what waits behind them."""

    def __init__(self, reader: loop.Reader, service: Service, rules: Rules, launch: Launch) -> None:
        self._reader = reader
        self._service = service
        self._rules = rules
        self._launch = launch
        self._waiting: deque[wire.Item] = deque()
        self._flights: deque[Flight] = deque()
        self._plain = loop.connect(service.context, reader, rules)
        self._lanes = [self._open_lane() for _ in range(IN_FLIGHT)]

    def run(self) -> None:
        """Serve until the server closes its end (EOFError)."""
        waiting, flights = self._waiting, self._flights
        while True:
            is_idle = not waiting and not flights
            if is_idle:
                self._reader.forget_cancelled()
            waiting.extend(self._reader.read_arrived(must_wait=is_idle))
            if flights and (
                not waiting or len(flights) == IN_FLIGHT or flights[0].pending.is_done()
            ):
                self._finish()
                continue
            batch = loop.take_batch(waiting, self._service.batch_size)
            if batch[0].flags & loop.KIND:
                self._drain()
                answers = loop.answer_batch(self._service, batch, self._rules, self._plain)
                self._send(batch, answers)
            else:
                self._start(batch)

    def _start(self, batch: Sequence[wire.Item]) -> None:
        """Launch a batch; answer it at once where there is nothing to launch, or it fails."""
        lane = self._lanes.pop()
        answers, requests = loop.read_requests(batch, self._rules, lane.chunks)
        if not requests:
            self._lanes.append(lane)
            self._answer(batch, answers, [], [])
            return
        began = loop.begin(lane.context, requests, lane.chunks)
        try:
            pending = self._launch([request.row for request in requests], lane.context)
        except BaseException as error:
            answered = self._answer_failure(error, requests, lane)
            self._answer(batch, answers, requests, answered)
        else:
            self._flights.append(Flight(batch, answers, requests, pending, began, lane))

    def _finish(self) -> None:
        """Wait for the oldest batch and answer it."""
        flight = self._flights.popleft()
        lane, requests = flight.lane, flight.requests
        try:
            outputs = flight.pending.result()
            outputs = check_outputs(outputs, len(requests))
        except BaseException as error:
            answered = self._answer_failure(error, requests, lane)
        else:
            answered = loop.answer_outputs(
                lane.context, outputs, flight.began, requests, self._rules, lane.chunks
            )
            self._lanes.append(lane)
        self._answer(flight.batch, flight.answers, requests, answered)

    def _drain(self) -> None:
        """Answer all that is in flight: what is run plainly has handler and device for itself."""
        while self._flights:
            self._finish()

    def _answer_failure(
        self, error: BaseException, requests: list[Request], lane: Lane
    ) -> list[Answer]:
        self._lanes.append(lane)
        self._drain()
        service = self._service
        chunks = lane.chunks if lane.chunks.has_sent else self._plain
        return loop.answer_failure(service, service.predict, error, requests, self._rules, chunks)

    def _answer(
        self,
        batch: Sequence[wire.Item],
        answers: dict[int, Answer],
        requests: Sequence[Request],
        answered: Sequence[Answer],
    ) -> None:
        for request, answer in zip(requests, answered, strict=True):
            answers[request.id] = answer
        self._send(batch, [answers[item.id] for item in batch])

    def _send(self, batch: Sequence[wire.Item], answers: Sequence[Answer]) -> None:
        metrics: Any = self._service.context.metrics
        loop.send(self._reader, batch, answers, metrics)

    def _open_lane(self) -> Lane:
        context = copy.copy(self._service.context)
        return Lane(context, loop.connect(context, self._reader, self._rules))
