"""The routes: one request's texts become calls of the model's queue, and its answer is theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import orjson
from fastapi import APIRouter, Response

from modelyard.plugins.embeddings.protocols import PATHS, Asked, Protocol, Refused, read_body
from modelyard.serve import errors
from modelyard.serve.api.description import ModelName, error_responses
from modelyard.serve.api.inference import JSON
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.dataplane import wire
from modelyard.serve.dataplane.call import PREDICT, Call, Reply, Target
from modelyard.serve.dataplane.tracing import Attributes
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.front.begin import CallReply, Headers, find_model, pack_fields
from modelyard.serve.front.face import Face, Inside
from modelyard.serve.front.models import readiness, why_not_ready
from modelyard.serve.http.application import Answers, Check, Route
from modelyard.serve.http.connection import RequestResponseCycle

WINDOW = 4
"""Batches of a request's texts that wait at once."""
MODEL_PATH = "/tei/"
HANDLERS = {protocol.handler for protocol in PATHS.values()}
"""Handlers whose models these clients ask."""


def find_protocol(path: str) -> tuple[Protocol, str | None] | None:
    """Return what a path is for, and the model that it names."""
    if (protocol := PATHS.get(path)) is not None:
        return protocol, None
    if not path.startswith(MODEL_PATH):
        return None
    model, _, name = path.removeprefix(MODEL_PATH).partition("/")
    found = PATHS.get(f"/{name or 'embed'}")
    return (found, model) if found is not None and model else None


class Embeddings(Face):
    """What clients of OpenAI, text-embeddings-inference, Cohere and Jina find on the server."""

    def __init__(self, inside: Inside) -> None:
        self._front, self._answers = inside.front, inside.answers
        self._check = inside.checks["inference"](lambda _: "predict")

    def guard(self, api: str, check: Check) -> Check:
        """Return the check of tokens: these paths are for those who may predict."""

        def guarded(path: str, headers: Headers) -> None:
            (self._check if find_protocol(path) else check)(path, headers)

        return guarded if api == "inference" else check

    def route(self, api: str, route: Route) -> Route:
        """Return what answers these paths; everything else goes on."""

        def answer(cycle: RequestResponseCycle, id: str) -> None:
            found = find_protocol(cycle.path)
            if found is None or cycle.method != found[0].method:
                route(cycle, id)
            else:
                cycle.read_body(lambda parts: self._wait(cycle, *found, parts))

        return answer if api == "inference" else route

    def _wait(self, cycle: RequestResponseCycle, *asked: Any) -> None:
        """Begin in a turn of its own, for a body takes milliseconds to read."""

        async def begin() -> None:
            async with cycle.connection.turns.one:
                await asyncio.sleep(0)
            if not cycle.has_left:
                self._begin(cycle, *asked)

        cycle.task = cycle.connection.loop.create_task(begin())

    def _begin(
        self, cycle: RequestResponseCycle, protocol: Protocol, model: str | None,
        parts: Sequence[Buffer],
    ) -> None:  # fmt: skip
        try:
            asked = protocol.read(read_body(b"".join(parts)))
            name = model or asked.model or self._only(protocol)
            path = name.split("/", 1)
            reply = TextsReply(self._front, cycle, Target(PREDICT, path, wire.TEXTS))
            reply.answers, reply.protocol, reply.wanted = self._answers, protocol, asked
            waited_s, expect = cycle.connection.waited_s, cycle.connection.turns.expect
            call = self._front.begin(
                reply, waited_s=waited_s, began_at=cycle.began, expect=expect
            )  # fmt: skip
        except Exception as error:
            refuse(self._answers, cycle, protocol, error)
            self._front.count_unrouted(cycle.status)
        else:
            if call is not None:
                reply.submit(call)

    def _only(self, protocol: Protocol) -> str:
        """Return the model that a request means which names none.

        Raises:
            BadRequest: there are several, or none.
        """
        served = {model.name: model for model in self._front.registry}
        fit = [name for name, model in served.items() if _handler(model) == protocol.handler]
        names = fit or list(served)
        if len(names) != 1:
            shown = ", ".join(sorted(names)[:10]) or "none"
            raise errors.BadRequest(
                f"the request names no model, and the server has {shown}; send it to "
                f"{MODEL_PATH}MODEL/…, or name it in the body where the protocol has that"
            )
        return names[0]

    @property
    def routes(self) -> Mapping[str, Sequence[APIRouter]]:
        """What describes the paths, and answers about models."""
        front = self._front
        registry, state = front.registry, front.state
        router = APIRouter(tags=["embeddings"], responses=error_responses(400, 404, 413, 503))

        async def described() -> None:
            """Answered before it comes here."""

        for path, protocol in PATHS.items():
            router.add_api_route(
                path, described, methods=[protocol.method], name=path, summary=protocol.summary
            )

        def model_card(model: ModelVersion) -> dict[str, Any]:
            if _handler(model) not in HANDLERS:
                return {}
            created = int(model.started_at.timestamp())
            return {
                "id": model.name, "object": "model", "created": created, "owned_by": "modelyard"
            }  # fmt: skip

        # Core describes these two, which KServe has; a model of texts has OpenAI's keys as well.
        @router.get("/v1/models", include_in_schema=False)
        async def models() -> dict[str, Any]:
            """The names of all models."""
            found = {model.name: model for model in registry if registry.is_default(model)}
            data = [card for model in found.values() if (card := model_card(model))]
            return {"models": list(found), **({"object": "list", "data": data} if data else {})}

        @router.get("/v1/models/{model}", include_in_schema=False)
        async def model(model: ModelName, response: Response) -> dict[str, Any]:
            """Return whether a worker of the default version is ready."""
            if ":" in model:  # no model has such a name
                raise errors.MethodNotAllowed(f"GET is not taken by {model}; expected POST")
            found = find_model(registry, state, model)
            ready, response.status_code, headers = readiness(found, state)
            response.headers.update(headers or {})
            is_ready = response.status_code == 200
            about = {} if is_ready else {"error": f"Model {model} is not ready"}
            return {**model_card(found), **ready, **about}

        @router.get("/health", summary="Ready, as text-embeddings-inference says it")
        async def health() -> Response:
            """Predictions can be answered now."""
            if why_not_ready(registry, state) is None:
                return Response()
            body = orjson.dumps({"error": "unhealthy", "error_type": "Unhealthy"})
            return Response(body, 503, media_type="application/json")

        return {"inference": [router]}


