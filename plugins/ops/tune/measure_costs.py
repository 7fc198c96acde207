"""Measure what a request costs: a worker's time by batch size, the server's own, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from statistics import median

import psutil

from modelyard.plugins.ops.tune.costs import Costs, summarise
from modelyard.plugins.ops.tune.load import Load, make_request, run_load
from modelyard.plugins.ops.tune.tune import WARM_S, Setting, Trial
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane.call import PREDICT, Call, Reply
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.wire import pack_meta
from modelyard.serve.errors import StartError
from modelyard.serve.policy import Policy

SIZES = (1, 2, 4, 8, 16, 32, 64)
LEAST_MS = 1e-3
"""That a request costs the server: the clock that says so has ticks of 10 ms."""
LEAST_BATCHES = 20
"""Of a size, however long they take, up to:"""
LONGEST_S = 20.0
BUSY_CONNECTIONS = 8
PAUSES_MS = (1, 4, 16)
"""Between an answer and the next request of a single client."""
LEAST_COMPANY = 2
"""Requests that the server has in a turn on average, while many wait for batches of one."""
MB = 1e6

OnSize = Callable[[str, int, int], None]


def measure_costs(
    trial: Trial,
    setting: Setting,
    file: str,
    cores: int,
    on_step: OnSize = lambda text, done, total: None,
) -> Costs:
    """Return what a request costs with this setting.

    Batches of each size run one after the other in one worker that always has the next one ready,
    with no server around it, and batches of one after pauses; then a server answers one client, at
    once and after the same pauses, and many.

    Args:
        trial: says which model, and with what bodies; each size is measured for its time.
        file: the archive, in the store.
        cores: of this machine.

    Raises:
        StartError: the model answers nothing but errors.
    """
    sizes = [size for size in SIZES if size < setting.batch_size] + [setting.batch_size]
    total = len(sizes) + 2
    batch_ms = {}
    for done, size in enumerate(sizes):
        on_step(f"batches of {size}", done, total)
        batch_ms[size] = summarise(asyncio.run(_batches(trial, setting, file, size)))
    on_step("after pauses", total - 2, total)
    paced_ms = asyncio.run(_paced(trial, setting, file))
    on_step("the server", total - 1, total)
    began = time.perf_counter()
    with trial.serve(replace(setting, workers=1)) as (url, pid):
        load_s = time.perf_counter() - began
        requests = [make_request(url, trial.path, *each) for each in trial.bodies]

        def ask(connections: int) -> tuple[Load, float]:
            cpu = _cpu_s(pid)
            load = run_load(url, requests, connections, trial.seconds, 0.0)
            if not load.latencies_s:
                raise StartError(f"{trial.name} answers {load.first_failure}; see --input")
            cpu_ms = (_cpu_s(pid) - cpu) / len(load.latencies_s) * 1e3
            return load, max(LEAST_MS, cpu_ms)

        run_load(url, requests, 1, WARM_S, 0.0)
        alone, light_ms = ask(1)
        _, many_ms = ask(max(BUSY_CONNECTIONS, 2 * setting.batch_size))
        rested_ms = [
            1e3 * run_load(url, requests, 1, _paced_s(trial), 0.0, pause / 1e3).quantile_s(0.5)
            for pause in PAUSES_MS
        ]
        worker_mb, server_mb = _memory_mb(pid)
    # Alone a request has two turns of the server, in company a part of two. Where many cost much
    # less than one alone, it is the server that limits, and more of them share a turn.
    many_ms = min(many_ms, light_ms)
    company = max(LEAST_COMPANY, setting.batch_size, 2 * light_ms / many_ms)
    turn_ms = (light_ms - many_ms) / 2 * company / (company - 1)
    server_ms = many_ms - 2 * turn_ms / company
    alone_ms = alone.quantile_s(0.5) * 1e3
    wait_ms = alone_ms - light_ms - _middle(batch_ms[1])
    return Costs(
        batch_ms=batch_ms,
        server_ms=_short(server_ms),
        turn_ms=_short(turn_ms),
        idle_ms=_pauses(rested_ms, alone_ms, paced_ms),
        wait_ms=_short(max(0.0, wait_ms)),
        worker_mb=_short(worker_mb),
        server_mb=_short(server_mb),
        load_s=_short(load_s),
        threads=setting.threads,
        batch_size=setting.batch_size,
        cores=cores,
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _middle(at_levels: Sequence[float]) -> float:
    return at_levels[len(at_levels) // 2 - 1]


def _paced_s(trial: Trial) -> float:
    """Return for how long a single client with the longest pause is watched, or a worker is."""
    return max(trial.seconds / 2, LEAST_BATCHES * PAUSES_MS[-1] / 1e3)


def _pauses(
    rested_ms: Sequence[float], alone_ms: float, paced_ms: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Return by each pause what it adds in the server, and in the worker.

    Args:
        rested_ms: a request's latency after each pause.
        alone_ms: without one.
        paced_ms: a worker's time without a pause, and after each.
    """
    server = worker = 0.0
    found = {}
    for pause, latency_ms, batch_ms in zip(PAUSES_MS, rested_ms, paced_ms[1:], strict=True):
        worker = max(worker, batch_ms - paced_ms[0])  # a longer one never costs less
        server = max(server, latency_ms - alone_ms - worker)
        found[pause] = (_short(server), _short(worker))
    return found


