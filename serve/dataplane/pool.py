"""Restart, scale and feed the workers of one model version."""

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from modelyard.serve import errors
from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Call, Reply
from modelyard.serve.dataplane.clock import Clock
from modelyard.serve.dataplane.metrics import VersionMetrics
from modelyard.serve.dataplane.poison import Poison
from modelyard.serve.dataplane.process import Backoff
from modelyard.serve.dataplane.wire import Item
from modelyard.serve.dataplane.worker import Worker, WorkerPlan, WorkerPolicy

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 5
"""Failed loads in a row, with no worker ready, after which waiting requests are refused."""
RETRY_AFTER_S = 5
"""Time after which clients are told to come back, if no worker could be started: what is killed
while it loads is started again no later, for memory that was short may be there again."""
SWEEP_EVERY_S = 0.1
NEWEST_SHARE = 0.1
"""Weight of the newest batch in the running means."""

_ids = itertools.count(9000)


@dataclass
class ReplicaSlot:
    """A place for one worker, refilled when the worker dies."""

    number: int
    """Number from 1 up within its model version."""
    id: int = field(default_factory=_ids.__next__)
    """Unique in this server and the same for every worker in this slot."""
    task: asyncio.Task[None] | None = None
    worker: Worker | None = None
    restarts: int = 0
    ended: str = ""
    """How its last worker ended, for people; empty where none has."""
    is_closing: bool = False
    has_given_up: bool = False
    """It stays empty: no worker could be started for the whole retry window."""

    @property
    def is_ready(self) -> bool:
        """Whether its worker is loaded and right."""
        return self.worker is not None and self.worker.is_ready


