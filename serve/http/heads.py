"""Heads of requests that were parsed before: the same bytes say the same again.

Most clients send the same head with every request, up to the length of its body and the ids that
name it. A head is kept only as it was parsed, strictly, at the beginning of what came, and only
where its Content-Length alone says where the request ends; so what a client sends is never read in
two ways. Clients that ask again what cannot be answered now are refused by their head alone.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from modelyard.serve.front.begin import Headers

END = b"\r\n\r\n"
MOST_HEADS = 512
"""Heads that a listener keeps; then it begins anew."""
MOST_BYTES = 2048
"""Longest head that is kept: all together take 2 MB at most, with what is read in them."""
VARIES = re.compile(
    rb"\r\n([Cc]ontent-[Ll]ength|[Xx]-[Rr]equest-[Ii][Dd]|[Tt]raceparent): ([!-~]{1,128})"
    rb"(?=\r\n|\Z)"
)
"""What differs from request to request in heads that are alike, each on a line of its own."""
LENGTHS = {one + b"ontent-" + two + b"ength" for one in (b"C", b"c") for two in (b"L", b"l")}
LENGTH_DIGITS = 12
"""Digits of the longest Content-Length that is not left to the parser."""
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
    make_id: Callable[[Headers], str]
    """Returns the id of a request by its headers."""
    pieces: Sequence[bytes]
    """Head and body of the answer around the id of the request."""
    status: int
    size: int
    """Bytes of its body."""
    keeps_alive: bool
    served: tuple[str, str] | None
    """Model and version that the request reached."""


@dataclass(slots=True, eq=False)
class Memo:
    """What is known of all requests whose heads are alike."""

    refusal: Refusal | None = None
    """How the last of them was refused."""
    terms: tuple[float, int] | None = None
    """Time in seconds and class, once they were read."""


@dataclass(slots=True, eq=False)
class Head:
    """A head, and what it says.

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
    memo: Memo = field(default_factory=Memo)
    shown: list[bytes] | None = None
    """What handlers see of `spelled`, once that was asked for."""

    def find_refusal(self, waited_s: float) -> Refusal | None:
        """Return what a request that waited so long is to be answered at once, if anything."""
        refusal = self.memo.refusal
        if refusal is None:
            return None
        again = refusal.again
        now = monotonic()
        if waited_s >= again.hopeless_s:
            return refusal if now <= again.until + HOPELESS_HOLDS_S else None
        is_so = waited_s >= again.waited_s and now <= again.until and again.is_so()
        return refusal if is_so else None

    @property
    def is_wanted(self) -> bool:
        """Whether workers would soon be idle without requests like this, which were refused."""
        refusal = self.memo.refusal
        return refusal is not None and refusal.again.is_short()

    def vary(self, places: Sequence[int], values: Sequence[bytes], length: int) -> "Head":
        """Return a head that is alike but for the values of some headers, and the length."""
        headers, spelled = self.headers.copy(), self.spelled.copy()
        for at, value in zip(places, values, strict=True):
            headers[at] = headers[at][0], value
            spelled[2 * at + 1] = value
        return Head(
            self.method, self.path, self.raw_path, self.query, headers, spelled, self.coding,
            length, self.memo,
        )  # fmt: skip


class Heads(dict[bytes, Head]):
    """The heads that came to one listener of late, by their bytes before `END`.

    Args:
        most_bytes: longest body that a request may have.

    Attributes:
        refuses_until: time of `time.monotonic()` until which one of them may be refused at once.
    """

    refuses_until = 0.0

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._alike: dict[tuple[bytes, ...], tuple[Head, list[int]]] = {}
        """Heads by what does not vary, and the places of the headers that do."""

    def refuse(self, head: Head, refusal: Refusal) -> None:
        """Have the next requests with heads like this one refused likewise."""
        head.memo.refusal, self.refuses_until = refusal, refusal.again.until

    def keep(self, data: bytes, head: Head) -> None:
        """Keep the head of a request that came as one piece, unless it is long."""
        end = len(data) - head.length - len(END)
        if 0 < end <= MOST_BYTES and data.find(END) == end:
            if len(self) >= MOST_HEADS:
                self.clear()
                self._alike.clear()
            known = data[:end]
            self[known] = head
            key, _ = _split(known)
            places = [known.count(b"\r\n", 0, found.start()) for found in VARIES.finditer(known)]
            self._alike[key] = head, places

    def find_alike(self, known: bytes) -> Head | None:
        """Return what a head says that is like one that is known, or None."""
        if len(known) > MOST_BYTES:
            return None
        key, values = _split(known)
        found = self._alike.get(key)
        if found is None:
            return None
        head, places = found
        length = 0
        for at, name, value in zip(places, key[1::2], values, strict=True):
            if name not in LENGTHS:
                if len(value) != len(head.headers[at][1]):
                    return None  # an answer with it would be of another length
            elif value.isdigit() and len(value) <= LENGTH_DIGITS:
                length = int(value)
            else:
                return None
        return head.vary(places, values, length) if length <= self._most_bytes else None


def _split(head: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
    """Return what does not vary in a head, with the names of what does, and their values."""
    pieces = VARIES.split(head)
    values = pieces[2::3]
    del pieces[2::3]
    return tuple(pieces), values
