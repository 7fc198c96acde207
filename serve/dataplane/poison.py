"""Requests that ended workers: who ended two is refused for a while, and costs no third.

What counts is a request that its worker held alone, so that no other one is blamed for it, and not
an end by the server. A worker that was killed may have lacked memory for the request, or somebody
else meant it: it takes four of these.
"""

import math
from time import monotonic
from typing import NamedTuple

from modelyard.serve.dataplane.cache import TRAVEL_HEADERS, digest_of
from modelyard.serve.dataplane.call import Call
from modelyard.serve.errors import PoisonRequest

REFUSED_S = 60.0
"""How long a request is refused that ended two workers, and how long one of these is remembered."""
MOST = 100
"""Requests of a version that are remembered; the newest stay."""


class _Known(NamedTuple):
    until: float
    size: int
    strikes: int
    how: str


class Poison(dict[bytes, _Known]):
    """The requests that ended workers of one model version, by digest; the oldest first."""

    def strike(self, call: Call, strikes: int, how: str) -> bool:
        """Take note of a worker's end, and return whether the request is refused from now on.

        Args:
            call: what the worker held, and nothing else.
            strikes: what the end says against it; it is refused from two on.
            how: how the worker ended, for people.
        """
        key, now = digest_of(call, TRAVEL_HEADERS), monotonic()
        before = known.strikes if (known := self.pop(key, None)) else 0
        self[key] = _Known(now + REFUSED_S, _size(call), before + strikes, how)
        self._forget(now)
        return before < 2 <= before + strikes

    def refusal(self, call: Call) -> PoisonRequest | None:
        """Return why a request is refused; None if it is not. The body is there."""
        self._forget(now := monotonic())
        if all(known.size != _size(call) for known in self.values()):
            return None  # most are told by their length
        known = self.get(digest_of(call, TRAVEL_HEADERS))
        if known is None or known.strikes < 2:
            return None
        return PoisonRequest(
            f"this request has just ended two workers of the model, the last one {known.how}; it "
            f"is refused for {math.ceil(known.until - now)} s more, so send another one"
        )

    def _forget(self, now: float) -> None:
        while self and (len(self) > MOST or next(iter(self.values())).until <= now):
            del self[next(iter(self))]


def _size(call: Call) -> int:
    return sum(map(len, call.parts))
