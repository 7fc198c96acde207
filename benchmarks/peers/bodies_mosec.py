"""mosec: bytes in, bytes out, as the model `sizes` of `benchmarks.protocols` has it."""

import os
import sys

from mosec import Runtime, Server, Worker


class Sizes(Worker):
    """Answers a long body with its length, with itself at `/echo`, a number with as many bytes."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}

    def deserialize(self, data: bytes) -> bytes:
        """Take the body as it is."""
        return data

    def forward(self, data: bytes) -> bytes:
        """Answer one request."""
        if len(data) > 16:
            return b"%d" % len(data)
        size = int(bytes(data))
        if size not in self.kept:
            self.kept[size] = b"x" * size
        return self.kept[size]

    def serialize(self, data: bytes) -> bytes:
        """Send it as it is."""
        return data


class Echo(Sizes):
    """Answers with the body."""

    def forward(self, data: bytes) -> bytes:
        """Answer one request."""
        return data


if __name__ == "__main__":
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", os.environ["BENCH_PORT"],
                    "--log-level", "warning"]  # fmt: skip
    server = Server()
    server.register_runtime({"/sizes": [Runtime(Sizes)], "/echo": [Runtime(Echo)]})
    server.run()
