"""Bearer tokens: made at the start, kept in a file for their owner, checked before any route."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from modelyard.serve.control.state import write_json
from modelyard.serve.errors import StartError, Unauthorized

APIS = ("management", "inference")


def make_keys(file: Path) -> dict[str, str]:
    """Write a new key per API (256 random bits) to `file`, mode 0600, and return them."""
    keys = {api: secrets.token_urlsafe(32) for api in APIS}
    write_json(file, keys)
    return keys


def read_key(file: Path, api: str) -> str:
    """Return the key of one API from the key file.

    Raises:
        StartError: there is no such file or key, or it belongs to somebody else.
    """
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))[api])
    except (OSError, ValueError, KeyError) as error:
        raise StartError(
            f"no {api} key in {file} ({type(error).__name__}); a server writes it when it starts"
        ) from error


class TokenCheck:
    """Refuses requests without the right token.

    Args:
        key: the token, or None to let everybody in.
        open_paths: paths that need none.
    """

    def __init__(self, key: str | None, open_paths: Iterable[str] = ()) -> None:
        self._expected = key.encode() if key is not None else None
        self._open_paths = frozenset(open_paths)

    def __call__(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise Unauthorized unless the request may pass."""
        if self._expected is None or path in self._open_paths:
            return
        for name, value in headers:
            scheme, _, token = value.partition(b" ")
            if (
                name == b"authorization"
                and scheme.lower() == b"bearer"
                and secrets.compare_digest(token.lstrip(b" "), self._expected)
            ):
                return
        raise Unauthorized(
            "this API needs the header `Authorization: Bearer TOKEN` with its current token; "
            "`modelyard serve token` prints it"
        )
