"""What a location that is fetched may be: read strictly, and compared with what is allowed.

What is compared with the settings is the parsed URL in its normal form, and it is what is fetched:
there is no second reading of the text. A host's name is resolved once, and all its addresses are
vetted.
"""

import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, unquote, urlsplit

from modelyard.serve.errors import FetchFailed, UrlRefused

STORES = ("s3", "gs", "az")
"""Object stores: the host is a bucket, which the environment's credentials open."""
PORTS = {"http": 80, "https": 443, "oci": 443, **dict.fromkeys(STORES, 0)}
SCHEMES = (*PORTS, "file")
ANYWHERE = "https?://.*"
"""What a URL of the operator may lead to; only public addresses, and the digest says what comes."""
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_DIGEST = re.compile("sha256=([0-9a-f]{64})")
_SAFE = "/:@!$&'()*+,;=~-._"


@dataclass(frozen=True)
class Url:
    """A URL in its normal form."""

    scheme: str
    host: str
    """Lower case, ASCII; an IPv6 address in brackets; a bucket; empty for a file."""
    port: int
    path: str
    """Decoded; absolute, without `.` and `..`."""
    query: str

    @property
    def target(self) -> str:
        """Path and query, encoded, as a request line has them."""
        return quote(self.path, safe=_SAFE) + (f"?{self.query}" if self.query else "")

    @property
    def origin(self) -> str:
        """Scheme, host and port, without a port that is usual."""
        port = "" if self.port == PORTS.get(self.scheme, 0) else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"

    def __str__(self) -> str:
        """Return the text that the settings' patterns are compared with."""
        return self.origin + (self.path if self.scheme == "file" else self.target)


class UrlRules:
    """Which URLs may be fetched.

    Args:
        patterns: regular expressions; one must match a URL's normal form whole, in any case.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    @classmethod
    def around(cls, url: Url) -> Self:
        """Allow the host of a URL that the operator wrote, and what it redirects to in public."""
        origins = {
            url.origin,
            re.sub("^oci", "https", url.origin),
            re.sub("^oci", "http", url.origin),
        }
        return cls([*(f"{re.escape(origin)}/.*" for origin in origins), ANYWHERE])

    def check(self, url: Url) -> list[str]:
        """Return the addresses that may be connected to; a file and a bucket have none.

        An address that only this machine or its network reaches, and a bucket or registry, for
        which there are credentials, are refused, unless a pattern that matches names the host
        letter by letter.

        Raises:
            UrlRefused: the URL or one of its host's addresses is not allowed.
        """
        text, matching = str(url), self.matching(url)
        if url.scheme == "file":
            return []
        is_named = any(_names(pattern.pattern, url) for pattern in matching)
        if url.scheme not in ("http", "https") and not is_named:
            raise UrlRefused(text, f"no pattern of allowed_urls names {url.origin} itself")
        addresses = [] if url.scheme in STORES else _resolve(url)
        for address in addresses:
            if not is_named and not _is_public(address):
                raise UrlRefused(
                    text,
                    f"its host is {address}, which is not public; only a pattern of allowed_urls "
                    "that names the host itself allows that",
                )
        return addresses

    def matching(self, url: Url) -> list[re.Pattern[str]]:
        """Return the patterns that a URL matches, before anything is asked about its host.

        Raises:
            UrlRefused: there is none.
        """
        text = str(url)
        if not (found := [pattern for pattern in self._patterns if pattern.fullmatch(text)]):
            raise UrlRefused(text, "no pattern of allowed_urls matches it")
        return found


def is_url(location: str) -> bool:
    """Return whether a location is to be fetched."""
    scheme, separator, _ = location.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


def split_digest(location: str) -> tuple[str, str | None]:
    """Split `LOCATION[#sha256=DIGEST]`.

    Raises:
        UrlRefused: what is behind the location is not a digest.
    """
    rest, separator, text = location.partition("#")
    digest = _DIGEST.fullmatch(text)
    if separator and digest is None:
        raise UrlRefused(
            location,
            "expected #sha256= and 64 hexadecimal digits behind it, the digest that "
            "`modelyard verify` shows",
        )
    return rest, digest[1] if digest else None


def parse_url(text: str) -> Url:
    """Read a URL, strictly: whatever two programs could read differently is refused.

    Raises:
        UrlRefused: the message says what is wrong.
    """
    if not text.isascii() or not text.isprintable() or set(text) & set(' \\"<>^`{|}#'):
        raise UrlRefused(text, "it holds a fragment, or a character that is to be written as %XX")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UrlRefused(text, str(error)) from error
    scheme, path = parts.scheme.lower(), unquote(parts.path)
    if scheme not in SCHEMES:
        raise UrlRefused(text, f"expected one of {', '.join(SCHEMES)}")
    if not path.isprintable() or "\\" in path or "%" in path:
        raise UrlRefused(text, "its path can be read in more than one way")
    if not path.startswith("/") or {".", ".."} & set(path.split("/")):
        raise UrlRefused(text, "its path is not absolute")
    if scheme == "file":
        if parts.netloc or parts.query:
            raise UrlRefused(text, "expected file:///path")
        return Url("file", "", 0, path, "")
    if (scheme in (*STORES, "oci") and parts.query) or (scheme in STORES and port is not None):
        raise UrlRefused(
            text, f"expected {scheme}://{'HOST' if scheme == 'oci' else 'BUCKET'}/PATH"
        )
    host = parts.netloc.lower()
    host = host[: -len(f":{port}")] if port is not None else host
    if not _HOST.fullmatch(host):
        seen = host.rpartition("@")[2]
        raise UrlRefused(text, f"expected a host name or address, without a user, got {seen!r}")
    return Url(scheme, host, port if port is not None else PORTS[scheme], path, parts.query)


def _resolve(url: Url) -> list[str]:
    try:
        resolved = socket.getaddrinfo(url.host.strip("[]"), url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise FetchFailed(str(url), f"its host is unknown: {error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in resolved))


def _is_public(address: str) -> bool:
    """Return whether an address, and any that it carries inside, belongs to the public network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return all(each.is_global and not each.is_multicast for each in (ip, *_inner(ip)))


def _inner(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> Iterator[ipaddress.IPv4Address]:
    if isinstance(ip, ipaddress.IPv6Address):
        carried = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in ipaddress.IPv6Network("64:ff9b::/96"):  # translated to IPv4 by the network
            carried.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        yield from (each for each in carried if each is not None)


def _names(pattern: str, url: Url) -> bool:
    """Return whether a pattern begins with this host, letter by letter."""
    plain = pattern.replace("\\", "").lower()
    start = re.match(r"\^?(?:http\(s\)\?|https\?|[a-z0-9]+)://", plain)
    if start is None:
        return False
    rest = plain[start.end() :]
    return rest.startswith(url.host) and rest[len(url.host) : len(url.host) + 1] in ("", ":", "/")
