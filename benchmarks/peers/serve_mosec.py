"""mosec: `python serve_mosec.py --port PORT`."""

import os
import sys

from mosec import Server, Worker
from work import BATCH_SIZE, PORT, WORKERS, Work, to_json


class Tiny(Worker):
    """Bytes in, JSON out."""

    def __init__(self) -> None:
        self.work = Work()

    def deserialize(self, data: bytes) -> bytes:
        """Take the body as it is."""
        return data

    def forward(self, data):
        """Answer a batch, or one request where batching is off."""
        return self.work(data) if BATCH_SIZE > 1 else self.work([data])[0]

    def serialize(self, data: list[float]) -> bytes:
        """Write one answer."""
        return to_json(data)


if __name__ == "__main__":
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(PORT), "--log-level", "warning"]
    server = Server()
    # Without batching it waits for nothing; with, the shortest wait that it knows is 1 ms.
    environment = [dict(os.environ) for _ in range(WORKERS)]
    server.append_worker(
        Tiny, num=WORKERS, max_batch_size=BATCH_SIZE, max_wait_time=1, env=environment
    )
    server.run()
