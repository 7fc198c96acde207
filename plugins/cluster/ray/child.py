"""The process of a cell's server: `python -P -m modelyard.plugins.cluster.ray.child PARENT PIPE`.

It ends with the replica that started it, and ends it when it hangs. Settings come as JSON on
standard input, events go as JSON lines to standard output; the log goes to standard error, which is
Ray's log of the replica.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from modelyard.plugins.cluster.ray.beats import watch
from modelyard.plugins.cluster.ray.versions import refuse_other
from modelyard.serve.errors import StartError
from modelyard.serve.walls.raising import die_with_parent


def main() -> int:
    """Serve until SIGTERM, or the end of the replica."""
    replica, pipe = map(int, sys.argv[1:])
    die_with_parent(replica)
    told = json.load(sys.stdin)
    try:
        refuse_other(told["version"])
    except StartError as error:
        _report({"event": "error", "message": str(error)})
        return 1
    threading.Thread(target=watch, args=(pipe, replica), name="beats", daemon=True).start()
    from modelyard.serve.log import log_to_stderr
    from modelyard.serve.server import run_ours
    from modelyard.serve.settings import Settings

    settings = Settings(**told["settings"])
    return run_ours(settings, _report, log_to_stderr(settings))


def _report(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)  # noqa: T201 - the protocol with the replica


if __name__ == "__main__":
    sys.exit(main())
