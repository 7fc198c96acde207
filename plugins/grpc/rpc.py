"""One gRPC call as a service sees it, and grpcio's server on an address of its own.

grpcio has the transport: connections, HTTP/2, TLS, flow control, deadlines. Here is what every call
has before a service sees it: its token is checked before its message is read, and the message is
counted and unpacked within limits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import unquote

import grpc
import grpc.aio
from grpc import StatusCode

from modelyard.archiver import ArchiveError
from modelyard.serve.dataplane.budget import AnswerBudget
from modelyard.serve.dataplane.tracing import trace_id_of
from modelyard.serve.dataplane.wire import VERSION_HEADER
from modelyard.serve.errors import ServeError, StartError, Unavailable, error_body, http_status
from modelyard.serve.front.begin import Headers, Release, Served, request_id
from modelyard.serve.front.face import Face
from modelyard.serve.http.application import Check
from modelyard.serve.http.connection import LEFT, Access, Answered
from modelyard.serve.http.listener import Tls, bind
from modelyard.serve.settings import Address, Settings

logger = logging.getLogger(__name__)

STREAMS = 250
"""Calls at once on one connection. With 1,000, heads of references into HPACK's table took 0.7 s
from everybody."""
PENDING = 500
"""Calls of all connections that wait for the event loop, 0.1 ms each, also when they were reset:
beyond them some are refused, beyond twice as many all."""
PING_S = 10
"""Pings of a client that come faster, three in a row, end its connection."""
PONG_S = 20
"""A client that does not answer a ping for so long is gone."""
SLACK_BYTES = 1 << 20
"""Bytes by which a message may be too long for grpcio to hand it on, so that its call is counted
and logged; one that is longer yet is refused by grpcio, and nobody sees it."""
TEXT_BYTES = 1500
"""Longest text of a status; grpcio's clients refuse trailers of more than 8 KB, each byte may
become 3."""
_WINDOW_BITS = {0x1F: 31, 0x78: 15}
"""First byte of a compressed message, gzip or deflate → how zlib reads it. No message of ours can
begin so: they would be the field 3 of a kind that there is not, and a field 15."""

STATUSES: Mapping[int, StatusCode] = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    416: StatusCode.OUT_OF_RANGE,
    429: StatusCode.RESOURCE_EXHAUSTED,
    LEFT: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
"""Status of gRPC for each HTTP status, as TorchServe's gRPC has them."""
HTTP_STATUSES: Mapping[StatusCode, int] = {
    **{code: status for status, code in reversed(list(STATUSES.items()))}, StatusCode.INTERNAL: 500
}  # fmt: skip


def code_of(http_status: int) -> StatusCode:
    """Return what an HTTP status is in gRPC."""
    if (known := STATUSES.get(http_status)) is not None:
        return known
    if http_status < 300:
        return StatusCode.OK
    return StatusCode.FAILED_PRECONDITION if http_status < 500 else StatusCode.INTERNAL


