"""mosec with dynamic batches: `python embed_mosec.py`."""

import sys

from encode_texts import BATCH_SIZE, PORT, Encoder, read, write
from mosec import Server, Worker


class Embeddings(Worker):
    """Texts in, vectors out."""

    def __init__(self) -> None:
        self.encoder = Encoder()

    def deserialize(self, data: bytes) -> list[str]:
        """Read a request."""
        return read(data)

    def forward(self, data):
        """Answer the requests of a batch."""
        vectors = self.encoder([text for texts in data for text in texts])
        found, at = [], 0
        for texts in data:
            found.append(vectors[at : at + len(texts)])
            at += len(texts)
        return found

    def serialize(self, data) -> bytes:
        """Write an answer."""
        return write(data)


if __name__ == "__main__":
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(PORT), "--log-level", "warning"]
    server = Server()
    server.append_worker(
        Embeddings, num=1, max_batch_size=BATCH_SIZE, max_wait_time=1, route="/v1/embeddings"
    )
    server.run()
