"""Writes texts; its steps wait for a file after the first few, and are counted in another."""

import os
import time

from modelyard.handlers import Generate


class Gated(Generate):
    def step(self):
        folder = self.handler_settings["folder"]
        with open(os.path.join(folder, "rows"), "a") as file:
            file.write(f"{len(self._running)}\n")
            file.flush()
            if file.tell() > 8:
                while not os.path.exists(os.path.join(folder, "gate")):
                    time.sleep(0.005)
        return super().step()
