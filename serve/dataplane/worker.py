"""The server's end of one worker process: how it starts, what it is sent, what it answers.

A worker is a process of its own session, joined by one end of a socket pair: no path that anybody
else could open, and its end of file is the worker's death. Async ends here; in the worker is plain
blocking code.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, Protocol, cast

from modelyard.serve import errors
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.budget import Share
from modelyard.serve.dataplane.call import EXPLAIN, PREDICT, Call, Reply, ReplySink, Stream
from modelyard.serve.dataplane.log_file import LogFile, LogWriter, Pipe
from modelyard.serve.dataplane.process import ChildProcess, Launch, start_process
from modelyard.serve.dataplane.tracing import Batch
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.walls.kernel import children

if TYPE_CHECKING:
    from modelyard.serve.dataplane.pool import Pool

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 2.0
"""Time from the end of file on its socket to SIGKILL."""
LINGER_S = 0.5
"""Time from its end to that of its socket, which a process that it forked may hold open; and the
other way round, while it holds requests."""
LOG_TAIL_BYTES = 2000
GATHER_S = 0.02
"""Time from one look at what a worker prints to the next."""
SEND_BYTES = 1 << 22
"""What the kernel may hold for either end, where it allows as much (net.core.wmem_max): with its
default of 208 KB a body of megabytes takes a wake-up of both processes for every piece."""
AHEAD_S = 0.008
"""Work that a worker holds, so that it never waits for the server: several of its turns."""
MOST_AHEAD = 256
"""Jobs that it may hold for that."""
EXPLAINED_S = 0.1
"""Explanations that take longer together are answered one after another, who came first first.
Sharing passes halves the time of those that take 7 ms, and saves nothing of 25 ms and more, each
of which fills them."""
TURN_S, JOB_S = 0.002, 0.005
"""Processor time that reading takes at once, and for each job that is answered. A worker that takes
more of ours, for it writes to the wire what it likes, is read in smaller pieces, and with rests."""
RESTS, REST_S = 9, 0.05
"""How many times as long as what is above that they are, and the longest: it may be no fault of
the worker's that the process stood still meanwhile."""
MOST_READ = wire.RECEIVE_BYTES << 8
"""Bytes of one receive from all others."""
MOST_REPORTS = 64
"""Messages of what a handler measured, from one answer to the next."""
Aside = tuple[bytes, Sequence[Buffer], int, ReplySink, int]
"""A job that nobody waits for: head, parts, flags, sink and rows (0 for one)."""


class Output(Protocol):
    """Where the standard output and the standard error of one worker go."""

    stdout: int
    """Descriptor for the process, as is `stderr`."""
    stderr: int

    def close(self) -> None:
        """Close the two descriptors, of which the process has its own copies."""

    def finish(self) -> None:
        """Take what is left, after the process has ended."""

    @property
    def last_line(self) -> str:
        """What was written last, for messages."""


class WorkerLog:
    """A worker's output in a file of its own, which is put aside when it is full."""

    def __init__(self, file: Path, max_bytes: int, keep: int) -> None:
        self._file = LogWriter(LogFile(file, max_bytes, keep))
        self._tail = b""
        self._pipe = Pipe(self._take, GATHER_S)
        self.stdout = self.stderr = self._pipe.writing

    def close(self) -> None:
        """Close the server's copy."""
        os.close(self.stdout)

    def finish(self) -> None:
        """Write what is left."""
        self._pipe.finish()

    def _take(self, data: bytes) -> None:
        if not data:
            self._file.close(0)
            return
        self._file.append(data)
        self._tail = (self._tail + data)[-LOG_TAIL_BYTES:]

    @property
    def last_line(self) -> str:
        """The last line."""
        return (self._tail.decode(errors="replace").strip().splitlines() or [""])[-1]


