"""One cell: a server process, its queues and its workers, each busy as long as was measured.

The queues are `Batcher`s with their `Admission`, over `Pool`s of `Worker`s: the classes that a
server runs, which pick, estimate, refuse and count as they do there. Made here is only what is a
process or a machine there: how long the server has of a core for its clients and its workers'
answers, how long a worker has for a batch, and that these share the cores.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.call import PREDICT, Call, ReplySink
from modelyard.serve.dataplane.clock import Clock
from modelyard.serve.dataplane.lengths import take_batch
from modelyard.serve.dataplane.metrics import VersionMetrics
from modelyard.serve.dataplane.pool import SWEEP_EVERY_S, Pool, ReplicaSlot
from modelyard.serve.dataplane.worker import Worker, WorkerPlan, WorkerPolicy
from modelyard.serve.errors import ServeError
from modelyard.serve.http.turns import FORGETS, SLICE_S, last_comes_first
from modelyard.serve.simulation.loop import VirtualLoop

Then = Callable[[], object]
"""What is called when something has run."""
IN_SHARE = 0.6
"""Of what a request costs the server, before it is queued: a refused one costs that much."""
MIGRATION_S = 0.0005
"""For which a core is idle before it takes who waits on another (sched_migration_cost_ns)."""


@dataclass(frozen=True)
class ModelShape:
    """One model as every cell that has it runs it."""

    name: str
    times_s: Callable[[int], Sequence[float]]
    """By batch size: times of one batch, each as likely as the next."""
    workers: int
    threads: int
    batch_size: int
    server_s: float
    """The server has of a core for one request of it."""
    turn_s: float
    """And for each turn of its event loop."""
    wait_s: float
    """On the way, with nobody busy."""
    queue_size: int
    request_timeout_s: float
    refuses_late: bool = True
    batch_delay_s: float = 0.0
    gathers_bursts: bool = False
    needs_ticket: bool = False
    idle_s: Callable[[float], tuple[float, float]] = lambda pause_s: (0.0, 0.0)
    """By a pause: what the server's next turn takes more for a request, and a worker's batch."""


class _Core:
    """One core, shared evenly by what runs on it (processor sharing)."""

    def __init__(self, loop: VirtualLoop, on_end: Callable[[_Core, Hashable, Then], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._work: list[tuple[float, int, Hashable, Then]] = []
        """What runs, by the work after which it ends."""
        self._done = self._at = 0.0
        """Work that each has done, up to when."""
        self._numbers = count()
        self.armed = 0
        """Changes with what runs."""

    def __len__(self) -> int:
        """Return how many run."""
        return len(self._work)

    def add(self, who: Hashable, seconds: float, then: Then) -> None:
        """Run something beside what runs."""
        self._advance()
        heapq.heappush(self._work, (self._done + seconds, next(self._numbers), who, then))
        self._arm()

    def take_longest(self) -> tuple[Hashable, float, Then]:
        """Take out what has most before it, with how much that is."""
        self._advance()
        longest = max(self._work)
        self._work.remove(longest)
        heapq.heapify(self._work)
        self._arm()
        end, _, who, then = longest
        return who, end - self._done, then

    def _advance(self) -> None:
        now = self._loop.now
        if self._work:
            self._done += (now - self._at) / len(self._work)
        self._at = now

    def _arm(self) -> None:
        """Come back when the first is done, if nothing changes until then."""
        self.armed += 1
        if self._work:
            left = max(0.0, self._work[0][0] - self._done) * len(self._work)
            self._loop.at(self._loop.now + left, self._ended, self.armed)

    def _ended(self, armed: int) -> None:
        if armed != self.armed:
            return
        self._done, _, who, then = heapq.heappop(self._work)
        self._at = self._loop.now
        self._arm()
        self._on_end(self, who, then)


class Cores:
    """Cores of one machine, each with its own queue, as kernels have them.

    A thread that wakes runs where it ran last if nothing else does, else on an idle core, and where
    there is none it shares the one where it ran last. It stays there until it sleeps, or until a
    core has been idle for a while. So one may wait while another core is idle for a moment, which
    is what many short turns on few cores do to each other.
    """

    def __init__(self, loop: VirtualLoop, cores: int, threads: int) -> None:
        self._loop = loop
        self._is_shared = threads > cores
        self._cores = [_Core(loop, self._ended) for _ in range(cores if self._is_shared else 0)]
        self._last: dict[Hashable, tuple[_Core, float]] = {}
        """Where each thread ran, and until when."""

    def run(self, who: Hashable, seconds: float, threads: int, then: Then) -> None:
        """Call when something has run for so long on so many threads."""
        if not self._is_shared:
            self._loop.at(self._loop.now + seconds, then)
        elif threads == 1:
            self._start(who, seconds, then)
        else:
            left = count(threads - 1, -1)

            def one_ended() -> None:
                if not next(left):
                    then()

            for number in range(threads):
                self._start((who, number), seconds, one_ended)

    def _start(self, who: Hashable, seconds: float, then: Then) -> None:
        now = self._loop.now
        core, until = self._last.get(who) or (self._cores[len(self._last) % len(self._cores)], -1.0)
        if core and until < now:  # it slept
            core = next((each for each in self._cores if not each), core)
        self._place(who, core, seconds, then)

    def _place(self, who: Hashable, core: _Core, seconds: float, then: Then) -> None:
        self._last[who] = core, math.inf
        core.add(who, seconds, then)

    def _ended(self, core: _Core, who: Hashable, then: Then) -> None:
        self._last[who] = core, self._loop.now
        then()
        if not core and any(len(each) > 1 for each in self._cores):
            # Looked at again in a while: it may have something to do then.
            self._loop.at(self._loop.now + MIGRATION_S, self._take, core, core.armed)

    def _take(self, core: _Core, armed: int) -> None:
        if core.armed != armed:
            return
        fullest = max(self._cores, key=len)
        if len(fullest) > 1:
            who, seconds, then = fullest.take_longest()
            self._place(who, core, seconds, then)


class SimulatedWorker(Worker):
    """A worker without a process: it has a batch for as long as one was measured to take."""

    def __init__(self, pool: Pool, number: int, cell: Cell, model: ModelShape) -> None:
        super().__init__(pool, number, number)
        self.is_ready = True
        self._cell = cell
        self._model = model
        self._inbox: deque[wire.Item] = deque()
        self._has_batch = False
        self._idle_since = 0.0

    def _send(self, ids: Sequence[int], jobs: Sequence[Call]) -> None:
        self._inbox.extend(
            wire.Item(id, job.rows, wire.ALONE if job.retried else 0, b"", b"", 0, 0)
            for id, job in zip(ids, jobs, strict=True)
        )
        if not self._has_batch:
            self._begin(self._model.idle_s(self._cell.loop.now - self._idle_since)[1])

    def cancel(self, id: int) -> None:
        """Take out what has not begun, as a worker does that is told."""
        for item in self._inbox:
            if item.id == id:
                self._inbox.remove(item)
                answer = wire.Item(id, 499, wire.UNREAD, b"", b"", 0, 0)
                self._cell.server.reply(self, [answer])
                return

    def _begin(self, rested_s: float = 0.0) -> None:
        model, cell = self._model, self._cell
        batch = take_batch(self._inbox, model.batch_size)
        self._has_batch = True
        times = model.times_s(sum(item.code for item in batch))
        seconds = times[int(cell.chance.random() * len(times))] + rested_s
        cell.batches += 1
        cell.run(self, seconds, model.threads, partial(self._ended, batch, cell.loop.time()))

    def _ended(self, batch: list[wire.Item], began: float) -> None:
        took_us = int((self._cell.loop.time() - began) * 1e6)
        answers = [wire.Item(item.id, 200, 0, b"", b"", 0, took_us, took_us) for item in batch]
        self._cell.server.reply(self, answers)
        if self._inbox:
            self._begin()
        else:
            self._has_batch = False
            self._idle_since = self._cell.loop.now

    def take_replies(self, answers: list[wire.Item]) -> None:
        """Take answers as from the socket."""
        self._replies(answers)
        self._pool.pump()


class SimulatedPool(Pool):
    """The workers of one model in one cell, all loaded."""

    def __init__(self, cell: Cell, model: ModelShape, world: World) -> None:
        super().__init__(
            world.plan_of(model),
            world.metrics,
            world.policy,
            world.budget,
            Clock(cell.loop.time),
        )
        for number in range(1, model.workers + 1):
            slot = ReplicaSlot(number, number)
            slot.worker = SimulatedWorker(self, number, cell, model)
            self.slots.append(slot)
        # Not all cells at the same moments, and never later than the clock bears.
        self._sweeper = cell.loop.call_later(SWEEP_EVERY_S * cell.chance.random(), self._sweep)

    def stop_sweeping(self) -> None:
        """Look after deadlines no more."""
        if self._sweeper is not None:
            self._sweeper.cancel()


class SimulatedModel:
    """A model version, as far as calls look at it."""

    def __init__(self, cell: Cell, model: ModelShape, world: World) -> None:
        self.shape = model
        self.request_timeout_s = model.request_timeout_s
        self.pool = SimulatedPool(cell, model, world)
        self.queue = Batcher(
            self.pool,
            PREDICT,
            world.metrics.kinds[PREDICT],
            batch_size=model.batch_size,
            delay_s=model.batch_delay_s,
            queue_size=model.queue_size,
            gathers_bursts=model.gathers_bursts,
            needs_ticket=model.needs_ticket,
            clock=cell.loop.time,
        )
        self.batchers = (self.queue,)
        self.pool.feed(self.batchers)

    def start_explainers(self) -> None:
        """Start nothing: predictions are simulated."""


class World:
    """What all cells share that has no part in what is found out."""

    def __init__(self, metrics: VersionMetrics) -> None:
        self.metrics = metrics
        self.policy = WorkerPolicy()
        self.budget = AnswerBudget()
        self._plans: dict[str, WorkerPlan] = {}

    def plan_of(self, model: ModelShape) -> WorkerPlan:
        """Return what a model's workers would be started with."""
        if model.name not in self._plans:
            self._plans[model.name] = WorkerPlan(
                label=f"{model.name} 1",
                load={},
                log_dir=Path(),
                threads=model.threads,
                batch_size=model.batch_size,
                startup_timeout_s=1e9,
                response_timeout_s=1e9,
                retry=True,
                max_answer_bytes=1 << 20,
            )
        return self._plans[model.name]


