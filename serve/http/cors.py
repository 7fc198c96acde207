"""Web pages of elsewhere that may call, and read the answers: https://fetch.spec.whatwg.org.

Nothing here lets a page use what a browser keeps for its reader, cookies for instance: no answer
says `Access-Control-Allow-Credentials`. A page sends its token in a header that it sets itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from modelyard.serve.http.site import ANY

METHODS = b"GET, HEAD, POST, PUT, DELETE"
MAX_AGE_S = 600
EXPOSED = (
    b"x-request-id, x-model-version, x-cache, etag, retry-after, inference-header-content-length"
)
"""What a page may read of an answer's headers, beside those that it may always read."""
_NAMES = re.compile(rb"[A-Za-z0-9-]+(?:[ ,]+[A-Za-z0-9-]+)*")

Headers = list[tuple[bytes, bytes]]


class Cors:
    """Tells browsers which pages may read an answer.

    Args:
        origins: origins of the pages, in lower case; ANY allows all.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)
        self._is_open = ANY in origins

    def headers(self, headers: Headers) -> Headers:
        """Return what is added to the answer to a request with these headers."""
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None:
            return []
        exposed = (b"access-control-expose-headers", EXPOSED)
        if self._is_open:
            return [(b"access-control-allow-origin", b"*"), exposed]
        if origin.lower() not in self._origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin"), exposed]

    def preflight(self, method: str, headers: Headers) -> Headers | None:
        """Return the answer to a browser that asks before a page's request; None to all others.

        It carries no token, whatever the request that it asks for will carry.
        """
        if method != "OPTIONS" or not self.headers(headers):
            return None
        fields = dict(headers)
        if b"access-control-request-method" not in fields:
            return None
        found = [
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
        names = fields.get(b"access-control-request-headers", b"")
        if _NAMES.fullmatch(names):  # whom we trust may send what it likes
            found.append((b"access-control-allow-headers", names))
        return found
