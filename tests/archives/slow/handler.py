"""Waits for the file that a request names, and tells which requests shared its batch."""

import time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row["body"]).decode() for row in data]
    for body in bodies:
        while body.startswith("/") and not Path(body).exists():
            time.sleep(0.01)
    return [{"batch": bodies} for _ in bodies]
