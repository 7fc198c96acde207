"""SHA-256 beside reading and writing: hashing weights takes as long as copying them."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

# Shorter chunks are hashed at once: a thread would take longer to wake.
_WORTH_A_THREAD_BYTES = 256 * 1024


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
    """A SHA-256 that takes one chunk ahead in a thread; use it as a context manager."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def update(self, chunk: bytes) -> None:
        """Add a chunk, which must not change any more; return before it is hashed."""
        self._wait()
        if len(chunk) < _WORTH_A_THREAD_BYTES:
            self._hash.update(chunk)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "sha256")
        self._pending = self._thread.submit(self._hash.update, chunk)

    def hexdigest(self) -> str:
        """Return the digest of everything that was added."""
        self._wait()
        return self._hash.hexdigest()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()
