"""TorchServe's inference API by gRPC: `Ping`, `Predictions`, `StreamPredictions`.

The values of a request go to the handler as they came, under their names, without headers. Its
answer is what it returned; a status that it set does not count, as in TorchServe.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson

from modelyard.plugins.grpc.fields import begin_bytes, cut_out
from modelyard.plugins.grpc.oip import begin_call, parse
from modelyard.plugins.grpc.protos import message
from modelyard.plugins.grpc.rpc import Message, Method, Rpc, RpcError, Status, status_of
from modelyard.plugins.torchserve.dialect import Refused, text_of
from modelyard.plugins.torchserve.grpc_services import with_class
from modelyard.serve.api.inference import CallReply, Calls
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Reply, Stream, Target
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.errors import (
    ModelNotFound,
    ServeError,
    StreamBroken,
    http_status,
)

logger = logging.getLogger(__name__)

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
        calls: makes calls of requests.
        is_healthy: what `Ping` says.
        most_bytes: of the chunks that make one answer.
    """

    def __init__(self, calls: Calls, is_healthy: Callable[[], bool], most_bytes: int) -> None:
        self._calls = calls
        self._is_healthy = is_healthy
        self._most_bytes = most_bytes

    def methods(self) -> dict[str, Method]:
        """Return the methods by full name."""
        return {
            f"/{SERVICE}/Ping": self._ping,
            f"/{SERVICE}/Predictions": lambda rpc: rpc.unary(partial(self._begin, rpc, False)),
            f"/{SERVICE}/StreamPredictions": lambda rpc: rpc.unary(partial(self._begin, rpc, True)),
            f"/{SERVICE}/StreamPredictions2": _refuse_sequences,
        }

    def _ping(self, rpc: Rpc) -> None:
        def reply(data: Message) -> None:
            parse("google.protobuf.Empty", data)
            text = json.dumps(
                {"status": "Healthy" if self._is_healthy() else "Unhealthy"}, indent=2
            )
            rpc.reply(
                message(f"{PACKAGE}.TorchServeHealthResponse")(health=text).SerializeToString()
            )

        rpc.unary(reply)

    def _begin(self, rpc: Rpc, takes_parts: bool, data: Message) -> None:
        request, values = _read(data)
        if not request.model_name:
            text = "Parameter model_name is required.\nBadRequestException.()"
            raise RpcError(Status.INTERNAL, text)
        # LEGACY: none of the headers that HTTP's requests have is made.
        path = [request.model_name, request.model_version]
        target = Target(PREDICT, path, wire.PARTS | wire.LEGACY)
        begin_call(
            self._calls, rpc, target, (), wire.pack_parts(values),
            lambda model: _Prediction(self._calls, model, target, rpc, takes_parts,
                                      self._most_bytes),
            form=_error_of,
        )  # fmt: skip


def _refuse_sequences(rpc: Rpc) -> None:
    """Answer as TorchServe does for a model that does not batch sequences."""
    raise RpcError(
        Status.UNKNOWN, "sequence batching is not supported here; StreamPredictions streams answers"
    )


class _Prediction(CallReply):
    """Sends the reply to a call on.

    Args:
        takes_parts: whether the client takes several messages.
    """

    __slots__ = ("_most_bytes", "_rpc", "_takes_parts")

    def __init__(
        self, calls: Calls, model: ModelVersion, target: Target, rpc: Rpc, takes_parts: bool,
        most_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(calls, model, target)
        self._rpc = rpc
        self._takes_parts = takes_parts
        self._most_bytes = most_bytes

    def answer(self, reply: Reply) -> None:
        """Send a worker's reply."""
        if reply.note is not None:
            self._rpc.outcome = reply.note.outcome
        if isinstance(reply.body, Stream):
            send = self._send_each if self._takes_parts else self._send_all
            self._rpc.run(send(reply.body))
        elif reply.status >= 400 and (refusal := _read_refusal(reply.body)) is not None:
            self._rpc.fail(refusal.status, str(refusal))
        else:
            self._rpc.reply(*_prediction(reply.body))

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        failure = _error_of(error)
        self._rpc.fail(failure.status, str(failure))

    async def _send_each(self, stream: Stream) -> None:
        """Send each chunk as it comes."""
        rpc = self._rpc
        try:
            async for chunk in stream.read():
                rpc.send(*_prediction(chunk))
                await rpc.drain()
            rpc.finish()
        except ServeError as error:
            self._break(error)
        finally:
            stream.close()

    async def _send_all(self, stream: Stream) -> None:
        """Send all chunks as one answer, once the last has come."""
        chunks, size = list[Payload](), 0
        budget = self._rpc.stream.connection.budget
        try:
            async for chunk in stream.read():
                chunks.append(chunk)
                size += len(chunk)
                budget.add(len(chunk))
                if size > self._most_bytes:
                    raise RpcError(
                        Status.RESOURCE_EXHAUSTED,
                        f"the answer is a stream of more than {self._most_bytes} bytes "
                        "(max_response_size); StreamPredictions takes it in parts",
                    )
            self._rpc.reply(*_prediction(b"".join(chunks)))
        except ServeError as error:
            self._break(error)
        finally:
            stream.close()
            budget.give_back(size)

    def _break(self, error: ServeError) -> None:
        """End an answer whose rest will not come."""
        logger.error("request %s: the stream is broken: %s", self._rpc.id, error)
        refusal = _read_refusal(str(error)) if isinstance(error, StreamBroken) else None
        failure = refusal or _error_of(error)
        self._rpc.fail(failure.status, str(failure))


def _read(data: Message) -> tuple[Any, dict[str, Sequence[Buffer]]]:
    """Return a request without its values, and those by name, in pieces, not copied.

    Raises:
        RpcError: it is not one.
    """
    values: dict[str, Sequence[Buffer]] = {}
    try:
        rest, entries = cut_out(data.pieces, (INPUT,))
        for _, entry in entries:
            key, cut = cut_out(entry, (VALUE,))
            name = parse(f"{REQUEST}.InputEntry", key).key
            values[name] = cut[-1][1] if cut else ()
    except ValueError as error:
        raise RpcError(
            Status.INVALID_ARGUMENT, f"the message is not a {REQUEST}: {error}"
        ) from error
    return parse(REQUEST, rest), values


def _prediction(body: Payload) -> tuple[bytes, Payload]:
    """Return a PredictionResponse of one answer, which is not copied."""
    return begin_bytes(PREDICTION, len(body)), body


def _read_refusal(body: Payload | str) -> RpcError | None:
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
    return RpcError(status_of(413 if is_too_large else code), with_class(text, INTERNAL))


def _error_of(error: Exception) -> RpcError:
    """Return an error of ours with TorchServe's status and text."""
    text, (status, kind) = text_of(error), http_status(error)
    if isinstance(error, ModelNotFound):
        return RpcError(Status.INTERNAL, with_class(text, kind))
    if isinstance(error, Refused):
        return RpcError(Status.INTERNAL, f"{text}\n{INTERNAL}.()")
    return RpcError(status_of(status), with_class(text, INTERNAL))


def open_inference(methods: dict[str, Method], service: str) -> dict[str, Any]:
    """Return the methods of the Open Inference Protocol by TorchServe's name of it, too."""
    also = f"{PACKAGE.rpartition('.')[0]}.openinference.{service.rpartition('.')[2]}"
    return methods | {f"/{also}/{name}": methods[f"/{service}/{name}"] for name in OPEN_INFERENCE}
