"""Answers at once; says what an answer came from when it is told to: until it is stopped, or dies."""

import os
import time
from pathlib import Path


class Unasked:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["predicted"] * len(data)

    def explain(self, data, context):
        return ["explained"] * len(data)

    def shares(self, data, context):
        body = data[0]["body"]
        if body == {"do": "die"}:
            os._exit(3)
        if isinstance(body, dict) and "note" in body:
            note = Path(body["note"])
            note.write_text("started")
            try:
                while True:
                    context.check_cancelled()
                    time.sleep(0.01)
            except BaseException as error:
                note.write_text(type(error).__name__)
                raise
        return [{"left": 0.5, "right": 0.5, "more": 1}] if body == {"do": "lie"} else [
            {"left": 0.25, "right": 0.75}
        ]
