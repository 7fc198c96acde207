"""Every call of tritonclient's four clients; run by the Python of an environment that has them.

Arguments: address by HTTP, address by gRPC, token of operators. Prints a JSON object: client and
call → true, or what was wrong.
"""

import asyncio
import inspect
import json
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.grpc.aio as by_grpc_aio
import tritonclient.http as by_http
import tritonclient.http.aio as by_http_aio
import tritonclient.utils.shared_memory as memory
from tritonclient.utils import InferenceServerException

HTTP, GRPC, TOKEN = sys.argv[1:]
OPERATOR = {"authorization": f"Bearer {TOKEN}"}
IMAGE = np.random.default_rng(7).random((2, 1, 8, 8)).astype(np.float32)
LOOP = asyncio.new_event_loop()
CLIENTS: dict[str, tuple[Any, Any]] = {
    "http": (by_http, lambda: by_http.InferenceServerClient(HTTP)),
    "grpc": (by_grpc, lambda: by_grpc.InferenceServerClient(GRPC)),
    "http.aio": (by_http, lambda: by_http_aio.InferenceServerClient(HTTP)),
    "grpc.aio": (by_grpc, lambda: by_grpc_aio.InferenceServerClient(GRPC)),
}


async def _make(make: Any) -> Any:
    return make()


async def _await(value: Any) -> Any:
    return await value


def done(value: Any) -> Any:
    return LOOP.run_until_complete(_await(value)) if inspect.isawaitable(value) else value


