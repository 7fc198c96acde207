"""One request for a page, and how a page is declared.

A page says which right it needs and how large a body it reads. `Console` checks both before the
body is read, so that no page can forget it.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from time import monotonic
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

from modelyard.serve.dataplane.form import MAX_CONTENT_TYPE, read_parts
from modelyard.serve.errors import BadRequest, Forbidden, TooManyAttempts, Unauthorized
from modelyard.serve.http.connection import Answer, Headers
from modelyard.serve.http.tokens import Grant, Grants, digest_of, find_grant

FORM_BYTES = 16384
"""Longest body of a page's form, unless the page says otherwise."""
HTML: Headers = [(b"content-type", b"text/html; charset=utf-8")]
MOST_FIELDS = 100
"""Most fields of one form."""


class Upload(NamedTuple):
    """A file of a form."""

    name: str
    """Name as the browser says; show it, and open nothing by it."""
    content: bytes


@dataclass
class Visit:
    """One request, once its session and its right are checked and its body is there."""

    method: str
    path: str
    """Decoded, from `/console` on."""
    places: Mapping[str, str]
    """What stands in the path where the page's pattern has a name in braces."""
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    id: str
    """Id of the request, for the log."""
    session: Session | None
    """None on pages that are open to all."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Fields of the form that was sent."""
    files: Mapping[str, Upload] = field(default_factory=dict)
    is_tls: bool = False
    address: str = ""
    """Address of the client."""
    cookie: str = ""
    """The session's id."""
    render: Callable[[str, Mapping[str, object]], str] = lambda template, values: ""
    """Makes text of a template."""

    @property
    def root(self) -> str:
        """The way from this page to `/console`: a proxy may have put a prefix before it."""
        depth = self.path.count("/") - 1
        return "/".join([".."] * (depth - 1)) or "." if depth else "console"

    def may(self, right: str) -> bool:
        """Return whether who looks may do something."""
        return self.session is not None and self.session.may(right)

    def is_partial(self) -> bool:
        """Return whether a script of the page asks, and only for a part of it."""
        return b"hx-request" in self.headers

    @property
    def home(self) -> str:
        """The way from this page to the console's first."""
        return f"{self.root}/../console" if self.root != "console" else self.root

    def page(
        self, template: str, values: Mapping[str, object] | None = None, status: int = 200
    ) -> Answer:
        """Return a whole page; what was to be said once is said on it."""
        session, notices = self.session, []
        if session is not None:
            notices, session.notices = session.notices, []
        common = {"visit": self, "root": self.root, "session": session, "notices": notices}
        return self.part(template, {**common, "status": status, **(values or {})}, status)

    def part(self, template: str, values: Mapping[str, object], status: int = 200) -> Answer:
        """Return a part of a page."""
        return status, list(HTML), self.render(template, values).encode()

    def done(self, text: str, to: str) -> Answer:
        """Return an answer that leads to another page, which says once what was done."""
        assert self.session is not None
        self.session.tell("done", text)
        return self.redirect(to)

    def redirect(self, to: str, *more: tuple[bytes, bytes]) -> Answer:
        """Return an answer that leads to another page of the console, such as `/log`."""
        place = f"{self.root}{to}" if to else self.home
        return 303, [(b"location", place.encode("ascii")), *more], b""


@dataclass(frozen=True)
class Page:
    """What answers one method of one path."""

    method: str
    """GET or POST."""
    path: str
    """Behind `/console`; a part in braces is a name, as in `/models/{model}/{version}`."""
    right: str | None
    """Right that a session needs; None where nobody must have signed in."""
    answer: Callable[[Visit], Awaitable[Answer]]
    body_bytes: int = FORM_BYTES

    def match(self, path: str) -> dict[str, str] | None:
        """Return the names in what is behind `/console`; None where it is another page's."""
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]*)", self.path)
        found = re.fullmatch(pattern, path)
        return found and {name: unquote(each) for name, each in found.groupdict().items()}


def read_query(query: bytes) -> dict[str, str]:
    """Return parameters; the last of a name counts.

    Raises:
        BadRequest: there are too many.
    """
    try:
        found = parse_qs(query.decode("utf-8", "replace"), True, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise BadRequest(f"more than {MOST_FIELDS} parameters") from error
    return {name: values[-1] for name, values in found.items()}


def read_form(body: bytes, kind: bytes) -> tuple[dict[str, str], dict[str, Upload]]:
    """Return fields and files of a form.

    Args:
        body: body as the browser sent it; the file contents are copies.
        kind: the Content-Type.

    Raises:
        BadRequest: it is neither kind of form, or not a whole one.
    """
    media = kind.partition(b";")[0].strip().lower()
    if media == b"application/x-www-form-urlencoded":
        return read_query(body), {}
    if media != b"multipart/form-data":
        shown = ascii(kind[:80].decode("latin-1"))
        raise BadRequest(f"Content-Type is {shown}; expected a form of a page of the console")
    try:
        parts = read_parts(kind.decode("latin-1"), body)
    except ValueError as error:
        raise BadRequest(f"the form is malformed: {error}") from error
    if len(parts) > MOST_FIELDS:
        raise BadRequest(f"more than {MOST_FIELDS} fields")
    fields: dict[str, str] = {}
    files: dict[str, Upload] = {}
    for head, content in parts:
        said = _parameters(head)
        if (file := said.get("filename")) is None:
            fields[said.get("name", "")] = content.decode("utf-8", "replace")
        else:
            files[said.get("name", "")] = Upload(file, bytes(content))
    return fields, files


def _parameters(head: Message) -> dict[str, str]:
    """Return what a part says of itself; browsers write it in UTF-8."""
    if len(head.get("content-disposition", "")) > MAX_CONTENT_TYPE:
        raise BadRequest(f"the form names a field in more than {MAX_CONTENT_TYPE} characters")
    found = head.get_params([], "content-disposition")
    return {
        name: value.encode("latin-1").decode("utf-8", "replace")
        for name, value in found
        if isinstance(value, str)
    }


# -- who is signed in ------------------------------------------------------------------------------


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
    """The sessions of one server: a token once, then a random cookie that only this process knows.

    The cookie is worth its token while it lasts, so it is kept as a hash, ends with its token, and
    is told to nobody but the browser that has it.

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
