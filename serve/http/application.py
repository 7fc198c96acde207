"""One API on a port: the way of every request from its head to its answer, in one order.

    accept → request id → CORS → token → a call, or a route → the form of the answer

What differs between dialects is handed in: the token check, the form of answers and errors, which
requests are calls, and what answers the others.
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from modelyard.archiver import ArchiveError
from modelyard.serve import errors
from modelyard.serve.dataplane.call import Stream, Target
from modelyard.serve.dataplane.wire import VERSION_HEADER, Payload
from modelyard.serve.front.begin import REQUEST_ID, Fields, Headers, ServerState, request_id
from modelyard.serve.http.connection import BODILESS, Answer, RequestResponseCycle, write_head
from modelyard.serve.http.heads import Refusal
from modelyard.serve.http.site import Cors
from modelyard.serve.http.tokens import ACTOR, Grants, bearer_tokens, find_grant, why_checked

logger = logging.getLogger(__name__)

COMMON_HEADERS: Headers = [
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
    (b"x-content-type-options", b"nosniff"),
]
"""Headers of every answer, as TorchServe's clients know them; browsers guess no type."""

T = TypeVar("T")
PREPARED = 128
"""Refusals and heads whose bytes are kept, of one API: they differ by model, time and length of the
id."""
LENGTH_MARK, ID_MARK = b"\1", b"\2"
"""Stand for them in a head: no header of a handler may have these bytes."""

Check = Callable[[str, Headers], None]
"""Called with path and headers; raises Unauthorized unless the request may pass."""
Route = Callable[[RequestResponseCycle, str], None]
"""Called with a request and its id: answers now, or from a task. What it raises is answered."""


CHANGES = "/v2/repository/models/"
"""What paths of the inference API begin with that change what is served."""


def changes_models(path: str) -> bool:
    """Return whether a path of the inference API changes what is served."""
    return path.startswith(CHANGES)


def check_changes(
    clients: Callable[..., None],
    operators: Callable[..., None],
    is_change: Callable[[str], bool] = changes_models,
) -> Callable[..., None]:
    """Return a check that asks for the operators' token where something is changed."""

    def check(path: str, headers: list[tuple[bytes, bytes]]) -> None:
        ACTOR.set("anybody")
        (operators if is_change(path) else clients)(path, headers)

    return check


@dataclass(frozen=True)
class TokenCheck:
    """Refuses requests without a token, and those whose token has not the right."""

    grants: Grants | None
    """The tokens; None lets everybody in."""
    right: Callable[[str], str | None]
    """Returns the right that a path needs; None where any token will do."""
    open_paths: Collection[str] = ()
    """Paths that need none."""
    is_open: bool = False
    """Whether requests of this machine that show no token pass."""

    def __call__(self, path: str, headers: Headers) -> None:
        """Raise Unauthorized or Forbidden unless the request may pass."""
        if self.grants is not None and path not in self.open_paths:
            self.check_right(self.right(path), headers)

    def check_right(self, right: str | None, headers: Headers) -> None:
        """Raise Unauthorized or Forbidden unless a token of the headers has a right, or any."""
        why = why_checked(headers) if self.is_open else b""
        if self.grants is None or (self.is_open and not why):
            return
        unfit = None
        for token in bearer_tokens(headers):
            grant = find_grant(self.grants(), token)
            if grant is not None and (right is None or right in grant.rights):
                if right == "manage":
                    ACTOR.set(grant.name)
                return
            unfit = unfit or grant
        if unfit is not None:
            raise errors.Forbidden(
                f"the token {unfit.name!r} may {', '.join(sorted(unfit.rights))}; this needs one "
                f"that may {right}"
            )
        is_shown = why in (b"", b"authorization")
        reason = "" if is_shown else f", for the header {why.decode()} says that a proxy sent this"
        raise errors.Unauthorized(
            "this API needs the header `Authorization: Bearer TOKEN` with a token that it knows"
            f"{reason}; `modelyard serve token` prints that of this start, `modelyard token new` "
            "makes one that stays"
        )


def error_answer(error: Exception, id: str) -> Answer:
    """Return status, headers and JSON body for an error."""
    status, _ = errors.http_status(error)
    body = json.dumps(errors.error_body(error, id)).encode()
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, errors.Unavailable):
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, errors.Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, errors.UnknownCoding):
        headers.append((b"accept-encoding", b"identity"))
    return status, headers, body


