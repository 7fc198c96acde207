"""Receive requests → step those that have joined → send what each step gives, until the end.

The loop of a handler whose requests join and leave between its steps (`handlers.steps`); all other
handlers have that of `loop`.
"""

import gc
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelyard.handlers.context import Headers
from modelyard.handlers.errors import HandlerError
from modelyard.handlers.steps import Part
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.lengths import KIND
from modelyard.serve.worker import loop
from modelyard.serve.worker.codec import UNREAD, Answer, Request, WrongAnswer, encode_value
from modelyard.serve.worker.load import Service

if TYPE_CHECKING:
    from modelyard.handlers.infer import TensorJob

EVENTS = "text/event-stream"
"""What a handler is told that asks how an answer is to be streamed."""
logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """A request that has joined."""

    item: wire.Item
    request: Request
    began_us: int
    has_sent: bool = False
    """Whether its client has a chunk already."""
    tensors: "TensorJob | None" = None
    """What a request of tensors is answered with."""


def run(reader: loop.Reader, service: Service) -> None:
    """Serve until the server closes its end (EOFError)."""
    gc.collect()
    gc.freeze()
    stepping = Stepping(reader, service)
    while True:
        stepping.turn()


class Stepping:
    """Requests that wait, and those that are stepped together."""

    def __init__(self, reader: loop.Reader, service: Service) -> None:
        assert service.steps is not None
        self._reader = reader
        self._service = service
        self._steps = service.steps
        self._waiting: deque[wire.Item] = deque()
        self._running: dict[int, _Job] = {}
        self._alone: set[int] = set()
        """Requests that are run by themselves: a step failed that had them and others."""

    def turn(self) -> None:
        """Take what has arrived, let requests join and leave, take a step, send what it gives.

        Raises:
            EOFError: the server closed its end.
        """
        reader = self._reader
        self._waiting.extend(reader.read_arrived(must_wait=not self._waiting and not self._running))
        reader.forget_cancelled([*self._running, *(item.id for item in self._waiting)])
        frame = wire.Frame()
        self._drop_left(frame)
        self._admit(frame)
        if self._running:
            self._step(frame)
        if len(frame):
            loop.send_replies(reader, frame, self._service.context)

    def _drop_left(self, frame: wire.Frame) -> None:
        left = self._reader.cancelled & self._running.keys()
        if left:
            self._steps.leave(left)
            for id in left:
                self._end(frame, self._running.pop(id), UNREAD)

    def _admit(self, frame: wire.Frame) -> None:
        """Let requests join in order, while there is room and none is to run by itself."""
        while self._waiting and len(self._running) < self._service.batch_size:
            item = self._waiting[0]
            kind = item.flags & (KIND | wire.INSTANCES)
            if kind & wire.STREAM:
                kind &= ~(wire.TENSORS | wire.STREAM)  # its chunks are sent, as those of others are
            is_alone = bool(kind) or item.id in self._alone
            if self._running and (is_alone or self._runs_alone):
                return
            self._waiting.popleft()
            if item.id in self._reader.cancelled:
                self._alone.discard(item.id)
                self._end(frame, _Job(item, Request(item), wire.now_us()), UNREAD)
            elif kind & ~wire.ALONE:
                job = _Job(item, Request(item), wire.now_us())  # of no prediction
                self._end(frame, job, loop.answer_batch(self._service, [item])[0])
            else:
                self._join(frame, item)

    @property
    def _runs_alone(self) -> bool:
        """Whether what runs is to have no company."""
        (job, *others) = self._running.values()
        return not others and (bool(job.item.flags & wire.ALONE) or job.item.id in self._alone)

    def _join(self, frame: wire.Frame, item: wire.Item) -> None:
        rules = self._service.rules
        job = _Job(item, Request(item), wire.now_us())
        try:
            job.request.decode(item.body, rules.read_json)
        except Exception as error:
            self._end(frame, job, rules.refuse(error, job.request.request_id, was_read=False))
            return
        try:
            row, headers = job.request.row, Headers(job.request.headers)
            if item.flags & wire.TENSORS:
                from modelyard.handlers.infer import TensorJob  # which few workers need

                job.tensors = TensorJob(row["body"], headers, self._service.context)
                row, headers = job.tensors.row, Headers({"accept": EVENTS})
            self._steps.join(item.id, row, headers)
        except BaseException as error:
            self._steps.leave([item.id])
            loop.log_failure(rules, error, job.request.request_id)
            self._end(frame, job, rules.refuse(error, job.request.request_id))
        else:
            self._running[item.id] = job

    def _step(self, frame: wire.Frame) -> None:
        try:
            parts = self._steps.step()
        except BaseException as error:
            self._fail(frame, error)
            return
        for part in parts:
            self._send(frame, self._running[part.request], part)

    def _send(self, frame: wire.Frame, job: _Job, part: Part) -> None:
        """Add a part of an answer; one that cannot be sent ends it."""
        rules = self._service.rules
        try:
            value: Any = part.value
            more: dict[str, str] = {}
            if job.tensors is not None and (job.has_sent or not part.is_last):
                value = job.tensors.chunk(value)
            elif job.tensors is not None:
                value, more = job.tensors.answer_with(value)
            body, headers = encode_value(value, rules)
            headers |= more
        except (WrongAnswer, HandlerError) as error:
            loop.log_failure(rules, error, job.request.request_id)
            self._steps.leave([part.request])
            del self._running[part.request]
            self._end(frame, job, self._refuse(job, error))
            return
        if part.content_type is not None and job.tensors is None:
            headers["content-type"] = part.content_type
        if part.is_last:
            del self._running[part.request]
            self._end(frame, job, Answer(200, headers, body))
            return
        meta = b"" if job.has_sent else loop.pack_headers({**headers, **loop.STREAMED})
        frame.add(part.request, 200, wire.MORE, meta, [body])
        job.has_sent = True

    def _fail(self, frame: wire.Frame, error: BaseException) -> None:
        """End what a step failed on: each request that is still whole is tried again by itself."""
        loop.finish_device(self._service)
        rules = self._service.rules
        if rules.ends_worker(error):
            raise error
        jobs = list(self._running.values())
        self._running.clear()
        self._steps.leave([job.item.id for job in jobs])
        loop.log_failure(rules, error, jobs[0].request.request_id)
        for job in reversed(jobs):
            if len(jobs) > 1 and not job.has_sent:
                self._alone.add(job.item.id)
                self._waiting.appendleft(job.item)
            else:
                self._end(frame, job, self._refuse(job, error))

    def _refuse(self, job: _Job, error: BaseException) -> Answer:
        answer = self._service.rules.refuse(error, job.request.request_id)
        return answer._replace(flags=wire.BROKEN) if job.has_sent else answer

    def _end(self, frame: wire.Frame, job: _Job, answer: Answer) -> None:
        """Add the last reply to a request."""
        self._alone.discard(job.item.id)
        queue_us = (job.began_us - job.item.queue_us) & 0xFFFFFFFF
        took_us = wire.since_us(job.began_us)
        meta = loop.pack_headers(answer.headers)
        frame.add(job.item.id, answer.status, answer.flags, meta, [answer.body], queue_us, took_us)
