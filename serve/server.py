"""The server process: start up, run, drain, end. `python -P -m modelyard.serve.server`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import uvloop

from modelyard.archiver.errors import ArchiveError
from modelyard.base.disk import remove
from modelyard.base.plugins import registered
from modelyard.serve.control.preload import start_fork_server
from modelyard.serve.control.state import StateDir, write_json
from modelyard.serve.dataplane.heap import give_back
from modelyard.serve.dataplane.process import adopt_orphans
from modelyard.serve.errors import ServeError, StartError
from modelyard.serve.log import AccessLog, log_to_file
from modelyard.serve.policy import Policy
from modelyard.serve.settings import Settings

if TYPE_CHECKING:
    from modelyard.serve.app import Server

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Report = Callable[[Event], None]
Create = Callable[[Settings], "Server"]
MakePolicy = Callable[[Settings], Policy]
Serve = Callable[[Settings, StateDir, Report, Create], Coroutine[None, None, None]]

ANNOUNCE_S = 0.2
"""Time after SIGTERM for which connections are still taken, and close with their answer."""
FLUSH_S = 2.0
"""Time for the last error answers to reach their clients."""
NOTHING = (
    "no model is served: name some with --models, or register them, `modelyard models register "
    "FILE.mar`"
)
GARBAGE = 50_000
"""Objects that have become more before Python looks for cycles among them: requests leave none, and
thousands of connections that are opened would have all of them looked at again and again."""


def run(settings: Settings, report: Report, create: Create, serve: Serve | None = None) -> int:
    """Run a server until SIGTERM or SIGINT; return its exit code.

    Args:
        settings: what to serve and where.
        report: called at each step with {"event": …}: locked when the state folder is held, started
            when the ports are open, loading, ready, error.
        create: builds the server.
        serve: starts it, and stops it after the signal.
    """
    state = StateDir(settings.state_dir)
    try:
        state.create()
        with state.lock():
            report({"event": "locked"})
            remove(state.unpacked)
            state.unpacked.mkdir(mode=0o700, exist_ok=True)  # handlers wrote there, some may stay
            uvloop.run((serve or _serve)(settings, state, report, create))
    except (ServeError, ArchiveError, OSError) as error:
        message = state.why_unusable(error) if isinstance(error, OSError) else str(error)
        logger.error("%s", message)
        report({"event": "error", "message": message})
        return 1
    return 0


def run_ours(
    settings: Settings,
    report: Report,
    access: AccessLog | None,
    keys: Mapping[str, str] | None = None,
    policy: MakePolicy = Policy,
) -> int:
    """Run a server of our own dialect, as `run` does, or as many as the settings say.

    Args:
        access: takes a line for each request.
        keys: of one of several servers, the keys of all.
        policy: makes the decisions of one server; several make their own.
    """

    def create(settings: Settings) -> Server:
        """Build it, while the fork server imports what workers need."""
        made = policy(settings)
        start_fork_server(made)
        from modelyard.serve.app import create_server  # which takes half a second of a core

        return create_server(made, access, keys)

    serve = _serve if settings.servers == 1 or keys else _serve_several
    return run(settings, report, create, serve)


async def _serve_several(
    settings: Settings, state: StateDir, report: Report, create: Create
) -> None:
    """Have the plug-in that is registered for it run several servers.

    Raises:
        StartError: there is none.
    """
    entry = registered("servers").get("shared_port")
    if entry is None:
        raise StartError("this installation lacks the plug-in for several servers; set servers: 1")
    await entry.load()(settings, state, report)


async def _serve(settings: Settings, state: StateDir, report: Report, create: Create) -> None:
    """Start, wait for the signal to stop, stop."""
    gc.disable()  # until it is ready: what is imported stays
    server = create(settings)
    from modelyard.serve.control.reload import Reloader
    from modelyard.serve.control.sandbox import check_machine

    measures = check_machine(settings)
    orphans, closing = asyncio.create_task(adopt_orphans()), list[asyncio.Task[None]]()
    stop = StopSignals()
    about = _describe(server, state, settings)
    walls = {each.name: {"status": each.status, "found": each.found} for each in measures}

    async def open_ports() -> None:
        for listener in server.listeners:
            await listener.start()
        for face in server.faces:
            await face.start()
        write_json(state.server_file, {**about, "sandbox": walls})
        report({"event": "started", **about})

    try:
        is_strict = server.lifecycle.policy.is_strict
        if is_strict:
            await open_ports()
        warnings = await _load(server, stop, report)
        if not is_strict:
            await open_ports()
        for warning in settings.warnings:
            logger.warning("%s", warning)
        warnings = [*settings.warnings, *warnings]
        served = ", ".join(f"{model.name} {model.version}" for model in server.lifecycle.registry)
        if not served and is_strict:
            served = NOTHING
            warnings.append(NOTHING)
        server.state.is_starting = False
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE)
        logger.info(
            "ready, pid %d: inference %s, management %s, metrics %s; %s",
            about["pid"], about["inference"], about["management"], about["metrics"], served,
        )  # fmt: skip
        report({"event": "ready", **about, "warnings": warnings})
        memory = asyncio.create_task(give_back())
        edits = asyncio.create_task(Reloader(server.lifecycle, settings.reload).run())
        await stop.first.wait()
        edits.cancel()
        memory.cancel()
        await _drain(server, settings, stop.second, closing)
    finally:
        await _end(server, state, closing)
        orphans.cancel()  # which looks for the last time


async def _load(server: Server, stop: StopSignals, report: Report) -> list[str]:
    """Register what is to be served, and return warnings for whoever started the server.

    Raises:
        StartError: a signal came first.
    """

    def progress(model: str, text: str) -> None:
        report({"event": "loading", "model": model, "text": text})

    from modelyard.serve.control.register import restore

    async def load() -> list[str]:
        warnings = await restore(server.lifecycle, progress)
        for observer in server.observers:
            await observer.restore(progress)
        return warnings

    loading = asyncio.ensure_future(load())
    stopped = asyncio.ensure_future(stop.first.wait())
    await asyncio.wait([loading, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not loading.done():
        loading.cancel()
        await asyncio.wait([loading])  # it ends the workers that it has started
        raise StartError("stopped while it was starting")
    return await loading


def _describe(server: Server, state: StateDir, settings: Settings) -> Event:
    return {
        "pid": os.getpid(),
        "inference": server.inference.url,
        "management": server.management.url,
        "metrics": server.metrics.url if server.metrics else None,
        "faces": {name: url for face in server.faces for name, url in face.urls.items()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "certificate": str(settings.tls_cert) if settings.tls_cert else None,
        "key_file": str(state.key_file),
        "log": str(state.log_file),
        "drain_timeout_s": settings.drain_delay_s + settings.drain_timeout_s,
    }


class StopSignals:
    """SIGTERM or SIGINT, once and twice."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _drain(
    server: Server, settings: Settings, now: asyncio.Event, closing: list[asyncio.Task[None]]
) -> None:
    """Answer what was accepted, close connections only after an answer, take nothing new.

    First the server is not ready, so that balancers send no more, and every answer says
    `Connection: close`, so that clients which keep connections open leave by themselves; then the
    listening sockets close; then idle connections. A second signal, or the end of the time, skips
    the waiting.

    Args:
        closing: gets what stops each face, which has a moment longer than the listeners: the calls
            that are still unanswered then are refused before it ends them.
    """
    loop = asyncio.get_running_loop()
    delay_s, timeout_s = settings.drain_delay_s, settings.drain_timeout_s
    logger.info("stopping; requests are taken for %g s more, up to %g s for those in progress",
                delay_s, timeout_s)  # fmt: skip
    server.state.is_draining = True
    announce_s = max(delay_s, min(ANNOUNCE_S, timeout_s))
    deadline = loop.time() + delay_s + timeout_s
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(now.wait(), announce_s)
    for listener in server.listeners:
        await listener.stop_accepting()
    rest_s = max(0.0, deadline - loop.time()) + FLUSH_S
    closing += [asyncio.create_task(face.stop(rest_s)) for face in server.faces]
    while not now.is_set() and loop.time() < deadline:
        remain = sum([listener.close_idle() for listener in server.listeners])
        if not remain and all(task.done() for task in closing):
            return
        await asyncio.sleep(0.02)
    logger.warning("the time for requests in progress is over")


