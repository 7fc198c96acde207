"""Files that are read again when they have changed, while the server runs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Generic, TypeVar

from modelyard.serve.errors import StartError

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Time from one look at the files to the next."""

T = TypeVar("T")


class Watched(Generic[T]):
    """What some files hold. Where they cannot be read any more, what they held before.

    Args:
        files: looked at for a change, at most once a second, by whoever asks for the value.
        read: returns the value; blocking, and short.

    Raises:
        StartError: `read` does, the first time.
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._files = files
        self._read = read
        self._seen = self._stamp()
        self._value = read()
        self._look_at = monotonic() + LOOK_S

    def get(self) -> T:
        """Return what the files hold."""
        if (now := monotonic()) >= self._look_at:
            self._look_at = now + LOOK_S
            if (stamp := self._stamp()) != self._seen:
                self._seen = stamp
                self._take()
        return self._value

    def _take(self) -> None:
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._read()
        except StartError as error:
            logger.error(
                "%s changed and cannot be used; what it held before counts: %s", names, error
            )
        else:
            logger.info("%s changed and was read again", names)

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        """Return what a change of the files changes; links are followed, as Kubernetes' mounts."""
        return [_stamp(file) for file in self._files]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
