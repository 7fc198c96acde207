"""Heads of requests that were parsed before: the same bytes say the same again.

Most clients send the same head with every request, up to the length of its body. A head is kept
only as it was parsed, strictly, at the beginning of what came, and only where its Content-Length
alone says where the request ends; so what a client sends is never read in two ways. Clients that
ask again what cannot be answered now are refused by their head alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from modelyard.serve.front.begin import Headers

END = b"\r\n\r\n"
MOST_HEADS = 512
"""Heads that a listener keeps; then it begins anew."""
MOST_BYTES = 2048
"""Longest head that is kept: all together take 2 MB at most, with what is read in them."""
HOLDS_S = 0.001
"""Time for which a refusal may be given again to the same head: what it goes by hardly changes
meanwhile."""

HOPELESS_HOLDS_S = 1.0
"""The same of those that have waited for so long that nothing could answer them in time."""


class Again(NamedTuple):
    """When a request is refused as the last one of the same head was."""

    waited_s: float
    """How long that one had waited; one that waited less may be taken."""
    until: float
    """Time of `time.monotonic()`."""
    hopeless_s: float
    """Who waited as long is refused whatever has changed, for `HOPELESS_HOLDS_S`; infinite where
    nobody is."""
    is_so: Callable[[], bool]
    """Returns whether nothing has changed since."""
    is_short: Callable[[], bool]
    """Returns whether too little waits for the workers, who would soon be idle."""
    note: Callable[[], None]
    """Counts one more refusal."""


class Refusal(NamedTuple):
    """An answer to requests that are not taken."""

    again: Again
    make_id: Callable[[], str]
    pieces: Sequence[bytes]
    """Head and body of the answer around the id of the request."""
    status: int
    size: int
    """Bytes of its body."""
    keeps_alive: bool
    served: tuple[str, str] | None
    """Model and version that the request reached."""


@dataclass(slots=True, eq=False)
class Head:
    """A head, what it says, and how the last request with it was refused.

    The lists belong to all its requests: nobody may change them.
    """

    method: str
    path: str
    """Path, decoded; `raw_path` is as the client wrote it."""
    raw_path: bytes
    query: bytes
    headers: Headers
    """Headers with names in lower case."""
    spelled: list[bytes]
    """Names and values in turn, as the client spelled them."""
    coding: bytes
    """Coding of the body, by its Content-Encoding."""
    length: int
    """Length of the body; 0 where the head does not say it, as of chunks."""
    refusal: Refusal | None = None
    shown: list[bytes] | None = None
    """What handlers see of `spelled`, once that was asked for."""
    terms: tuple[float, int] | None = None
    """Time in seconds and class of its requests, once they were read."""

    def find_refusal(self, waited_s: float) -> Refusal | None:
        """Return what a request that waited so long is to be answered at once, if anything."""
        refusal = self.refusal
        if refusal is None:
            return None
        again = refusal.again
        now = monotonic()
        if waited_s >= again.hopeless_s:
            return refusal if now <= again.until + HOPELESS_HOLDS_S else None
        is_so = waited_s >= again.waited_s and now <= again.until and again.is_so()
        return refusal if is_so else None


class Heads(dict[bytes, Head]):
    """The heads that came to one listener of late, by their bytes before `END`.

    Attributes:
        refuses_until: time of `time.monotonic()` until which one of them may be refused at once.
    """

    refuses_until = 0.0

    def refuse(self, head: Head, refusal: Refusal) -> None:
        """Have the next requests of this head refused likewise."""
        head.refusal, self.refuses_until = refusal, refusal.again.until

    def keep(self, data: bytes, head: Head) -> None:
        """Keep the head of a request that came as one piece, unless it is long."""
        end = len(data) - head.length - len(END)
        if 0 < end <= MOST_BYTES and data.find(END) == end:
            if len(self) >= MOST_HEADS:
                self.clear()
            self[data[:end]] = head