async def _batches(trial: Trial, setting: Setting, file: str, size: int) -> list[float]:
    """Return the times of batches of one size, in seconds, while the next one always waits."""
    async with _worker(trial, replace(setting, workers=1, batch_size=size), file) as model:
        return await _Row(model, trial, size).run()


async def _paced(trial: Trial, setting: Setting, file: str) -> list[float]:
    """Return the middle time of a batch of one without a pause before it, and after each, in ms."""
    found = []
    async with _worker(trial, replace(setting, workers=1), file) as model:
        for pause_ms in (0, *PAUSES_MS):
            times = await _Row(model, trial, 1, pause_ms / 1e3).run()
            found.append(median(times) * 1e3)
    return found


@asynccontextmanager
async def _worker(trial: Trial, setting: Setting, file: str) -> AsyncIterator[ModelVersion]:
    """Yield the model with a worker that no server is around."""
    settings = trial.settings_for(setting)
    # What a fork server forks becomes a server's child, and this process is none.
    policy = Policy(settings.model_copy(update={"fork_workers": False}))
    policy.state.create()
    lifecycle = Lifecycle(policy, Registry(), Metrics())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(lifecycle.stop, 0.0)
        yield await lifecycle.register(file, trial.name, 1)


class _Row:
    """Batches one after the other: two of them always in the worker's hands, or one at a time."""

    def __init__(
        self, model: ModelVersion, trial: Trial, size: int, pause_s: float | None = None
    ) -> None:
        self._model = model
        self._size = size
        self._pause_s = pause_s
        """After each batch, of which then one runs at a time."""
        self._seconds = trial.seconds if pause_s is None else _paced_s(trial)
        self._bodies = self._turns(trial.bodies)
        self._name = trial.name
        self._ended = asyncio.get_running_loop().create_future()
        self._left = [size, size if pause_s is None else 0]
        """Answers that are missing of the batch that runs, and of the next."""
        self._times: list[float] = []
        self._began = self._last = time.perf_counter()

    @staticmethod
    def _turns(bodies: Sequence[tuple[bytes, str]]) -> Iterator[tuple[bytes, bytes]]:
        while True:
            for body, kind in bodies:
                yield body, pack_meta((b"", b"", b"tune", b"content-type", kind.encode()))

    async def run(self) -> list[float]:
        """Return the times, the first ones left out."""
        self._send()
        if self._pause_s is None:
            self._send()
        await self._ended
        return self._times[len(self._times) // 10 :]

    def _send(self) -> None:
        jobs = []
        for _ in range(self._size):
            body, head = next(self._bodies)
            job = Call(self._model, PREDICT, head, _Sink(self))
            job.arrived([body], time.monotonic())
            jobs.append(job)
        self._model.pool.workers[0].run(jobs)

    def answered(self, reply: Reply | Exception) -> None:
        """Take an answer, and send the next batch where that was the last of one."""
        if self._ended.done():
            return
        if isinstance(reply, Exception) or reply.status != 200:
            said = str(reply) if isinstance(reply, Exception) else f"status {reply.status}"
            self._ended.set_exception(StartError(f"{self._name} answers {said}; see --input"))
            return
        self._left[0] -= 1
        if self._left[0]:
            return
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        self._left = [self._left[1] or self._size, self._size if self._left[1] else 0]
        took_s = now - self._began
        is_enough = took_s > self._seconds and len(self._times) >= LEAST_BATCHES
        if is_enough or took_s > self._seconds + LONGEST_S:
            self._ended.set_result(None)
        elif self._pause_s is None:
            self._send()
        else:
            asyncio.get_running_loop().call_later(self._pause_s, self._go_on)

    def _go_on(self) -> None:
        """Send the next batch after a pause."""
        self._last = time.perf_counter()
        self._send()


class _Sink:
    """Where the answer to one job goes."""

    __slots__ = ("_has_ended", "_row")

    def __init__(self, row: _Row) -> None:
        self._row = row
        self._has_ended = False

    def done(self) -> bool:
        """Return whether it has its answer."""
        return self._has_ended

    def set_result(self, reply: Reply, /) -> None:
        """Take the answer."""
        self._has_ended = True
        self._row.answered(reply)

    def set_exception(self, error: Exception, /) -> None:
        """Take an error."""
        self._has_ended = True
        self._row.answered(error)

    def cancel(self) -> bool:
        """Note nothing."""
        return True


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _memory_mb(pid: int) -> tuple[float, float]:
    """Return what a worker takes that is its own, and what all else takes, in MB.

    Of a page that n processes share each has 1/n. Workers are the server's children with memory of
    their own above that of the fork server, which does no work: the largest child.
    """
    server = psutil.Process(pid)
    own: list[float] = []
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        try:
            memory = process.memory_full_info()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        total += memory.pss / MB
        if process is not server:
            own.append(memory.uss / MB)
    worker = max(own, default=0.0)
    return worker, max(0.0, total - worker)