async def _end(server: Server, state: StateDir, closing: list[asyncio.Task[None]]) -> None:
    """End workers and connections; what is still unanswered gets its 503."""
    loop = asyncio.get_running_loop()
    for observer in server.observers:
        await observer.stop()
    await server.lifecycle.stop(0)
    deadline = loop.time() + FLUSH_S
    closing = closing or [asyncio.create_task(face.stop(0)) for face in server.faces]
    if closing:
        await asyncio.wait(closing, timeout=FLUSH_S)
    while any(listener.busy_count for listener in server.listeners) and loop.time() < deadline:
        await asyncio.sleep(0.01)
    for listener in server.listeners:
        await listener.stop_accepting()
        listener.close_idle(0)
    if server.access_log is not None:
        server.access_log.close()
    if server.tracing is not None:
        await server.tracing.close()
    state.server_file.unlink(missing_ok=True)
    logger.info("stopped")


def main() -> int:
    """Run detached: settings as JSON on standard input, events as JSON lines on standard output."""
    settings = Settings(**json.load(sys.stdin))
    access = log_to_file(settings)

    def report(event: Event) -> None:
        try:
            print(json.dumps(event), flush=True)  # noqa: T201 - the protocol with the command line
        except (BrokenPipeError, ValueError):
            return
        if event["event"] == "ready":
            # The command that started us leaves now; nothing must be written to its pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return run_ours(settings, report, access)


if __name__ == "__main__":
    sys.exit(main())
