"""What the APIs have in common in TorchServe's dialect: paths, parameters, answers, errors."""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from modelyard.archiver import ArchiveError
from modelyard.plugins.torchserve import openapi
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve import errors
from modelyard.serve.api.management import CONTENT_TYPE
from modelyard.serve.dataplane.call import Stream
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.dataplane.wire import Buffer, Payload
from modelyard.serve.front.begin import Fields, ServerState
from modelyard.serve.http.application import Answers, Application, Calls, Check, Events
from modelyard.serve.http.connection import Answer, Headers, RequestResponseCycle
from modelyard.serve.observers import Observer, with_observers

logger = logging.getLogger(__name__)

JSON: Headers = [(b"content-type", b"application/json")]
REASON = b"x-modelyard-reason"
"""Header of an error whose message is TorchServe's and says less than we know."""
MAX_REASON = 500
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


class Dialect(ABC):
    """One API of TorchServe's, behind an `Application`.

    Args:
        check: the token check.
        answers: answers as `dialect_answers` makes them.
        document: the OpenAPI document of its port.
        calls: calls as of `Application`.
        observers: answer the paths that they own beside this API's.
    """

    def __init__(
        self,
        check: Check,
        answers: Answers,
        document: openapi.Document,
        calls: Calls | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        check, route = with_observers(observers, check, self._route)
        self.application = Application(check, answers, route, calls)
        self.document = document
        self._answers = answers

    @abstractmethod
    def owns(self, path: str) -> bool:
        """Return whether a path is this API's, where one port carries several."""

    @abstractmethod
    async def respond(
        self, cycle: RequestResponseCycle, path: list[str], body: bytes, id: str
    ) -> Answer:
        """Answer what is not a call, once its body is there; what it raises is answered."""

    def begin(
        self, cycle: RequestResponseCycle, path: list[str], parts: Sequence[Buffer], id: str
    ) -> bool:
        """Make a call of a request that says only in the body for which model it is, or return."""
        return False

    def answer_first(self, cycle: RequestResponseCycle, id: str) -> bool:
        """Answer a request that comes before all others, or return False."""
        return False

    def _route(self, cycle: RequestResponseCycle, id: str) -> None:
        """Answer with the API's description, or as soon as the body is there."""
        if self.answer_first(cycle, id):
            return
        path = segments(cycle.path)
        if not path and cycle.method != "OPTIONS":
            raise errors.MethodNotAllowed
        if not path or path == ["api-description"]:
            self._answers.send(cycle, *json_answer(self.document))
        else:
            cycle.read_body(lambda parts: self._with_body(cycle, path, parts, id))

    def _with_body(
        self, cycle: RequestResponseCycle, path: list[str], parts: Sequence[Buffer], id: str
    ) -> None:
        try:
            if self.begin(cycle, path, parts, id):
                return
        except errors.ServeError as error:
            self._answers.send(cycle, *self._answers.error(error, id))
        else:
            cycle.run(self._run(cycle, path, b"".join(parts), id))

    async def _run(
        self, cycle: RequestResponseCycle, path: list[str], body: bytes, id: str
    ) -> None:
        try:
            answer = await self.respond(cycle, path, body, id)
        except Exception as error:
            answer = self._answers.error(error, id)
        self._answers.send(cycle, *answer)


class Combined:
    """Several APIs on one port, as KServe configures it; each checks its own key.

    Args:
        apis: APIs in the order of their addresses; the first answers what is nobody's, and
            describes the port.
    """

    def __init__(self, apis: Sequence[Dialect]) -> None:
        self._first, *self._others = apis
        paths = {path: item for api in apis for path, item in api.document["paths"].items()}
        self._first.document = {**self._first.document, "paths": paths}

    def accept(self, cycle: RequestResponseCycle) -> None:
        """Hand a request to the API that its path belongs to."""
        api = next((api for api in self._others if api.owns(cycle.path)), self._first)
        api.application.accept(cycle)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        """Return the last answer on a connection."""
        return self._first.application.refuse(error, cycle)


class Scrape(Dialect):
    """The metrics API: one path, in any method."""

    def __init__(self, check: Check, metrics: Metrics, answers: Answers) -> None:
        super().__init__(check, answers, openapi.server())
        self._metrics = metrics

    def owns(self, path: str) -> bool:
        """Return whether it is that path."""
        return segments(path) == ["metrics"]

    async def respond(
        self, cycle: RequestResponseCycle, path: list[str], body: bytes, id: str
    ) -> Answer:
        """Return the metrics, all or those that `name[]` names."""
        if path != ["metrics"]:
            raise errors.NoSuchRoute
        query = parse_qsl(cycle.query.decode("latin-1"))
        names = [value for name, value in query if name == "name[]"]
        headers = [(b"content-type", CONTENT_TYPE.encode())]
        return 200, headers, (await self._metrics.gather(names)).encode()


def dialect_answers(
    state: ServerState,
    settings: TorchServeSettings,
    on_status: Callable[[int], None] | None = None,
) -> "DialectAnswers":
    """Return the form of TorchServe's answers: its errors, request ids and CORS headers."""
    cors = (
        (b"access-control-allow-origin", settings.cors_allowed_origin),
        (b"access-control-allow-methods", settings.cors_allowed_methods),
        (b"access-control-allow-headers", settings.cors_allowed_headers),
    )
    more = [(name, value.encode("latin-1")) for name, value in cors if value]
    return DialectAnswers(
        state, form_error, UUID, more, closes_after_errors=True, on_status=on_status
    )


class DialectAnswers(Answers):
    """TorchServe's answers; an error says `error`, too, where requests of tensors are answered.

    That is the name that clients of the Open Inference Protocol know.
    """

    adds_error = False
    """Whether such requests are read as TorchServe does not."""

    def send(
        self, cycle: RequestResponseCycle, status: int, headers: Fields,
        body: Payload | Stream | Events,
    ) -> None:  # fmt: skip
        """Send an answer."""
        if status >= 400 and self._is_of_tensors(cycle) and isinstance(body, bytes | bytearray):
            body = _with_error(body)
        super().send(cycle, status, headers, body)

    def send_refusal(self, cycle: RequestResponseCycle, error: errors.Unavailable) -> None:
        """Send the answer to a call that is not taken."""
        if self._is_of_tensors(cycle):
            self.send(cycle, *self.error(error, cycle.id))
        else:
            super().send_refusal(cycle, error)

    def refuse(self, error: Exception, cycle: RequestResponseCycle | None) -> Answer:
        """Return the last answer on a connection."""
        status, headers, body = super().refuse(error, cycle)
        if cycle is not None and self._is_of_tensors(cycle):
            if not body:
                headers, body = [*JSON, *headers], error_answer(status, "", str(error))[2]
            body = _with_error(body)
        return status, headers, body

    def _is_of_tensors(self, cycle: RequestResponseCycle) -> bool:
        return self.adds_error and cycle.path.startswith("/v2/")


def _with_error(body: bytes | bytearray) -> bytes:
    """Return the JSON of an error with its message under `error`, too; else the body itself."""
    try:
        content = json.loads(body)
    except ValueError:
        return bytes(body)
    if not isinstance(content, dict) or "message" not in content:
        return bytes(body)
    return (json.dumps({**content, "error": content["message"]}, indent=2) + "\n").encode()


class Refused(errors.Unavailable):
    """No worker takes a request; TorchServe's words, and ours as the reason."""

    def __init__(self, message: str, cause: errors.Unavailable) -> None:
        super().__init__(message, cause.retry_after_s)
        self.reason = str(cause)


def form_error(error: Exception, id: str) -> Answer:
    """Return status, headers and body for an error."""
    if isinstance(error, errors.BodyTooLarge):
        return 413, [], b""
    if isinstance(error, errors.BadMessage):
        return error_answer(400, "BadRequestException", "Invalid HTTP message.", str(error))
    status, kind = errors.http_status(error)
    if isinstance(error, errors.Unauthorized):
        status = 400
    reason = error.reason if isinstance(error, errors.FetchFailed | errors.UrlRefused) else None
    answer = error_answer(status, kind, text_of(error), reason)
    if isinstance(error, errors.Unavailable):
        answer[1].append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, Refused):
        answer[1].append((REASON, error.reason.encode("ascii", "replace")))
    return answer


