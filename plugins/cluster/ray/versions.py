"""One version of Modelyard for all cells of a set."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from modelyard.serve.errors import StartError


def this_version() -> str:
    """Return the version of Modelyard that runs here."""
    return version("modelyard")


def refuse_other(expected: str) -> None:
    """Raise StartError unless the version here is the one that the application was built by."""
    if (found := this_version()) != expected:
        raise StartError(_describe(found, expected, sys.prefix))


def check_python(python: Path) -> None:
    """Raise StartError unless an interpreter has the version that runs here."""
    code = "from importlib.metadata import version; print(version('modelyard'))"
    try:
        ran = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, env={})
    except OSError as error:
        raise StartError(f"cannot start {python}: {error.strerror}") from error
    if ran.returncode:
        raise StartError(f"{python} has no modelyard; install it there, or name another one")
    if (found := ran.stdout.strip()) != (ours := this_version()):
        raise StartError(_describe(found, ours, str(python)))


def _describe(found: str, expected: str, where: str) -> str:
    return (
        f"{os.uname().nodename} has modelyard {found} in {where}, and this application was built "
        f"by {expected}; install that version on every node"
    )
