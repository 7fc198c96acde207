"""Bearer tokens, checked before any route."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from modelyard.serve.errors import Unauthorized


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
