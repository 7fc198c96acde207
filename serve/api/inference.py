"""The inference API: predictions and explanations.

A request for an answer costs no FastAPI machinery: `Inference.__call__` takes it before routing
(1.5 µs instead of 80). The same paths are declared as routes, which document them and give the same
answers.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from serve import wire
from serve.api.asgi import (
    Answer,
    Api,
    Check,
    Front,
    Headers,
    Phase,
    Receive,
    Scope,
    Send,
    request_id,
    send_stream,
)
from serve.auth import TokenCheck
from serve.batcher import EXPLAIN, PREDICT, Job, Stream
from serve.body import ClientLeft, linger, read_body
from serve.connection import SPELLING
from serve.errors import BodyTooLarge, ModelNotFound, ServeError, Unavailable, http_status
from serve.metrics import Metrics
from serve.registry import ModelVersion, Registry

KINDS = {"predictions": PREDICT, "explanations": EXPLAIN}
METHODS = frozenset({"POST", "PUT"})
"""`curl -T` sends PUT."""


class StreamedResponse(Response):
    """A streamed answer, where FastAPI wants a response."""

    def __init__(self, status: int, headers: Headers, stream: Stream, id: str) -> None:
        super().__init__(status_code=status)
        self._answer = status, headers, stream, id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks."""
        await send_stream(send, *self._answer)


class Answering(Front):
    """Runs requests: the one implementation behind the routes of every dialect."""

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        check: Check,
        phase: Phase,
        max_request_bytes: int,
    ) -> None:
        Front.__init__(self, check, phase)
        self._models = registry
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes

    async def run_job(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        id: str,
        kind: int,
        path: list[str],
        flags: int = 0,
    ) -> None:
        """Check the token, run one request and send its answer; `path` as `answer` takes it."""
        try:
            self.check(scope["path"], scope["headers"])
            answer = await self.answer(scope, receive, kind, path, id, flags)
        except ClientLeft:
            return
        except BodyTooLarge as error:
            self._metrics.unrouted.labels("413").inc()
            await refuse_body(self, receive, send, id, error)
            return
        except ServeError as error:
            answer = self.form_error(error, id)
            self._metrics.unrouted.labels(str(answer[0])).inc()
        await self.send_answer(scope, send, id, *answer)

    def refuse(self, error: Exception) -> Answer:
        """Return the last answer on a connection, to what could not be read as a request."""
        answer = super().refuse(error)
        self._metrics.unrouted.labels(str(answer[0])).inc()
        return answer

    def word(self, error: Exception, path: list[str]) -> Exception:
        """Return what is said of an error of the model and version that `path` begins with."""
        return error

    def _find(self, name: str, version: str | None) -> ModelVersion:
        try:
            return self._models.get(name, version)
        except ModelNotFound as error:
            if self.phase.is_starting:
                raise Unavailable(f"the server is starting; {error} yet") from error
            raise

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        kind: int,
        path: list[str],
        id: str,
        flags: int = 0,
        parts: list[bytes] | None = None,
    ) -> tuple[int, Headers, bytes | Stream]:
        """Queue one request and return its answer, or what of it has come when it is streamed.

        Args:
            path: model, version (optional), rest (optional).
            flags: of `wire`, for the worker.
            parts: the body, where it has been read already.

        Raises:
            ModelNotFound, VersionNotFound, BodyTooLarge, ClientLeft.
        """
        model = self._find(path[0], path[1] if len(path) > 1 and path[1] else None)
        if parts is None:
            parts = await read_body(scope, receive, self._max_request_bytes)
        if kind == EXPLAIN:
            await model.start_explainers()
        began = monotonic()
        metrics = model.metrics.kinds[kind]
        torchserve = self._metrics.torchserve
        version = path[1] if len(path) > 1 else None
        if torchserve is not None:
            torchserve.accepted(model.name, version)
        job = Job(
            kind,
            pack_head(scope, "/".join(path[2:]), id),
            parts,
            receive,
            began,
            model.config.request_timeout_s,
            asyncio.get_running_loop().create_future(),
            flags,
        )
        try:
            reply = await model.batchers[kind].submit(job)
        except asyncio.CancelledError:
            if not job.future.cancelled():
                raise  # the server cancels this request, not the batcher
            raise ClientLeft from None
        except Exception as error:
            metrics.answered(http_status(error)[0], monotonic() - began)
            return self.form_error(self.word(error, path), id)
        took_s = monotonic() - began
        metrics.answered(reply.status, took_s)
        if torchserve is not None:
            torchserve.inferred(model.name, version, job.taken_at - began, took_s)
        fields = wire.unpack_meta(reply.headers)
        return reply.status, list(zip(fields[::2], fields[1::2], strict=True)), reply.body