class TextsReply(CallReply):
    """Gathers the replies to the texts of a request, and sends its answer: one version's.

    Only so many texts are in the queue at once, for others are to have their turn meanwhile; those
    of like length come one after the other.
    """

    __slots__ = ("_first", "_left", "_next", "_replies", "answers", "protocol", "wanted")
    asked: RequestResponseCycle
    answers: Answers
    protocol: Protocol
    wanted: Asked

    def submit(self, first: Call) -> None:
        """Queue the first texts, or none."""
        bodies = [orjson.dumps(text) for text in self.wanted.texts]
        order = sorted(range(len(bodies)), key=lambda at: len(bodies[at]), reverse=True)
        self._replies, self._left, self._first = [b""] * len(bodies), len(bodies), first
        self._next = iter([(at, bodies[at]) for at in order])
        first.lookup = None
        at, body = next(self._next)
        first.arrived([body], now := monotonic())
        first.sink = _Part(self, at)
        most = min(len(bodies), WINDOW * first.model.config.batch_size)  # type: ignore[attr-defined]
        batcher = first.model.batchers[PREDICT]
        try:
            batcher.check(first.timeout_s, first.must_fit, now, rows=most, priority=first.priority)
        except errors.Unavailable as error:
            self.set_exception(error)
            return
        batcher.put(first)
        for _ in range(most - 1):
            self._put_next()

    def _put_next(self) -> None:
        """Queue the next text, within the time that the request has left."""
        if (item := next(self._next, None)) is not None:
            first, now = self._first, monotonic()
            call = Call(
                first.model, PREDICT, first.head, _Part(self, item[0]), first.deadline - now,
                first.has_left, first.flags, first.must_fit, None, first.priority, first.client,
            )  # fmt: skip
            call.arrived([item[1]], now)
            first.model.batchers[PREDICT].put(call)

    def take(self, at: int, reply: Reply) -> None:
        """Take the reply to a text; the last one, or one that is an error, ends the request."""
        assert isinstance(reply.body, bytes | bytearray)
        self._replies[at] = bytes(reply.body)
        self._left -= 1
        if reply.status >= 400 or not self._left:
            super().set_result(reply)
        else:
            self._put_next()

    def cancel(self) -> bool:
        """Note that nobody waits for it any more."""
        return self.call is None or super().cancel()

    def move(self, call: Call) -> bool:
        """Leave it: all vectors of an answer are one version's."""
        return False

    def head(self) -> bytes:
        """Return what a worker needs of the request's head."""
        return pack_fields(b"", b"", self.asked.id, ())

    def describe(self) -> tuple[str, Attributes]:
        """Return the span's name and attributes."""
        path = self.asked.path
        return f"POST {path}", {"url.path": path, **self.describe_call()}

    def describe_status(self, status: int) -> Attributes:
        """Return what the span says of an answer."""
        return {"http.response.status_code": status}

    def answer(self, reply: Reply) -> None:
        """Send the answer."""
        if reply.status >= 400:
            self.refuse(Refused(_message(reply), reply.status))
            return
        try:
            body = self.wanted.write(self._replies, self.model.name)
        except Exception as error:
            self.refuse(error)
        else:
            self.answers.send(self.asked, 200, JSON, body)

    def refuse(self, error: Exception) -> None:
        """Send an error."""
        refuse(self.answers, self.asked, self.protocol, error)


class _Part:
    """Where the reply to one of the other texts goes."""

    __slots__ = ("_at", "_whole")

    def __init__(self, whole: TextsReply, at: int) -> None:
        self._whole, self._at = whole, at

    def done(self) -> bool:
        return self._whole.done()

    def cancel(self) -> bool:
        return self._whole.cancel()

    def set_result(self, reply: Reply, /) -> None:
        if not self.done():
            self._whole.take(self._at, reply)

    def set_exception(self, error: Exception, /) -> None:
        if not self.done():
            self._whole.set_exception(error)


def refuse(
    answers: Answers, cycle: RequestResponseCycle, protocol: Protocol, error: Exception
) -> None:
    """Send an error in a protocol's form, with the headers that it has in ours."""
    status, headers, body = answers.error(error, cycle.id)
    kind = "Validation"
    if isinstance(error, Refused):
        status, kind = error.status, error.kind
    status, content = protocol.error(status, orjson.loads(body)["message"], kind)
    answers.send(cycle, status, headers, orjson.dumps(content))


def _message(reply: Reply) -> str:
    """Return what a worker's error says."""
    try:
        return str(orjson.loads(bytes(reply.body))["message"])  # type: ignore[arg-type]
    except (ValueError, LookupError, TypeError):
        return f"the worker answered {reply.status}"


def _handler(model: ModelVersion) -> str:
    return str(((model.manifest or {}).get("model") or {}).get("handler", ""))
