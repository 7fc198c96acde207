"""The work that every server does for one request: PNG bytes → probabilities of ten classes.

Nothing here belongs to any server; each definition beside this file calls it. It needs numpy,
Pillow and onnxruntime, and runs one thread.
"""

import io
import os

import numpy as np
from PIL import Image

MODEL = os.environ.get("BENCH_MODEL", "tiny.onnx")
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))
PORT = int(os.environ.get("BENCH_PORT", "8080"))
BATCH_SIZE = int(os.environ.get("BENCH_BATCH", "8"))


class Work:
    """The network, loaded once per process."""

    def __init__(self, model: str = MODEL) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, bodies: list[bytes]) -> list[list[float]]:
        """Answer a batch of PNG files (28 x 28, grey)."""
        pixels = [np.asarray(Image.open(io.BytesIO(body)), np.float32) for body in bodies]
        images = np.stack(pixels)[:, None] / np.float32(255)
        (logits,) = self._session.run(None, {"image": images})
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        answers: list[list[float]] = (exponents / exponents.sum(axis=1, keepdims=True)).tolist()
        return answers
