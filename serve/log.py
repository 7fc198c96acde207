"""The logs of a server: its own, in which nobody's words look like a line of ours; requests.

The access log has a line for each answer, by values that an answer has anyway. Python's logging
would cost a request 14 µs: here a line is made at once, and many are written together.
"""

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import quote

from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane.log_file import Console, LogFile, LogWriter
from modelyard.serve.settings import Settings

if TYPE_CHECKING:
    from modelyard.serve.http.connection import Answered

logger = logging.getLogger(__name__)

GATHER_S = 0.2
"""Time from the first line that waits to when all are written."""
GATHER_BYTES = 1 << 16
"""Size of the lines that are written at once."""
_READABLE = "/!#$&'()*+,:;=?@[]~%"
"""What a path keeps as it is written."""

Form = Callable[["Answered", float], bytes]
"""Returns the line of an answer, given the time."""


class AccessLog:
    """Takes what answers say of themselves, and writes lines.

    Args:
        form: text or JSON.
        to: the file, or the console.
    """

    def __init__(self, form: Form, to: LogWriter) -> None:
        self._form = form
        self._to = to
        self._lines: list[bytes] = []
        self._size = 0

    def __call__(self, answered: "Answered") -> None:
        """Take one answer."""
        line = self._form(answered, time.time())
        self._lines.append(line)
        self._size += len(line)
        if self._size >= GATHER_BYTES:
            self.flush()
        elif len(self._lines) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        if not self._lines:
            return
        data, self._lines, self._size = b"".join(self._lines), [], 0
        if lost := self._to.append(data):
            logger.warning("%d lines of the access log could not be written", lost)

    def close(self) -> None:
        """Write what waits, and end."""
        self.flush()
        self._to.close()


class Clock:
    """Writes times of now, in UTC and milliseconds; a second's beginning is made once."""

    def __init__(self) -> None:
        self._second = -1
        self._text = ""

    def __call__(self, now: float) -> str:
        """Return a time as RFC 3339 has it."""
        second = int(now)
        if second != self._second:
            self._second, self._text = (
                second,
                time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)),
            )
        return f"{self._text}.{int((now - second) * 1000):03d}Z"


def service() -> dict[str, object]:
    """Return what every JSON line of this process says: Elastic's names, which others read too."""
    return {
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or "modelyard",
        "service.version": version("modelyard"),
        "process.pid": os.getpid(),
    }


def text_form() -> Form:
    """Return what makes lines for people: time, client, request, status, bytes, seconds."""
    clock = Clock()

    def form(answered: "Answered", now: float) -> bytes:
        client, method, target, status, seconds, id, size, served, trace_id, outcome = answered
        host = f"{client[0]}:{client[1]}" if client else "unix"
        model = "/".join(served) if served else "-"
        return (
            f'{clock(now)} {host} "{method} {_path(target)}" {status} {size} {seconds:.6f} '
            f"{model} {id or '-'} {trace_id or '-'}{' ' if outcome else ''}{outcome}\n"
        ).encode()

    return form


def json_form() -> Form:
    """Return what makes JSON lines.

    Nothing in them needs to be escaped: paths are printable ASCII without quotes, and ids, models
    and versions are of few characters. A dict and a dump of it take three times as long.
    """
    clock = Clock()
    common = json.dumps({**service(), "log.level": "info", "log.logger": "modelyard.access"})[1:-1]

    def form(answered: "Answered", now: float) -> bytes:
        client, method, target, status, seconds, id, size, served, trace_id, outcome = answered
        path = _path(target)
        said = (
            f'"rpc.system":"grpc","rpc.method":"{path}","rpc.grpc.status_code":{status:d}'
            if method == "gRPC"
            else f'"http.request.method":"{method}","url.path":"{path}",'
            f'"http.response.status_code":{status}'
        )
        if client:
            said = f'{said},"client.ip":"{client[0]}","client.port":{client[1]}'
        if served:
            said = f'{said},"labels.model":"{served[0]}","labels.version":"{served[1]}"'
        if outcome:
            said = f'{said},"labels.cache":"{outcome}"'
        if trace_id:
            said = f'{said},"trace.id":"{trace_id}"'
        return (
            f'{{"@timestamp":"{clock(now)}","message":"{method} {path} {status:d}",{common},'
            f'"http.request.id":"{id}","http.response.body.bytes":{size},'
            f'"event.duration":{int(seconds * 1e9)},{said}}}\n'
        ).encode()

    return form


FORMS: dict[str, Callable[[], Form]] = {"text": text_form, "json": json_form}


def _path(target: str) -> str:
    """Return the path of a target, in printable ASCII. A query may hold what a client sent."""
    path = target.partition("?")[0]
    if path.isascii() and path.isprintable() and '"' not in path and "\\" not in path:
        return path
    return quote(path, safe=_READABLE, encoding="latin-1")


# -- the server's own ---------------------------------------------------------------------------

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def escape_controls(text: str) -> str:
    """Return a text whose control characters but tabs and line breaks are written out."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class Formatter(logging.Formatter):
    """Escapes control characters and indents the further lines of a record.

    Messages hold words of authors and clients: the error of a handler that does not load may bring
    a line that looks like ours, or a sequence that steers the reader's terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines; only the first begins at the margin."""
        return escape_controls(super().format(record)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """Makes one JSON object of a record, by the names that the access log uses as well."""

    def __init__(self) -> None:
        super().__init__()
        self._clock = Clock()
        self._common = service()

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        line: dict[str, object] = {
            "@timestamp": self._clock(record.created),
            "log.level": record.levelname.lower(),
            "message": record.getMessage(),
            **self._common,
            "log.logger": record.name,
        }
        if (id := getattr(record, "request_id", None)) is not None:
            line["http.request.id"] = id
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line["error.type"] = type(error).__name__
            line["error.message"] = str(error)
            line["error.stack_trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


class FileHandler(logging.Handler):
    """Writes records to a file that is put aside when it is full."""

    def __init__(self, file: LogWriter) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; what a full disk does not take is lost."""
        try:
            self._file.append(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)


def log_to_stderr(settings: Settings) -> AccessLog | None:
    """Set up logging for the process of a server; return its access log, where it has one.

    Lines of requests go to a thread: whoever reads standard error may stop reading.
    """
    _log_to(logging.StreamHandler(), settings)
    return AccessLog(FORMS[settings.log_format](), Console(2)) if settings.access_log else None


def log_to_file(settings: Settings) -> AccessLog | None:
    """Set up logging for a server that runs detached, whose standard error is the log as well.

    Raises:
        OSError: a file cannot be opened.
    """
    state, sizes = StateDir(settings.state_dir), (settings.log_bytes, settings.log_keep)
    log = LogFile(state.log_file, *sizes, on_open=lambda opened: os.dup2(opened, 2))
    _log_to(FileHandler(LogWriter(log)), settings)
    if not settings.access_log:
        return None
    return AccessLog(FORMS[settings.log_format](), LogWriter(LogFile(state.access_file, *sizes)))


def _log_to(handler: logging.Handler, settings: Settings) -> None:
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else Formatter())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
