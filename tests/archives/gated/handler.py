"""Is loaded once the file that its configuration names as `gate` exists; then it waits for a file that a request names."""

import time
from pathlib import Path


class Gated:
    def initialize(self, context):
        while not Path(context.model_yaml_config["gate"]).exists():
            time.sleep(0.01)

    def handle(self, data, context):
        bodies = [bytes(row["body"]).decode() for row in data]
        for body in bodies:
            while body.startswith("/") and not Path(body).exists():
                time.sleep(0.01)
        return [{"body": body} for body in bodies]
