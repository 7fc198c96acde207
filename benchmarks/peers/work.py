"""The work that every server does for one request: PNG bytes → probabilities of ten classes.

Nothing here belongs to any server; each definition beside this file calls it. It needs numpy,
Pillow, orjson, and torch or onnxruntime, and runs one thread. BENCH_MODEL names the network: a
TorchScript `.pt`, an `.onnx`, or nothing, and then every answer is there at once.
"""

import io
import os

import numpy as np
import orjson
from PIL import Image

MODEL = os.environ.get("BENCH_MODEL", "")
WORKERS = int(os.environ.get("BENCH_WORKERS", "1"))
PORT = int(os.environ.get("BENCH_PORT", "8080"))
BATCH_SIZE = int(os.environ.get("BENCH_BATCH", "8"))

to_json = orjson.dumps
"""What every server writes an answer with, where it lets its user choose."""


class Work:
    """The network, loaded once per process."""

    def __init__(self, model: str = MODEL) -> None:
        self._run = _torchscript(model) if model.endswith(".pt") else model and _onnx(model)

    def __call__(self, bodies: list[bytes]) -> list[list[float]]:
        """Answer a batch of PNG files (28 x 28, grey)."""
        if not self._run:
            return [[1.0]] * len(bodies)
        pixels = [np.asarray(Image.open(io.BytesIO(body)), np.float32) for body in bodies]
        logits = self._run(np.stack(pixels)[:, None] / np.float32(255))
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        answers: list[list[float]] = (exponents / exponents.sum(axis=1, keepdims=True)).tolist()
        return answers


def _onnx(model: str):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"image": images})[0]


def _torchscript(model: str):
    import torch

    torch.set_num_threads(1)
    network = torch.jit.load(model).eval()

    def run(images):
        with torch.inference_mode():
            return network(torch.from_numpy(images)).numpy()

    return run