class Caller:
    """One client, and what differs between the four."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind, make = CLIENTS[name]
        self.client = LOOP.run_until_complete(_make(make)) if "aio" in name else make()
        self.is_grpc = "grpc" in name

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        found = done(getattr(self.client, method)(*arguments, **options))
        if self.is_grpc and hasattr(found, "DESCRIPTOR"):
            from google.protobuf.json_format import MessageToDict

            found = MessageToDict(found, preserving_proto_field_name=True)
        return found

    def image(self) -> Any:
        given = self.kind.InferInput("image", IMAGE.shape, "FP32")
        given.set_data_from_numpy(IMAGE)
        return given

    def output(self, **options: Any) -> Any:
        return self.kind.InferRequestedOutput("logits", **options)

    def infer(self, **options: Any) -> Any:
        return done(self.client.infer("digits", [self.image()], **options))

    def labels(self) -> int:
        found = self.infer(outputs=[self.output(class_count=3)], request_id="a").as_numpy("logits")
        return int(found.shape[1])

    def answers(self) -> bool:
        plain = self.infer().as_numpy("logits")
        if self.is_grpc:
            packed = self.infer(compression_algorithm="gzip").as_numpy("logits")
        else:
            packed = self.infer(request_compression_algorithm="deflate").as_numpy("logits")
        return plain.shape == (2, 10) and bool((plain == packed).all())

    def shared(self) -> bool:
        """Have a prediction made from and into shared memory, beside one by bytes."""
        given = memory.create_shared_memory_region("in", f"/in-{self.name}", IMAGE.nbytes)
        taken = memory.create_shared_memory_region("out", f"/out-{self.name}", 200)
        try:
            memory.set_shared_memory_region(given, [IMAGE])
            self.ask("register_system_shared_memory", "in", f"/in-{self.name}", IMAGE.nbytes)
            self.ask("register_system_shared_memory", "out", f"/out-{self.name}", 100, offset=100)
            image = self.kind.InferInput("image", IMAGE.shape, "FP32")
            image.set_shared_memory("in", IMAGE.nbytes)
            output = self.output()
            output.set_shared_memory("out", 80, offset=12)
            found = done(self.client.infer("digits", [image], outputs=[output]))
            assert found.get_output("logits") is not None
            shared = memory.get_contents_as_numpy(taken, np.float32, [2, 10], offset=112)
            return bool((shared == self.infer().as_numpy("logits")).all())
        finally:
            self.ask("unregister_system_shared_memory", "in")
            self.ask("unregister_system_shared_memory")
            memory.destroy_shared_memory_region(given)
            memory.destroy_shared_memory_region(taken)

    def streamed(self) -> Any:
        """Return the ids of answers to a stream, or of calls that are under way together."""
        ids = ["1", "2", "3"]
        if self.name == "http":
            waiting = [self.client.async_infer("digits", [self.image()], request_id=i) for i in ids]
            return [each.get_result().get_response()["id"] for each in waiting]
        if self.name == "grpc":
            import queue

            found: Any = queue.Queue()
            self.client.start_stream(lambda result, error: found.put(error or result))
            for id in ids:
                self.client.async_stream_infer("digits", [self.image()], request_id=id)
            answers = [found.get(timeout=20) for _ in ids]
            self.client.stop_stream()
            return [each.get_response().id for each in answers]
        if self.name == "http.aio":
            return [self.infer(request_id=id).get_response()["id"] for id in ids]

        async def requests() -> Any:
            for id in ids:
                yield {"model_name": "digits", "inputs": [self.image()], "request_id": id}

        async def all_of() -> list[str]:
            answers = self.client.stream_infer(requests())
            return [result.get_response().id async for result, _ in answers]

        return LOOP.run_until_complete(all_of())


def has(*words: str) -> Any:
    """Return what checks that an answer has all of these words."""
    return lambda found: all(word in json.dumps(found) for word in words)


def is_empty(found: Any) -> bool:
    """Return whether an answer says nothing."""
    return not found


def refused(*words: str) -> Any:
    """Return what checks that a call is refused with these words."""
    return lambda found: (
        isinstance(found, InferenceServerException) and all(word in str(found) for word in words)
    )


CALLS: dict[str, tuple[Any, Any]] = {
    "live": (lambda it: it.ask("is_server_live"), bool),
    "ready": (lambda it: it.ask("is_server_ready"), bool),
    "model ready": (lambda it: it.ask("is_model_ready", "digits", "1"), bool),
    "metadata": (lambda it: it.ask("get_server_metadata"), has("statistics", "system_shared")),
    "model": (lambda it: it.ask("get_model_metadata", "digits"), has("logits", "FP32")),
    "config": (lambda it: it.ask("get_model_config", "digits"), has("TYPE_FP32", "dynamic_batch")),
    "no config": (lambda it: it.ask("get_model_config", "nothing"), refused("nothing")),
    "index": (lambda it: it.ask("get_model_repository_index"), has("READY", "digits")),
    "unload": (lambda it: it.ask("unload_model", "tensors", headers=OPERATOR), is_empty),
    "load": (lambda it: it.ask("load_model", "tensors", headers=OPERATOR), is_empty),
    "infer": (lambda it: it.answers(), bool),
    "labels": (lambda it: it.labels(), lambda found: found == 3),
    "stream": (lambda it: it.streamed(), lambda found: found == ["1", "2", "3"]),
    "sequence": (lambda it: it.infer(sequence_id=7, sequence_start=True), refused("sequence_")),
    "statistics": (lambda it: it.ask("get_inference_statistics", "digits"), has("execution_count")),
    "traces": (lambda it: it.ask("get_trace_settings"), has("trace_level", "OFF")),
    "trace": (lambda it: it.ask("update_trace_settings", settings={"trace_rate": "1"}),
              refused("trace_rate")),
    "logs": (lambda it: it.ask("get_log_settings"), has("log_info")),
    "log": (lambda it: it.ask("update_log_settings", settings={"log_info": False}),
            refused("log_info")),
    "shared": (lambda it: it.shared(), bool),
    "regions": (lambda it: it.ask("get_system_shared_memory_status"), is_empty),
    "no region": (lambda it: it.ask("register_system_shared_memory", "x", "/none", 8),
                  refused("/dev/shm/none")),
    "cuda": (lambda it: it.ask("get_cuda_shared_memory_status"), is_empty),
    "cuda region": (lambda it: it.ask("register_cuda_shared_memory", "x", b"aGFuZGxl", 0, 8),
                    refused("CUDA shared memory is not supported")),
    "no cuda": (lambda it: it.ask("unregister_cuda_shared_memory"), is_empty),
}  # fmt: skip


def main() -> None:
    found: dict[str, Any] = {}
    for client in CLIENTS:
        it = Caller(client)
        for name, (ask, is_right) in CALLS.items():
            try:
                answer = ask(it)
            except Exception as error:
                answer = error
            found[f"{client} {name}"] = is_right(answer) is True or f"{type(answer)} {answer}"
        done(it.client.close())
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
