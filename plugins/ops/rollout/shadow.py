"""Copies of answered predictions → the other version, and the answers of both → what was found.

A copy is taken when its answer has been given out, and costs no client anything: it waits in a
queue of its own, bounded in number and bytes, for a worker that has nothing to do, and not while
requests wait for the live version. It has a deadline of its own and is never tried again; what
finds no room is dropped and counted. What was answered as one batch is copied as one: a candidate
that mixes up the rows of a batch is right about each of them alone.

One request of ten, and each one while there is doubt, is asked once more, alone, of both versions.
How often the live version's two answers differ is the noise that the candidate is measured against.
Where the candidate's own two differ its answers depend on what else it is asked.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, cast

from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply, Stream
from modelyard.serve.dataplane.wire import Payload
from modelyard.serve.dataplane.worker import Worker
from modelyard.serve.errors import StreamBroken, WorkerDied

if TYPE_CHECKING:
    from modelyard.plugins.ops.rollout.trial import Trial

MOST_COPIES = 64
"""Copies that wait or run, beyond which no further batch is taken."""
MOST_BYTES = 32 << 20
"""Most bytes of all copies that wait or run, their answers included."""
MOST_COPY_BYTES = 8 << 20
"""Most bytes of one batch."""
WAIT_S = 10.0
"""Time after which a copy is not worth running any more."""
LEAST_RUN_S = 5.0
"""Least time that a copy may run, however fast its answer was."""
SLOWER = 50
"""Times as long as its answer took that a copy may run."""
PUMP_EVERY_S = 0.1
_NOT_COPIED = wire.DESCRIBE | wire.STREAM | wire.EXPLAIN | wire.SHARES


class Copy(NamedTuple):
    """A request that was answered, and its answer."""

    head: bytes
    parts: tuple[bytes, ...]
    flags: int
    rows: int
    reply: Reply
    took_s: float
    """Time from the whole body to its answer."""
    size: int

    @property
    def request_id(self) -> str:
        """The id as the client or the server named the request."""
        fields = wire.unpack_meta(self.head)
        return fields[2].decode("latin-1") if len(fields) > 2 else ""


@dataclass(eq=False, slots=True)
class CopyBatch:
    """Copies that wait for a worker, or run in one, as one batch."""

    copies: Sequence[Copy]
    for_candidate: bool
    """Whether the candidate runs them; else the live version."""
    since: float
    """When it was made, and then when it began to run."""
    first: CopyBatch | None = None
    """Batch that its only copy was in before; None where it is asked for the first time."""
    then: CopyBatch | None = None
    """What runs when it has ended."""
    worker: Worker = field(init=False)
    sinks: Sequence[asyncio.Future[Reply]] = ()
    done: asyncio.Future[list[Reply | BaseException]] = field(init=False)

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(copy.size for copy in self.copies)


def place(salt: str, key: str) -> float:
    """Return where a key falls from 0 to 1, evenly, and differently for each salt."""
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, key=salt.encode())
    return int.from_bytes(digest.digest()) / 2**64


@dataclass(frozen=True)
class Canary:
    """Sends a share of the requests to the candidate, the same ones always; a `Split`."""

    live: ModelVersion
    candidate: ModelVersion
    salt: str
    """Salt of the roll-out: who is among the first in one is not among the first in the next."""
    share: float
    header: bytes = b""
    """Header whose value decides, in lower case; the request's id does where it is absent, or where
    this is empty."""

    def choose(self, id: str, headers: Iterable[tuple[bytes, bytes]]) -> ModelVersion:
        """Return the version that answers a request of this id and these headers."""
        if self.header:
            id = next((v.decode("latin-1") for n, v in headers if n == self.header), id)
        return self.candidate if place(self.salt, id) < self.share else self.live


class Shadow:
    """Copies a share of one version's predictions to the other. Lives on the event loop.

    Args:
        live: version that is measured by, and whose requests go first.
        candidate: version that is measured.
        share: share of the answers that are copied, above 0 and at most 1.
        findings: what takes what was found.
        is_own: whether the candidate's own answers to clients are copied to the live version, in
            place of the live version's to the candidate.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, share: float, findings: Trial,
        is_own: bool = False,
    ) -> None:  # fmt: skip
        self._live = live
        self._candidate = candidate
        self._is_own = is_own
        self._share = share
        self._findings = findings
        self._loop = asyncio.get_running_loop()
        self._queues: dict[bool, deque[CopyBatch]] = {True: deque(), False: deque()}
        """Whether the candidate runs them → what waits."""
        self._running: list[CopyBatch] = []
        self._held = 0
        """Bytes of all copies."""
        self._count = 0
        self.noise_every = 1
        """One copy in so many is asked again; the judge says how many."""
        self._since_noise = self.noise_every
        self._soon: asyncio.Handle | None = None
        self._timer = self._loop.call_later(PUMP_EVERY_S, self._tick)
        self._is_stopped = False
        self._source = candidate.pool if is_own else live.pool
        self._source.on_answer = (*self._source.on_answer, self.offer)

    def stop(self) -> None:
        """Copy nothing more, and forget what waits."""
        self._is_stopped = True
        pool = self._source
        pool.on_answer = tuple(each for each in pool.on_answer if each != self.offer)
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        for queue in self._queues.values():
            while queue:
                self._let_go(queue.popleft())

    def offer(self, answered: Sequence[tuple[Call, Reply]]) -> None:
        """Copy a batch that was answered just now, if it is drawn and there is room."""
        first = answered[0][0]
        if first.kind != PREDICT or first.flags & _NOT_COPIED or random.random() >= self._share:
            return
        if self._is_own and any(reply.status >= 500 for _, reply in answered):
            return  # clients' failures are counted where they are answered
        if reason := self._why_not(answered):
            self._findings.dropped(reason, len(answered))
            return
        now, copies = monotonic(), []
        for job, reply in answered:
            parts = tuple(map(bytes, job.parts))  # the connection goes on with its buffers
            took_s, size = now - job.queued_at, _size(job, reply)
            copies.append(Copy(job.head, parts, job.flags, job.rows, reply, took_s, size))
        batch = CopyBatch(copies, not self._is_own, now)
        self._put(batch)
        self._since_noise += len(copies)
        if self._since_noise >= self.noise_every:
            self._since_noise = 0
            again = [random.choice(copies)]
            here, there = (
                CopyBatch(again, side, now, batch) for side in (not self._is_own, self._is_own)
            )
            if random.random() < 0.5:
                batch.then = here  # in the same worker, mostly
            else:
                self._put(here)  # beside it, where two workers are idle
            if not self._queues[there.for_candidate]:  # whoever answers clients has time
                self._put(there)
        self._wake()

    def _why_not(self, answered: Sequence[tuple[Call, Reply]]) -> str:
        if self._count >= MOST_COPIES:
            return "full"
        if any(isinstance(reply.body, Stream) for _, reply in answered):
            return "stream"
        size = sum(_size(*each) for each in answered)
        if size > MOST_COPY_BYTES:
            return "large"
        return "full" if self._held + size > MOST_BYTES else ""

    def _put(self, batch: CopyBatch) -> None:
        self._queues[batch.for_candidate].append(batch)
        self._hold(len(batch.copies), batch.size)

    def _let_go(self, batch: CopyBatch) -> None:
        self._hold(-len(batch.copies), -batch.size)

    def _hold(self, count: int, size: int) -> None:
        self._count += count
        self._held += size
        self._live.pool.budget.bodies += size

    # -- running -------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Run what waits, once what is being answered now is."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Run what waits, as far as workers have nothing else to do."""
        self._soon = None
        now = monotonic()
        self._end_late(now)
        is_busy = self._live.batchers[PREDICT].queued > 0
        for for_candidate, queue in self._queues.items():
            pool = self._candidate.pool if for_candidate else self._live.pool
            idle = (worker for worker in pool.workers if worker.is_idle and not is_busy)
            while queue and (worker := next(idle, None)) is not None:
                self._run(worker, queue.popleft(), now)
            while queue and now - queue[0].since > WAIT_S:
                batch = queue.popleft()
                self._let_go(batch)
                if batch.first is None:
                    self._findings.dropped("late", len(batch.copies))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(PUMP_EVERY_S, self._tick)
        self._pump()

    def _run(self, worker: Worker, batch: CopyBatch, now: float) -> None:
        batch.worker, batch.since = worker, now
        batch.sinks = [self._loop.create_future() for _ in batch.copies]
        self._running.append(batch)
        batch.done = asyncio.gather(*batch.sinks, return_exceptions=True)
        batch.done.add_done_callback(lambda _: self._ended(batch))
        pairs = zip(batch.copies, batch.sinks, strict=True)
        worker.run_aside([(*copy[:3], sink, copy.rows) for copy, sink in pairs])

    def _end_late(self, now: float) -> None:
        """End copies that take far longer than their answers took."""
        for batch in self._running:
            took_s = now - batch.since
            if took_s <= max(LEAST_RUN_S, *(SLOWER * copy.took_s for copy in batch.copies)):
                continue
            for sink in batch.sinks:
                if not sink.done() and batch.for_candidate:
                    sink.set_exception(TimeoutError(f"no answer within {took_s:.1f} s"))
                sink.cancel()
            if batch.for_candidate:
                batch.worker.condemn()  # it may hang for good

    def _ended(self, batch: CopyBatch) -> None:
        """Take what became of a batch; what is cancelled gave way to a request."""
        self._running.remove(batch)
        self._let_go(batch)
        if self._is_stopped:
            return
        if batch.then is not None:
            self._put(batch.then)
        # A worker that is ended here has made no error.
        is_judged = batch.for_candidate and not batch.worker.is_closing
        answered: list[tuple[Copy, Reply]] = []
        for copy, outcome in zip(batch.copies, batch.done.result(), strict=True):
            if isinstance(outcome, Reply):
                answered.append((copy, outcome))
            elif isinstance(outcome, StreamBroken):
                self._findings.dropped("stream")
            elif isinstance(outcome, asyncio.CancelledError) or not is_judged:
                self._findings.dropped("interrupted", batch.first is None)
            elif len(batch.copies) > 1:  # one of them may be what kills it, as of clients' requests
                self._put(CopyBatch([copy], True, monotonic()))
            else:
                answered.append((copy, _failure(outcome)))
        if batch.first is None:
            pairs = [(copy, reply, copy.reply) if self._is_own else (copy, copy.reply, reply)
                     for copy, reply in answered]  # fmt: skip
            self._findings.compared(pairs, self._is_own)
        elif answered:
            self._repeated(batch, batch.first, *answered[0])
        self._wake()

    def _repeated(self, batch: CopyBatch, first: CopyBatch, copy: Copy, again: Reply) -> None:
        """Have a second answer compared with the first one, once that is there."""
        if batch.for_candidate == self._is_own:  # which went to a client
            self._findings.repeated(batch, copy.reply, again)
            return

        def ended(done: asyncio.Future[list[Reply | BaseException]]) -> None:
            outcome = done.result()[first.copies.index(copy)]
            if isinstance(outcome, Reply) and not self._is_stopped:
                self._findings.repeated(batch, outcome, again)

        first.done.add_done_callback(ended)


def _failure(error: BaseException) -> Reply:
    """Return what there is instead of a candidate's answer."""
    text = str(error) or type(error).__name__
    status = 500 if isinstance(error, WorkerDied) else 504
    return Reply(status, b"content-type\0text/plain", text.encode())


def _size(job: Call, reply: Reply) -> int:
    return sum(map(len, job.parts)) + len(cast("Payload", reply.body))
