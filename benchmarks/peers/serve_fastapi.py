"""FastAPI and uvicorn, as one writes a model's server by hand: `python serve_fastapi.py`.

One process with the network in it. BENCH_BATCH=1 runs it in the event loop, which is the fastest
for a call this short; above 1, requests that wait are answered together, one batch in a thread.
"""

import asyncio

import uvicorn
from fastapi import FastAPI, Request, Response
from work import BATCH_SIZE, PORT, WORKERS, Work, to_json

app = FastAPI()
work = Work()
waiting: asyncio.Queue = asyncio.Queue()
tasks: set[asyncio.Task] = set()


async def answer_batches() -> None:
    """Answer what waits, up to a batch at once, for ever."""
    while True:
        batch = [await waiting.get()]
        while len(batch) < BATCH_SIZE and not waiting.empty():
            batch.append(waiting.get_nowait())
        answers = await asyncio.to_thread(work, [body for body, _ in batch])
        for (_, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)


@app.post("/predict")
async def predict(request: Request) -> Response:
    """Take the body as it is."""
    body = await request.body()
    if BATCH_SIZE == 1:
        (answer,) = work([body])
    else:
        if not tasks:
            tasks.add(asyncio.create_task(answer_batches()))
        future = asyncio.get_running_loop().create_future()
        waiting.put_nowait((body, future))
        answer = await future
    return Response(to_json(answer), media_type="application/json")


if __name__ == "__main__":
    uvicorn.run("serve_fastapi:app", port=PORT, workers=WORKERS, log_level="error",
                access_log=False, loop="uvloop", http="httptools")  # fmt: skip
