"""URL → archive in the model store, when the settings allow that URL.

What is compared with the settings is the parsed URL in its normal form, and it is what is fetched:
there is no second reading of the text. Every redirect is vetted as the first URL was. A host's name
is resolved once; all its addresses are vetted, and the connection goes to one of them. Proxies of
the environment are not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import logging
import os
import re
import secrets
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import quote, unquote, urljoin, urlsplit

from modelyard.archiver import ArchiveError, open_archive
from modelyard.archiver.errors import RefusedArchive
from modelyard.archiver.untrusted.names import file_name_problem
from modelyard.serve.errors import FetchFailed, FileExists, UrlRefused

logger = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}
SCHEMES = (*PORTS, "file")
STAGING = ".fetching-"
"""Folders in the store that hold what is being fetched; hidden, so never served."""
CHUNK_BYTES = 1 << 20
REDIRECTS = (301, 302, 303, 307, 308)
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\]")
_SAFE = "/:@!$&'()*+,;=~-._"


@dataclass(frozen=True)
class Limits:
    """What one fetch may cost."""

    size_bytes: int = 32 << 30
    total_s: float = 3600
    silence_s: float = 30
    """Longest time without a byte."""
    bytes_per_s: int = 10_000
    """Least speed on average, after `silence_s`; a slower fetch is given up."""
    hops: int = 5
    """Redirects that are followed."""


@dataclass(frozen=True)
class Url:
    """A URL in its normal form."""

    scheme: str
    host: str
    """Lower case, ASCII; an IPv6 address in brackets; empty for a file."""
    port: int
    path: str
    """Decoded; absolute, without `.` and `..`."""
    query: str

    @property
    def target(self) -> str:
        """Path and query, encoded, as a request line has them."""
        return quote(self.path, safe=_SAFE) + (f"?{self.query}" if self.query else "")

    def __str__(self) -> str:
        """Return the text that the settings' patterns are compared with."""
        if self.scheme == "file":
            return f"file://{self.path}"
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.target}"


