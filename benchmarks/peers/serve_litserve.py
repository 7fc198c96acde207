"""LitServe: `python serve_litserve.py`."""

from typing import Annotated

import litserve
from fastapi import Body, Response
from work import BATCH_SIZE, PORT, WORKERS, Work, to_json


class Tiny(litserve.LitAPI):
    """Bytes in, JSON out."""

    def setup(self, device: str) -> None:
        """Load."""
        self.work = Work()

    def decode_request(
        self, request: Annotated[bytes, Body(media_type="application/octet-stream")]
    ) -> bytes:
        """Take the body as it is."""
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Leave the batch a list."""
        return inputs

    def predict(self, bodies):
        """Answer a batch, or one request where batching is off."""
        return self.work(bodies) if BATCH_SIZE > 1 else self.work([bodies])[0]

    def unbatch(self, output: list[list[float]]) -> list[list[float]]:
        """Leave the answers a list."""
        return output

    def encode_response(self, output: list[float]) -> Response:
        """Write one answer."""
        return Response(to_json(output), media_type="application/json")


if __name__ == "__main__":
    wait = {"batch_timeout": 0.001} if BATCH_SIZE > 1 else {}
    api = Tiny(max_batch_size=BATCH_SIZE, **wait)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=WORKERS, timeout=False, fast_queue=True
    )
    server.run(
        host="127.0.0.1", port=PORT, num_api_servers=1, log_level="error",
        generate_client_file=False, access_log=False,
    )  # fmt: skip
