"""The way of every request for a page: its session, its origin, its right, then its body."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Iterable, Mapping, Sequence

from modelyard.archiver import ArchiveError
from modelyard.plugins.ops.console.render import Renderer
from modelyard.plugins.ops.console.visit import (
    AGE_S,
    SLOW_S,
    Page,
    Sessions,
    Visit,
    read_form,
    read_query,
)
from modelyard.serve import errors
from modelyard.serve.dataplane.wire import Buffer
from modelyard.serve.http.application import Answers
from modelyard.serve.http.connection import Answer, Headers, RequestResponseCycle
from modelyard.serve.http.tokens import ACTOR, Grants

logger = logging.getLogger(__name__)

ROOT = "/console"
CSRF = b"x-csrf-token"
"""Header by which a script sends what a form has in its field `csrf`."""


def is_console(path: str) -> bool:
    """Return whether a path is the console's."""
    return path == ROOT or path.startswith(f"{ROOT}/")


class Console:
    """Answers what is under `/console`.

    Args:
        pages: all of them.
        renderer: makes their HTML.
        grants: the tokens that are known now; None asks for none.
        answers: answers of the API whose port it is on.
    """

    def __init__(
        self, pages: Iterable[Page], renderer: Renderer, grants: Grants | None, answers: Answers
    ) -> None:
        self.sessions = Sessions(grants)
        self._renderer = renderer
        self._answers = answers
        own = [
            Page("GET", "/sign-in", None, self._show_sign_in),
            Page("POST", "/sign-in", None, self._sign_in),
            Page("POST", "/sign-out", "view", self._sign_out),
            Page("GET", "/static/{name}", None, self._send_static),
        ]
        self._pages = [*own, *pages]

    def __call__(self, cycle: RequestResponseCycle, id: str) -> None:
        """Check a request, and answer it once its body is there."""
        visit = self._visit(cycle, id)
        try:
            page = self._find(cycle, visit)
            self._admit(page, visit)
            if visit.method == "POST":
                self._admit_body(page, cycle)
        except Exception as error:
            self._send(cycle, visit, self._error(error, visit))
            return
        if visit.method == "POST":
            cycle.read_body(lambda parts: cycle.run(self._run(cycle, page, visit, parts)))
        else:
            cycle.run(self._run(cycle, page, visit, None))

    # -- what every request is checked for -------------------------------------------------------

    def _visit(self, cycle: RequestResponseCycle, id: str) -> Visit:
        headers = dict(cycle.headers)
        client = cycle.connection.client
        is_tls = cycle.connection.endpoints["scheme"] == "https"
        is_tls |= headers.get(b"x-forwarded-proto", b"").lower() == b"https"
        method = "GET" if cycle.method == "HEAD" else cycle.method
        visit = Visit(method, cycle.path, {}, {}, headers, id, None, is_tls=is_tls)
        visit.render = self._renderer.text
        visit.address = client[0] if client else "unix"
        visit.cookie = _cookie(cycle.headers, _cookie_name(headers))
        if visit.cookie:
            visit.session = self.sessions.find(visit.cookie)
        return visit

    def _find(self, cycle: RequestResponseCycle, visit: Visit) -> Page:
        """Return the page of a request, and fill in what its path and query say.

        Raises:
            NoSuchRoute, MethodNotAllowed, BadRequest.
        """
        path = cycle.head.raw_path.decode("latin-1").removeprefix(ROOT)
        found = [(page, names) for page in self._pages if (names := page.match(path)) is not None]
        if not found:
            raise errors.NoSuchRoute
        for page, names in found:
            if page.method == visit.method:
                visit.places, visit.query = names, read_query(cycle.query)
                return page
        raise errors.MethodNotAllowed

    def _admit(self, page: Page, visit: Visit) -> None:
        """Check origin, session and right.

        Raises:
            Forbidden, Unauthorized.
        """
        if visit.method == "POST":
            _check_origin(visit.headers)
        if page.right is None:
            return
        if visit.session is None:
            raise errors.Unauthorized("sign in first: the session is over, or there was none")
        if not visit.session.may(page.right):
            raise errors.Forbidden(
                f"the token {visit.session.name!r} may "
                f"{', '.join(sorted(visit.session.rights))}; this needs one that may {page.right}"
            )

    def _admit_body(self, page: Page, cycle: RequestResponseCycle) -> None:
        """Raise where a body is too long, or does not say how long it is."""
        if cycle.is_chunked:
            raise errors.BadRequest("a form comes with its Content-Length, as browsers send it")
        if cycle.length > page.body_bytes:
            raise errors.BodyTooLarge(page.body_bytes)

    def _check_csrf(self, visit: Visit) -> None:
        """Raise Forbidden unless a page of this session sent the form."""
        sent = visit.headers.get(CSRF, b"") or visit.fields.get("csrf", "").encode()
        if visit.session is not None and not hmac.compare_digest(sent, visit.session.csrf.encode()):
            raise errors.Forbidden(
                "the form is not of a page of this session; load the page again, then repeat it"
            )

    # -- the answer ------------------------------------------------------------------------------

    async def _run(
        self, cycle: RequestResponseCycle, page: Page, visit: Visit, body: Sequence[Buffer] | None
    ) -> None:
        if visit.session is not None:
            ACTOR.set(visit.session.name)
        try:
            await self._renderer.prepare()
            if body is not None:
                kind = visit.headers.get(b"content-type", b"")
                visit.fields, visit.files = read_form(b"".join(body), kind)
                if page.right is not None:
                    self._check_csrf(visit)
            answer = await page.answer(visit)
        except Exception as error:
            answer = self._error(error, visit)
        self._send(cycle, visit, answer)

    def _send(self, cycle: RequestResponseCycle, visit: Visit, answer: Answer) -> None:
        status, headers, body = answer
        self._answers.send(cycle, status, [*self._renderer.headers, *headers], body)

    def _error(self, error: Exception, visit: Visit) -> Answer:
        """Return the page that says what is wrong; who is not signed in is led to where that is."""
        status, _ = errors.http_status(error)
        if not isinstance(error, errors.ServeError | ArchiveError):
            logger.error("request %s", visit.id, exc_info=error, extra={"request_id": visit.id})
            text = f"internal error ({type(error).__name__}); the log has more, request {visit.id}"
        else:
            text = str(error)
        if isinstance(error, errors.Unauthorized) and visit.path != f"{ROOT}/sign-in":
            if visit.is_partial():
                return 401, [(b"hx-refresh", b"true")], b""
            return visit.redirect("/sign-in")
        if visit.is_partial():
            return status, [(b"content-type", b"text/plain; charset=utf-8")], text.encode()
        if visit.path == f"{ROOT}/sign-in" and visit.method == "POST":
            answer = self._sign_in_page(visit, status, text)
            if isinstance(error, errors.TooManyAttempts):
                answer[1].append((b"retry-after", str(error.retry_after_s).encode()))
            return answer
        return visit.page("error.html", {"message": text}, status)

    # -- pages of its own ------------------------------------------------------------------------

    async def _show_sign_in(self, visit: Visit) -> Answer:
        if visit.session is not None:
            return visit.redirect("")
        return self._sign_in_page(visit, 200, self.sessions.why_ended(visit.cookie))

    def _sign_in_page(self, visit: Visit, status: int, message: str) -> Answer:
        values = {"message": message, "asks_for_token": self.sessions.asks_for_token}
        return visit.page("sign_in.html", values, status)

    async def _sign_in(self, visit: Visit) -> Answer:
        try:
            id = self.sessions.open(visit.fields.get("token", "").strip(), visit.address)
        except errors.ServeError as error:
            logger.warning("console: a sign-in from %s is refused: %s", visit.address,
                           type(error).__name__)  # fmt: skip
            if isinstance(error, errors.TooManyAttempts):
                await asyncio.sleep(SLOW_S)
            raise
        if visit.cookie:
            self.sessions.close(visit.cookie)
        session = self.sessions.find(id)
        assert session is not None
        logger.info("console: %s signed in from %s", session.name, visit.address)
        return visit.redirect("", _set_cookie(visit, id, AGE_S))

    async def _sign_out(self, visit: Visit) -> Answer:
        self.sessions.close(visit.cookie)
        return visit.redirect("/sign-in", _set_cookie(visit, "", 0))

    async def _send_static(self, visit: Visit) -> Answer:
        return self._renderer.static(visit.places["name"])


