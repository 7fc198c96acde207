"""mosec: `python serve_mosec.py --port PORT`."""

import json
import os
import sys

from mosec import Server, Worker
from work import BATCH_SIZE, PORT, WORKERS, Work


class Tiny(Worker):
    """Bytes in, JSON out."""

    def __init__(self) -> None:
        self.work = Work()

    def deserialize(self, data: bytes) -> bytes:
        """Take the body as it is."""
        return data

    def forward(self, data: list[bytes]) -> list[list[float]]:
        """Answer a batch."""
        return self.work(data)

    def serialize(self, data: list[float]) -> bytes:
        """Write one answer."""
        return json.dumps(data).encode()


if __name__ == "__main__":
    sys.argv[1:] = ["--port", str(PORT), "--wait", "1", "--log-level", "warning"]
    server = Server()
    # The shortest wait that it knows is one millisecond.
    environment = [dict(os.environ) for _ in range(WORKERS)]
    server.append_worker(
        Tiny, num=WORKERS, max_batch_size=BATCH_SIZE, max_wait_time=1, env=environment
    )
    server.run()