def text_of(error: Exception) -> str:
    """Return what a client reads of an error; of one that nobody declared, its class only."""
    if isinstance(error, errors.WorkerDied):
        return errors.WorkerDied.text
    declared = isinstance(error, (errors.ServeError, ArchiveError))
    return str(error) if declared else f"internal error ({type(error).__name__})"


def with_class(message: str, kind: str) -> str:
    """Return an error's text by gRPC: a message, and the name of a class of Java's.

    Args:
        kind: the class without its package, as `type` of an error by HTTP.
    """
    package = "archive.model" if "Model" in kind else "archive" if "Archive" in kind else "http"
    return f"{message}\norg.pytorch.serve.{package}.{kind}"


def segments(path: str) -> list[str]:
    """Split a decoded path as TorchServe does: empty parts at its end do not count."""
    parts = path.split("/")[1:]
    while parts and not parts[-1]:
        parts.pop()
    return parts


def parameters(query: bytes) -> dict[str, str]:
    """Return a query's parameters; the first of a name counts."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return dict(reversed(pairs))


def integer(values: Mapping[str, Any], name: str, default: int) -> int:
    """Return a whole number; anything else is the default, as in TorchServe."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return default
    try:
        return int(value)
    except ValueError:
        return default


def boolean(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return whether a value is `true`, in any case."""
    value = values.get(name)
    return default if value is None else str(value).lower() == "true"


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an answer of the server's own: JSON over several lines, with a line end."""
    more = [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    return status, [*JSON, *more], (json.dumps(value, indent=2) + "\n").encode()


def status_answer(text: str, status: int = 200) -> Answer:
    """Return what TorchServe's management API says of a change."""
    return json_answer({"status": text}, status)


def error_answer(status: int, kind: str, message: str, reason: str | None = None) -> Answer:
    """Return an error; what it says beyond TorchServe's words is in a header.

    Args:
        kind: the name of TorchServe's class.
    """
    answer = json_answer({"code": status, "type": kind, "message": message}, status)
    if reason:
        logger.warning("%d %s: %s", status, message, reason)
        line = " ".join(reason.split())[:MAX_REASON]
        answer[1].append((REASON, line.encode("ascii", "replace")))
    return answer
