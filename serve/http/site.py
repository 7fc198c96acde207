"""Names that this server is called by, and which web pages may call it.

A browser sends to any address what a page asks it to. So a page of anywhere can post to a server on
its reader's own machine, and read the answers too when it has its own name resolve to that machine
(DNS rebinding). What the browser says of the page stands in three headers that no page can set:
Host, Origin and Sec-Fetch-Site. Programs send the first of them only.
"""

import ipaddress
import re
from collections.abc import Collection, Mapping

from modelyard.serve.errors import Forbidden
from modelyard.serve.front.begin import Headers
from modelyard.serve.settings import Address

ANY = "*"
PROBE = "/ping"
"""Says that the server is there, which a page sees in any case."""
KNOWN = 64
"""Values of Host that are kept once they have passed: clients of a server send few."""
SHOWN = 200

Fields = Mapping[bytes, bytes]
"""The headers of a request, names in lower case."""


class SiteCheck:
    """Refuses requests by a foreign name, and those of foreign web pages.

    A server on loopback has the names of loopback. One that others reach has any name, unless its
    hosts are named: then it has those, and its addresses, which probes call it by.

    Args:
        address: where requests come in.
        allowed_hosts: further names of this server; their pages may call it. ANY allows all.
        allowed_origins: pages of elsewhere, as CORS writes them. ANY allows all.
    """

    def __init__(
        self,
        address: Address,
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
    ) -> None:
        self._allowed_hosts = frozenset(allowed_hosts)
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)
        self._names = self._allowed_hosts | {address.host.lower()}
        self._is_loopback = address.is_loopback
        self._checks_host = (
            address.path is None
            and ANY not in self._allowed_hosts
            and (address.is_loopback or bool(self._allowed_hosts))
        )
        self._passes_all = ANY in self._allowed_hosts or ANY in self._allowed_origins
        self.known: set[bytes | None] = set()
        """Values of Host that have passed; a request with one of them and without the other two
        headers need not be checked."""

    def __call__(self, method: str, fields: Fields, path: str = "") -> None:
        """Check a request; any page may ask for `PROBE`.

        Raises:
            Forbidden: it is refused.
        """
        host = fields.get(b"host", b"")
        if host not in self.known:
            self._check_host(host)
        is_probe = path == PROBE and method in ("GET", "HEAD")
        if (b"origin" in fields or b"sec-fetch-site" in fields) and not is_probe:
            self._check_page(method, fields, host)

    def _check_host(self, host: bytes) -> None:
        name = _name(host)
        is_ours = (
            not self._checks_host or not name or name in self._names or self._is_own_address(name)
        )
        if not is_ours and not name.endswith(".localhost") and name != "localhost":
            raise Forbidden(
                f"this server is not called {_shown(host)}; it answers to localhost, to its own "
                "address, and to the names in the setting allowed_hosts"
            )
        if len(self.known) < KNOWN:
            self.known.add(host)

    def _is_own_address(self, name: str) -> bool:
        """Return whether this is an address, which no page can have resolve to another one.

        On loopback only its own: there are others, such as 0.0.0.0, that lead to it as well.
        """
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self._is_loopback

    def _check_page(self, method: str, fields: Fields, host: bytes) -> None:
        site = fields.get(b"sec-fetch-site")
        if self._passes_all or site in (b"same-origin", b"none"):
            return  # a page of ours, also behind a proxy that changes Host; or no page
        origin = fields.get(b"origin")
        if origin is None:
            if site != b"cross-site" or _is_link(method, fields):
                return
            origin = fields.get(b"referer", b"elsewhere")
        else:
            place = origin.partition(b"://")[2]
            is_ours = place.lower() == host.lower() or _name(place) in self._allowed_hosts
            if (is_ours and place) or origin.decode("latin-1").lower() in self._allowed_origins:
                return
        raise Forbidden(
            f"a web page of {_shown(origin)} may not call this server; the setting "
            "allowed_origins, or allowed_hosts, names the pages that may"
        )


def _is_link(method: str, fields: Fields) -> bool:
    """Return whether a reader followed a link to here: the page that had it sees no answer."""
    is_page = fields.get(b"sec-fetch-dest") == b"document"
    return method == "GET" and is_page and fields.get(b"sec-fetch-mode") == b"navigate"


def _name(host: bytes) -> str:
    """Return a host without its port."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


def _shown(value: bytes) -> str:
    return ascii(value[:SHOWN].decode("latin-1"))


# -- pages of elsewhere: https://fetch.spec.whatwg.org ------------------------------------------

METHODS = b"GET, HEAD, POST, PUT, DELETE"
MAX_AGE_S = 600
EXPOSED = (
    b"x-request-id, x-model-version, x-cache, etag, retry-after, inference-header-content-length"
)
"""What a page may read of an answer's headers, beside those that it may always read."""
_NAMES = re.compile(rb"[A-Za-z0-9-]+(?:[ ,]+[A-Za-z0-9-]+)*")


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
