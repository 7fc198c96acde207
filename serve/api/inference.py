"""The inference API: predictions and explanations.

A request for an answer costs no FastAPI machinery: `Inference.__call__` takes it before routing
(1.5 µs instead of 80). The same paths are declared as routes, which document them and give the same
answers.
"""

from __future__ import annotations

import asyncio
import math
import re
from functools import lru_cache, partial
from time import monotonic
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from modelyard.archiver.explain_options import EXPLAIN_OPTIONS
from modelyard.serve.api.asgi import Api, Check, Front, Phase, Receive, Scope, Send, send_stream
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import (
    EXPLAIN,
    PREDICT,
    Call,
    HasLeft,
    Reply,
    ReplySink,
    Stream,
)
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.errors import (
    BadRequest,
    BodyTooLarge,
    ModelNotFound,
    ServeError,
    Unavailable,
    http_status,
)
from modelyard.serve.http.answers import Answer, Headers, request_id
from modelyard.serve.http.auth import TokenCheck
from modelyard.serve.http.body import ClientLeft, linger, read_body
from modelyard.serve.http.connection import SPELLING, WholeRequest

KINDS = {"predictions": PREDICT, "explanations": EXPLAIN}
METHODS = frozenset({"POST", "PUT"})
"""`curl -T` sends PUT."""
TIME_HEADER = b"x-request-timeout"
_TIME = re.compile(rb"(\d*\.?\d+)(ms|s)?")
LONGEST_TIME_S = 86_400.0


class StreamedResponse(Response):
    """A streamed answer, where FastAPI wants a response."""

    def __init__(self, status: int, headers: Headers, stream: Stream, id: str) -> None:
        super().__init__(status_code=status)
        self._answer = status, headers, stream, id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks."""
        await send_stream(send, *self._answer)


class Target(NamedTuple):
    """What a request asks a model for."""

    kind: int
    path: list[str]
    """Model, version (optional), rest (optional)."""
    flags: int = 0
    """Of `wire`, for the worker."""

    @property
    def version(self) -> str | None:
        """The version, None for the default one."""
        return self.path[1] if len(self.path) > 1 and self.path[1] else None


def client_left(receive: Receive) -> bool:
    """Return whether the client has hung up, in one synchronous step of ASGI's `receive`.

    The whole body must have been read: then the only message left is the disconnect. Costs 2 µs,
    a twentieth of `Request.is_disconnected`, and leaves no task behind.
    """
    step: Any = receive()
    try:
        step.send(None)
    except StopIteration as stop:
        return bool(stop.value["type"] == "http.disconnect")
    step.close()
    return False


class Answering(Front):
    """Runs requests: the one implementation behind the routes of every dialect.

    A prediction whose body is there when its head has been read is answered by `take`, without a
    task: that halves what it costs the server. All others go the way of ASGI.
    """

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
        self.observer = metrics.observer
        self._max_request_bytes = max_request_bytes

    def target(self, scope: Scope) -> Target | None:
        """Return what a request asks a model for; None for all other requests."""
        raise NotImplementedError

    def request_id(self, scope: Scope) -> str:
        """Return the client's own request id where it has the right form, else a new one."""
        return request_id(scope["headers"])

    def take(self, exchange: WholeRequest) -> bool:
        """Answer a prediction whose body is there; return False for everything else."""
        scope = exchange.scope
        target = self.target(scope)
        if target is None or target.kind != PREDICT:
            return False
        if exchange.received > self._max_request_bytes:
            return False
        id = self.request_id(scope)
        try:
            self.check(scope["path"], scope["headers"])
            asked = Asked(self, self._find(target), scope, target, id)
        except ServeError as error:
            self.send_to(exchange, id, *self._answer_unrouted(error, id))
            return True
        promise = AtOnce(asked, exchange)
        try:
            asked.submit(exchange.take_body(), exchange.is_left, promise)
        except Exception as error:
            promise.set_exception(error)
        return True

    def send_to(
        self, exchange: WholeRequest, id: str, status: int, headers: Headers, body: bytes | Stream
    ) -> None:
        """Send an answer in one piece, or by a task where that cannot be done."""
        if not self.send_at_once(exchange.send_at_once, id, status, headers, body):
            exchange.run(self.send_answer(exchange.scope, exchange.send, id, status, headers, body))

    async def run_job(
        self, scope: Scope, receive: Receive, send: Send, id: str, target: Target
    ) -> None:
        """Check the token, run one request and send its answer."""
        try:
            self.check(scope["path"], scope["headers"])
            answer = await self.answer(scope, receive, target, id)
        except ClientLeft:
            return
        except BodyTooLarge as error:
            self._metrics.unrouted.labels("413").inc()
            await refuse_body(self, receive, send, id, error)
            return
        except ServeError as error:
            answer = self._answer_unrouted(error, id)
        await self.send_answer(scope, send, id, *answer)

    def _answer_unrouted(self, error: ServeError, id: str) -> Answer:
        answer = self.form_error(error, id)
        self._metrics.unrouted.labels(str(answer[0])).inc()
        return answer

    def word(self, error: Exception, path: list[str]) -> Exception:
        """Return what is said of an error of the model and version that `path` begins with."""
        return error

    def _find(self, target: Target) -> ModelVersion:
        try:
            return self._models.get(target.path[0], target.version)
        except ModelNotFound as error:
            if self.phase.is_starting:
                raise Unavailable(f"the server is starting; {error} yet") from error
            raise

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        target: Target,
        id: str,
        parts: list[bytes] | None = None,
    ) -> tuple[int, Headers, bytes | Stream]:
        """Queue one request and return its answer, or what of it has come when it is streamed.

        Args:
            parts: the body, where it has been read already.

        Raises:
            ModelNotFound, VersionNotFound, BodyTooLarge, ClientLeft.
        """
        model = self._find(target)
        if parts is None:
            parts = await read_body(scope, receive, self._max_request_bytes)
        if target.kind == EXPLAIN:
            await model.start_explainers()
        asked = Asked(self, model, scope, target, id)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        try:
            asked.submit(parts, partial(client_left, receive), future)
            reply = await future
        except asyncio.CancelledError:
            if not future.cancelled():
                raise  # the server cancels this request, not the batcher
            raise ClientLeft from None
        except Exception as error:
            return asked.failed(error)
        return asked.answered(reply)