class Server:
    """The server process of a cell: one thread, that reads clients and workers in turns.

    A turn takes the answers that are there, and requests for a millisecond's work; what it took is
    acted on at its end. It has a cost of its own, so that many in one are cheaper.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._requests: deque[tuple[float, str, float, ReplySink]] = deque()
        self._answers: deque[tuple[SimulatedWorker, list[wire.Item]]] = deque()
        self._is_busy = False
        self._taken = 0
        self._patience_s = float("inf")
        self._idle_since = 0.0
        self.busy_s = 0.0

    def request(self, model: str, timeout_s: float, sink: ReplySink) -> None:
        """Take a request, when it is its turn."""
        timeout_s = min(timeout_s, self._cell.models[model].request_timeout_s)
        self._patience_s = min(timeout_s, FORGETS * self._patience_s)
        self._requests.append((self._cell.loop.now, model, timeout_s, sink))
        if not self._is_busy:
            idle_s = self._cell.loop.now - self._idle_since
            self._begin(self._cell.models[model].shape.idle_s(idle_s)[0])

    def reply(self, worker: SimulatedWorker, answers: list[wire.Item]) -> None:
        """Take a worker's answers, when it is their turn."""
        self._answers.append((worker, answers))
        if not self._is_busy:
            self._begin()  # which it slept for as long when this was measured

    def _begin(self, rested_s: float = 0.0) -> None:
        self._is_busy = True
        answers = list(self._answers)
        self._answers.clear()
        first = answers[0][0]._model if answers else self._cell.models[self._requests[0][1]].shape
        seconds = first.turn_s + rested_s
        for worker, items in answers:
            seconds += (1 - IN_SHARE) * worker._model.server_s * len(items)
        requests = []
        of_clients = 0.0
        while self._requests and of_clients < SLICE_S:
            self._taken += 1
            waited_s = self._cell.loop.now - self._requests[0][0]
            if last_comes_first(waited_s, self._patience_s, self._taken):
                request = self._requests.pop()
            else:
                request = self._requests.popleft()
            of_clients += IN_SHARE * self._cell.models[request[1]].shape.server_s
            requests.append(request)
        self.busy_s += seconds + of_clients
        self._cell.run(self, seconds + of_clients, 1, partial(self._end, answers, requests))

    def _end(
        self,
        answers: list[tuple[SimulatedWorker, list[wire.Item]]],
        requests: list[tuple[float, str, float, ReplySink]],
    ) -> None:
        for worker, items in answers:
            worker.take_replies(items)
        for came_at, model, timeout_s, sink in requests:
            self._cell.submit(came_at, model, timeout_s, sink)
        if self._requests or self._answers:
            self._begin()
        else:
            self._is_busy = False
            self._idle_since = self._cell.loop.now


