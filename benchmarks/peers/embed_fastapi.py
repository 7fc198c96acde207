"""FastAPI: `python embed_fastapi.py`; with BENCH_BATCHER=1 what waits shares a call."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import uvicorn
from encode_texts import BATCH_SIZE, PORT, Encoder, read, write
from fastapi import FastAPI, Request, Response

HAS_BATCHER = os.environ.get("BENCH_BATCHER") == "1"
app = FastAPI()
encoder = Encoder()
executor = ThreadPoolExecutor(1)
waiting: asyncio.Queue = asyncio.Queue()


async def _batches() -> None:
    """Run whatever waits, up to BATCH_SIZE texts, as soon as the last call has ended."""
    loop = asyncio.get_running_loop()
    while True:
        taken = [await waiting.get()]
        count = len(taken[0][0])
        while not waiting.empty() and count < BATCH_SIZE:
            taken.append(waiting.get_nowait())
            count += len(taken[-1][0])
        texts = [text for given, _ in taken for text in given]
        vectors = await loop.run_in_executor(executor, encoder, texts)
        at = 0
        for given, future in taken:
            if not future.cancelled():
                future.set_result(vectors[at : at + len(given)])
            at += len(given)


@app.on_event("startup")
async def start() -> None:
    """Begin to gather."""
    app.state.task = asyncio.create_task(_batches())


@app.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """Answer one request."""
    texts = read(await request.body())
    loop = asyncio.get_running_loop()
    vectors: np.ndarray
    if HAS_BATCHER:
        future = loop.create_future()
        waiting.put_nowait((texts, future))
        vectors = await future
    else:
        vectors = await loop.run_in_executor(executor, encoder, texts)
    return Response(write(vectors), media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False)
