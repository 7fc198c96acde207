"""Ray Serve: `python serve_ray.py`."""

from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from work import BATCH_SIZE, PORT, WORKERS, Work


@serve.deployment(num_replicas=WORKERS, max_ongoing_requests=128)
class Tiny:
    """Bytes in, JSON out."""

    def __init__(self) -> None:
        self.work = Work()

    @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=0)
    async def run(self, bodies: list[bytes]) -> list[list[float]]:
        """Answer a batch."""
        return self.work(bodies)

    async def __call__(self, request: Request) -> list[float]:
        """Answer one request."""
        return await self.run(await request.body())


if __name__ == "__main__":
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=PORT))
    serve.run(Tiny.bind(), blocking=True)
