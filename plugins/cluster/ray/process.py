"""The server of a cell: started, watched and stopped by the replica, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from modelyard.base.exits import describe_exit
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings

STOP_GRACE_S = 10.0
"""Beyond the server's own drain time."""
OF_THE_INTERPRETER = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class CellServer:
    """A server that lives as long as this process, and not longer.

    One thread starts it and waits for its end: the kernel ties a child to the life of the thread
    that started it.

    Args:
        version: version of Modelyard, which the server must be.
        settings: settings of the server.
        python: its interpreter; None takes this one.
        beats: the pipe of this process's `Beats`.
        on_end: called in a thread with how it ended, where nobody stopped it.
    """

    def __init__(
        self,
        version: str,
        settings: Settings,
        python: Path | None,
        beats: int,
        on_end: Callable[[str], None],
    ) -> None:
        told = {"version": version, "settings": settings.model_dump(mode="json")}
        self._told = json.dumps(told)
        self._grace_s = settings.drain_delay_s + settings.drain_timeout_s + STOP_GRACE_S
        self._cwd = settings.state_dir
        self._python = python
        self._beats = beats
        self._on_end = on_end
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self.started: Future[dict[str, Any]] = Future()
        """What the server says of itself when it is ready; StartError where it does not start."""
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the server is gone."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Have the server answer what it accepted, and wait for its end. Blocking."""
        self._is_stopped = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._thread.join(self._grace_s)
            self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        try:
            message = self._serve()
        except OSError as error:
            message = f"cannot start {self._python or sys.executable}: {error.strerror}"
        if not self.started.done():
            self.started.set_exception(StartError(message))
        elif not self._is_stopped:
            self._on_end(message)

    def _serve(self) -> str:
        """Run the server to its end; return why it ended, in its own words where it has some."""
        environment = dict(os.environ)
        if self._python is not None:
            for name in OF_THE_INTERPRETER:
                environment.pop(name, None)
        message = ""
        with tempfile.TemporaryFile("w+") as told:
            told.write(self._told)
            told.seek(0)
            process = subprocess.Popen(
                [
                    *(
                        self._python or sys.executable,
                        "-P",
                        "-m",
                        "modelyard.plugins.cluster.ray.child",
                    ),
                    *(str(os.getpid()), str(self._beats)),
                ],
                stdin=told,
                stdout=subprocess.PIPE,
                pass_fds=[self._beats],
                cwd=self._cwd,
                env=environment,
                start_new_session=True,
                text=True,
            )
        with process:
            self._process = process
            if self._is_stopped:
                process.terminate()
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "ready":
                    self.started.set_result(event)
                elif event["event"] == "error":
                    message = event["message"]
            code = process.wait()
        ended = f"the server of the cell ended with {describe_exit(code)}"
        return message or f"{ended}; Ray's log of this replica says more"