class WorkerPolicy:
    """What a dialect decides of workers while they run. These are our own decisions."""

    counts_handed_over = False
    """Whether jobs that a worker holds and does not run yet still count as queued."""

    log_bytes = 10 << 20
    """Size of a worker's log, and of each of those put aside."""
    log_keep = 3

    def open_output(self, log: Path, worker: str) -> Output:
        """Return where a worker's output goes; `log` is a file of its own."""
        return WorkerLog(log, self.log_bytes, self.log_keep)

    def loaded(self, worker: str, seconds: float) -> None:
        """Take note of a worker that is ready, and how long that took."""

    def failed(self, error: Exception) -> None:
        """Log why a worker could not load."""
        logger.error("%s", error)

    def ended(self, worker: str) -> None:
        """Take note of a worker that ended unasked."""

    def retries(self, worker: str, id: int, pause_s: float) -> None:
        """Take note that a worker will be replaced, and when."""

    def silence(self, limit_s: float) -> errors.ServeError:
        """Return what a request is answered with which a worker hung."""
        return errors.DeadlinePassed(f"the worker gave no answer for {limit_s:g} s")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a model version's batches are made and run. Keys of model-config.yaml in brackets."""

    batch_size: int
    """Largest batch, never above what the export's report proved [batchSize]."""
    batch_delay_ms: int
    """Longest time that a batch waits for more requests; 0 waits for none [maxBatchDelay]."""
    queue_size: int
    """Requests that may wait [jobQueueSize]."""
    gathers_bursts: bool = False
    """Whether only the first requests after a pause wait for others, as `Batcher` says; else every
    batch does [batchDelay: busy | always]."""
    needs_ticket: bool = False
    """Whether a request is taken only while a worker is idle [useJobTicket]."""
    threads: int = 0
    """Threads of each worker; 0 leaves the choice to the server [workerThreads]."""
    startup_timeout_s: float
    """Time to load [startupTimeout, seconds]."""
    response_timeout_s: float
    """Time for one batch in a worker [responseTimeout, seconds]."""
    retry: bool
    """Whether a request that a worker died with is tried once more, alone [retry]."""
    retry_s: float = math.inf
    """How long a worker that cannot be started any more is tried again [maxRetryTimeoutInSec]."""


@dataclass(frozen=True)
class WorkerPlan(Launch):
    """What every worker of a model version is started with."""

    label: str
    """`name 1.0`, for logs and messages."""
    load: dict[str, Any]
    """The LOAD message, read by `worker.load`; a worker's number is added to it."""
    log_dir: Path
    run: RunConfig
    max_answer_bytes: int
    """Size of one answer, or of one chunk of it."""
    log_stem: str = "worker"
    """Stem of the log files' names."""


