"""Does what the body says: raise, sleep SECONDS, leak MEGABYTES; else it answers."""

import time
from typing import Any

KEPT: list[bytearray] = []


def handle(data: Any, context: Any) -> Any:
    """Answer each row, after what it asks for."""
    if data is None:
        return None
    for row in data:
        what, _, number = bytes(row["body"]).decode().partition(" ")
        if what == "raise":
            raise RuntimeError("the price list is empty")
        if what == "sleep":
            time.sleep(float(number))
        if what == "leak":
            KEPT.append(bytearray(b"x") * (int(number) << 20))
    return ["fine" for _ in data]
