"""The server's own log: what others say in it cannot be taken for a line of ours."""

from __future__ import annotations

import logging
import re

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


def log_to_stderr() -> None:
    """Set up logging for the process of a server."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
