"""The server process that `torchserve --start` runs: `python -P -m serve.torchserve.server`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from serve.errors import StartError
from serve.server import run
from serve.torchserve import launcher
from serve.torchserve.arguments import parse_command_line
from serve.torchserve.configuration import load_configuration

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until SIGTERM; the arguments are a descriptor to write to at the start, and flags."""
    started, *arguments = sys.argv[1:]
    try:
        configuration = load_configuration(parse_command_line(arguments), os.environ, Path.cwd())
    except StartError as error:
        _say(f"Invalid configuration: {error}")
        return 1
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stdout,
        format="%(asctime)s [%(levelname)s] %(threadName)s %(name)s - %(message)s",
    )
    for notice in configuration.notices:
        logger.warning("%s", notice)

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "started":
            _say("Model server started.")
            if started != "-":
                os.write(int(started), b"1")
                os.close(int(started))
        elif event["event"] == "error":
            _say(event["message"])

    code = run(configuration.settings, report)
    if launcher.read_pid() == os.getpid():
        launcher.pid_file().unlink(missing_ok=True)
    return code


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - scripts wait for these lines on standard output


if __name__ == "__main__":
    sys.exit(main())
