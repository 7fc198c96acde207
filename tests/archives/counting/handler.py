"""Writes the name of each row that it computes into a file, and computes until another one is there.

A body is `NAME LOG GATE`; without a gate it is computed at once. `sleep SECONDS` only takes time. An
explanation looks between its passes whether anybody still waits.
"""

import time
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    asked = [bytes(row["body"]).decode().split() for row in data]
    explains = context.get_request_header(0, "explain") == "True"
    for name, *files in asked:
        if name == "sleep":
            time.sleep(float(files[0]))
        elif files:
            with open(files[0], "a") as log:
                log.write(name + "\n")
    for _, _, *gate in (words for words in asked if len(words) > 2):
        while not Path(gate[0]).exists():
            time.sleep(0.01)
            if explains:
                context.check_cancelled()
    return [words[0] for words in asked]