class Worker(asyncio.BufferedProtocol):
    """One worker process and the server's end of its socket."""

    def __init__(self, pool: "Pool", number: int, id: int) -> None:
        self.started_at = datetime.now(UTC)
        self._pool = pool
        self.plan = pool.plan
        """What it is started with."""
        self._loop = asyncio.get_running_loop()
        self._share = Share(pool.budget, self._pause, self._go_on)
        self._decoder = decoder_of_answers(pool.plan.max_answer_bytes, self._share.take)
        self._partial = (PREDICT, 0)
        """Kind and number of the replies of a batch whose others come in the next frame."""
        self._ran: list[tuple[Call, wire.Item]] = []
        """The same for `on_batch`."""
        self._transport: asyncio.Transport | None = None
        self._process: ChildProcess | None = None
        """What the server knows of it: the reaper of the process that runs the handler."""
        self.pid = -1
        """Process id of what runs the handler, once that is loaded; of the reaper before."""
        self._output: Output | None = None
        self._has_exited = False
        self._next_id = 0
        self.number = number
        self.name = f"W-{id}-{pool.plan.label.replace(' ', '_')}"
        """Unique in this server, and the same for every worker of its slot."""
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
        """Time of the pool's clock when it sent something last, or got work while it was idle."""
        self.began_at = 0.0
        """Time of the pool's clock when its current batch began."""
        self.answered = 0
        self._replied_at = 0.0
        self._reports = self._ended = 0
        """Messages of what its handler measured since its last answer; jobs of this read."""
        self._most_read = MOST_READ
        """Size of its next receive."""
        self._aside: dict[int, ReplySink] = {}
        self._aside_since = 0.0
        self._streams_aside: set[int] = set()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and wait until it is loaded and right.

        Raises:
            LoadFailed: with the worker's own error.
        """
        plan, timeout_s = self.plan, self.plan.run.startup_timeout_s
        try:
            ours = await self._spawn()
        except OSError as error:
            raise errors.LoadFailed(
                f"{plan.label}: no worker process can be started: {error.strerror}"
            ) from error
        await self._loop.connect_accepted_socket(lambda: self, ours)
        assert self._transport is not None
        self._transport.write(wire.encode_control(wire.LOAD, {**plan.load, "worker": self.number}))
        try:
            async with asyncio.timeout(timeout_s):
                await self.loaded
        except TimeoutError:
            self.condemn()
            raise errors.LoadFailed(
                f"{plan.label}: not ready after {timeout_s:g} s (startup_timeout_s); "
                f"the log ends: {self._log_tail}"
            ) from None

    async def _spawn(self) -> socket.socket:
        """Start the process, and return our end of its socket."""
        plan = self.plan
        log = plan.log_dir / f"{plan.log_stem}-{self.number}.log"
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            output = self._pool.policy.open_output(log, self.name)
            undo.callback(output.finish)
            fds = (theirs.fileno(), output.stdout, output.stderr)
            try:
                process = await start_process(plan, fds)
            finally:
                output.close()
            undo.pop_all()
        self._process, self._output, self.pid = process, output, process.pid
        process.ended.add_done_callback(self._exited)
        return ours

    def condemn(self) -> None:
        """Kill a process that hangs, talks nonsense or works for nobody; it did not lack memory."""
        self.is_condemned = True
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """Let an idle process end by itself, or kill it after a short while."""
        if self._process is None:
            return
        if not self.is_ready or self.flight:
            self.condemn()
        if self._transport is not None:
            self._transport.close()
        await self._process.end(EXIT_GRACE_S)
        await self.ended

    def _exited(self, _: asyncio.Future[int]) -> None:
        """The process has ended. Replies that it had sent may still be on their way."""
        self._has_exited = True
        self.is_ready = False
        assert self._output is not None
        self._output.finish()
        if self._transport is None or self._transport.is_closing():
            self._finish()
        else:  # end of file comes by itself, unless a process it forked holds the socket open
            self._loop.call_later(LINGER_S, self._transport.abort)

    def _finish(self) -> None:
        """Give back what it held, once both process and connection have ended."""
        self._pool.lost(self)
        while self._aside:
            _, sink = self._aside.popitem()
            if not sink.done():
                sink.set_exception(self.death)
        if not self.loaded.done():
            assert self._process is not None
            kind = errors.LoadKilled if self._was_killed else errors.LoadFailed
            self.loaded.set_exception(
                kind(
                    f"{self.plan.label}: the worker {self._process.how_it_ended} "
                    f"before it was ready; the log ends: {self._log_tail}"
                )
            )
            self.loaded.exception()  # whoever waited may have left
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def _log_tail(self) -> str:
        return (self._output.last_line if self._output is not None else "") or "(empty)"

    # -- the connection ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: a long answer straight into its own place."""
        return self._decoder.buffer()[: self._most_read]

    def buffer_updated(self, nbytes: int) -> None:
        """Take replies and control messages; a worker that talks nonsense is ended."""
        self._read(partial(self._decoder.received, nbytes))

    def _read(self, receive: Callable[[], list[list[wire.Item]]]) -> None:
        # To look at the thread's own time takes 5 µs: only of who took long by the wall's.
        clock = thread_time if self._most_read < MOST_READ else monotonic
        began, self._ended = clock(), 0
        try:
            for frame in receive():
                if frame[0].id == 0:
                    self._control(frame[0])
                else:
                    self._replies(frame)
        except wire.WireError as error:
            logger.error("%s worker %d: %s; ending it", self.plan.label, self.number, error)
            self.condemn()
            assert self._transport is not None
            self._transport.abort()  # nothing that follows means anything
        else:
            share = self._share
            if share.taken or share.budget.held > share.budget.limit:
                share.settle(is_begun=self._decoder.room is not None)
            excess_s = clock() - began - TURN_S - self._ended * JOB_S
            if excess_s > 0:
                self._most_read = max(min(self._most_read, wire.RECEIVE_BYTES) >> 2, 1 << 12)
                if clock is thread_time:
                    self._pause()
                    self._loop.call_later(min(RESTS * excess_s, REST_S), self._resume)
            elif clock is thread_time:
                self._most_read <<= 1
        self._pool.pump()

    @property
    def is_held_up(self) -> bool:
        """Whether it is not read, for there is no room for its answers."""
        return self._share.is_held_up

    def _pause(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def _go_on(self) -> None:
        """Read on with what waited for room."""
        self.busy_since = self._read_clock()
        if self._resume():
            self._read(partial(self._decoder.feed, b""))

    def _resume(self) -> bool:
        """Read on after a rest, unless there is no room, and return whether it does."""
        assert self._transport is not None
        if is_read := not (self._transport.is_closing() or self.is_held_up):
            self._transport.resume_reading()
        return is_read

    def connection_lost(self, error: Exception | None) -> None:
        """End the process, if it still runs; how it ended decides over what it held."""
        self._share.close()
        self._decoder.forget()  # this stays until Python looks for cycles
        self.is_ready = False
        assert self._process is not None
        if self._has_exited:
            self._finish()
        elif error is not None or self.flight:
            # Mostly it is ending by itself, and closed its socket a moment before it can be reaped.
            self._loop.call_later(LINGER_S, self.condemn)
        else:
            self._loop.call_later(EXIT_GRACE_S, self._process.kill)

    def _control(self, item: wire.Item) -> None:
        message = wire.decode_control(item)
        self._reports += 1
        if item.code == wire.METRICS and self.loaded.done() and self._reports <= MOST_REPORTS:
            busy_s = self._read_clock() - self.busy_since
            self._pool.metrics.reported(message.get("records"), busy_s)
        elif self.loaded.done():
            raise wire.WireError(f"control message {item.code} from a worker that is loaded")
        elif item.code == wire.READY and message.get("protocol") == wire.PROTOCOL:
            if (pid := message.get("pid")) in children(self.pid):
                self.pid = pid
            self.is_ready = True
            self.loaded.set_result(message)
        elif item.code == wire.FAILED:
            text = f"{self.plan.label}: {message.get('message', 'no reason given')}"
            kinds = {"out_of_memory": errors.OutOfMemory, "golden": errors.GoldenFailed}
            failed = next((kinds[key] for key in kinds if message.get(key)), errors.HandlerFailed)
            self.loaded.set_exception(failed(text))
        else:
            raise wire.WireError(f"control message {item.code} that nobody expects")

    def _replies(self, frame: list[wire.Item]) -> None:
        now = self._replied_at = monotonic()
        read_at = self._pool.clock.read(now)
        kind = count = 0
        batch: Batch | None = None
        answered: list[tuple[Call, Reply]] = []
        before = len(self.flight)
        if len(frame) > before + len(self._aside) + 1:  # and what the handler measured
            raise wire.WireError(f"{len(frame)} replies, while it holds fewer jobs")
        for item in frame:
            id, status, flags, headers, body, queue_us, handler_us, _ = item
            if id == 0:
                self._control(item)
                continue
            job = self.flight.get(id)
            if job is None:
                self._end_aside(item)
                continue
            if not 200 <= status <= 599 or (headers and headers.count(0) % 2 == 0):
                raise wire.WireError(f"a reply with status {status} and headers {headers[:200]!r}")
            if flags & wire.MORE:
                self._chunk(id, job, status, headers, body)
                continue
            del self.flight[id]
            self.held[job.kind] -= job.rows
            if not flags & wire.UNREAD:
                kind = job.kind
                # What was refused may have claimed any number of rows.
                count += job.rows if status < 400 else 1
                self._pool.metrics.kinds[kind].ran(queue_us, handler_us)
                if job.trace is not None:
                    if batch is None:
                        size = sum(each.id > 0 for each in frame) + self._partial[1]
                        batch = Batch(self.pid, size)
                    job.trace.ran(batch, now, queue_us, handler_us)
                if self._pool.on_batch is not None:
                    self._ran.append((job, item))
            if job.stream is not None:
                if flags & wire.BROKEN:
                    job.fail(errors.StreamBroken(body.decode("utf-8", "replace")))
                else:
                    job.stream.put(body, is_last=True)
                    answered.append((job, Reply(status, headers, job.stream)))
            elif not job.sink.done():
                reply = Reply(status, headers, body, queue_us, handler_us)
                job.sink.set_result(reply)
                if self._pool.on_answer:
                    answered.append((job, reply))
        if ended := before - len(self.flight):
            self._reports, self._ended = 0, self._ended + ended
        if answered:
            for tell in self._pool.on_answer:
                tell(answered)
        if self._ran and self._pool.on_batch is not None and not frame[0].flags & wire.PARTIAL:
            ran, self._ran = self._ran, []
            self._pool.on_batch(self, ran)
        if self._partial[1]:
            kind, count = self._partial[0], self._partial[1] + count
        self._partial = (kind, count) if frame[0].flags & wire.PARTIAL else (PREDICT, 0)
        if not self._partial[1] and len(self.flight) < before:
            if count:
                self.answered += count
                self._pool.metrics.kinds[kind].ran_batch(count, frame[0].batch_us / 1e6)
                if not self._pool.clock.stood_still_since(self.began_at, now):
                    seconds = read_at - self.began_at
                    self._pool.measured(kind, count, seconds, frame[0].batch_us / 1e6)
            self._pool.worked_s += read_at - self.began_at
            self.began_at = read_at
            # It takes what has arrived, up to a batch.
            self.running = min(self.plan.run.batch_size, sum(self.held))
        self.busy_since = read_at
        if not self.flight:
            self.is_alone = self.is_reserved = False

    def _chunk(self, id: int, job: Call, status: int, headers: bytes, body: wire.Payload) -> None:
        """Pass on a chunk; status and headers go with the first one."""
        if job.stream is None:
            job.stream = Stream(job.has_left, partial(self.cancel, id), self._pool.budget)
            if job.sink.done():  # its deadline has passed
                job.stream.close()
            else:
                job.sink.set_result(Reply(status, headers, job.stream))
        job.stream.put(body)

    def cancel(self, id: int) -> None:
        """Notify the worker that nobody reads this job's answer, or the rest of it."""
        if id in self.flight and self._transport is not None:
            self._transport.write(wire.encode_control(wire.CANCEL, {"ids": [id]}))

    # -- what nobody waits for -----------------------------------------------------------------

    def run_aside(self, jobs: Sequence[Aside]) -> None:
        """Send jobs that nobody waits for, and that give way to every other, as one batch.

        They do not count among what the worker holds: nothing is refused or expected later for
        them. A sink is cancelled where it gave way, and takes a StreamBroken for a streamed answer.
        """
        assert self._transport is not None and not self._aside
        self._aside_since = self._read_clock()
        frame, now_us = wire.Frame(), wire.now_us()
        for head, parts, flags, sink, rows in jobs:
            self._next_id = self._next_id % 0xFFFFFFFF + 1
            self._aside[self._next_id] = sink
            frame.add(self._next_id, rows, flags, head, parts, now_us)
        self._transport.writelines(frame.buffers())

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all runs in it."""
        return self.takes_work and not self.has_work

    @property
    def has_work(self) -> bool:
        """Whether it runs anything, or holds what it runs next."""
        return bool(self.flight or self._aside)

    def hangs_aside(self, worked: float) -> bool:
        """Return whether what it runs aside has taken longer than a batch may."""
        return (
            bool(self._aside)
            and not self.flight
            and worked - max(self._aside_since, self.busy_since) > self.plan.run.response_timeout_s
        )

    def _give_way(self) -> None:
        """Ask the worker to end what it runs aside, which it does between two passes."""
        assert self._transport is not None
        self._transport.write(wire.encode_control(wire.CANCEL, {"ids": list(self._aside)}))

    def _end_aside(self, item: wire.Item) -> None:
        """Pass on the reply to what ran aside."""
        sink = self._aside.get(item.id)
        if sink is None:
            raise wire.WireError(f"a reply to job {item.id}, which it does not hold")
        if item.flags & wire.MORE:
            self._streams_aside.add(item.id)
            return
        del self._aside[item.id]
        was_stream = item.id in self._streams_aside
        self._streams_aside.discard(item.id)
        if item.flags & wire.UNREAD:
            sink.cancel()
        elif sink.done():
            return  # nobody waits for it any more
        elif was_stream:
            sink.set_exception(errors.StreamBroken("it is streamed, and nobody reads it"))
        else:
            sink.set_result(Reply(item.code, item.meta, item.body, item.queue_us, item.handler_us))

    @property
    def death(self) -> errors.WorkerDied:
        """What its end means to the requests that it held."""
        kind = errors.WorkerKilled if self._was_killed else errors.WorkerDied
        return kind(f"the worker that held the request {self.end}")

    @property
    def end(self) -> str:
        """How it ended, for people."""
        if self.is_condemned:
            return "was ended by the server: it took too long, or made no sense"
        if self._was_killed:
            return "was killed from outside, for lack of memory most likely"
        return self._process.how_it_ended if self._process else "ended"

    @property
    def _was_killed(self) -> bool:
        """Whether somebody else killed it: for memory, most likely."""
        code = self._process.exit_code if self._process else None
        return code in (-signal.SIGKILL, 128 + signal.SIGKILL) and not self.is_condemned

    def _read_clock(self) -> float:
        """Return the time by the pool's clock."""
        return self._pool.clock.read(monotonic())

    # -- a replica, as the batcher knows it ----------------------------------------------------

    def capacity(self, kind: int) -> int:
        """Return how many more jobs of this kind it takes.

        Two batches of predictions, or as many as it does while the server looks after clients, if
        it has just done some; one of explanations, which are long, and no more than are short
        together.
        """
        if kind == EXPLAIN:
            most, job_s = self.plan.run.batch_size, self._pool.job_s(kind)
            if job_s:
                most = min(most, max(1, int(EXPLAINED_S / job_s)))
            return most - self.held[kind]
        most = 2 * self.plan.run.batch_size
        job_s = self._pool.own_job_s
        if job_s and monotonic() - self._replied_at < AHEAD_S:
            most = max(most, min(int(AHEAD_S / job_s), MOST_AHEAD))
        return most - self.held[kind]

    def run(self, jobs: list[Call]) -> None:
        """Send the jobs in one frame; `_replies` answers them, or the pool if it dies."""
        if self._aside:
            self._give_way()
        is_next, rows = bool(self.flight), 0
        frame, now_us = wire.Frame(), wire.now_us()
        for job in jobs:
            rows += job.rows
            id = self._next_id = self._next_id % 0xFFFFFFFF + 1
            self.flight[id] = job
            self.held[job.kind] += job.rows
            flags = job.flags
            flags |= wire.EXPLAIN if job.kind == EXPLAIN else 0
            flags |= wire.ALONE if job.retried else 0
            frame.add(id, job.rows, flags, job.head, job.parts, now_us)
        if not is_next:
            self.busy_since = self.began_at = self._pool.clock.read(monotonic())
            self.running = rows
        assert self._transport is not None
        self._transport.writelines(frame.buffers())

    def rest_s(self, now: float) -> float:
        """Return in how many seconds it will have answered what it holds; 0 when it is idle.

        A batch that has overrun its time is expected to overrun it by as much again.
        """
        if not self.flight:
            return 0.0
        pool, held = self._pool, self.held
        all_s = held[PREDICT] * pool.job_s(PREDICT) + held[EXPLAIN] * pool.job_s(EXPLAIN)
        running_s = all_s * self.running / sum(self.held)
        return all_s - running_s + abs(running_s - (pool.clock.read(now) - self.began_at))

    @property
    def takes_work(self) -> bool:
        """Whether it may be given anything new."""
        return self.is_ready and not (self.is_alone or self.is_reserved or self.is_closing)


def decoder_of_answers(
    max_answer_bytes: int, may_begin: Callable[[int], bool] = lambda size: True
) -> wire.Decoder:
    """Return what reads a worker's frames: no frame is collected that is longer than it may be."""
    max_item, max_frame = max_answer_bytes + wire.MAX_CONTROL, frame_bytes(max_answer_bytes)
    return wire.Decoder(max_item, wire.MAX_CONTROL, max_frame, may_begin)


def frame_bytes(max_answer_bytes: int) -> int:
    """Return the most that a frame of answers may have."""
    return max(wire.FRAME_BYTES, max_answer_bytes + wire.MAX_CONTROL) + wire.MAX_CONTROL
