"""TorchServe's inference API by gRPC: `Ping`, `Predictions`, `StreamPredictions`.

The values of a request go to the handler as they came, under their names, without headers. Its
answer is what it returned; a status that it set does not count, as in TorchServe.
"""

import json
from collections.abc import Callable
from typing import Any

import orjson
from grpc import StatusCode

from modelyard.plugins.grpc.fields import begin_bytes, cut_out
from modelyard.plugins.grpc.messages import not_a, parse
from modelyard.plugins.grpc.oip import ask
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Failure, Method, Rpc, code_of
from modelyard.plugins.torchserve.dialect import Refused, text_of, with_class
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.call import PREDICT, Reply, Stream, Target
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.errors import ModelNotFound, ServeError, StreamBroken, http_status
from modelyard.serve.front.begin import Front

PACKAGE = "org.pytorch.serve.grpc.inference"
SERVICE = f"{PACKAGE}.InferenceAPIsService"
REQUEST = f"{PACKAGE}.PredictionsRequest"
INPUT, VALUE, PREDICTION = 3, 2, 1
"""Numbers of fields: of the request, of an entry in its map, of the answer."""
INTERNAL = "InternalServerException"
OPEN_INFERENCE = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata",
                  "ModelInfer")  # fmt: skip
"""What TorchServe has of that protocol. Not what changes models: that needs another key, which is
asked for by the name of the method."""
OUT_OF_RESOURCES = "Out of resources"
REFUSAL = {"code", "type", "message"}
"""What a worker writes of an error."""


class InferenceApi:
    """The service.

    Args:
        front: where requests begin.
        is_healthy: what `Ping` says.
        most_bytes: most bytes of the chunks that make one answer.
        budget: counts those meanwhile.
    """

    def __init__(
        self, front: Front, is_healthy: Callable[[], bool], most_bytes: int, budget: AnswerBudget
    ) -> None:
        self._front = front
        self._is_healthy = is_healthy
        self._most_bytes = most_bytes
        self._budget = budget

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {
            f"/{SERVICE}/Ping": Method(self._ping),
            f"/{SERVICE}/Predictions": Method(self._predict),
            f"/{SERVICE}/StreamPredictions": Method(self._stream, is_stream=True),
            f"/{SERVICE}/StreamPredictions2": Method(_refuse_sequences, is_stream=True),
        }

    async def _ping(self, rpc: Rpc, data: bytes) -> bytes:
        parse("google.protobuf.Empty", data)
        text = json.dumps({"status": "Healthy" if self._is_healthy() else "Unhealthy"}, indent=2)
        answer = message(f"{PACKAGE}.TorchServeHealthResponse")(health=text)
        return bytes(answer.SerializeToString())

    async def _ask(self, rpc: Rpc, data: bytes) -> Reply:
        request, values = _read(data)
        if not request.model_name:
            text = "Parameter model_name is required.\nBadRequestException.()"
            raise Failure(StatusCode.INTERNAL, text)
        # LEGACY: none of the headers that HTTP's requests have is made.
        path = [request.model_name, request.model_version]
        target = Target(PREDICT, path, wire.PARTS | wire.LEGACY)
        reply = await ask(self._front, rpc, target, wire.pack_parts(values))
        if isinstance(reply.body, Stream) or reply.status < 400:
            return reply
        if (refusal := _read_refusal(reply.body)) is not None:
            raise refusal
        return reply

    async def _predict(self, rpc: Rpc, data: bytes) -> bytes:
        try:
            reply = await self._ask(rpc, data)
            body = reply.body
            return _prediction(await self._gather(body) if isinstance(body, Stream) else body)
        except ServeError as error:
            raise _failure_of(error) from error

    async def _stream(self, rpc: Rpc) -> None:
        """Send each chunk as it comes."""
        try:
            reply = await self._ask(rpc, await rpc.read() or b"")
            if not isinstance(reply.body, Stream):
                await rpc.send(_prediction(reply.body))
                return
            try:
                async for chunk in reply.body.read():
                    await rpc.send(_prediction(chunk))
            finally:
                reply.body.close()
        except ServeError as error:
            raise _failure_of(error) from error

    async def _gather(self, stream: Stream) -> bytes:
        """Return all chunks as one answer, once the last has come."""
        chunks, size = list[Payload](), 0
        try:
            async for chunk in stream.read():
                chunks.append(chunk)
                size += len(chunk)
                self._budget.add(len(chunk))
                if size > self._most_bytes:
                    raise Failure(
                        StatusCode.RESOURCE_EXHAUSTED,
                        f"the answer is a stream of more than {self._most_bytes} bytes "
                        "(max_response_size); StreamPredictions takes it in parts",
                    )
            return b"".join(chunks)
        finally:
            stream.close()
            self._budget.give_back(size)


async def _refuse_sequences(rpc: Rpc) -> None:
    """Answer as TorchServe does for a model that does not batch sequences."""
    raise Failure(
        StatusCode.UNKNOWN,
        "sequence batching is not supported here; StreamPredictions streams answers",
    )


def _read(data: bytes) -> tuple[Any, dict[str, list[Buffer]]]:
    """Return a request without its values, and those by name, not copied.

    Raises:
        Failure: it is not one.
    """
    values: dict[str, list[Buffer]] = {}
    try:
        rest, entries = cut_out(data, (INPUT,))
        for _, entry in entries:
            key, cut = cut_out(entry, (VALUE,))
            name = parse(f"{REQUEST}.InputEntry", key).key
            values[name] = [cut[-1][1]] if cut else []
    except ValueError as error:
        raise not_a(REQUEST, error) from error
    return parse(REQUEST, rest), values


def _prediction(body: Payload) -> bytes:
    """Return a PredictionResponse of one answer."""
    return b"".join((begin_bytes(PREDICTION, len(body)), body))


def _read_refusal(body: Payload | str) -> Failure | None:
    """Return the status of an error that a worker writes; None for what a handler answers."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(said, dict) or said.keys() != REFUSAL:
        return None
    code, text = said["code"], str(said["message"])
    # By HTTP an answer of 413 is one of 507, as is memory that ran out.
    is_too_large = code == 507 and text != OUT_OF_RESOURCES
    return Failure(code_of(413 if is_too_large else code), with_class(text, INTERNAL))


def _failure_of(error: ServeError) -> Failure:
    """Return an error of ours with TorchServe's status and text."""
    if isinstance(error, StreamBroken) and (refusal := _read_refusal(str(error))) is not None:
        return refusal
    text, (status, kind) = text_of(error), http_status(error)
    if isinstance(error, ModelNotFound):
        return Failure(StatusCode.INTERNAL, with_class(text, kind))
    if isinstance(error, Refused):
        return Failure(StatusCode.INTERNAL, f"{text}\n{INTERNAL}.()")
    return Failure(code_of(status), with_class(text, INTERNAL))


def open_inference(methods: dict[str, Method], service: str) -> dict[str, Any]:
    """Return the methods of the Open Inference Protocol by TorchServe's name of it, too."""
    also = f"{PACKAGE.rpartition('.')[0]}.openinference.{service.rpartition('.')[2]}"
    return methods | {f"/{also}/{name}": methods[f"/{service}/{name}"] for name in OPEN_INFERENCE}