class UrlRules:
    """Which URLs may be fetched.

    Args:
        patterns: regular expressions; one must match a URL's normal form whole, in any case.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern, re.IGNORECASE) for pattern in patterns]

    def check(self, url: Url) -> list[str]:
        """Return the addresses that may be connected to; a file has none.

        An address that only this machine or its network reaches is refused, unless a pattern that
        matches names the host letter by letter.

        Raises:
            UrlRefused: the URL or one of its host's addresses is not allowed.
        """
        text, matching = str(url), self.matching(url)
        if url.scheme == "file":
            return []
        addresses = _resolve(url)
        if any(_names(pattern.pattern, url) for pattern in matching):
            return addresses
        for address in addresses:
            if not _is_public(address):
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
    host = parts.netloc.lower()
    host = host[: -len(f":{port}")] if port is not None else host
    if not _HOST.fullmatch(host):
        raise UrlRefused(text, f"expected a host name or address, got {host!r}")
    return Url(scheme, host, port if port is not None else PORTS[scheme], path, parts.query)


def fetch_archive(
    location: str,
    store: Path,
    rules: UrlRules,
    limits: Limits | None = None,
    name: str | None = None,
    digest: str | None = None,
) -> Path:
    """Fetch an archive into the store, and return its path.

    It is checked as an archive before it gets its name there; when anything fails the store is
    left as it was. Blocking.

    Args:
        name: name of its file there; None takes the URL's last part.
        digest: digest that the archive must have.

    Raises:
        UrlRefused, FetchFailed, FileExists, ArchiveError.
    """
    url = parse_url(location)
    rules.check(url)
    if name is None:
        name = url.path.rpartition("/")[2]
    if name.startswith(".") or file_name_problem(name):
        raise UrlRefused(location, "its last part is not a name for a file")
    target = store / name
    if target.exists():
        raise FileExists(name)
    staging = store / f"{STAGING}{secrets.token_hex(8)}"
    try:
        staging.mkdir(mode=0o700)
        file = staging / name
        with file.open("xb") as out:
            _write(url, out, rules, limits or Limits())
            os.fsync(out.fileno())
        with open_archive(file, needs_manifest=False) as archive:
            if digest not in (None, archive.digest):
                raise RefusedArchive(f"its digest is {archive.digest}, expected {digest}")
        os.link(file, target)  # unlike a renamed file it never replaces one
    except FileExistsError as error:
        raise FileExists(name) from error
    except (OSError, http.client.HTTPException, _FetchAborted) as error:
        logger.error("%s cannot be fetched: %s: %s", location, type(error).__name__, error)
        raise FetchFailed(location, str(error)) from error
    except ArchiveError as error:
        logger.error("%s was fetched and is refused: %s", location, error)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    logger.info("%s fetched, %d bytes", location, target.stat().st_size)
    return target


def clear_leftovers(store: Path) -> None:
    """Remove what a server that was killed had fetched half."""
    for folder in store.glob(f"{STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


class _FetchAborted(Exception):
    """The fetch costs more than it may, or the other side does not keep to HTTP."""


def _write(url: Url, out: IO[bytes], rules: UrlRules, limits: Limits) -> None:
    if url.scheme == "file":
        _copy_file(url, out, rules, limits)
        return
    began = time.monotonic()
    for _ in range(limits.hops + 1):
        addresses = rules.check(url)
        with contextlib.closing(_connect(url, addresses, limits.silence_s)) as connection:
            connection.request("GET", url.target, headers={"Accept-Encoding": "identity"})
            connection.auto_open = 0  # it would look the host up again
            with _bounded(connection.sock, limits.silence_s):
                response = connection.getresponse()
            if response.status in REDIRECTS:
                url = _follow(url, response.headers.get("location", ""))
                continue
            if response.status != 200:
                raise _FetchAborted(f"status {response.status}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise _FetchAborted("an encoding that was not requested")
            expected = response.length
            if expected is not None and expected > limits.size_bytes:
                raise _FetchAborted(f"{expected} bytes; {limits.size_bytes} are allowed")
            size = 0
            while chunk := response.read1(CHUNK_BYTES):
                size += len(chunk)
                _check_cost(size, time.monotonic() - began, limits)
                out.write(chunk)
            if expected is not None and size != expected:
                raise _FetchAborted(f"it ended after {size} of {expected} bytes")
            out.flush()
            return
    raise _FetchAborted(f"more than {limits.hops} redirects")


def _copy_file(url: Url, out: IO[bytes], rules: UrlRules, limits: Limits) -> None:
    """Copy a file, whose path without links must be allowed too."""
    real = Path(url.path).resolve(strict=True)
    rules.check(Url("file", "", 0, str(PurePosixPath(real)), ""))
    fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as source:
        if not real.is_file():
            raise _FetchAborted("it is not a file")
        size = 0
        while chunk := source.read(CHUNK_BYTES):
            size += len(chunk)
            _check_cost(size, 0, limits)
            out.write(chunk)
    out.flush()


@contextlib.contextmanager
def _bounded(connection: socket.socket, seconds: float) -> Iterator[None]:
    """End a connection that has not done with a block in time, however busy it keeps us."""
    timer = threading.Timer(seconds, connection.shutdown, [socket.SHUT_RDWR])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_cost(size: int, seconds: float, limits: Limits) -> None:
    if size > limits.size_bytes:
        raise _FetchAborted(f"more than {limits.size_bytes} bytes")
    is_slow = seconds > limits.silence_s and size < limits.bytes_per_s * seconds
    if is_slow or seconds > limits.total_s:
        raise _FetchAborted(f"too slow: {size} bytes in {seconds:.0f} s")


def _follow(url: Url, location: str) -> Url:
    try:
        following = parse_url(urljoin(str(url), location))
    except ValueError as error:
        raise UrlRefused(location, f"a redirection to it: {error}") from error
    if following.scheme == "file":
        raise UrlRefused(location, f"{url} redirects to a file of this machine")
    return following


def _connect(url: Url, addresses: list[str], timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to the first address that answers, under the host's own name."""
    host = f"{url.host}:{url.port}"
    connection = http.client.HTTPConnection(host, timeout=timeout_s)
    connected = _first(addresses, url.port, timeout_s)
    if url.scheme == "https":
        context = ssl.create_default_context()
        connected = context.wrap_socket(connected, server_hostname=url.host.strip("[]"))
    connection.sock = connected
    return connection


def _first(addresses: Sequence[str], port: int, timeout_s: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout_s)
        except OSError as error:
            failure = error
    raise failure


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
    start = re.match(r"\^?(?:https?|http\(s\)\?|https\?)://", plain)
    if start is None:
        return False
    rest = plain[start.end() :]
    return rest.startswith(url.host) and rest[len(url.host) : len(url.host) + 1] in ("", ":", "/")
