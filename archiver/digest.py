"""SHA-256 beside reading and writing: hashing weights takes as long as copying them."""

import hashlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

# Shorter chunks are hashed at once: a thread would take longer to wake.
_WORTH_A_THREAD_BYTES = 256 * 1024
# Reading and writing are uneven: a hash that is ahead or behind by some chunks is not held up.
_MOST_AHEAD = 8


@dataclass(frozen=True)
class DigestedFile:
    """One file that was read to its end."""

    name: str
    size_bytes: int
    sha256: str


def digest_of_all(files: Iterable[DigestedFile]) -> str:
    """Return one SHA-256 that names all files: of the sorted lines `sha256  name`."""
    lines = sorted(f"{file.sha256}  {file.name}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Digest:
    """A SHA-256 that takes chunks ahead in a thread; use it as a context manager."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def update(self, chunk: bytes) -> None:
        """Add a chunk, which must not change any more; return before it is hashed."""
        if len(chunk) < _WORTH_A_THREAD_BYTES:
            self._wait(0)
            self._hash.update(chunk)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "sha256")
        self._wait(_MOST_AHEAD - 1)
        self._pending.append(self._thread.submit(self._hash.update, chunk))

    def hexdigest(self) -> str:
        """Return the digest of everything that was added."""
        self._wait(0)
        return self._hash.hexdigest()

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