class Client:
    """Whoever asks, where it runs on the machine that it asks: one thread, on the same cores.

    It sends what is due and takes answers one after the other.
    """

    def __init__(self, cores: Cores, request_s: float) -> None:
        self._cores = cores
        self._each_s = request_s / 2
        self._due: deque[Then] = deque()

    def run(self, then: Then) -> None:
        """Call when it has sent a request, or taken an answer: each half of the work."""
        self._due.append(then)
        if len(self._due) == 1:
            self._cores.run(self, self._each_s, 1, self._next)

    def _next(self) -> None:
        then = self._due.popleft()
        if self._due:
            self._cores.run(self, self._each_s, 1, self._next)
        then()


class Cell:
    """A server with its workers, on the cores of a machine.

    Args:
        models: those that it serves.
        cores: that its threads share, with nobody else unless it is given as `Cores`.
        chance: for the times of batches.
        slowness: by which everything takes longer here.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        world: World,
        models: Sequence[ModelShape],
        cores: int | Cores,
        chance: Random,
        slowness: float = 1.0,
    ) -> None:
        self.loop = loop
        self.chance = chance
        self.batches = 0
        if not isinstance(cores, Cores):
            threads = 1 + sum(model.workers * model.threads for model in models)
            cores = Cores(loop, cores, threads)
        self.cores = cores
        self._slowness = slowness
        self.work_s = 0.0
        """Of one core, in all."""
        self.server = Server(self)
        self.models = {model.name: SimulatedModel(self, model, world) for model in models}

    def run(self, who: Hashable, seconds: float, threads: int, then: Then) -> None:
        """Call when somebody here has had so many of the cores for so long."""
        seconds *= self._slowness
        self.work_s += seconds * threads
        self.cores.run(who, seconds, threads, then)

    def stop(self) -> None:
        """Look after nobody any more: what it holds is lost."""
        for model in self.models.values():
            model.pool.stop_sweeping()

    def submit(self, came_at: float, model: str, timeout_s: float, sink: ReplySink) -> None:
        """Queue a request that the server has read, or refuse it."""
        of, now = self.models[model], self.loop.now
        must_fit = of.shape.refuses_late or timeout_s < of.request_timeout_s
        waited_s = now - came_at
        try:
            of.queue.check(timeout_s, must_fit, now, waited_s)
        except ServeError as error:
            sink.set_exception(error)
            return
        call = Call(of, PREDICT, b"", sink, timeout_s - waited_s, None, 0, must_fit)
        call.arrived((b"",), now)
        of.queue.put(call)
