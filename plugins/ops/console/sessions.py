"""Who is signed in: a token once, then a random cookie that only this process knows.

The cookie is worth its token while it lasts, so it is kept as a hash, ends with its token, and is
told to nobody but the browser that has it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from modelyard.serve.errors import Forbidden, TooManyAttempts, Unauthorized
from modelyard.serve.http.tokens import Grant, Grants, digest_of, find_grant

MOST_SESSIONS = 64
"""Most sessions at once; one more ends the one that was used least recently."""
AGE_S = 12 * 3600
"""Age at which a session ends, used or not."""
MOST_FAILURES = 10
"""Wrong tokens from one address within `FAILURES_S`; a further wrong one waits for `SLOW_S`, and is
told so. A right one passes: behind a proxy all operators have one address."""
FAILURES_S = 60
SLOW_S = 1.0
MOST_ADDRESSES = 1024
"""Most addresses whose failures are counted; one more forgets the oldest."""
MOST_NOTICES = 5
"""Most notices that wait for a session's next page."""
REVOKED = (
    "you are signed out: the token that you signed in with was taken away, or its rights were "
    "changed; sign in with one that this server knows"
)
OVER = f"you are signed out: a session lasts {AGE_S // 3600} hours; sign in again"
UNKNOWN = "sign in again: the server has started anew since you signed in, or forgot the session"
SIGNS_IN = ("view", "manage")
"""A token with one of these rights may sign in."""


@dataclass
class Session:
    """One browser that is signed in."""

    name: str
    """Name of its token."""
    rights: frozenset[str]
    digest: bytes | None
    """Digest of its token; None where the server asks for none."""
    ends_at: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    """What every form of its pages carries, and no other page knows."""
    notices: list[tuple[str, str]] = field(default_factory=list)
    """Kind (`done`, `failed`) and text of what the next page says once."""

    def tell(self, kind: str, text: str) -> None:
        """Have the next page say something; `kind` is `done` or `failed`."""
        self.notices = [*self.notices, (kind, text)][-MOST_NOTICES:]

    def may(self, right: str) -> bool:
        """Return whether it may do something; who manages may do everything."""
        return right in self.rights or "manage" in self.rights


class Sessions:
    """The sessions of one server.

    Args:
        grants: the tokens that are known now; None lets everybody in.
        time: clock, for tests.
    """

    def __init__(self, grants: Grants | None, time: Callable[[], float] = monotonic) -> None:
        self._grants = grants
        self._time = time
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._ended: dict[bytes, str] = {}
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    @property
    def asks_for_token(self) -> bool:
        """Whether a sign-in needs one."""
        return self._grants is not None

    def open(self, token: str, address: str) -> str:
        """Return the id of a new session, for the cookie.

        Args:
            address: address whose failures are counted.

        Raises:
            Unauthorized: nobody knows the token.
            Forbidden: it has not the right.
            TooManyAttempts: it is one more wrong token from the address.
        """
        name, rights, digest = "anybody", frozenset({"manage"}), None
        if self._grants is not None:
            grant = self._check(self._grants(), token, address)
            name, rights, digest = grant.name, grant.rights, grant.digest
        id = secrets.token_urlsafe(32)
        while len(self._sessions) >= MOST_SESSIONS:
            self._sessions.popitem(last=False)
        ends_at = self._time() + AGE_S
        self._sessions[digest_of(id.encode())] = Session(name, rights, digest, ends_at)
        return id

    def _check(self, grants: Sequence[Grant], token: str, address: str) -> Grant:
        grant, now = find_grant(grants, token.encode()), self._time()
        if grant is not None and not grant.rights.isdisjoint(SIGNS_IN):
            self._failures.pop(address, None)
            return grant
        failures = [at for at in self._failures.get(address, ()) if now - at < FAILURES_S]
        if len(failures) >= MOST_FAILURES:
            raise TooManyAttempts(int(FAILURES_S - (now - failures[0])) + 1)
        while len(self._failures) >= MOST_ADDRESSES:
            self._failures.popitem(last=False)
        self._failures[address] = [*failures, now]
        if grant is not None:
            raise Forbidden(
                f"the token {grant.name!r} may {', '.join(sorted(grant.rights))}; the console "
                f"needs one that may {' or '.join(SIGNS_IN)}"
            )
        raise Unauthorized(
            "this server does not know that token; `modelyard serve token` prints the one of this "
            "start, `modelyard token new NAME --rights view` makes one that only shows"
        )

    def find(self, id: str) -> Session | None:
        """Return the session of a cookie; None once it, or its token, has ended."""
        key = digest_of(id.encode())
        if (session := self._sessions.get(key)) is None:
            return None
        grants = self._grants() if self._grants is not None else ()
        is_known = session.digest is None or any(
            grant.digest == session.digest and grant.rights == session.rights for grant in grants
        )
        if not is_known or self._time() >= session.ends_at:
            del self._sessions[key]
            self._ended = {**self._ended, key: REVOKED if not is_known else OVER}
            while len(self._ended) > MOST_SESSIONS:
                del self._ended[next(iter(self._ended))]
            return None
        self._sessions.move_to_end(key)
        return session

    def why_ended(self, id: str) -> str:
        """Return why the session of a cookie has ended, for whoever had it."""
        return self._ended.get(digest_of(id.encode()), UNKNOWN) if id else ""

    def close(self, id: str) -> None:
        """Sign out."""
        self._sessions.pop(digest_of(id.encode()), None)