class Inference(Answering, Api):
    """Routes for clients, with the hot path in front of them."""

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        check: TokenCheck,
        phase: Phase,
        max_request_bytes: int,
    ) -> None:
        Api.__init__(self, "Modelyard", DESCRIPTION, check, phase)
        Answering.__init__(self, registry, metrics, check, phase, max_request_bytes)
        self.include_router(_routes(self))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer predictions and explanations here, everything else by routing."""
        if scope["type"] == "http" and scope["method"] in METHODS:
            _, first, *rest = scope["path"].split("/")
            if first in KINDS and rest and rest[0]:
                id = request_id(scope["headers"])
                await self.run_job(scope, receive, send, id, KINDS[first], rest)
                return
            if first == "v2" and rest[:1] == ["models"] and (path := _infer_path(rest[1:])):
                id = request_id(scope["headers"])
                await self.run_job(scope, receive, send, id, PREDICT, path, wire.KSERVE)
                return
        await Api.__call__(self, scope, receive, send)


def _infer_path(path: list[str]) -> list[str] | None:
    """Return model and version of a path of the Open Inference Protocol that infers."""
    match path:
        case [model, "infer"] if model:
            return [model]
        case [model, "versions", version, "infer"] if model and version:
            return [model, version]
    return None


def pack_head(scope: Scope, rest: str, id: str) -> bytes:
    """Pack what a worker needs of the request's head; `worker.request` reads it."""
    # The path is decoded already and may hold a NUL, which separates the fields.
    fields = [rest.replace("\0", "%00").encode(), scope["query_string"], id.encode()]
    extensions = scope.get("extensions")
    if extensions and (spelling := extensions.get(SPELLING)):
        for name, (_, value) in zip(spelling, scope["headers"], strict=False):
            fields += (name, value)
    else:
        for pair in scope["headers"]:
            fields += pair
    return wire.pack_meta(fields)


async def refuse_body(api: Front, receive: Receive, send: Send, id: str, error: Exception) -> None:
    """Answer 413, then read on for a moment, so that a client still sending can read the answer."""
    status, headers, body = api.form_error(error, id)
    headers = [pair for pair in headers if pair[0] != b"connection"]
    headers += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    headers += [pair for pair in api.headers(id, status) if pair[0] != b"connection"]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await linger(receive)
    await send({"type": "http.response.body", "body": b""})


DESCRIPTION = """\
Predictions and explanations of the models that this server holds.

`curl http://127.0.0.1:8080/predictions/digits -T 0.png`

The management and metrics routes live on ports of their own, named in each route's *servers*.
"""