class Failure(Exception):
    """A call ends with this status."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def failure_of(error: Exception) -> Failure:
    """Return an error of ours as gRPC has it."""
    if isinstance(error, Failure):
        return error
    return Failure(code_of(http_status(error)[0]), str(error_body(error, "")["message"]))


class Rpc:
    """One call, as a service sees it.

    Args:
        services: services that have it.
        method: full name, `/package.Service/Method`.
        metadata: metadata of the client.

    Attributes:
        id: id of the request, the client's own where it has one.
        headers: the metadata.
        timeout_s: how long the client still waits; infinite where it does not say.
        is_counted: whether it is among the requests of a model, or of none.
        outcome: outcome of looking for an answer that is kept; empty where none are.
        sent: bytes of messages so far.
    """

    __slots__ = (
        *("_held", "_services", "began", "code", "context", "has_left", "headers", "id"),
        *("is_counted", "method", "outcome", "release", "sent", "served", "timeout_s", "trace_id"),
    )

    def __init__(self, services: Services, method: str, metadata: Any) -> None:
        self._services = services
        self._held = 0
        self.method = method
        self.headers: Headers = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in metadata
        ]
        self.id = request_id(self.headers)
        self.began = monotonic()
        self.has_left = self.is_counted = False
        self.code = StatusCode.CANCELLED
        self.served: Served = None
        self.timeout_s = math.inf
        self.trace_id = self.outcome = ""
        self.sent = 0
        self.release: Release | None = None

    def let_go(self) -> None:
        """Count no more among what its token has at once."""
        if self.release is not None:
            self.release()
            self.release = None

    @property
    def client(self) -> tuple[str, int] | None:
        """Host and port of who sent it."""
        return _client(self.context.peer())

    def is_left(self) -> bool:
        """Return whether nobody waits for the answer any more."""
        return self.has_left

    def open(self, context: Any) -> None:
        """Begin to answer; `context` is grpcio's."""
        self.context = context
        remaining_s = context.time_remaining()
        if remaining_s is not None:
            self.timeout_s = remaining_s

    def take(self, data: bytes) -> bytes:
        """Return a message, which counts among the bodies that the server holds until the next.

        Raises:
            Failure: it cannot be unpacked, or is too long.
            Unavailable: all bodies together are.
        """
        data = unpack(data, self._services.most_bytes)
        self.hold(len(data))
        budget = self._services.budget
        if budget.bodies > budget.body_limit:
            raise Unavailable(
                f"the bodies of requests take {budget.bodies} bytes; {budget.body_limit} are "
                "allowed (request_memory_bytes)",
                retry_after_s=1,
            )
        return data

    def hold(self, size: int) -> None:
        """Count so many bytes among the bodies that the server holds, in place of those before."""
        self._services.budget.bodies += size - self._held
        self._held = size

    async def read(self) -> bytes | None:
        """Return the next message of a stream; None after the last.

        Raises:
            Unavailable: the server is being stopped.
        """
        data = await self.rest(self.context.read())
        return None if data is grpc.aio.EOF else self.take(data)

    async def rest(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        """Wait for something that may take long, unless the server is stopped meanwhile.

        Raises:
            Unavailable: it is.
        """
        self.hold(0)
        task: asyncio.Future[Any] = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait({task, self._services.stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unavailable("the server is being stopped", retry_after_s=1)
            return task.result()
        finally:
            task.cancel()

    async def send(self, message: bytes) -> None:
        """Send one message of a stream, as soon as the client takes it."""
        self.sent += len(message)
        await self.context.write(message)

    def trailers(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata behind an answer: which version gave it, and how."""
        found = [] if self.served is None else [(VERSION_HEADER.decode(), self.served[1])]
        return (*found, ("x-cache", self.outcome)) if self.outcome else tuple(found)

    async def fail(self, error: Exception) -> None:
        """End the call with an error."""
        if not isinstance(error, Failure | ServeError | ArchiveError):
            logger.error("request %s: %s failed", self.id, self.method, exc_info=error)
        failure = failure_of(error)
        self.code = failure.code
        text = str(failure).encode()[:TEXT_BYTES].decode(errors="ignore")
        await self.context.abort(failure.code, text, self.trailers())


def unpack(message: bytes, most_bytes: int) -> bytes:
    """Return a message as it was before it was compressed: grpcio would unpack any size.

    Raises:
        Failure: it cannot be unpacked, or is longer than that.
    """
    if len(message) > most_bytes:
        raise Failure(
            StatusCode.RESOURCE_EXHAUSTED,
            f"a message of {len(message)} bytes; at most {most_bytes} are taken",
        )
    if not message or (bits := _WINDOW_BITS.get(message[0])) is None:
        return message
    reader = zlib.decompressobj(bits)
    try:
        data = reader.decompress(message, most_bytes + 1)
    except zlib.error as error:
        raise Failure(StatusCode.INTERNAL, f"a message cannot be decompressed: {error}") from error
    if len(data) > most_bytes:
        raise Failure(
            StatusCode.RESOURCE_EXHAUSTED,
            f"a message of more than {most_bytes} bytes, decompressed",
        )
    if not reader.eof:
        raise Failure(StatusCode.INTERNAL, "a compressed message ends too early")
    return data


class Method(NamedTuple):
    """What answers the calls of one name."""

    answer: Callable[..., Awaitable[Any]]
    """Takes the call and its message and returns the answer's; of a stream it takes the call
    alone."""
    is_stream: bool = False


class Services(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Routes calls to the methods of services.

    Args:
        methods: methods by full name.
        check: the token check; it comes before everything else, with the full name as path.
        budget: counts the messages that the server holds.
        most_bytes: longest message.
        access: called with each call, for an access log.
        on_end: called with each call that is over.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        check: Check,
        budget: AnswerBudget,
        most_bytes: int,
        access: Access | None = None,
        on_end: Callable[[Rpc], None] | None = None,
    ) -> None:
        self._methods = methods
        self._check = check
        self.budget = budget
        self.most_bytes = most_bytes
        self._access = access
        self._on_end = on_end
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the server begins to stop."""

    def service(self, details: Any) -> Any:
        """Return what answers a call, as grpcio has it; a refused one ends with its head."""
        rpc = Rpc(self, details.method, details.invocation_metadata or ())
        try:
            self._check(rpc.method, rpc.headers)
            method = self._methods.get(rpc.method)
            if method is None:
                name = rpc.method.removeprefix("/")
                raise Failure(StatusCode.UNIMPLEMENTED, f"Method not found: {name}")
        except Exception as error:
            method = Method(partial(_refuse, error), is_stream=True)
        if method.is_stream:
            return grpc.stream_stream_rpc_method_handler(partial(self._stream, rpc, method))
        return grpc.unary_unary_rpc_method_handler(partial(self._unary, rpc, method))

    async def _unary(self, rpc: Rpc, method: Method, data: bytes, context: Any) -> bytes | None:
        rpc.open(context)
        try:
            answer: bytes = await method.answer(rpc, rpc.take(data))
            rpc.sent += len(answer)
            context.set_trailing_metadata(rpc.trailers())
            rpc.code = StatusCode.OK
            return answer
        except Exception as error:
            await rpc.fail(error)
            return None
        finally:
            self._end(rpc)

    async def _stream(self, rpc: Rpc, method: Method, _: Any, context: Any) -> None:
        rpc.open(context)
        try:
            await method.answer(rpc)
            context.set_trailing_metadata(rpc.trailers())
            rpc.code = StatusCode.OK
        except Exception as error:
            await rpc.fail(error)
        finally:
            self._end(rpc)

    def _end(self, rpc: Rpc) -> None:
        rpc.has_left = True
        rpc.hold(0)
        rpc.let_go()
        if self._access is not None:
            self._access(
                Answered(
                    rpc.client, "gRPC", rpc.method.removeprefix("/"),
                    rpc.code.value[0], monotonic() - rpc.began, rpc.id, rpc.sent, rpc.served,
                    rpc.trace_id or trace_id_of(rpc.headers), rpc.outcome,
                )
            )  # fmt: skip
        if self._on_end is not None:
            self._on_end(rpc)


async def _refuse(error: Exception, rpc: Rpc) -> None:
    raise error


def _client(peer: str) -> tuple[str, int] | None:
    """Return host and port of grpcio's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, place = unquote(peer).partition(":")
    host, _, port = place.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") else None


class GrpcServer(Face):
    """grpcio's server on one address, bound but not started.

    Args:
        services: services that it serves.
        address: where to listen; port 0 lets the system choose.
        settings: settings whose limits hold.
        tls: returns certificate and key for the next client, of an address that asks for TLS.
        age_s: after which clients are told to open another connection, and the grace that the
            calls of the old one have.

    Raises:
        StartError: the address cannot be bound; the message says why and what to do.
    """

    def __init__(
        self,
        services: Services,
        address: Address,
        settings: Settings,
        tls: Tls | None = None,
        age_s: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        self._services = services
        options = {
            "so_reuseport": 0,
            "max_receive_message_length": settings.max_request_bytes + SLACK_BYTES,
            "max_send_message_length": -1,
            "max_metadata_size": settings.max_header_bytes,
            "absolute_max_metadata_size": settings.max_header_bytes,
            "max_concurrent_streams": STREAMS,
            "server.max_pending_requests": PENDING,
            "server.max_pending_requests_hard_limit": 2 * PENDING,
            "http2.max_requests_per_read": 1,  # of a connection, before others have a turn
            "per_message_decompression": 0,  # `unpack` does it
            "server_handshake_timeout_ms": _ms(settings.head_timeout_s),
            "max_connection_idle_ms": _ms(settings.keep_alive_s),
            "max_connection_age_ms": _ms(age_s[0]),
            "max_connection_age_grace_ms": _ms(age_s[1]),
            "keepalive_time_ms": _ms(settings.keep_alive_s),
            "keepalive_timeout_ms": _ms(PONG_S),
            "http2.min_ping_interval_without_data_ms": _ms(PING_S),
            "http2.max_ping_strikes": 2,
        }
        self._server = grpc.aio.server(
            options=[(f"grpc.{name}", value) for name, value in options.items()],
            maximum_concurrent_rpcs=settings.max_connections,
        )
        self._server.add_generic_rpc_handlers((services,))
        bind(address)[0].close()  # which says best why it cannot be
        host = f"[{address.host}]" if ":" in address.host else address.host
        where = f"{host}:{address.port}"
        try:
            if address.is_tls and tls is not None:
                credentials = _credentials(tls)
                port = self._server.add_secure_port(where, credentials)
            else:
                port = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise StartError(f"{where} cannot be bound for gRPC: {error}") from error
        self.url = f"grpc{'s' if address.is_tls else ''}://{host}:{port}"

    @property
    def urls(self) -> Mapping[str, str]:
        """Where it listens."""
        return {"grpc": self.url}

    async def start(self) -> None:
        """Begin to accept."""
        await self._server.start()

    async def stop(self, timeout_s: float) -> None:
        """Take nothing new; answer the calls that were accepted, within this time."""
        if not self._services.stopping.done():
            self._services.stopping.set_result(None)
        await self._server.stop(timeout_s)


def _ms(seconds: float) -> int:
    return min((1 << 31) - 1, round(seconds * 1000)) if seconds < math.inf else (1 << 31) - 1


def _credentials(tls: Tls) -> Any:
    """Return the certificate for grpcio, which asks for it again with each client."""

    def configuration() -> Any:
        context = tls()
        return grpc.ssl_server_certificate_configuration([(context.key, context.chain)])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration)
