"""The access log: a line for each answer, by values that an answer has anyway.

Python's logging would cost a request 14 µs. Here a line is made at once, and many are written
together.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import quote

from modelyard.serve.dataplane.log_file import LogWriter

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
