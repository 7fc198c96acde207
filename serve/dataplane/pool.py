"""Start, watch, restart and scale the workers of one model version.

A worker is a process of its own session, joined by one end of a socket pair: no path that anybody
else could open, and its end of file is the worker's death. Async ends here; below is plain blocking
code.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, cast

from modelyard.archiver.threads import thread_environment
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.batcher import Batcher
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Call, Reply, Stream
from modelyard.serve.dataplane.clock import Clock
from modelyard.serve.dataplane.metrics import VersionMetrics
from modelyard.serve.errors import (
    DeadlinePassed,
    Draining,
    LoadFailed,
    OutOfMemory,
    ServeError,
    StreamBroken,
    Unavailable,
    WorkerDied,
    WorkerKilled,
)
from modelyard.serve.torchserve.logs import WorkerOutput

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 30.0
GIVE_UP_AFTER = 5
"""Failed loads in a row, with no worker ready, after which waiting requests are refused."""
EXIT_GRACE_S = 2.0
"""From the end of file on its socket to SIGKILL."""
SWEEP_EVERY_S = 0.1
REAP_GRACE_S = 0.1
"""From the end of file on a worker's socket to SIGKILL, when it holds requests."""
LOG_TAIL_BYTES = 2000
NEWEST_SHARE = 0.1
"""Of the newest batch, in the running means."""


@dataclass(frozen=True)
class Plan:
    """What every worker of a model version is started with."""

    label: str
    """`name 1.0`, for logs and messages."""
    load: dict[str, Any]
    """The LOAD message, read by `worker.load`; a worker's number is added to it."""
    log_dir: Path
    threads: int
    batch_size: int
    startup_timeout_s: float
    response_timeout_s: float
    retry: bool
    """Whether a request that a worker died with is tried once more."""
    max_reply_bytes: int
    interpreter: str = sys.executable
    """Python of the workers; another one where the archive brings requirements."""
    hidden_variables: str | None = None
    """Regular expression; variables whose whole name it matches are kept from workers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the workers' environment, beside the server's."""
    retry_window_s: float = math.inf
    """How long a worker that cannot be started any more is tried again."""
    log_stem: str = "worker"
    """Of the log files' names."""
    niceness: int = 0
    """Of the processes: 0 to 19, the higher the sooner others go first."""

    @property
    def is_torchserve(self) -> bool:
        """Whether the server speaks TorchServe's dialect."""
        return self.load.get("dialect") == "torchserve"