class Asked:
    """One request for a model's answer, from the body read to the answer ready."""

    __slots__ = ("_began", "_call", "_metrics", "_model", "_scope", "_target", "api", "id")

    def __init__(
        self, api: Answering, model: ModelVersion, scope: Scope, target: Target, id: str
    ) -> None:
        self.api = api
        self.id = id
        self._model = model
        self._scope = scope
        self._target = target
        self._metrics = model.metrics.kinds[target.kind]
        self._began = monotonic()

    def submit(self, parts: list[bytes], has_left: HasLeft, promise: ReplySink) -> None:
        """Queue it.

        Raises:
            ServeError: it is refused.
        """
        scope, (kind, path, flags), model = self._scope, self._target, self._model
        asked_s = read_timeout(scope["headers"])
        if (observer := self.api.observer) is not None:
            observer.accepted(model.name, self._target.version)
        self._call = Call(
            model,
            kind,
            pack_head(scope, "/".join(path[2:]), self.id),
            promise,
            asked_s,
            has_left,
            flags,
            model.config.refuses_late or asked_s < math.inf,
        )
        self._call.submit(parts)

    def answered(self, reply: Reply) -> tuple[int, Headers, bytes | Stream]:
        """Count an answer and return its status, headers and body."""
        took_s = monotonic() - self._began
        self._metrics.answered(reply.status, took_s)
        if (observer := self.api.observer) is not None:
            waited_s = self._call.taken_at - self._began
            observer.inferred(self._model.name, self._target.version, waited_s, took_s)
        return reply.status, unpack_headers(reply.headers), reply.body

    def failed(self, error: Exception) -> Answer:
        """Count an error and return its status, headers and body."""
        self._metrics.answered(http_status(error)[0], monotonic() - self._began)
        return self.api.form_error(self.api.word(error, self._target.path), self.id)