def _check_origin(fields: Mapping[bytes, bytes]) -> None:
    """Raise Forbidden unless what a browser says of the page that posts is that it is ours.

    Pages that the settings let call the APIs may not act here: a cookie is not theirs to use.
    """
    site, origin = fields.get(b"sec-fetch-site"), fields.get(b"origin")
    is_same = site in (None, b"same-origin", b"none")
    if is_same and site is None and origin is not None:
        is_same = origin.partition(b"://")[2].lower() == fields.get(b"host", b"").lower()
    if not is_same:
        raise errors.Forbidden("a page of elsewhere may not act in the console")


def _cookie_name(headers: Mapping[bytes, bytes]) -> str:
    """Return the name of the cookie: browsers keep one jar for all ports of a host."""
    port = headers.get(b"host", b"").rpartition(b":")[2].decode("latin-1")
    return f"modelyard-console-{port}" if port.isdecimal() else "modelyard-console"


def _cookie(headers: Headers, name: str) -> str:
    """Return a cookie's value; empty where there is none."""
    for field, value in headers:
        if field == b"cookie":
            for pair in value.decode("latin-1").split(";"):
                key, _, text = pair.strip().partition("=")
                if key == name:
                    return text
    return ""


def _set_cookie(visit: Visit, value: str, age_s: int) -> tuple[bytes, bytes]:
    """Return the header; without `Path` the cookie goes to /console and what is under it.

    That is the folder of the page that sets it, with whatever a proxy has put in front.
    """
    name = _cookie_name(visit.headers)
    more = "; Secure" if visit.is_tls else ""
    text = f"{name}={value}; HttpOnly; SameSite=Strict; Max-Age={age_s}{more}"
    return b"set-cookie", text.encode("ascii")
