"""A server in a process of its own, by its parent's side and its own.

Run as `python -P -m modelyard.plugins.cluster.process PARENT [PIPE]`. It ends with its parent, and
ends it when that hangs and beats in the pipe. What it is told comes as JSON on standard input,
events go as JSON lines to standard output; the log goes to standard error, or to its file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelyard.base.exits import describe_exit
from modelyard.plugins.cluster.ray.beats import watch
from modelyard.plugins.cluster.ray.versions import refuse_other, this_version
from modelyard.serve.errors import StartError
from modelyard.serve.log import log_to_file, log_to_stderr
from modelyard.serve.server import Report, run_ours
from modelyard.serve.settings import Address, Settings
from modelyard.serve.walls.raising import die_with_parent

OF_THE_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class OneOf(Settings):
    """Settings of one of several servers."""

    sockets: Path
    """Folder of the Unix sockets by which the parent speaks to it; a short path."""

    @property
    def quota_place(self) -> tuple[Path, int]:
        """Folder of what tokens have used, which is that of all, and the number of this server."""
        return self.state_dir.parents[1] / "quotas", int(self.state_dir.name)

    @property
    def addresses(self) -> tuple[Address, Address, Address]:
        """Where it listens; the ports of the last two are the parent's, for documentation."""
        inference, management, metrics = super().addresses
        return (
            replace(inference, is_shared=True),
            replace(management, path=self.sockets / "management", is_tls=False),
            replace(metrics, path=self.sockets / "metrics", is_tls=False),
        )


class ChildServer:
    """A server that this process starts, and that does not outlive it.

    The kernel ties a child to the life of the thread that started it, which is the event loop's.

    Args:
        name: of it, as messages have it.
        where_more: where its log is.
    """

    def __init__(self, name: str, where_more: str) -> None:
        self._name, self._where_more = name, where_more
        self._process: asyncio.subprocess.Process | None = None
        self._message = ""

    def __str__(self) -> str:
        return self._name

    async def launch(
        self,
        settings: Settings,
        report: Report = lambda event: None,
        *,
        version: str | None = None,
        python: Path | None = None,
        beats: int | None = None,
        **told: Any,
    ) -> dict[str, Any]:
        """Start it, and return what it says of itself when its models are ready.

        Args:
            settings: settings of it; it runs in its state folder.
            report: called with what happens until then.
            version: version of Modelyard that it must be; None for this one.
            python: its interpreter; None takes this one.
            beats: the pipe of this process's `Beats`.
            told: what it is told beside its settings.

        Raises:
            StartError: it has ended; in its own words where it has some.
        """
        self._message = ""
        environment, pipes = dict(os.environ), [] if beats is None else [beats]
        for name in OF_THE_INTERPRETER if python is not None else ():
            environment.pop(name, None)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(python or sys.executable, "-P", "-m", "modelyard.plugins.cluster.process"),
                *map(str, (os.getpid(), *pipes)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=pipes,
                cwd=settings.state_dir,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            text = f"cannot start {python or sys.executable}: {error.strerror}"
            raise StartError(text) from error
        assert process.stdin is not None
        told |= {"version": version or this_version(), "settings": settings.model_dump(mode="json")}
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
        async for event in self._events(process):
            if event["event"] == "ready":
                return event
            if event["event"] == "loading":
                report(event)
        raise StartError(await self.ended())

    async def _events(self, process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line)
            self._message = event.get("message", self._message)
            yield event

    async def ended(self) -> str:
        """Return how it ended, once it has, in its own words where it has some."""
        assert self._process is not None
        async for _ in self._events(self._process):
            pass
        how = describe_exit(await self._process.wait())
        return self._message or f"{self._name} ended with {how}; {self._where_more}"

    async def stop(self, grace_s: float) -> None:
        """Have it answer what it accepted, and wait for its end, so long."""
        self.signal(signal.SIGTERM)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
            self.signal(signal.SIGKILL)
            await self._process.wait()

    @property
    def runs(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self._process is not None and self.runs:
            self._process.send_signal(number)


def main() -> int:
    """Serve until SIGTERM, or the end of the parent."""
    parent, *beats = map(int, sys.argv[1:])
    die_with_parent(parent)
    told = json.load(sys.stdin)
    try:
        refuse_other(told["version"])
    except StartError as error:
        _report({"event": "error", "message": str(error)})
        return 1
    for pipe in beats:
        threading.Thread(target=watch, args=(pipe, parent), name="beats", daemon=True).start()
    settings = (OneOf if "sockets" in told["settings"] else Settings)(**told["settings"])
    log = log_to_file if told.get("logs_to_file") else log_to_stderr
    return run_ours(settings, _report, log(settings), told.get("keys"))


def _report(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - the protocol with the parent


if __name__ == "__main__":
    sys.exit(main())
