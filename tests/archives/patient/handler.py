"""Answers with its process id; explains until it is stopped, and writes down what stopped it.

Asked to take some seconds, it takes them for each request, and tells which it was asked together.
"""

import os
import time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    if context.get_request_header(0, "explain") != "True":
        return [str(os.getpid())] * len(data)
    path = bytes(data[0]["body"]).decode()
    if not path:
        return [f"{os.getpid()} {os.nice(0)}"] * len(data)
    if path.startswith("takes "):
        time.sleep(float(path.split()[1]) * len(data))
        return [[bytes(row["body"]).decode() for row in data] for _ in data]
    Path(path).write_text("started")
    try:
        while True:
            context.check_cancelled()
            time.sleep(0.01)
    except BaseException as error:
        Path(path).write_text(type(error).__name__)
        raise
