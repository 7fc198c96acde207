"""Ray Serve: `python serve_ray.py`."""

from ray import serve
from ray.serve.config import HTTPOptions
from starlette.requests import Request
from starlette.responses import Response
from work import BATCH_SIZE, PORT, WORKERS, Work, to_json


@serve.deployment(num_replicas=WORKERS, max_ongoing_requests=128)
class Tiny:
    """Bytes in, JSON out."""

    def __init__(self) -> None:
        self.work = Work()

    @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=0)
    async def run(self, bodies: list[bytes]) -> list[list[float]]:
        """Answer a batch."""
        return self.work(bodies)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.body()
        answer = await self.run(body) if BATCH_SIZE > 1 else self.work([body])[0]
        return Response(to_json(answer), media_type="application/json")


if __name__ == "__main__":
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=PORT))
    serve.run(Tiny.bind(), blocking=True)
