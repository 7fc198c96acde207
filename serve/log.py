"""The server's own log: what others say in it cannot be taken for a line of ours."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from modelyard.serve.dataplane.log_file import LogFile

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class Formatter(logging.Formatter):
    """Escapes control characters and indents the further lines of a record.

    Messages hold words of authors and clients: the error of a handler that does not load may bring
    a line that looks like ours, or a sequence that steers the reader's terminal.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines; only the first begins at the margin."""
        text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], super().format(record))
        return text.replace("\n", "\n    ")


class FileHandler(logging.Handler):
    """Writes records to a file that is put aside when it is full."""

    def __init__(self, file: LogFile) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; what a full disk does not take is lost."""
        try:
            self._file.append(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)


def log_to_stderr() -> None:
    """Set up logging for the process of a server."""
    _log_to(logging.StreamHandler())


def log_to_file(file: Path, max_bytes: int, keep: int) -> None:
    """Set up logging for a server that runs detached, whose standard error is the log as well."""
    _log_to(FileHandler(LogFile(file, max_bytes, keep, on_open=lambda opened: os.dup2(opened, 2))))


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(Formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
