"""TorchServe's tokens: three keys in a file, two of which expire and can be replaced."""

import re
import secrets
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from modelyard.serve.control.state import write_json
from modelyard.serve.errors import StartError, Unauthorized
from modelyard.serve.http.connection import Headers
from modelyard.serve.http.tokens import Grant, make_grant, why_checked

KEY_FILE = "key_file.json"
EXPIRING = ("management", "inference")
"""Keys that open one API each and expire; the third, `API`, only replaces them."""
BEARER = re.compile(rb"Bearer\s+(\S+)\s*")


Token = tuple[str, float]
"""A key and the time of its end, in seconds since 1970 by the wall clock; inf: never."""


class Tokens:
    """The keys of a running server. Each start writes new ones, readable by their owner only.

    Args:
        folder: where key_file.json goes.
        minutes: how long a key is taken.

    Raises:
        StartError: the file cannot be written.
    """

    def __init__(self, folder: Path, minutes: float) -> None:
        self._file = folder / KEY_FILE
        self._life_s = minutes * 60
        self._tokens: dict[str, Token] = {name: self._new() for name in EXPIRING}
        self._tokens["API"] = secrets.token_urlsafe(32), inf
        try:
            self._write()
        except OSError as error:
            raise StartError(f"cannot write {self._file}: {error.strerror}") from error

    def check(
        self, name: str, open_paths: Iterable[str] = (), is_needed: bool = True
    ) -> Callable[[str, Headers], None]:
        """Return the check that an API makes before it looks at a request.

        Args:
            name: name of the key that opens the API.
            open_paths: paths that need none.
            is_needed: False lets requests of this machine in that show none.
        """
        is_open = frozenset((*open_paths, "", "/api-description"))  # these describe the API

        def check(path: str, headers: Headers) -> None:
            if path in is_open or path.rstrip("/") in is_open:
                return
            if is_needed or why_checked(headers):
                self._require(name, headers, "Authorization")

        return check

    def grants(self) -> list[Grant]:
        """Return what the management key may do while it lasts, for the console."""
        key, end = self._tokens["management"]
        return [] if time.time() >= end else [make_grant("management", "manage", key)]

    def replace(self, kind: str, headers: Headers) -> None:
        """Make a new key of a kind, which ends the old one; for who has the `API` key.

        Raises:
            Unauthorized: the key or the kind is another one.
        """
        self._require("API", headers, "Authentication")
        name = kind.lower()
        if name not in EXPIRING:
            raise _refusal("Authentication")
        before, self._tokens[name] = self._tokens[name], self._new()
        try:
            self._write()
        except OSError:
            self._tokens[name] = before  # nobody could read the new one
            raise

    def _require(self, name: str, headers: Headers, purpose: str) -> None:
        key, end = self._tokens[name]
        authorization = next(
            (value for header, value in headers if header == b"authorization"), b""
        )
        match = BEARER.fullmatch(authorization)
        is_right = match is not None and secrets.compare_digest(match[1], key.encode())
        if not (is_right and time.time() < end):
            raise _refusal(purpose)

    def _new(self) -> Token:
        return secrets.token_urlsafe(32), time.time() + self._life_s

    def _write(self) -> None:
        content = {name: {"key": key} for name, (key, _) in self._tokens.items()}
        for name in EXPIRING:
            end = datetime.fromtimestamp(self._tokens[name][1], UTC)
            content[name]["expiration time"] = end.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        write_json(self._file, content)


def _refusal(purpose: str) -> Unauthorized:
    return Unauthorized(
        f"Token {purpose} failed. Token either incorrect, expired, or not provided correctly"
    )