class Worker(asyncio.Protocol):
    """One worker process and the server's end of its socket."""

    def __init__(self, pool: Pool, number: int, id: int) -> None:
        self.started_at = datetime.now(UTC)
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._decoder = wire.Decoder(pool.plan.max_reply_bytes)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._next_id = 0
        self.number = number
        self._id = id
        self._outputs: list[WorkerOutput] = []
        self.log = pool.plan.log_dir / f"{pool.plan.log_stem}-{number}.log"
        self.loaded: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.is_ready = False
        self.is_alone = False
        """It runs a retried job, and nothing beside it."""
        self.is_reserved = False
        """It takes nothing new until it is idle."""
        self.is_closing = False
        """It takes nothing new any more."""
        self.is_condemned = False
        """The server itself is about to kill it."""
        self.flight: dict[int, Call] = {}
        self.held = [0, 0]
        self.running = 0
        """Jobs of its current batch, as far as the server can know."""
        self.busy_since = 0.0
        """When it sent something last, or got work while it was idle, by the pool's clock."""
        self.began_at = 0.0
        """When its current batch began, by the pool's clock."""
        self.answered = 0

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and wait until it is loaded and right.

        Raises:
            LoadFailed: with the worker's own error.
        """
        try:
            ours = self._spawn()
        except OSError as error:
            raise LoadFailed(
                f"{self._pool.plan.label}: no worker process can be started: {error.strerror}"
            ) from error
        await self._loop.connect_accepted_socket(lambda: self, ours)
        load = {**self._pool.plan.load, "worker": self.number}
        assert self._transport is not None
        self._transport.write(wire.encode_control(wire.LOAD, load))
        limit = self._pool.plan.startup_timeout_s
        try:
            async with asyncio.timeout(limit):
                await self.loaded
        except TimeoutError:
            self.condemn()
            raise LoadFailed(
                f"{self._pool.plan.label}: not ready after {limit:g} s (startup_timeout_s); "
                f"the log ends: {self._log_tail()}"
            ) from None

    def _spawn(self) -> socket.socket:
        """Start the process, watch for its end, and return our end of its socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self.log.open("ab") as log:
                output = subprocess.PIPE if self._pool.plan.is_torchserve else log
                self._process = subprocess.Popen(
                    [
                        self._pool.plan.interpreter,
                        "-P",
                        "-m",
                        "modelyard.serve.worker",
                        str(theirs.fileno()),
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_worker_environment(self._pool.plan),
                    start_new_session=True,
                )
            self._pidfd = os.pidfd_open(self._process.pid)
            if niceness := self._pool.plan.niceness:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        except OSError:
            ours.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
            raise
        self._loop.add_reader(self._pidfd, self._exited)
        thread = f"W-{self._id}-{self._pool.plan.label.replace(' ', '_')}"
        if self._process.stdout is not None and self._process.stderr is not None:
            self._outputs = [
                WorkerOutput(self._process.stdout, f"{thread}-stdout", logging.INFO),
                WorkerOutput(self._process.stderr, f"{thread}-stderr", logging.WARNING),
            ]
        return ours

    @property
    def pid(self) -> int:
        """Process id; -1 before the start."""
        return self._process.pid if self._process else -1

    def kill(self) -> None:
        """End the process and whatever it started, at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def condemn(self) -> None:
        """Kill a process that hangs or talks nonsense: its end is no lack of memory."""
        self.is_condemned = True
        self.kill()

    async def stop(self) -> None:
        """Let an idle process end by itself, or kill it after a short while."""
        if self._process is None:
            return
        if not self.is_ready or self.flight:
            self.condemn()
        if self._transport is not None:
            self._transport.close()
        try:
            async with asyncio.timeout(EXIT_GRACE_S):
                await asyncio.shield(self.ended)
        except TimeoutError:
            self.kill()
            await self.ended

    def _exited(self) -> None:
        """The process has ended: reap it. Replies that it had sent may still be on their way."""
        self.is_ready = False
        assert self._process is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it started and left behind
        for output in self._outputs:
            output.finish()
        if self._transport is None or self._transport.is_closing():
            self._finish()
        else:
            # End of file comes by itself, unless a process it forked holds the socket open.
            self._loop.call_later(0.5, self._transport.abort)

    def _finish(self) -> None:
        """Once both process and connection have ended: give back what it held, tell who waits."""
        self._pool.lost(self)
        if not self.loaded.done():
            assert self._process is not None
            self.loaded.set_exception(
                LoadFailed(
                    f"{self._pool.plan.label}: the worker ended with "
                    f"{_describe_exit(self._process.returncode)} before it was ready; "
                    f"the log ends: {self._log_tail()}"
                )
            )
            self.loaded.exception()  # whoever waited may have left
        if not self.ended.done():
            self.ended.set_result(None)

    def _log_tail(self) -> str:
        if self._outputs:
            return next((o.last_line for o in reversed(self._outputs) if o.last_line), "(empty)")
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else "(empty)"
        return "(unreadable)"

    # -- the connection ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take replies and control messages; a worker that talks nonsense is ended."""
        try:
            for frame in self._decoder.feed(data):
                if frame[0].id == 0:
                    self._control(frame[0])
                else:
                    self._replies(frame)
        except wire.WireError as error:
            logger.error("%s worker %d: %s; ending it", self._pool.plan.label, self.number, error)
            self.condemn()
            assert self._transport is not None
            self._transport.abort()  # nothing that follows means anything
        self._pool.pump()

    def connection_lost(self, error: Exception | None) -> None:
        """End the process, if it still runs; how it ended decides over what it held."""
        self.is_ready = False
        assert self._process is not None
        if self._process.returncode is not None:
            self._finish()
        elif error is not None or self.flight:
            # Mostly it is ending by itself, and closed its socket a moment before it can be reaped.
            self._loop.call_later(REAP_GRACE_S, self.condemn)
        else:
            self._loop.call_later(EXIT_GRACE_S, self.kill)

    def _control(self, item: wire.Item) -> None:
        message = wire.decode_control(item)
        if item.code == wire.METRICS and self.loaded.done():
            busy_s = self._pool.clock.read(monotonic()) - self.busy_since
            self._pool.metrics.reported(message.get("records"), busy_s)
        elif self.loaded.done():
            raise wire.WireError(f"control message {item.code} from a worker that is loaded")
        elif item.code == wire.READY and message.get("protocol") == wire.PROTOCOL:
            self.is_ready = True
            self.loaded.set_result(message)
        elif item.code == wire.FAILED:
            text = f"{self._pool.plan.label}: {message.get('message', 'no reason given')}"
            failed = OutOfMemory if message.get("out_of_memory") else LoadFailed
            self.loaded.set_exception(failed(text))
        else:
            raise wire.WireError(f"control message {item.code} that nobody expects")

    def _replies(self, frame: list[wire.Item]) -> None:
        now = monotonic()
        read_at = self._pool.clock.read(now)
        kind = count = 0
        before = len(self.flight)
        for item in frame:
            id, status, flags, headers, body, queue_us, handler_us = item
            if id == 0:
                self._control(item)
                continue
            job = self.flight.get(id)
            if job is None:
                raise wire.WireError(f"a reply to job {id}, which it does not hold")
            if not 200 <= status <= 599 or (headers and headers.count(0) % 2 == 0):
                raise wire.WireError(f"a reply with status {status} and headers {headers[:200]!r}")
            if flags & wire.MORE:
                self._chunk(id, job, status, headers, body)
                continue
            del self.flight[id]
            self.held[job.kind] -= 1
            if not flags & wire.UNREAD:
                kind = job.kind
                count += 1
                self._pool.metrics.kinds[kind].ran(queue_us, handler_us)
            if job.stream is not None:
                if flags & wire.BROKEN:
                    job.fail(StreamBroken(body.decode("utf-8", "replace")))
                else:
                    job.stream.put(body, is_last=True)
            elif not job.sink.done():
                job.sink.set_result(Reply(status, headers, body, queue_us, handler_us))
        if len(self.flight) < before:
            if count:
                self.answered += count
                self._pool.metrics.kinds[kind].batch_size.observe(count)
                if not self._pool.clock.stood_still_since(self.began_at, now):
                    self._pool.measured(kind, count, read_at - self.began_at)
            self.began_at = read_at
            # It takes what has arrived, up to a batch.
            self.running = min(self._pool.plan.batch_size, len(self.flight))
        self.busy_since = read_at
        if not self.flight:
            self.is_alone = self.is_reserved = False

    def _chunk(self, id: int, job: Call, status: int, headers: bytes, body: bytes) -> None:
        """Pass on a chunk; status and headers go with the first one."""
        if job.stream is None:
            job.stream = Stream(job.has_left, partial(self.cancel, id))
            if job.sink.done():  # its deadline has passed
                job.stream.close()
            else:
                job.sink.set_result(Reply(status, headers, job.stream))
        job.stream.put(body)

    def cancel(self, id: int) -> None:
        """Notify the worker that nobody reads this job's answer, or the rest of it."""
        if id in self.flight and self._transport is not None:
            self._transport.write(wire.encode_control(wire.CANCEL, {"ids": [id]}))

    @property
    def death(self) -> WorkerDied:
        """What its end means to the requests that it held."""
        code = self._process.returncode if self._process else None
        killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL) and not self.is_condemned
        return WorkerKilled() if killed else WorkerDied()

    # -- a replica, as the batcher knows it ----------------------------------------------------

    def room(self, kind: int) -> int:
        """Return how many more jobs of this kind it takes.

        Two batches of predictions, one of explanations, which are long.
        """
        depth = 1 if kind == EXPLAIN else 2
        return depth * self._pool.plan.batch_size - self.held[kind]

    def run(self, jobs: list[Call]) -> None:
        """Send the jobs in one frame; `_replies` answers them, or the pool if it dies."""
        assert self._transport is not None
        if not self.flight:
            self.busy_since = self.began_at = self._pool.clock.read(monotonic())
            self.running = len(jobs)
        frame, now_us = wire.Frame(), wire.now_us()
        for job in jobs:
            self._next_id = self._next_id % 0xFFFFFFFF + 1
            self.flight[self._next_id] = job
            self.held[job.kind] += 1
            flags = job.flags
            flags |= wire.EXPLAIN if job.kind == EXPLAIN else 0
            flags |= wire.ALONE if job.retried else 0
            frame.add(self._next_id, 0, flags, job.head, job.parts, now_us)
        self._transport.writelines(frame.buffers())

    def rest_s(self, now: float) -> float:
        """Return in how many seconds it will have answered what it holds; 0 when it is idle.

        A batch that has overrun its time is expected to overrun it by as much again.
        """
        if not self.flight:
            return 0.0
        pool, held = self._pool, self.held
        all_s = held[PREDICT] * pool.job_s(PREDICT) + held[EXPLAIN] * pool.job_s(EXPLAIN)
        running_s = all_s * self.running / len(self.flight)
        return all_s - running_s + abs(running_s - (pool.clock.read(now) - self.began_at))

    @property
    def takes_work(self) -> bool:
        """Whether it may be given anything new."""
        return self.is_ready and not (self.is_alone or self.is_reserved or self.is_closing)


