"""The process of one of several servers: `python -P -m …cluster.servers.one PARENT`.

It ends with its parent. What it needs comes as JSON on standard input, events go as JSON lines to
standard output.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelyard.serve.settings import Address, Settings
from modelyard.serve.walls.raising import die_with_parent


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


def main() -> int:
    """Serve until SIGTERM, or the end of the parent."""
    die_with_parent(int(sys.argv[1]))
    told = json.load(sys.stdin)
    from modelyard.serve.log import log_to_file, log_to_stderr
    from modelyard.serve.server import run_ours

    settings = OneOf(**told["settings"])
    log = log_to_file if told["logs_to_file"] else log_to_stderr
    return run_ours(settings, _report, log(settings), told["keys"])


def _report(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - the protocol with the parent


if __name__ == "__main__":
    sys.exit(main())
