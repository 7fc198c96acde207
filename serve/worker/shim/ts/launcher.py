"""Start and stop the server from Python, as TorchServe's tests and notebooks do."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from queue import Full, Queue
from typing import Any, TextIO

MANAGEMENT = "http://localhost:8081"
COMMAND = [sys.executable, "-P", "-m", "modelyard.serve.torchserve.cli"]
KEPT_LINES = 1000


class Response:
    """The answer to a request; the part of `requests.Response` that callers read."""

    def __init__(self, status_code: int, content: bytes) -> None:
        self.status_code = status_code
        self.content = content
        self.text = content.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Whether the request succeeded."""
        return self.status_code < 400

    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.content)


def stop(wait: bool = True) -> None:
    """Stop the server of this temp folder; without one nothing happens."""
    subprocess.run([*COMMAND, "--stop", *(["--foreground"] if wait else [])])


def start(
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | Iterable[str] | None = None,
    enable_model_api: bool = False,
) -> Queue[str | None]:
    """Start a server in place of the one that runs, and return once its ports are open.

    Args:
        model_store: folder of the archives.
        snapshot_file: a configuration file.
        no_config_snapshots: neither write nor restore snapshots.
        plugin_folder: accepted, without effect.
        disable_token: serve without tokens.
        models: what to load.
        enable_model_api: let models be registered while serving.

    Returns:
        The lines that the server goes on to print, at most 1000 of them kept; None at its end.
    """
    stop()
    command = [*COMMAND, "--start"]
    for flag, value in (
        ("--model-store", model_store),
        ("--plugins-path", plugin_folder),
        ("--ts-config", snapshot_file),
    ):
        if value:
            command += [flag, str(value)]
    for flag, is_set in (
        ("--no-config-snapshots", no_config_snapshots),
        ("--disable-token-auth", disable_token),
        ("--enable-model-api", enable_model_api),
    ):
        if is_set:
            command.append(flag)
    if models:
        command += ["--models", *([models] if isinstance(models, str) else models)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line.rstrip())  # noqa: T201 - callers watch the server's output
        if "Model server started" in line:
            break
    lines: Queue[str | None] = Queue(KEPT_LINES)
    threading.Thread(target=_follow, args=(process, process.stdout, lines), daemon=True).start()
    return lines


def register_model(model_name: str, url: str) -> Response:
    """Register a model with one worker, on the default management address."""
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    )


def register_model_with_params(
    params: Mapping[str, str] | Iterable[tuple[str, str]],
) -> Response:
    """Register a model; `params` are the parameters of `POST /models`."""
    # Every worker imports this module, and would pay for these.
    import urllib.error
    import urllib.parse
    import urllib.request

    query = urllib.parse.urlencode(dict(params))
    request = urllib.request.Request(f"{MANAGEMENT}/models?{query}", method="POST")
    try:
        with urllib.request.urlopen(request) as answer:
            return Response(answer.status, answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, error.read())


def _follow(process: subprocess.Popen[str], output: TextIO, lines: Queue[str | None]) -> None:
    """Print and keep what the server prints; a full queue drops lines, never holds the server."""
    with output:
        for line in output:
            print(line.rstrip())  # noqa: T201
            with contextlib.suppress(Full):
                lines.put_nowait(line)
    process.wait()
    if lines.full():
        lines.get_nowait()
    lines.put_nowait(None)
