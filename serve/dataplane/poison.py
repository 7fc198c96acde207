"""Requests that ended workers, and clients of such: both are refused for a while, and cost no more.

What counts is a request that its worker held alone, so that no other one is blamed for it, and not
an end by the server. A worker that was killed may have lacked memory for the request, or somebody
else meant it: it takes four of these to refuse the request, and they say nothing of its client.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv6Address, IPv6Network
from time import monotonic
from typing import NamedTuple

from modelyard.serve.dataplane.cache import TRAVEL_HEADERS, digest_of
from modelyard.serve.dataplane.call import Call, Client
from modelyard.serve.errors import PoisonClient, PoisonRequest, ServeError

REFUSED_S = 60.0
"""How long a request is refused that ended two workers, and how long one of these is remembered;
the same of clients and the workers that their requests ended."""
MOST = 100
"""Requests of a version that are remembered, and clients; the newest stay."""
ENDS = 6
"""Workers after which a client is refused whatever it asks: those of three requests, each of which
is tried twice. One may be a damaged file, and two its copies."""
PER_END = 10
"""Requests, for each of these workers, from which on a client that ends some is not refused: a
service with many users sends many that are harmless, and would lose all of them over a few."""
NETWORK_ENDS = 3 * ENDS
"""The same of an address, whoever its clients say that they are: where nobody asks for tokens
anybody has one, and who is no proxy may say who sent what."""


class _Known(NamedTuple):
    until: float
    size: int
    strikes: int
    how: str


@dataclass
class _Ends:
    """Workers that a client's requests ended."""

    times: list[tuple[float, int]] = field(default_factory=list)
    """When each was, and what `asked` was."""
    asked: int = 0
    """Its requests since the first."""
    until: float = 0.0
    """Until when the client is refused."""
    how: str = ""


class Poison(dict[bytes, _Known]):
    """The requests that ended workers of one model version, by digest; the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: dict[tuple[str, str], _Ends] = {}
        """The same of clients, where they are told."""

    def strike(self, call: Call, strikes: int, how: str, ends: int = 0) -> bool:
        """Take note of a worker's end, and return whether more is refused from now on.

        Args:
            call: what the worker held, and nothing else.
            strikes: what the end says against it; it is refused from two on.
            how: how the worker ended, for people.
            ends: workers that count against its client.
        """
        key, now = digest_of(call, TRAVEL_HEADERS), monotonic()
        before = known.strikes if (known := self.pop(key, None)) else 0
        self[key] = _Known(now + REFUSED_S, _size(call), before + strikes, how)
        is_new = before < 2 <= before + strikes
        for who, most in _tell(call.client) if ends else ():
            found = self.clients[who] = self.clients.pop(who, _Ends())
            late = [each for each in found.times if each[0] > now - REFUSED_S]
            found.times = late + [(now, found.asked)] * ends
            found.how = how
            is_often = len(found.times) >= most and found.until <= now
            if is_often and found.asked - found.times[-most][1] < PER_END * most:
                found.until, is_new = now + REFUSED_S, True
        self._forget(now)
        return is_new

    def refusal(self, call: Call) -> ServeError | None:
        """Return why a request is refused; None if it is not. The body is there."""
        self._forget(now := monotonic())
        for who, _ in _tell(call.client) if self.clients else ():
            if (ends := self.clients.get(who)) is None:
                continue
            ends.asked += 1
            if (rest_s := math.ceil(ends.until - now)) > 0:
                return PoisonClient(
                    f"requests of {who[0]} have just ended {len(ends.times)} workers of the model, "
                    f"the last one {ends.how}; all of them are refused for {rest_s} s more, so "
                    "find out which ones end workers, and send no more of these",
                    rest_s,
                )
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
        while self.clients:
            who, ends = next(iter(self.clients.items()))
            if len(self.clients) <= 2 * MOST and ends.times[-1][0] + REFUSED_S > now:
                return
            del self.clients[who]


def _size(call: Call) -> int:
    return sum(map(len, call.parts))


def _tell(client: Client | None) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield names of a client, and after how many workers all of that name are refused.

    First its address, for whom a proxy there sent it, and its token; then the address alone, of
    IPv6 the network that one client has.
    """
    if client is None:  # nobody sent it: a copy, or a page of the console
        return
    host = client.client[0] if client.client else "a Unix socket"
    said = dict(client.headers)  # the last of each: proxies write theirs behind what they were sent
    hop = said.get(b"x-forwarded-for", said.get(b"x-real-ip", b"")).rpartition(b",")[2].strip()
    name = f"{hop[:60].decode('latin-1')!a} through {host}" if hop else host
    yield (name, hashlib.sha256(said.get(b"authorization", b"")).hexdigest()), ENDS
    yield (_network(host), ""), NETWORK_ENDS


def _network(host: str) -> str:
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return host if address.ipv4_mapped else str(IPv6Network((int(address), 64), strict=False))