class AtOnce:
    """A promise whose answer goes to the client as soon as it is given."""

    __slots__ = ("_asked", "_exchange")

    def __init__(self, asked: Asked, exchange: WholeRequest) -> None:
        # Given up with the answer: request, job and promise hold each other, and left to the
        # collector those of every request would be, which stops this process for it.
        self._asked: Asked | None = asked
        self._exchange = exchange

    def done(self) -> bool:
        """Return whether it has its answer, or nobody waits for it any more."""
        return self._asked is None

    def cancel(self) -> bool:
        """Note that nobody waits for it any more."""
        self._asked = None
        return True

    def set_result(self, reply: Reply, /) -> None:
        """Send an answer."""
        asked = self._take()
        asked.api.send_to(self._exchange, asked.id, *asked.answered(reply))

    def set_exception(self, error: Exception, /) -> None:
        """Send an error."""
        asked = self._take()
        asked.api.send_to(self._exchange, asked.id, *asked.failed(error))

    def _take(self) -> Asked:
        asked, self._asked = self._asked, None
        assert asked is not None, "it has its answer"
        return asked


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
        target = self.target(scope) if scope["type"] == "http" else None
        if target is None:
            await Api.__call__(self, scope, receive, send)
        else:
            await self.run_job(scope, receive, send, self.request_id(scope), target)

    def target(self, scope: Scope) -> Target | None:
        """Return what a request asks a model for; None for all other requests."""
        if scope["method"] not in METHODS:
            return None
        _, first, *rest = scope["path"].split("/")
        if first in KINDS and rest and rest[0]:
            return Target(KINDS[first], rest)
        if first == "v2" and rest[:1] == ["models"] and (path := _infer_path(rest[1:])):
            return Target(PREDICT, path, wire.KSERVE)
        return None


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


def read_timeout(headers: Headers) -> float:
    """Return how long the client waits for an answer, in seconds; infinite where it does not say.

    Raises:
        BadRequest: what it says is not a time.
    """
    timeout_s = math.inf
    for name, value in headers:
        if name == TIME_HEADER:
            timeout_s = min(timeout_s, parse_timeout(value))
    return timeout_s


def parse_timeout(value: bytes) -> float:
    """Return the seconds that a value of X-Request-Timeout says: `0.5`, `2s` or `150ms`.

    Raises:
        BadRequest: it is not a time, or none from above 0 to a day.
    """
    match = _TIME.fullmatch(value)
    seconds = float(match[1]) * (0.001 if match[2] == b"ms" else 1) if match else 0.0
    if not 0 < seconds <= LONGEST_TIME_S:
        seen = value[:40].decode("ascii", "backslashreplace")
        raise BadRequest(
            f'X-Request-Timeout is "{seen}"; expected are seconds such as 0.5 or 2s, or '
            f"milliseconds such as 150ms, above 0 and at most {LONGEST_TIME_S:.0f} s"
        )
    return seconds


@lru_cache(maxsize=64)
def unpack_headers(packed: bytes) -> Headers:
    """Return the headers of a worker's answer; most answers of a model have the same. Read only."""
    fields = wire.unpack_meta(packed)
    return list(zip(fields[::2], fields[1::2], strict=True))


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

`curl ADDRESS/predictions/digits -T 0.png`, where ADDRESS is this page's without `/docs`.

The management and metrics routes live on ports of their own, named in each route's *servers*.
"""

ModelName = Annotated[str, Path(description="Registered name.", examples=["digits"])]
Version = Annotated[str, Path(description="Registered version.", examples=["1.0"])]
TIMEOUT_PARAMETER = {
    "name": "X-Request-Timeout",
    "in": "header",
    "schema": {"type": "string"},
    "examples": {"seconds": {"value": "0.5"}, "milliseconds": {"value": "150ms"}},
    "description": "How long the client waits, if less than the model allows. A request whose "
    "answer is not to be expected in this time is refused at once.",
}
BODY: dict[str, Any] = {
    "parameters": [TIMEOUT_PARAMETER],
    "requestBody": {
        "description": "What the model's handler takes: an image, JSON, text, or a form.",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {}},
        },
    },
}
EXPLAIN_BODY: dict[str, Any] = {
    **BODY,
    "parameters": [
        TIMEOUT_PARAMETER,
        *(
            {"name": name, "in": "query", "schema": {"type": "string"}, "description": each.text}
            for name, each in EXPLAIN_OPTIONS.items()
        ),
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
        503: "The queue is full, the time too short or no worker there; see Retry-After.",
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
            request.scope, request.receive, Target(kind, path, flags), id
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
