"""BentoML: `bentoml serve serve_bentoml:Tiny`. Batched inputs are lists, so base64 in JSON."""

import base64

import bentoml
from work import BATCH_SIZE, WORKERS, Work

BATCHES = {"batchable": True, "max_batch_size": BATCH_SIZE, "max_latency_ms": 1000}


@bentoml.service(workers=WORKERS, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Tiny:
    """{"images": [base64]} in, JSON out."""

    def __init__(self) -> None:
        self.work = Work()

    @bentoml.api(**(BATCHES if BATCH_SIZE > 1 else {}))
    def predict(self, images: list[str]) -> list[list[float]]:
        """Answer a batch."""
        return self.work([base64.b64decode(image) for image in images])
