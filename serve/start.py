"""Start a server process and follow what it reports until it is ready."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from modelyard.base.exits import describe_exit
from modelyard.serve.control.state import StateDir, describe_running
from modelyard.serve.errors import StartError
from modelyard.serve.settings import Settings

SERVER = ("-m", "modelyard.serve.server")


def start_detached(
    settings: Settings,
    state: StateDir,
    on_loading: Callable[[str, str], None],
    program: Sequence[str] = SERVER,
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a server in a session of its own; return it, and what it says of itself when ready.

    Args:
        on_loading: called with a model's name and what happens to it.
        program: what the interpreter runs.

    Raises:
        StartError: a server runs already; the server's own words, or where its log is.
    """
    if (running := state.running()) is not None:
        raise StartError(describe_running(running))
    try:
        state.create()
        log = state.log_file.open("ab")
    except OSError as error:
        raise StartError(state.why_unusable(error)) from error
    with log:
        process = subprocess.Popen(
            [sys.executable, "-P", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=state.root,
            start_new_session=True,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(settings.model_dump_json())
        process.stdin.close()
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return process, dict(event)
            if event["event"] == "error":
                raise StartError(event["message"])
            if event["event"] == "loading":
                on_loading(event["model"], event["text"])
    except (KeyboardInterrupt, BrokenPipeError):
        process.terminate()
        process.wait()
        raise
    finally:
        process.stdout.close()
    ended = describe_exit(process.wait())
    raise StartError(f"the server ended with {ended}; its log is {state.log_file}")
