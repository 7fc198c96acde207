"""Waits for the file that a request names, and tells which requests shared its batch.

Meanwhile it leaves a file beside it, where it may: only then is the batch closed.
"""

import contextlib
import time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row["body"]).decode() for row in data]
    for body in bodies:
        if body.startswith("/"):
            with contextlib.suppress(OSError):
                Path(f"{body}.began").touch()
        while body.startswith("/") and not Path(body).exists():
            time.sleep(0.01)
    return [{"batch": bodies} for _ in bodies]
