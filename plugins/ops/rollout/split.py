"""Which of two versions answers a request: the same one for the same request, always."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from modelyard.serve.control.registry import ModelVersion


def place(salt: str, key: str) -> float:
    """Return where a key falls from 0 to 1, evenly, and differently for each salt."""
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, key=salt.encode())
    return int.from_bytes(digest.digest()) / 2**64


class Canary:
    """Sends a share of the requests to the candidate; a `Split`.

    Args:
        salt: of the roll-out: who is among the first in one is not among the first in the next.
        header: whose value decides, in lower case; the request's id does where it is absent, or
            where this is empty.
    """

    def __init__(
        self, live: ModelVersion, candidate: ModelVersion, salt: str, header: str = ""
    ) -> None:
        self.share = 0.0
        self._live = live
        self._candidate = candidate
        self._salt = salt
        self._header = header.encode()

    def choose(self, id: str, headers: Iterable[tuple[bytes, bytes]]) -> ModelVersion:
        """Return the version that answers a request of this id and these headers."""
        if self._header:
            id = next((v.decode("latin-1") for n, v in headers if n == self._header), id)
        return self._candidate if place(self._salt, id) < self.share else self._live
