"""Measure what a request costs: a worker's time by batch size, the server's own, memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice

import psutil

from modelyard.plugins.tune.costs import Costs, summarise
from modelyard.plugins.tune.load import Load, make_request, run_load
from modelyard.plugins.tune.tune import BATCH_SIZES, WARM_S, Setting, Trial, running
from modelyard.serve.control.register import Lifecycle
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane.call import PREDICT, Call, Reply
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.wire import pack_meta
from modelyard.serve.errors import ServeError, StartError
from modelyard.serve.policy import Policy

LEAST_MS = 1e-3
"""Least time that a request costs the server: the clock that says so has ticks of 10 ms."""
LEAST_BATCHES = 20
"""Batches of a size, however long they take, up to:"""
LONGEST_S = 20.0
BUSY_CONNECTIONS = 8
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
    with no server around it; then a server answers one client, and many.

    Args:
        trial: says which model, and with what bodies; each size is measured for its time.
        file: the archive, in the store.
        cores: cores of this machine.

    Raises:
        StartError: the model answers nothing but errors.
    """
    sizes = [size for size in BATCH_SIZES if size < setting.batch_size] + [setting.batch_size]
    total = len(sizes) + 1
    batch_ms = {}
    for done, size in enumerate(sizes):
        on_step(f"batches of {size}", done, total)
        batch_ms[size] = summarise(asyncio.run(_batches(trial, setting, file, size)))
    on_step("the server", total - 1, total)
    began = time.perf_counter()
    with running(trial.settings_for(replace(setting, workers=1))) as (url, pid):
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
        worker_mb, server_mb = _memory_mb(pid)
    # Alone a request has two turns of the server, in company a part of two. Where many cost much
    # less than one alone, it is the server that limits, and more of them share a turn.
    many_ms = min(many_ms, light_ms)
    company = max(LEAST_COMPANY, setting.batch_size, 2 * light_ms / many_ms)
    turn_ms = (light_ms - many_ms) / 2 * company / (company - 1)
    alone_ms = alone.quantile_s(0.5) * 1e3
    return Costs(
        batch_ms=batch_ms,
        server_ms=_short(many_ms - 2 * turn_ms / company),
        turn_ms=_short(turn_ms),
        wait_ms=_short(alone_ms - light_ms - batch_ms[1][len(batch_ms[1]) // 2 - 1]),
        worker_mb=_short(worker_mb),
        server_mb=_short(server_mb),
        load_s=_short(load_s),
        threads=setting.threads,
        batch_size=setting.batch_size,
        cores=cores,
    )


def _short(value: float) -> float:
    return float(f"{max(0.0, value):.4g}")


async def _batches(trial: Trial, setting: Setting, file: str, size: int) -> list[float]:
    """Return the times of batches of one size, in seconds, while the next one always waits.

    Raises:
        StartError: the model answers an error.
    """
    settings = trial.settings_for(replace(setting, workers=1, batch_size=size))
    # What a fork server forks becomes a server's child, and this process is none.
    policy = Policy(settings.model_copy(update={"fork_workers": False}))
    policy.state.create()
    lifecycle = Lifecycle(policy, Registry(), Metrics())
    turns = cycle(
        (body, pack_meta((b"", b"", b"tune", b"content-type", kind.encode())))
        for body, kind in trial.bodies
    )

    def send(model: ModelVersion) -> asyncio.Future[list[Reply]]:
        jobs, sinks = [], []
        for body, head in islice(turns, size):
            sinks.append(asyncio.get_running_loop().create_future())
            jobs.append(Call(model, PREDICT, head, sinks[-1]))
            jobs[-1].arrived([body], time.monotonic())
        model.pool.workers[0].run(jobs)
        return asyncio.gather(*sinks)

    try:
        model = await lifecycle.register(file, trial.name, 1)
        running, times = [send(model), send(model)], list[float]()
        began = last = time.perf_counter()
        while True:
            try:
                statuses = {reply.status for reply in await running.pop(0)} - {200}
                said = f"status {min(statuses)}" if statuses else ""
            except ServeError as error:
                said = str(error)
            if said:
                raise StartError(f"{trial.name} answers {said}; see --input")
            now = time.perf_counter()
            times.append(now - last)
            last, took_s = now, now - began - trial.seconds
            if (took_s > 0 and len(times) >= LEAST_BATCHES) or took_s > LONGEST_S:
                break
            running.append(send(model))
        await asyncio.gather(*running, return_exceptions=True)
        return times[len(times) // 10 :]
    finally:
        await lifecycle.stop(0.0)


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