@dataclass(eq=False)
class Answers:
    """How the answers of an API are made and sent."""

    state: ServerState
    """Shared with the server."""
    form_error: Callable[[Exception, str], Answer] = error_answer
    """Returns status, headers and body for an error and a request id."""
    id_pattern: re.Pattern[bytes] = REQUEST_ID
    """What of a client's own request ids is taken."""
    more_headers: Sequence[tuple[bytes, bytes]] = ()
    """On every answer, beside the common ones."""
    closes_after_errors: bool = False
    """Whether a connection ends with an error."""
    on_status: Callable[[int], None] | None = None
    """Called with the status of every answer."""
    cors: Cors | None = None
    """Which pages of elsewhere may read the answers; None: none."""
    _kept: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """Heads and refusals that were made before."""

    def request_id(self, headers: Headers) -> str:
        """Return the client's own request id where it has the right form, else a new one."""
        return request_id(headers, self.id_pattern)

    def error(self, error: Exception, id: str) -> Answer:
        """Return status, headers and body for an error; what nobody declared goes to the log."""
        if not isinstance(error, (errors.ServeError, ArchiveError)):
            logger.error("request %s", id, exc_info=error, extra={"request_id": id})
        return self.form_error(error, id)

    def begin(self, cycle: RequestResponseCycle | None, id: str, status: int) -> Headers:
        """Count an answer, and return the headers that every answer of this status has."""
        self.count(status)
        if cycle is not None:
            self._close_after(cycle, status)
        return self._common_of(cycle, id.encode())

    def _common_of(self, cycle: RequestResponseCycle | None, id: bytes) -> Headers:
        common = [(b"x-request-id", id), *COMMON_HEADERS, *self.more_headers]
        if cycle is None:
            return common
        if cycle.served is not None:
            common.append((VERSION_HEADER, cycle.served[1].encode()))
        return common if self.cors is None else [*common, *self.cors.headers(cycle.headers)]

    def _close_after(self, cycle: RequestResponseCycle, status: int) -> None:
        """Have the connection end with this answer, where it is to."""
        if self.state.is_draining or (self.closes_after_errors and status >= 400):
            cycle.keeps_alive = False

    def send(
        self, cycle: RequestResponseCycle, status: int, headers: Fields,
        body: "Payload | Stream | Events",
    ) -> None:  # fmt: skip
        """Send an answer: in one piece, or by a task where that cannot be done.

        Heads around tuples of headers, which are a worker's, are kept but for length and id.
        """
        if isinstance(headers, tuple) and self.cors is None and isinstance(body, Payload):
            self._close_after(cycle, status)
            key = status, headers, cycle.keeps_alive, cycle.served
            template: bytes | None = self._kept.get(key)
            if template is None:
                template = self._keep(key, self._make_template(cycle, status, headers))
            head = template % (len(body), cycle.id.encode()) if template else b""
            if head and cycle.send_ready(status, head, body):
                self.count(status)
                return
        all_headers = self._around(headers, self.begin(cycle, cycle.id, status))
        if isinstance(body, Events | Stream):
            cycle.run(_send_chunks(cycle, status, all_headers, body))
            return
        if body or status not in (204, 304):
            all_headers.insert(len(headers), (b"content-length", b"%d" % len(body)))
        if not cycle.send_whole(status, all_headers, body):
            cycle.connection.budget.add(len(body))
            cycle.run(_send_parts(cycle, status, all_headers, body))

    def _make_template(self, cycle: RequestResponseCycle, status: int, headers: Fields) -> bytes:
        """Return a head that lacks the body's length and the id; empty where it must have none."""
        length = (b"content-length", LENGTH_MARK)
        common = self._around(headers, [length, *self._common_of(cycle, ID_MARK)])
        head = write_head(status, common, cycle.keeps_alive)
        if head is None or status in BODILESS:
            return b""
        head = head.replace(b"%", b"%%")
        return head.replace(LENGTH_MARK, b"%d").replace(ID_MARK, b"%b")

    @staticmethod
    def _around(headers: Fields, common: Headers) -> Headers:
        """Return both; what a handler says, of caching for instance, counts."""
        own = {name for name, _ in headers}
        return [*headers, *(pair for pair in common if pair[0] not in own)]

    def send_refusal(self, cycle: RequestResponseCycle, error: errors.Unavailable) -> None:
        """Send the answer to a call that is not taken: its bytes are kept, but for the id.

        Under an overload most answers are such, and each takes time from one that is not.
        """
        self._close_after(cycle, 503)
        id, served, stays = cycle.id, cycle.served, cycle.keeps_alive
        key = (type(error), str(error), *vars(error).values(), len(id), stays, served)
        # A page of elsewhere reads it.
        if self.cors is not None and self.cors.headers(cycle.headers):
            self.send(cycle, *self.error(error, id))
            return
        prepared: tuple[int, list[bytes]] | None = self._kept.get(key)
        if prepared is None:
            prepared = self._keep(key, self._prepare(cycle, error))
        status, pieces = prepared
        if not cycle.send_ready(status, id.encode().join(pieces), b""):
            self.send(cycle, *self.error(error, id))
        else:
            self.count(status)
            if cycle.again is not None:
                make_id = self.request_id
                refusal = Refusal(cycle.again, make_id, pieces, status, cycle.sent, stays, served)
                cycle.connection.heads.refuse(cycle.head, refusal)

    def count(self, status: int) -> None:
        """Count an answer."""
        if self.on_status is not None:
            self.on_status(status)

    def _keep(self, key: tuple[object, ...], made: T) -> T:
        if len(self._kept) >= PREPARED:
            self._kept.clear()
        self._kept[key] = made
        return made

    def _prepare(self, cycle: RequestResponseCycle, error: Exception) -> tuple[int, list[bytes]]:
        """Return the status of an error's answer, and what stands around the id in its bytes."""
        mark = "~" * len(cycle.id)  # in no id and no model's name, and JSON leaves it as it is
        status, headers, body = self.error(error, mark)
        length = (b"content-length", b"%d" % len(body))
        common = self._common_of(cycle, mark.encode())
        head = write_head(status, [*headers, length, *common], cycle.keeps_alive)
        assert head is not None, "no error of ours has a line break in a header"
        return status, (head + body).split(mark.encode())

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        """Return the last answer on a connection, to what is not a request, or to its body."""
        id = self.request_id(cycle.headers if cycle is not None else [])
        if cycle is not None:
            cycle.id = id
        status, headers, body = self.error(error, id)
        return status, [*headers, *self.begin(cycle, id, status)], body


