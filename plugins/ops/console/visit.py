"""One request for a page, and how a page is declared.

A page says which right it needs and how large a body it reads. `Console` checks both before the
body is read, so that no page can forget it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, unquote

from python_multipart import FormParser
from python_multipart.multipart import Field, File, parse_options_header

from modelyard.plugins.ops.console.sessions import Session
from modelyard.serve.errors import BadRequest
from modelyard.serve.http.connection import Answer

FORM_BYTES = 16384
"""Longest body of a page's form, unless the page says otherwise."""
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
    media, options = parse_options_header(kind)
    if media == b"application/x-www-form-urlencoded":
        return read_query(body), {}
    if media != b"multipart/form-data" or "boundary" not in {str(o, "latin-1") for o in options}:
        shown = ascii(kind[:80].decode("latin-1"))
        raise BadRequest(f"Content-Type is {shown}; expected a form of a page of the console")
    fields: dict[str, str] = {}
    files: dict[str, Upload] = {}
    ended = False

    def take(found: Field | File) -> None:
        if len(fields) + len(files) >= MOST_FIELDS:
            raise BadRequest(f"more than {MOST_FIELDS} fields")
        name = (found.field_name or b"").decode("utf-8", "replace")
        if isinstance(found, Field):
            fields[name] = (found.value or b"").decode("utf-8", "replace")
            return
        found.file_object.seek(0)
        shown = (found.file_name or b"").decode("utf-8", "replace")
        files[name] = Upload(shown, found.file_object.read())

    def end() -> None:
        nonlocal ended
        ended = True

    try:
        parser = FormParser(
            "multipart/form-data",
            take,
            take,
            end,
            boundary=options[b"boundary"],
            config={"MAX_MEMORY_FILE_SIZE": len(body) + 1, "UPLOAD_DIR": None},
        )
        parser.write(body)
        parser.finalize()
    except BadRequest:
        raise
    except Exception as error:
        raise BadRequest(f"the form is malformed: {error}") from error
    if not ended:
        raise BadRequest("the form is not whole: its last line is missing")
    return fields, files
