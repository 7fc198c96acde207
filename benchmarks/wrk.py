"""wrk, the load generator: one bounded run of closed-loop requests, and its figures."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("post.lua")
MARK = "figures "
REQUEST_TIMEOUT_S = 60
"""Above what a request waits behind 64 others of a slow model; wrk counts a later one as failed."""
GRACE_S = 30
"""Beyond its own duration, after which a run counts as hung."""


class WrkFailed(Exception):
    """wrk ended with an error or printed no figures."""


@dataclass(frozen=True)
class Load:
    """What wrk saw in one run."""

    requests: int
    seconds: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    errors: dict[str, int]
    """Answers of status 400 and above, and broken or timed out connections, by kind."""
    cpu_s: float
    """CPU time of wrk itself."""

    @property
    def failures(self) -> int:
        """Requests that were not answered well."""
        return sum(self.errors.values())


def run_wrk(
    url: str,
    connections: int,
    seconds: float,
    content_type: str,
    files: Sequence[Path],
    skip_s: float = 0,
) -> Load:
    """Post files in rotation over `connections` connections, each with one request in flight.

    Args:
        url: URL of the prediction.
        connections: all of one thread of wrk.
        seconds: duration; wrk knows whole seconds only, so it is rounded up.
        content_type: Content-Type of every file.
        files: bodies.
        skip_s: leave the first seconds out of `requests` and `seconds`, so that no edge of what is
            counted falls together with an answer; for servers that answer a few times per second.

    Raises:
        WrkFailed: the run gave no figures.
    """
    whole = max(1, -int(-seconds // 1))
    command = ["wrk", "-t", "1", "-c", str(connections), "-d", f"{whole}s"]
    command += ["--timeout", f"{REQUEST_TIMEOUT_S}s", "-s", str(SCRIPT), url, "--"]
    command += [content_type, str(skip_s)]
    before = _children_cpu_s()
    done = subprocess.run(
        [*command, *map(str, files)], capture_output=True, text=True, timeout=whole + GRACE_S
    )
    if done.returncode:
        raise WrkFailed(f"wrk ended with code {done.returncode}: {done.stderr.strip()}")
    return parse_figures(done.stdout, _children_cpu_s() - before)


def parse_figures(output: str, cpu_s: float) -> Load:
    """Read the line that `post.lua` prints.

    Raises:
        WrkFailed: there is none, or it is damaged.
    """
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    if len(lines) != 1:
        raise WrkFailed(f'wrk printed {len(lines)} lines "{MARK}…", expected one: {output.strip()}')
    try:
        return Load(**json.loads(lines[0].removeprefix(MARK)), cpu_s=cpu_s)
    except (ValueError, TypeError) as error:
        raise WrkFailed(f"wrk printed figures that cannot be read ({error}): {lines[0]}") from error


def version() -> str:
    """Return wrk's version, as it says it."""
    done = subprocess.run(["wrk", "-v"], capture_output=True, text=True)
    return (done.stdout + done.stderr).splitlines()[0].partition(" [")[0].removeprefix("wrk ")


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