class Pool:
    """The workers of one model version; the engine that `batcher.py` speaks of."""

    def __init__(
        self,
        plan: WorkerPlan,
        metrics: VersionMetrics,
        policy: WorkerPolicy,
        budget: AnswerBudget | None = None,
    ) -> None:
        self.budget = budget or AnswerBudget()
        self.plan = plan
        self.metrics = metrics
        self.policy = policy
        self._loop = asyncio.get_running_loop()
        self._batchers: Sequence[Batcher] = ()
        self._retries: deque[Call] = deque()
        self._batch_s = [0.0, 0.0]
        self._batch_jobs = [1.0, 1.0]
        self.own_job_s = 0.0
        """Time of a prediction, as workers say it: without the time that its answer lay here
        unread. By what the server sees, one that is late would take workers for slow, and have them
        wait."""
        self.worked_s = 0.0
        """Time of all its workers in batches that have ended, by the clock."""
        self._failures = 0
        self._last_failure = ""
        self._sweeper: asyncio.TimerHandle | None = None
        self.clock = Clock()
        """What workers are judged by."""
        self.on_answer: tuple[Callable[[Sequence[tuple[Call, Reply]]], None], ...] = ()
        """Called with the jobs of each batch that a worker answered, and their replies, in order,
        when these have been given out."""
        self.on_batch: Callable[[Worker, Sequence[tuple[Call, Item]]], None] | None = None
        """Called with each batch that a worker has run, its jobs and their replies in the worker's
        order: those too whose clients have left, or have had an error meanwhile."""
        self.heir: Callable[[Call], bool] | None = None
        """Called with a job whose worker has died, in place of trying it once more; returns whether
        somebody else answers it."""
        self.poison = Poison()
        self._is_stopping = False
        self._closing: set[asyncio.Task[None]] = set()
        self.slots: list[ReplicaSlot] = []
        self.least = self.most = 0
        """How many workers the last scaling set, or the first job is to start."""
        self.load: Callable[[], None] | None = None
        """Called with each batch while a job waits and there are no workers, to start them; None
        where only scaling does."""
        self._opened_at = -math.inf
        self.load_failure: str | None = None
        """Why they could not be started, until that is tried again."""

    def feed(self, batchers: Sequence[Batcher]) -> None:
        """Name the batchers to wake when a worker has room."""
        self._batchers = batchers

    # -- life ----------------------------------------------------------------------------------

    async def scale(
        self, least: int, drain_timeout_s: float, *, most: int | None = None, wait: bool = True
    ) -> None:
        """Have at least `least` workers and at most `most`: start missing ones, end surplus ones.

        Args:
            least: how many to start.
            drain_timeout_s: time for surplus ones to answer what they hold.
            most: how many may stay; None takes `least`.
            wait: False returns at once; new workers that cannot load are tried again.

        Raises:
            LoadFailed: a new worker could not load; the workers that ran before still run.
        """
        self.least, self.most = least, max(least, most if most is not None else least)
        new = self.open(wait)
        outcomes = await asyncio.gather(*(first for _, first in new), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self._close([slot for slot, _ in new], 0)
            raise failures[0]
        surplus = self.open_slots[self.most :]
        for slot in surplus:
            slot.is_closing = True
        closing = self._loop.create_task(self._shrink(surplus, drain_timeout_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if wait:
            await closing

    def open(self, wait: bool = False) -> list[tuple[ReplicaSlot, asyncio.Future[None]]]:
        """Start the workers that are missing; return their slots, and what tells of each start.

        Args:
            wait: False has what cannot load be tried again, and tells of nothing.
        """
        self._look()
        self._opened_at = monotonic()
        new: list[tuple[ReplicaSlot, asyncio.Future[None]]] = []
        while len(self.open_slots) < self.least:
            number = max((slot.number for slot in self.slots), default=0) + 1
            slot, first = ReplicaSlot(number), self._loop.create_future()
            if not wait:
                first.set_result(None)
            slot.task = self._loop.create_task(self._keep(slot, first))
            slot.task.add_done_callback(partial(_tell_of_end, first))
            self.slots.append(slot)
            new.append((slot, first))
        return new

    def unload(self) -> Coroutine[None, None, None]:
        """End all workers, which get nothing from now on; what comes has them loaded again."""
        slots = list(self.slots)
        _retire(slots)
        return self._unload(slots)

    async def _unload(self, slots: Sequence[ReplicaSlot]) -> None:
        await self._close(slots, 0)
        self._failures = 0
        self.pump()

    async def renew(self, plan: WorkerPlan, least: int, drain_timeout_s: float) -> None:
        """Have `least` workers of another plan; the old ones end once these are ready.

        Raises:
            LoadFailed: one could not load; the old ones go on.
        """
        before, old = (self.plan, self.least, self.most), list(self.open_slots)
        for slot in old:  # so that scaling does not count them
            slot.is_closing = True
        self.plan = plan
        try:
            await self.scale(least, 0)
        except BaseException:
            self.plan, self.least, self.most = before
            for slot in old:
                slot.is_closing = False
            raise
        await self._close(old, drain_timeout_s)

    @property
    def open_slots(self) -> list[ReplicaSlot]:
        """Those that are not being ended."""
        return [slot for slot in self.slots if not slot.is_closing]

    async def _shrink(self, slots: Sequence[ReplicaSlot], drain_timeout_s: float) -> None:
        """End these slots; when none are left, nobody serves what still waits."""
        await self._close(slots, drain_timeout_s)
        if (reason := self.why_none) is not None:
            self.refuse(errors.Unavailable(reason, retry_after_s=RETRY_AFTER_S))

    async def stop(self, drain_timeout_s: float) -> None:
        """Answer what was accepted, as far as the time allows, and end all workers."""
        deadline = self._loop.time() + drain_timeout_s
        # A worker that is being replaced serves what waits, unless it cannot be loaded any more.
        while self._loop.time() < deadline and self.why_none is None:
            if not self.is_awaited and not any(worker.flight for worker in self.workers):
                break
            await asyncio.sleep(0.02)
        self._is_stopping, self.load = True, None
        self.refuse(errors.Draining("the model is being removed"))
        await self._close(list(self.slots), max(0.0, deadline - self._loop.time()))
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.refuse(errors.Draining("the model is being removed"))

    def refuse(self, error: errors.ServeError) -> None:
        """Answer everything that waits with `error`."""
        for batcher in self._batchers:
            batcher.fail(error)
        while self._retries:
            self._retries.popleft().fail(error)

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for a worker."""
        return bool(self._retries) or any(batcher.waiting for batcher in self._batchers)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and no worker has work or is being ended."""
        return not self.is_awaited and not any(
            slot.is_closing or (slot.worker is not None and slot.worker.has_work)
            for slot in self.slots
        )

    @property
    def used_at(self) -> float:
        """Time of `time.monotonic()` when a worker got work last, or was started."""
        return max(self._opened_at, *(batcher.handed_over_at for batcher in self._batchers))

    async def _close(self, slots: Sequence[ReplicaSlot], drain_timeout_s: float) -> None:
        """End these slots' workers, each after it has answered what it holds."""
        _retire(slots)
        deadline = self._loop.time() + drain_timeout_s
        while self._loop.time() < deadline and any(s.worker and s.worker.flight for s in slots):
            await asyncio.sleep(0.02)
        for slot in slots:
            if slot.task is not None:
                slot.task.cancel()
        await asyncio.gather(*(s.worker.stop() for s in slots if s.worker is not None))
        self.slots = [slot for slot in self.slots if slot not in slots]

    async def _keep(self, slot: ReplicaSlot, first: asyncio.Future[None]) -> None:
        """Keep one worker alive in this slot; `first` tells how the first start went."""
        backoff = Backoff()
        failing_since: float | None = None
        while True:
            began = self._loop.time()
            worker = slot.worker = Worker(self, slot.number, slot.id)
            try:
                await worker.start()
            except (errors.LoadFailed, OSError) as error:
                longest_s = (
                    RETRY_AFTER_S if isinstance(error, errors.LoadKilled) else Backoff.LONGEST_S
                )
                if not first.done():
                    first.set_exception(error)
                    return
                self._load_failed(error)
            else:
                self._failures = 0
                failing_since = None
                longest_s = Backoff.LONGEST_S
                logger.info("%s ready, pid %d", self._name(slot.number), worker.pid)
                self.policy.loaded(worker.name, self._loop.time() - began)
                if not first.done():
                    first.set_result(None)
                self.pump()
                await asyncio.shield(worker.ended)
                if worker.answered:
                    backoff.reset()
            if slot.is_closing:
                return
            self.policy.ended(worker.name)
            now = self._loop.time()
            if failing_since is None:
                failing_since = now
            elif now - failing_since >= self.plan.run.retry_s:
                self._give_up(slot)
                return
            slot.restarts += 1
            slot.ended = self._last_failure if self._failures else worker.end
            self.metrics.restarts.inc()
            name, pause_s = self._name(slot.number), backoff.pause_s
            logger.warning("%s %s; replacing it in %g s", name, worker.end, pause_s)
            self.policy.retries(worker.name, slot.id, pause_s)
            await asyncio.sleep(pause_s)
            backoff.grow(longest_s)

    def _name(self, number: int) -> str:
        """Return a worker's name in the log: its model and version, its kind, its number."""
        return f"{self.plan.label} {self.plan.log_stem} {number}"

    def _give_up(self, slot: ReplicaSlot) -> None:
        slot.has_given_up = True
        logger.error("%s: no start succeeded for %g s; not tried again",
                     self._name(slot.number), self.plan.run.retry_s)  # fmt: skip
        if (reason := self.why_none) is not None:
            self.refuse(errors.Unavailable(reason, retry_after_s=RETRY_AFTER_S))

    def _load_failed(self, error: Exception) -> None:
        self._failures += 1
        self._last_failure = str(error)
        self.policy.failed(error)
        if (reason := self.why_none) is not None:
            self.refuse(errors.LoadFailed(reason))

    # -- work ----------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        """The workers that have a process, loading ones included."""
        return [slot.worker for slot in self.slots if slot.worker is not None]

    @property
    def ready_count(self) -> int:
        """How many workers are loaded and right."""
        count = 0
        for slot in self.slots:  # asked for every batch
            count += slot.worker is not None and slot.worker.is_ready
        return count

    @property
    def busy_s(self) -> float:
        """How long its workers have had work so far, all together."""
        now = self.clock.read(monotonic())
        running = (now - worker.began_at for worker in self.workers if worker.flight)
        return self.worked_s + sum(running)

    def in_flight(self, kind: int) -> int:
        """Return how many jobs of a kind are in workers, or wait to be tried once more."""
        held = (job for worker in self.workers for job in worker.flight.values())
        return sum(job.kind == kind for job in (*held, *self._retries))

    @property
    def healthy_count(self) -> int:
        """How many workers are ready, or started again and again within the retry window."""
        return sum(not slot.has_given_up for slot in self.slots)

    @property
    def why_none(self) -> str | None:
        """Why no worker will come up soon, or None."""
        if self._is_stopping:
            return f"{self.plan.label} is being removed"
        if not self.slots:
            if self.load is not None and self.least:
                return self.load_failure
            return f"{self.plan.label} has no workers; scale it up"
        # Asked for every request: no generator where the first slot has the answer.
        if self.slots[0].has_given_up and not self.healthy_count:
            return f"no worker of {self.plan.label} can be started any more: {self._last_failure}"
        if self._failures >= GIVE_UP_AFTER and not self.ready_count:
            return (
                f"no worker of {self.plan.label} could be started, {self._failures} times in a "
                f"row; it is tried again and again: {self._last_failure}"
            )
        return None

    @property
    def idle_count(self) -> int:
        """How many workers would start a request at once, or be started for it."""
        if not self.slots and self.load is not None:
            return self.least
        return sum(worker.takes_work and not worker.flight for worker in self.workers)

    def pick(self, kind: int) -> Worker | None:
        """Return the worker to give work to: no explanation running, fewest jobs held."""
        best, least = None, (0, 0)
        for slot in self.slots:  # asked for every batch
            worker = slot.worker
            if worker is None or not worker.takes_work or worker.capacity(kind) <= 0:
                continue
            load = worker.held[EXPLAIN], len(worker.flight)
            if best is None or load < least:
                best, least = worker, load
        if not self.slots:
            self._look()
            if self.load is not None:
                self.load()
        return best

    def handed_over(self) -> int:
        """Return how many jobs wait inside workers, where these count as queued."""
        if not self.policy.counts_handed_over:
            return 0
        count = 0
        for slot in self.slots:  # asked for every request
            if slot.worker is not None:
                count += sum(slot.worker.held) - slot.worker.running
        return count

    def batch_s(self, kind: int) -> float:
        """Return a running mean of how long a worker is busy with a batch; 0 while unknown."""
        return self._batch_s[kind]

    def job_s(self, kind: int) -> float:
        """Return what a job costs one worker in batches as they are of late; 0 while unknown."""
        return self._batch_s[kind] / self._batch_jobs[kind]

    def expected_s(self, kind: int, queued: int) -> float:
        """Return in how many seconds one more job will be answered, behind `queued` others.

        0 while that is unknown, and where an idle worker waits for it.
        """
        if not self._batch_s[kind]:
            return 0.0
        now = monotonic()
        rests: list[float] = []
        for slot in self.slots:
            worker = slot.worker
            if worker is not None and worker.is_ready and not worker.is_closing:
                rests.append(worker.rest_s(now))
        if rests.count(0.0) > queued:
            return 0.0
        return begins_in_s(queued * self.job_s(kind), rests) + self._batch_s[kind]

    def measured(self, kind: int, jobs: int, seconds: float, own_s: float = 0.0) -> None:
        """Take note of one batch: its size and how long the worker was busy with it.

        Args:
            kind: kind of its jobs.
            jobs: how many.
            seconds: until its answers were read here.
            own_s: time as the worker says it; 0 where it does not.
        """
        if kind == PREDICT:
            newest = NEWEST_SHARE if self.own_job_s else 1
            self.own_job_s += newest * ((own_s or seconds) / jobs - self.own_job_s)
        if self._batch_s[kind]:
            self._batch_s[kind] += NEWEST_SHARE * (seconds - self._batch_s[kind])
            self._batch_jobs[kind] += NEWEST_SHARE * (jobs - self._batch_jobs[kind])
        else:
            self._batch_s[kind], self._batch_jobs[kind] = seconds, jobs

    def pump(self) -> None:
        """Hand out work: first what a dead worker held, then what waits."""
        if self._retries:
            self._serve_retries()
        for batcher in self._batchers:
            if batcher.queued:
                batcher.wake()

    def lost(self, worker: Worker) -> None:
        """Try once more, each alone, what a worker held when it died.

        Alone, because one of them may be what kills workers: it must not take the others along.
        """
        if worker.flight:
            self.worked_s += self.clock.read(monotonic()) - worker.began_at
        is_blamed = len(worker.flight) == 1 and not worker.is_condemned
        for job in worker.flight.values():
            is_over = job.retried or job.stream is not None or job.sink.done()
            if self.plan.run.retry and not is_over:
                if self.heir is None or not self.heir(job):
                    job.retried = True
                    self._retries.append(job)
                continue
            job.fail(worker.death)
            is_own = not isinstance(worker.death, errors.WorkerKilled)
            ends = is_own * (1 + job.retried)
            if is_blamed and self.poison.strike(job, job.retried + is_own, worker.end, ends):
                logger.error("%s: %s", self.plan.label, self.poison.refusal(job))
                for batcher in self._batchers:
                    for other in batcher.withdraw():
                        batcher.put(other)  # or refuse it, now that more is known
        worker.flight.clear()
        self.pump()

    def _serve_retries(self) -> None:
        while self._retries:
            first, poison = self._retries[0], self.poison
            if first.sink.done() or (poison and first.model.batchers[first.kind].refuses(first)):
                self._retries.popleft()
                continue
            able = (w for w in self.workers if w.is_ready and not (w.is_alone or w.is_closing))
            worker = min(able, key=lambda w: len(w.flight), default=None)
            if worker is None:
                return
            if worker.flight:
                worker.is_reserved = True
                return
            worker.is_alone = True
            worker.run([self._retries.popleft()])

    def _look(self) -> None:
        """Look after requests and workers while there are any: a thousand models may have none."""
        if self._sweeper is None:
            self.clock.tick(monotonic())
            self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def _sweep(self) -> None:
        """Answer 504 where a deadline has passed, stop what nobody waits for, replace who hangs.

        A worker does not begin a job that is cancelled, and ends a running one where its handler
        looks.
        """
        now, self._sweeper = monotonic(), None
        if not (self.slots or self.is_awaited):
            return
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)
        if self.clock.tick(now):  # answers that came meanwhile are not read yet: timers go first
            return
        worked = self.clock.read(now)
        late: errors.ServeError = errors.DeadlinePassed(
            "the answer took longer than the request's time"
        )
        for worker in self.workers:
            for id, job in worker.flight.items():
                if job.sink.done():  # answered by an error, or by a stream's first chunk
                    continue
                if job.deadline <= now:
                    job.fail(late)
                    worker.cancel(id)
                elif job.drop_if_left():
                    worker.cancel(id)
            limit = self.plan.run.response_timeout_s
            is_busy = worker.is_ready and worker.flight and not worker.is_held_up
            if is_busy and worked - worker.busy_since > limit:
                logger.error("%s: no answer for %g s; ending it", self._name(worker.number), limit)
                next(iter(worker.flight.values())).fail(self.policy.silence(limit))
                worker.condemn()
            elif worker.is_ready and worker.hangs_aside(worked):
                logger.error("%s: what it explains unasked takes over %g s; ending it",
                             self._name(worker.number), limit)  # fmt: skip
                worker.condemn()
        for job in self._retries:
            if job.deadline <= now:
                job.fail(late)
            else:
                job.drop_if_left()
        for batcher in self._batchers:
            batcher.sweep(now)


def _retire(slots: Iterable[ReplicaSlot]) -> None:
    """Hand these workers no more requests."""
    for slot in slots:
        slot.is_closing = True
        if slot.worker is not None:
            slot.worker.is_closing = True


def begins_in_s(work_s: float, rests: list[float]) -> float:
    """Return after how many seconds a job begins that `work_s` of work is queued before.

    Args:
        work_s: seconds of one worker.
        rests: seconds until each worker is idle; empty while none is ready. Whoever is idle first
            takes what is first, so the queue fills the gaps between them from below, as water.
    """
    rests.sort()
    sum_s = work_s
    for count, rest in enumerate(rests, 1):
        sum_s += rest
        if count == len(rests) or sum_s <= count * rests[count]:
            return sum_s / count
    return work_s


def _tell_of_end(first: asyncio.Future[None], _: asyncio.Task[None]) -> None:
    """Notify whoever waits for a worker's first start that it was given up before it was ready."""
    if not first.done():
        first.set_exception(errors.Draining("the model is being removed"))