_ids = itertools.count(9000)


@dataclass
class ReplicaSlot:
    """A place for one worker, refilled when the worker dies."""

    number: int
    """From 1 up within its model version."""
    id: int = field(default_factory=_ids.__next__)
    """Unique in this server and the same for every worker in this slot; TorchServe's is a port."""
    task: asyncio.Task[None] | None = None
    worker: Worker | None = None
    restarts: int = 0
    is_closing: bool = False
    has_given_up: bool = False
    """It stays empty: no worker could be started for the whole retry window."""

    @property
    def is_ready(self) -> bool:
        """Whether its worker is loaded and right."""
        return self.worker is not None and self.worker.is_ready


class Pool:
    """The workers of one model version; the engine that `batcher.py` speaks of."""

    def __init__(self, plan: Plan, metrics: VersionMetrics) -> None:
        self.plan = plan
        self.metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._batchers: Sequence[Batcher] = ()
        self._retries: deque[Call] = deque()
        self._batch_s = [0.0, 0.0]
        self._batch_jobs = [1.0, 1.0]
        self._failures = 0
        self._last_failure = ""
        self._sweeper: asyncio.TimerHandle | None = None
        self.clock = Clock()
        """What workers are judged by."""
        self._is_stopping = False
        self._counts_handed_over = plan.is_torchserve
        self._closing: set[asyncio.Task[None]] = set()
        self.slots: list[ReplicaSlot] = []
        self.least = self.most = 0
        """How many workers were asked for, last."""

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
            drain_timeout_s: for surplus ones to answer what they hold.
            most: how many may stay; None takes `least`.
            wait: False returns at once; new workers that cannot load are tried again.

        Raises:
            LoadFailed: a new worker could not load; the workers that ran before still run.
        """
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)
        self.least, self.most = least, max(least, most if most is not None else least)
        new: list[tuple[ReplicaSlot, asyncio.Future[None]]] = []
        while len(self._open_slots) < least:
            number = max((slot.number for slot in self.slots), default=0) + 1
            slot, first = ReplicaSlot(number), self._loop.create_future()
            if not wait:
                first.set_result(None)
            slot.task = self._loop.create_task(self._keep(slot, first))
            slot.task.add_done_callback(partial(_tell_of_end, first))
            self.slots.append(slot)
            new.append((slot, first))
        outcomes = await asyncio.gather(*(first for _, first in new), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self._close([slot for slot, _ in new], 0)
            raise failures[0]
        surplus = self._open_slots[self.most :]
        for slot in surplus:
            slot.is_closing = True
        closing = self._loop.create_task(self._shrink(surplus, drain_timeout_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        if wait:
            await closing

    @property
    def _open_slots(self) -> list[ReplicaSlot]:
        return [slot for slot in self.slots if not slot.is_closing]

    async def _shrink(self, slots: Sequence[ReplicaSlot], drain_timeout_s: float) -> None:
        """End these slots; when none are left, nobody serves what still waits."""
        await self._close(slots, drain_timeout_s)
        if (reason := self.why_none) is not None:
            self._refuse(Unavailable(reason, retry_after_s=5))

    async def stop(self, drain_timeout_s: float) -> None:
        """Answer what was accepted, as far as the time allows, and end all workers."""
        deadline = self._loop.time() + drain_timeout_s
        # A worker that is being replaced serves what waits, unless it cannot be loaded any more.
        while self._loop.time() < deadline and self._is_busy and self.why_none is None:
            await asyncio.sleep(0.02)
        self._is_stopping = True
        self._refuse(Draining("the model is being removed"))
        await self._close(list(self.slots), max(0.0, deadline - self._loop.time()))
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._refuse(Draining("the model is being removed"))

    def _refuse(self, error: ServeError) -> None:
        """Answer everything that waits with `error`."""
        for batcher in self._batchers:
            batcher.fail(error)
        while self._retries:
            self._retries.popleft().fail(error)

    @property
    def _is_busy(self) -> bool:
        return (
            any(batcher.waiting for batcher in self._batchers)
            or bool(self._retries)
            or any(slot.worker and slot.worker.flight for slot in self.slots)
        )

    async def _close(self, slots: Sequence[ReplicaSlot], drain_timeout_s: float) -> None:
        """End these slots' workers, each after it has answered what it holds."""
        for slot in slots:
            slot.is_closing = True
            if slot.worker is not None:
                slot.worker.is_closing = True
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
        backoff_s = FIRST_BACKOFF_S
        failing_since: float | None = None
        while True:
            began = self._loop.time()
            worker = slot.worker = Worker(self, slot.number, slot.id)
            try:
                await worker.start()
            except (LoadFailed, OSError) as error:
                if not first.done():
                    first.set_exception(error)
                    return
                self._load_failed(error)
            else:
                self._failures = 0
                failing_since = None
                self.metrics.worker_loaded(slot.id, self._loop.time() - began)
                logger.info("%s worker %d ready, pid %d", self.plan.label, slot.number, worker.pid)
                self._tell(slot, "State change WORKER_STARTED -> WORKER_MODEL_LOADED")
                if not first.done():
                    first.set_result(None)
                self.pump()
                await asyncio.shield(worker.ended)
                if worker.answered:
                    backoff_s = FIRST_BACKOFF_S
            if slot.is_closing:
                return
            self._tell(slot, "Backend worker process died.")
            now = self._loop.time()
            if failing_since is None:
                failing_since = now
            elif now - failing_since >= self.plan.retry_window_s:
                self._give_up(slot)
                return
            slot.restarts += 1
            self.metrics.restarts.inc()
            logger.warning(
                "%s worker %d ended; replacing it in %g s", self.plan.label, slot.number, backoff_s
            )
            self._tell(slot, f"Retry worker: {slot.id} in {backoff_s:g} seconds.")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    def _tell(self, slot: ReplicaSlot, text: str) -> None:
        """Log a line that TorchServe's users search their logs for."""
        if self.plan.is_torchserve:
            logger.info("W-%d-%s %s", slot.id, self.plan.label.replace(" ", "_"), text)

    def _give_up(self, slot: ReplicaSlot) -> None:
        slot.has_given_up = True
        logger.error("%s worker %d: no start succeeded for %g s; not tried again",
                     self.plan.label, slot.number, self.plan.retry_window_s)  # fmt: skip
        if (reason := self.why_none) is not None:
            self._refuse(Unavailable(reason, retry_after_s=5))

    def _load_failed(self, error: Exception) -> None:
        self._failures += 1
        self._last_failure = str(error)
        logger.error("%s", error)
        if (reason := self.why_none) is not None:
            self._refuse(LoadFailed(reason))

    # -- work ----------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Worker]:
        """The workers that have a process, loading ones included."""
        return [slot.worker for slot in self.slots if slot.worker is not None]

    @property
    def ready_count(self) -> int:
        """How many workers are loaded and right."""
        return sum(worker.is_ready for worker in self.workers)

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
            return f"{self.plan.label} has no workers; scale it up"
        # Asked for every request: no generator where the first slot has the answer.
        is_hopeless = self.slots[0].has_given_up and not self.healthy_count
        if is_hopeless or (self._failures >= GIVE_UP_AFTER and not self.ready_count):
            return f"no worker of {self.plan.label} can be started any more: {self._last_failure}"
        return None

    @property
    def idle_count(self) -> int:
        """How many workers would start a request at once."""
        return sum(worker.takes_work and not worker.flight for worker in self.workers)

    def pick(self, kind: int) -> Worker | None:
        """Return the worker to give work to: no explanation running, fewest jobs held."""
        able = (w for w in self.workers if w.takes_work and w.room(kind) > 0)
        return min(able, key=lambda w: (w.held[EXPLAIN], len(w.flight)), default=None)

    def handed_over(self) -> int:
        """Return how many jobs wait inside workers; TorchServe's queue holds them still."""
        if not self._counts_handed_over:
            return 0
        return sum(len(worker.flight) - worker.running for worker in self.workers)

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

    def measured(self, kind: int, jobs: int, seconds: float) -> None:
        """Take note of one batch: its size and how long the worker was busy with it."""
        if self._batch_s[kind]:
            self._batch_s[kind] += NEWEST_SHARE * (seconds - self._batch_s[kind])
            self._batch_jobs[kind] += NEWEST_SHARE * (jobs - self._batch_jobs[kind])
        else:
            self._batch_s[kind], self._batch_jobs[kind] = seconds, jobs

    def pump(self) -> None:
        """Hand out work: first what a dead worker held, then what waits."""
        self._serve_retries()
        for batcher in self._batchers:
            if batcher.waiting:
                batcher.wake()

    def lost(self, worker: Worker) -> None:
        """Try once more, each alone, what a worker held when it died.

        Alone, because one of them may be what kills workers: it must not take the others along.
        """
        for job in worker.flight.values():
            if job.stream is not None or job.retried or not self.plan.retry:
                job.fail(worker.death)
            elif not job.sink.done():
                job.retried = True
                self._retries.append(job)
        worker.flight.clear()
        self.pump()

    def _serve_retries(self) -> None:
        while self._retries:
            if self._retries[0].sink.done():
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

    def _sweep(self) -> None:
        """Answer 504 where a deadline has passed, stop what nobody waits for, replace who hangs.

        A worker does not begin a job that is cancelled, and ends a running one where its handler
        looks.
        """
        now = monotonic()
        self._sweeper = self._loop.call_later(SWEEP_EVERY_S, self._sweep)
        if self.clock.tick(now):  # answers that came meanwhile are not read yet: timers go first
            return
        worked = self.clock.read(now)
        late: ServeError = DeadlinePassed("the answer took longer than the request's time")
        for worker in self.workers:
            for id, job in worker.flight.items():
                if job.sink.done():  # answered by an error, or by a stream's first chunk
                    continue
                if job.deadline <= now:
                    job.fail(late)
                    worker.cancel(id)
                elif job.drop_if_left():
                    worker.cancel(id)
            limit = self.plan.response_timeout_s
            if worker.is_ready and worker.flight and worked - worker.busy_since > limit:
                logger.error("%s worker %d: no answer for %g s; ending it",
                             self.plan.label, worker.number, limit)  # fmt: skip
                oldest = next(iter(worker.flight.values()))
                oldest.fail(
                    WorkerDied()
                    if self.plan.is_torchserve
                    else DeadlinePassed(f"the worker gave no answer for {limit:g} s")
                )
                worker.condemn()
        for job in self._retries:
            if job.deadline <= now:
                job.fail(late)
            else:
                job.drop_if_left()
        for batcher in self._batchers:
            batcher.sweep(now)


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
        first.set_exception(Draining("the model is being removed"))


def _worker_environment(plan: Plan) -> dict[str, str]:
    """Return the environment of a worker."""
    hidden = re.compile(plan.hidden_variables) if plan.hidden_variables else None
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if hidden is None or not hidden.fullmatch(name)
        },
        **plan.variables,
        **thread_environment(plan.threads),
        "PYTHONUNBUFFERED": "1",
    }


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
