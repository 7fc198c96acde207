"""Asks a server as KServe's own clients do; run by a Python that has them.

Arguments are the name of a model, the file of a picture, and what is there: `picture`, a model that
takes pictures; `torchserve`, the same in the drop-in; `row`, one that takes rows of numbers. What
was answered is written as JSON.
"""

import asyncio
import base64
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kserve import (  # type: ignore[import-not-found]
    InferenceGRPCClient,
    InferenceRESTClient,
    InferInput,
    InferRequest,
    RESTConfig,
)

URL = "http://127.0.0.1:8080"
GRPC = "127.0.0.1:7070"


async def ask(model: str, content: bytes, kind: str) -> dict[str, Any]:
    """Return what each client said of the model, and what the model said of the content."""
    v1, v2 = (InferenceRESTClient(RESTConfig(protocol=each, timeout=60)) for each in ("v1", "v2"))
    grpc = InferenceGRPCClient(GRPC)
    said: dict[str, Any] = {
        "ready": [
            await v1.is_model_ready(URL, model),
            await v2.is_server_live(URL),
            await v2.is_server_ready(URL),
            await v2.is_model_ready(URL, model),
            await grpc.is_server_live(),
            await grpc.is_server_ready(),
            await grpc.is_model_ready(model),
        ]
    }
    if kind != "torchserve":  # which answers 405 at the root, ours too in its place
        said["alive"] = await v1.is_server_live(URL)
    if kind != "row":
        text = base64.b64encode(content).decode()
        # Of TorchServe's users, then of ours.
        for name, row in (("data", {"data": text}), ("b64", {"b64": text})):
            try:
                answer = await v1.infer(URL, {"instances": [row, row]}, model)
            except Exception as error:
                said[name] = str(error)
            else:
                said[name] = [max(each, key=each.get) for each in answer["predictions"]]
                why = await v1.explain(URL, model, {"instances": [row]})
                said["explained"] = why["explanations"][0]["label"]
    else:
        answer = await v1.infer(URL, {"instances": [[[[0.0] * 8] * 8]] * 2}, model)
        said["row"] = [int(np.argmax(each)) for each in answer["predictions"]]
    image = np.zeros((2, 1, 8, 8), np.float32)
    for name, client in (("v2", v2), ("grpc", grpc)):
        for binary in (False, True):
            given = InferInput("image", list(image.shape), "FP32")
            given.set_data_from_numpy(image, binary_data=binary)
            request = InferRequest(model_name=model, infer_inputs=[given])
            where = (URL, request, model) if client is v2 else (request,)
            found = (await client.infer(*where)).outputs[0]
            said[f"{name}{' binary' * binary}"] = [found.name, list(found.as_numpy().shape)]
    await grpc.close()
    return said


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    name, file, kind = sys.argv[1:]
    said = asyncio.run(ask(name, Path(file).read_bytes(), kind))
    sys.stdout.write(json.dumps(said))