ModelName = Annotated[str, Path(description="Registered name.", examples=["digits"])]
Version = Annotated[str, Path(description="Registered version.", examples=["1.0"])]
BODY: dict[str, Any] = {
    "requestBody": {
        "description": "What the model's handler takes: an image, JSON, text, or a form.",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {}},
        },
    }
}
EXPLAIN_PARAMETERS = {
    "method": "integrated_gradients (default), layer_integrated_gradients, saliency, "
    "input_x_gradient, smoothgrad, gradient_shap, occlusion, feature_ablation or kernel_shap.",
    "target": "Class index, label, `predicted`, `top-3`, or a place such as `3,7`.",
    "output": "`logit` (default) or `probability`.",
    "baseline": "zero, black, white, mean, blur, noise, pad, or `file:NAME` of the archive.",
    "n_steps": "Points between baseline and input.",
    "tolerance": "Largest |delta| / |f(input) - f(baseline)|; steps are raised until it is met.",
    "max_steps": "Where raising ends.",
    "n_samples": "Random points.",
    "noise": "Standard deviation, as a share of the input's range.",
    "window": "Side of what is replaced at once.",
    "stride": "By which windows move.",
    "layer": "Where layer_integrated_gradients looks.",
    "seed": "Of everything random.",
    "internal_batch_size": "Points that share a pass.",
    "aggregate": "`none`, or `sum` over an image's channels or a token's embedding.",
    "format": "json, png or html; the Accept header asks for them too.",
    "quality": "`true` measures infidelity and sensitivity.",
}
EXPLAIN_BODY: dict[str, Any] = {
    **BODY,
    "parameters": [
        {"name": name, "in": "query", "schema": {"type": "string"}, "description": text}
        for name, text in EXPLAIN_PARAMETERS.items()
    ],
}
ERROR_SCHEMA = {
    "type": "object",
    "required": ["code", "type", "message", "request_id"],
    "properties": {
        "code": {"type": "integer"},
        "type": {"type": "string"},
        "message": {"type": "string"},
        "request_id": {"type": "string"},
    },
}


def error_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    """Describe error answers for the documentation."""
    texts = {
        400: "The input or a parameter is wrong; the message names it.",
        401: "The token is missing or wrong.",
        403: "Refused.",
        404: "No such model or version.",
        409: "The version is registered already.",
        413: "The body is over the limit.",
        500: "The handler failed, or the worker died.",
        503: "The queue is full or no worker is there; see Retry-After.",
        504: "Not answered in time.",
    }
    return {
        code: {
            "description": texts[code],
            "content": {"application/json": {"schema": ERROR_SCHEMA}},
        }
        for code in codes
    }


def _routes(api: Inference) -> APIRouter:
    """Declare the hot paths."""
    router = APIRouter(tags=["inference"], responses=error_responses(400, 404, 413, 500, 503, 504))

    async def respond(request: Request, kind: int, path: list[str], flags: int = 0) -> Response:
        id = request.state.request_id
        status, headers, body = await api.answer(
            request.scope, request.receive, kind, path, id, flags
        )
        if not isinstance(body, bytes):
            return StreamedResponse(status, headers, body, id)
        response = Response(body, status)
        response.raw_headers = [*headers, (b"content-length", str(len(body)).encode())]
        return response

    @router.post("/predictions/{model}", openapi_extra=BODY, summary="Predict")
    async def predict(request: Request, model: ModelName) -> Response:
        """Run the default version of a model on one input."""
        return await respond(request, PREDICT, [model])

    @router.post("/predictions/{model}/{version}", openapi_extra=BODY, summary="Predict, version")
    async def predict_version(request: Request, model: ModelName, version: Version) -> Response:
        """Run one version of a model on one input."""
        return await respond(request, PREDICT, [model, version])

    @router.post("/explanations/{model}", openapi_extra=EXPLAIN_BODY, summary="Explain")
    async def explain(request: Request, model: ModelName) -> Response:
        """Attribute the default version's answer to each input value, with the error of the sum.

        The handler reads the parameters; a JSON body `{"data": input, "explain": {…}}` and a part
        `explain` of a form take them too.
        """
        return await respond(request, EXPLAIN, [model])

    @router.post(
        "/explanations/{model}/{version}", openapi_extra=EXPLAIN_BODY, summary="Explain, version"
    )
    async def explain_version(request: Request, model: ModelName, version: Version) -> Response:
        """Attribute one version's answer to each input value."""
        return await respond(request, EXPLAIN, [model, version])

    @router.post("/v2/models/{model}/infer", openapi_extra=BODY, summary="Infer")
    async def infer(request: Request, model: ModelName) -> Response:
        """Run the default version, by the path of the Open Inference Protocol.

        The handler gets the body as it is, and answers in its own form.
        """
        return await respond(request, PREDICT, [model], wire.KSERVE)

    @router.post(
        "/v2/models/{model}/versions/{version}/infer", openapi_extra=BODY, summary="Infer, version"
    )
    async def infer_version(request: Request, model: ModelName, version: Version) -> Response:
        """Run one version, by the path of the Open Inference Protocol."""
        return await respond(request, PREDICT, [model, version], wire.KSERVE)

    return router
