"""Answers at once; says what an answer came from when it is told to: until it is stopped, or dies."""

import os
import time


class Unasked:
    ended = "nothing"

    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["predicted"] * len(data)

    def explain(self, data, context):
        return [f"explained after {self.ended}"] * len(data)

    def shares(self, data, context):
        what = data[0]["body"].get("do")
        if what == "die":
            os._exit(3)
        if what == "wait":
            try:
                while True:
                    context.check_cancelled()
                    time.sleep(0.01)
            except BaseException as error:
                self.ended = type(error).__name__
                raise
        if what == "lie":
            return [{"left": 0.5, "right": 0.5, "more": 1}]
        return [{"left": 0.25, "right": 0.75}]
