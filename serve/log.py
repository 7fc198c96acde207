"""The logs of a server: its own, in which nobody's words look like a line of ours; requests."""

import json
import logging
import os
import re

from modelyard.serve.control.state import StateDir
from modelyard.serve.dataplane.log_file import Console, LogFile, LogWriter
from modelyard.serve.http.access import FORMS, AccessLog, Clock, service
from modelyard.serve.settings import Settings

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
