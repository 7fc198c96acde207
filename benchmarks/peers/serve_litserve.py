"""LitServe: `python serve_litserve.py`. Its requests are JSON, so the picture comes as base64."""

import base64

import litserve
from work import BATCH_SIZE, PORT, WORKERS, Work


class Tiny(litserve.LitAPI):
    """{"image": base64} in, JSON out."""

    def setup(self, device: str) -> None:
        """Load."""
        self.work = Work()

    def decode_request(self, request: dict) -> bytes:
        """Take the picture out."""
        return base64.b64decode(request["image"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Leave the batch a list."""
        return inputs

    def predict(self, bodies: list[bytes]) -> list[list[float]]:
        """Answer a batch."""
        return self.work(bodies)

    def unbatch(self, output: list[list[float]]) -> list[list[float]]:
        """Leave the answers a list."""
        return output

    def encode_response(self, output: list[float]) -> list[float]:
        """Write one answer."""
        return output


if __name__ == "__main__":
    api = Tiny(max_batch_size=BATCH_SIZE, batch_timeout=0.001)
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=WORKERS, timeout=False, fast_queue=True
    )
    server.run(
        host="127.0.0.1", port=PORT, num_api_servers=1, log_level="error",
        generate_client_file=False, access_log=False,
    )  # fmt: skip
