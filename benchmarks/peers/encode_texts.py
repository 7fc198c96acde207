"""The work that every server of texts does, as people write it: tokens, encoder, mean, length 1.

Nothing here belongs to any server. It needs numpy, orjson, tokenizers and onnxruntime, and runs one
thread. BENCH_MODEL is a folder with `minilm.onnx` and `tokenizer.json`.
"""

import os
from pathlib import Path

import numpy as np
import onnxruntime
import orjson
from tokenizers import Tokenizer

FOLDER = Path(os.environ.get("BENCH_MODEL", "."))
BATCH_SIZE = int(os.environ.get("BENCH_BATCH", "32"))
PORT = int(os.environ.get("BENCH_PORT", "8080"))
MOST_TOKENS = 256


class Encoder:
    """The model, loaded once per process."""

    def __init__(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._tokenizer.enable_truncation(MOST_TOKENS)
        self._tokenizer.enable_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(FOLDER / "minilm.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._output = self._session.get_outputs()[0].name

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Return a vector of length 1 for each text, BATCH_SIZE of them in a call at most."""
        return np.concatenate(
            [self._run(texts[at : at + BATCH_SIZE]) for at in range(0, len(texts), BATCH_SIZE)]
        )

    def _run(self, texts: list[str]) -> np.ndarray:
        encodings = self._tokenizer.encode_batch(texts)
        ids = np.array([each.ids for each in encodings], np.int64)
        mask = np.array([each.attention_mask for each in encodings], np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask}
        (vectors,) = self._session.run([self._output], feeds)
        weights = mask[..., None].astype(np.float32)
        mean = (vectors * weights).sum(1) / weights.sum(1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def read(body: bytes) -> list[str]:
    """Return the texts of a request as OpenAI has it."""
    value = orjson.loads(body)["input"]
    return [value] if isinstance(value, str) else value


def write(vectors: np.ndarray) -> bytes:
    """Return an answer as OpenAI has it."""
    data = [
        {"object": "embedding", "index": at, "embedding": vector}
        for at, vector in enumerate(vectors)
    ]
    content = {"object": "list", "data": data, "model": "minilm"}
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