async def _send_parts(
    cycle: RequestResponseCycle, status: int, headers: Headers, body: Payload
) -> None:
    try:
        await cycle.start(status, headers)
        await cycle.write(body)
    finally:
        cycle.connection.budget.give_back(len(body))


PAUSE_S = 15.0
"""Pause of a stream that sends nothing, after which its reader is told that it still goes on."""


class Events(NamedTuple):
    """A streamed answer, each of whose chunks is written as an event."""

    stream: Stream
    write: Callable[[Payload], bytes]
    """It raises a ValueError for what has no such form."""
    write_error: Callable[[str], bytes]
    pause: bytes


async def _send_chunks(
    cycle: RequestResponseCycle, status: int, headers: Headers, body: Stream | Events
) -> None:
    """Send each chunk as it comes; of events an error is the last one.

    Another stream that breaks is left without its end, which closes the connection: a client must
    not take a part for the whole.
    """
    events = body if isinstance(body, Events) else None
    stream = body if isinstance(body, Stream) else body.stream
    chunks: AsyncGenerator[Payload | None] | AsyncGenerator[Payload]
    chunks = stream.read() if events is None else with_pauses(stream.read(), PAUSE_S)
    try:
        await cycle.start(status, headers)
        try:
            async for chunk in chunks:
                if events is None:
                    text = chunk or b""
                else:
                    text = events.pause if chunk is None else events.write(chunk)
                await cycle.write(text, is_more=True)
        except (errors.ServeError, ValueError) as error:
            logger.error("request %s: the stream is broken: %s", cycle.id, error,
                         extra={"request_id": cycle.id})  # fmt: skip
            if events is None:
                return
            await cycle.write(events.write_error(str(error)), is_more=True)
        await cycle.write(b"")
    finally:
        await chunks.aclose()
        stream.close()


async def with_pauses(
    chunks: AsyncIterator[Payload], pause_s: float
) -> AsyncGenerator[Payload | None]:
    """Yield what comes, and None whenever nothing has come for so long."""
    pending = asyncio.ensure_future(anext(chunks, None))
    try:
        while True:
            await asyncio.wait({pending}, timeout=pause_s)
            if not pending.done():
                yield None
            elif (chunk := pending.result()) is None:
                return
            else:
                yield chunk
                pending = asyncio.ensure_future(anext(chunks, None))
    finally:
        pending.cancel()


class Calls(Protocol):
    """What turns the requests for a model's answer into calls."""

    def target(self, cycle: RequestResponseCycle) -> Target | None:
        """Return what a request asks a model for; None for all other requests."""

    def begin(self, cycle: RequestResponseCycle, target: Target) -> None:
        """Make a call that is submitted when its body is there.

        Raises:
            ServeError: it cannot be made.
        """

    def count_unrouted(self, status: int) -> None:
        """Count the answer to a request that has become no call."""


@dataclass(eq=False)
class Application:
    """One API."""

    check: Check
    """The token check; it comes before everything, so that no route can forget it."""
    answers: Answers
    """Their form."""
    route: Route
    """What answers requests that are not calls."""
    calls: Calls | None = None
    """What makes calls; None where there are none."""

    def accept(self, cycle: RequestResponseCycle) -> None:
        """Begin to answer a request, whose head is there and whose body may come later."""
        id = cycle.id = request_id(cycle.headers, self.answers.id_pattern)
        calls, target = self.calls, None
        cors = self.answers.cors
        if cors is not None and (found := cors.preflight(cycle.method, cycle.headers)) is not None:
            self.answers.send(cycle, 200, found, b"")
            return
        try:
            target = calls.target(cycle) if calls is not None else None
            self.check(cycle.path, cycle.headers)
            if calls is None or target is None:
                self.route(cycle, id)
            else:
                calls.begin(cycle, target)
        except Exception as error:
            answer = self.answers.error(error, id)
            if calls is not None and target is not None:
                calls.count_unrouted(answer[0])
            self.answers.send(cycle, *answer)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        """Return the last answer on a connection, to what is not a request, or to its body."""
        answer = self.answers.refuse(error, cycle)
        calls = self.calls
        large = cycle if isinstance(error, errors.BodyTooLarge) else None
        if large is not None and calls is not None and calls.target(large) is not None:
            calls.count_unrouted(answer[0])
        return answer
