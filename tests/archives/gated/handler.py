"""Is loaded once the file `gate` exists, not while `curse` does; waits for a file that a body names.

Meanwhile it leaves a file beside it, where it may: only then is the batch closed.
"""

import contextlib
import time
from pathlib import Path


class Gated:
    def initialize(self, context):
        config = context.model_yaml_config.get("handler", {})
        while "gate" in config and not Path(config["gate"]).exists():
            time.sleep(0.01)
        if "curse" in config and Path(config["curse"]).exists():
            raise RuntimeError("cursed\r\n2026-01-01 00:00:00,000 CRITICAL serve forged\x1b[2J")

    def handle(self, data, context):
        bodies = [bytes(row["body"]).decode() for row in data]
        for body in bodies:
            if body.startswith("/"):
                with contextlib.suppress(OSError):
                    Path(f"{body}.began").touch()
            while body.startswith("/") and not Path(body).exists():
                time.sleep(0.01)
        return [{"body": body} for body in bodies]
