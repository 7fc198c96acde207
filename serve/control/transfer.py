"""One request for bytes of a file elsewhere: by HTTP, of a registry, of an object store, of a disk.

Every redirect is vetted as the first URL was, and the connection goes to an address that was
vetted. Proxies of the environment are not used for HTTP and registries.
"""

import base64
import binascii
import contextlib
import datetime
import email.utils
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlencode, urljoin

from modelyard.archiver.untrusted.names import file_name_problem
from modelyard.base.extras import what_is_missing
from modelyard.serve.control.urls import STORES, Url, UrlRules, parse_url
from modelyard.serve.errors import UrlRefused, without_secrets

CHUNK_BYTES = 1 << 20
PART_BYTES = 8 << 20
"""Size of one request to an object store; it must come within the longest silence."""
MAX_DOCUMENT_BYTES = 4 << 20
"""Size of a registry's manifest, as registries bound it, or of a token."""
REDIRECTS = (301, 302, 303, 307, 308)
PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may go well."""
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYERS = (
    "application/vnd.modelyard.archive",
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/octet-stream",
)
"""Media types of an archive in a registry; the second is what oras writes where none is named."""
_REFERENCE = re.compile(
    r"/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))",
    re.ASCII,
)
_SHA256 = re.compile("sha256:([0-9a-f]{64})")
_CHALLENGE = re.compile(r'(realm|service|scope)="([^"]*)"')
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")


@dataclass(frozen=True)
class Limits:
    """What one fetch may cost."""

    size_bytes: int = 32 << 30
    total_s: float = 3600
    """Time for all attempts and the pauses between them."""
    silence_s: float = 30
    """Longest time without a byte."""
    bytes_per_s: int = 10_000
    """Least speed on average, after `silence_s`; a slower fetch is given up."""
    hops: int = 5
    """Redirects that are followed."""
    attempts: int = 5
    """Attempts, one after the other, that may bring nothing new."""
    pause_s: float = 0.5
    """Pause after the first of them; it doubles."""


class FetchAborted(Exception):
    """The fetch costs more than it may, or the other side does not keep to its protocol."""


class Interrupted(Exception):
    """An attempt brought less than the whole; another one may.

    Args:
        reason: what was seen.
        after_s: how long the other side wants to be left alone.
        begins_anew: whether what came before is worth nothing.
    """

    def __init__(self, reason: str, after_s: float = 0, begins_anew: bool = False) -> None:
        super().__init__(reason)
        self.after_s, self.begins_anew = after_s, begins_anew


@dataclass(frozen=True)
class Part:
    """Bytes of a file, from some place to its end."""

    version: str
    """What another content of the file would not have; empty where that is not known."""
    start: int
    size: int | None
    """Size of the whole file."""
    chunks: Iterator[bytes] = field(compare=False)
    sha256: str | None = None
    """Digest that the whole file must have."""


def open_part(
    url: Url, start: int, version: str, rules: UrlRules, limits: Limits
) -> AbstractContextManager[Part]:
    """Ask for a file's bytes from `start` on; what is opened may begin at 0, or be another version.

    Raises:
        Interrupted, OSError, HTTPException: another attempt may go well.
        FetchAborted, UrlRefused: it would not.
    """
    if url.scheme == "file":
        return _open_file(url, rules)
    if url.scheme == "oci":
        return _open_layer(url, start, version, rules, limits)
    if url.scheme in STORES:
        return _open_object(url, start, rules, limits)
    return _open_http(url, start, version, rules, limits)


@contextlib.contextmanager
def _open_file(url: Url, rules: UrlRules) -> Iterator[Part]:
    """Open a file, whose path without links must be allowed too."""
    rules.check(url)
    try:
        real = Path(url.path).resolve(strict=True)
        rules.check(Url("file", "", 0, str(PurePosixPath(real)), ""))
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise FetchAborted(str(error)) from error
    with os.fdopen(fd, "rb") as source:
        if not real.is_file():
            raise FetchAborted("it is not a file")
        yield Part("", 0, None, iter(lambda: source.read(CHUNK_BYTES), b""))


# -- HTTP: RFC 9110 ----------------------------------------------------------------------------


@contextlib.contextmanager
def _open_http(
    url: Url, start: int, version: str, rules: UrlRules, limits: Limits
) -> Iterator[Part]:
    headers = {"Range": f"bytes={start}-", "If-Range": version} if start else {}
    with _get(url, headers, rules, limits) as response:
        tag = response.headers.get("etag", "")
        yield _part(response, start, "" if tag.startswith("W/") else tag)


def _part(response: http.client.HTTPResponse, start: int, version: str) -> Part:
    """Return what a response brings.

    Raises:
        Interrupted, FetchAborted: it is not the file, nor a part of it.
    """
    if response.status in (*PASSING, 416):
        after = response.headers.get("retry-after")
        after_s = _seconds(after) if after else 0
        raise Interrupted(f"status {response.status}", after_s, begins_anew=response.status == 416)
    if response.status != 200 and not (response.status == 206 and start):
        raise FetchAborted(f"status {response.status}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchAborted("an encoding that was not requested")
    first, size = 0, response.length
    if response.status == 206:
        stated = re.fullmatch(
            r"bytes (\d+)-\d+/(\d+)", response.headers.get("content-range", ""), re.ASCII
        )
        if stated is None:
            raise Interrupted("a part of the file that does not say which")
        first, size = int(stated[1]), int(stated[2])
    return Part(version, first, size, iter(lambda: response.read1(CHUNK_BYTES), b""))


def _seconds(after: str) -> float:
    """Return what Retry-After says: seconds, or a date."""
    if after.isdecimal():
        return float(after)
    try:
        at = email.utils.parsedate_to_datetime(after)
        return max(0.0, (at - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (TypeError, ValueError):
        return 0


@contextlib.contextmanager
def _get(
    url: Url,
    headers: Mapping[str, str],
    rules: UrlRules,
    limits: Limits,
    addresses: Sequence[str] = (),
) -> Iterator[http.client.HTTPResponse]:
    """Open the answer to a GET request; credentials stay with the origin.

    Args:
        addresses: addresses of the URL's host, where they have been vetted.
    """
    origin = url.origin
    for _ in range(limits.hops + 1):
        headers = {k: v for k, v in headers.items() if k != "Authorization" or url.origin == origin}
        addresses = addresses or rules.check(url)
        with contextlib.closing(_connect(url, addresses, limits.silence_s)) as connection:
            connection.request(
                "GET", url.target, headers={"Accept-Encoding": "identity", **headers}
            )
            connection.auto_open = 0  # it would look the host up again
            with _bounded(connection.sock, limits.silence_s):
                response = connection.getresponse()
            with response:
                if response.status not in REDIRECTS:
                    yield response
                    return
            url, addresses = _follow(url, response.headers.get("location", "")), ()
    raise FetchAborted(f"more than {limits.hops} redirects")


@contextlib.contextmanager
def _bounded(connection: socket.socket, seconds: float) -> Iterator[None]:
    """End a connection that has not done with a block in time, however busy it keeps us."""
    timer = threading.Timer(seconds, connection.shutdown, [socket.SHUT_RDWR])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _follow(url: Url, location: str) -> Url:
    try:
        following = parse_url(urljoin(str(url), location))
    except ValueError as error:
        raise UrlRefused(location, f"a redirection to it: {error}") from error
    if following.scheme not in ("http", "https"):
        what = "a file of this machine" if following.scheme == "file" else str(following)
        where = without_secrets(str(url))
        raise UrlRefused(location, f"{where} redirects to {what}; expected http or https")
    return following


def _connect(url: Url, addresses: Sequence[str], timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to the first address that answers, under the host's own name."""
    connection = http.client.HTTPConnection(f"{url.host}:{url.port}", timeout=timeout_s)
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


# -- registries: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md ----------


@contextlib.contextmanager
def _open_layer(
    url: Url, start: int, version: str, rules: UrlRules, limits: Limits
) -> Iterator[Part]:
    """Open the one layer of an artifact that is an archive; a manifest is asked for each time."""
    named = _REFERENCE.fullmatch(url.path)
    if named is None:
        raise UrlRefused(str(url), "expected oci://REGISTRY/NAME:TAG, or …/NAME@sha256:DIGEST")
    registry = _Registry(url, rules, limits)
    reference = named["digest"] or named["tag"]
    with registry.get(f"/v2/{named['name']}/manifests/{reference}", {"Accept": MANIFEST}) as answer:
        content = _read_document(answer)
        media_type = answer.headers.get("content-type", "").partition(";")[0].strip()
    if named["digest"] and named["digest"] != f"sha256:{hashlib.sha256(content).hexdigest()}":
        raise FetchAborted(f"a manifest that does not have the digest {named['digest']}")
    digest, size = _find_layer(content, media_type)
    headers = {"Range": f"bytes={start}-"} if start and version == digest else {}
    with registry.get(f"/v2/{named['name']}/blobs/{digest}", headers) as answer:
        part = _part(answer, start, digest)
        if part.size not in (None, size):
            raise Interrupted(f"a blob of {part.size} bytes; its manifest says {size}")
        yield Part(digest, part.start, size, part.chunks, digest.removeprefix("sha256:"))


class _Registry:
    """Requests to one registry, with what it wants of who asks."""

    def __init__(self, url: Url, rules: UrlRules, limits: Limits) -> None:
        self._addresses = rules.check(url)
        scheme = "http" if _LOOPBACK.fullmatch(url.host) else "https"
        self._base = Url(scheme, url.host, url.port, "/", "")
        self._rules, self._limits = rules, limits
        self._authorization: dict[str, str] = {}

    @contextlib.contextmanager
    def get(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Open the answer to a GET request; once more with a token, if it is 401."""
        with self._ask(path, headers) as answer:
            if answer.status != 401 or self._authorization:
                yield answer
                return
            challenge = answer.headers.get("www-authenticate", "")
        self._authorization = {"Authorization": self._answer(challenge)}
        with self._ask(path, headers) as answer:
            yield answer

    def _ask(
        self, path: str, headers: Mapping[str, str]
    ) -> AbstractContextManager[http.client.HTTPResponse]:
        url, sent = replace(self._base, path=path), {**headers, **self._authorization}
        return _get(url, sent, self._rules, self._limits, self._addresses)

    def _answer(self, challenge: str) -> str:
        """Return the credentials that a challenge asks for: a token of its realm, or our own."""
        own = _docker_credentials(f"{self._base.host}:{self._base.port}")
        kind, asked = challenge.partition(" ")[0].lower(), dict(_CHALLENGE.findall(challenge))
        if kind == "basic" and own:
            return own
        if kind != "bearer" or "realm" not in asked:
            raise FetchAborted("status 401; `docker login` writes what a registry wants")
        realm = asked.pop("realm")
        url = parse_url(f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked)}")
        if url.scheme != "https" and not _LOOPBACK.fullmatch(url.host):
            raise FetchAborted(f"tokens of {realm}, without TLS")
        headers = {"Authorization": own} if own else {}
        with _get(url, headers, self._rules, self._limits) as answer:
            given = _parse_object(_read_document(answer))
        return f"Bearer {given.get('token') or given.get('access_token')}"


def _docker_credentials(host: str) -> str:
    """Return what `docker login` has written for a host; programs that keep it are not run."""
    folder = Path(os.environ.get("DOCKER_CONFIG", Path.home() / ".docker"))
    try:
        entries = _parse_object((folder / "config.json").read_bytes()).get("auths", {})
        entry = entries.get(host) or entries.get(host.removesuffix(":443")) or {}
        return f"Basic {base64.b64encode(base64.b64decode(entry['auth'])).decode()}"
    except (OSError, KeyError, AttributeError, TypeError, binascii.Error, FetchAborted):
        return ""


def _read_document(answer: http.client.HTTPResponse) -> bytes:
    if answer.status in PASSING:
        _part(answer, 0, "")
    if answer.status != 200:
        raise FetchAborted(f"status {answer.status} for a manifest or token")
    content = answer.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise FetchAborted(f"a manifest of more than {MAX_DOCUMENT_BYTES} bytes")
    return content


def _parse_object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FetchAborted(f"JSON that cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise FetchAborted(f"a JSON {type(value).__name__}; expected an object")
    return value


def _find_layer(content: bytes, media_type: str) -> tuple[str, int]:
    """Return digest and size of the one layer that is an archive.

    Raises:
        FetchAborted: there is none, or more than one; the manifest is of another kind.
    """
    manifest = _parse_object(content)
    if (kind := manifest.get("mediaType", media_type)) != MANIFEST or media_type != MANIFEST:
        raise FetchAborted(f"a manifest of media type {kind or media_type}; expected {MANIFEST}")
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) != 1 or not isinstance(layers[0], dict):
        seen = len(layers) if isinstance(layers, list) else 0
        raise FetchAborted(f"an artifact of {seen} layers; expected one, the archive")
    (layer,) = layers
    if (kind := layer.get("mediaType")) not in LAYERS:
        raise FetchAborted(f"a layer of media type {kind}; expected one of {', '.join(LAYERS)}")
    digest, size = str(layer.get("digest")), layer.get("size")
    if not _SHA256.fullmatch(digest) or type(size) is not int or size < 0:
        raise FetchAborted(f"a layer with the digest {digest} and size {size}; expected sha256")
    notes = layer.get("annotations")
    title = notes.get("org.opencontainers.image.title") if isinstance(notes, dict) else None
    if title is not None and (not isinstance(title, str) or file_name_problem(title)):
        raise FetchAborted(f"a layer with the title {title!r}; expected the plain name of a file")
    return digest, size


# -- object stores, by fsspec --------------------------------------------------------------------

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


@contextlib.contextmanager
def _open_object(url: Url, start: int, rules: UrlRules, limits: Limits) -> Iterator[Part]:
    """Open an object, whose version is looked at again when all of it has come."""
    rules.check(url)
    if missing := what_is_missing(_PACKAGES[url.scheme]):
        raise FetchAborted(missing)
    import fsspec
    from fsspec.asyn import sync

    path = url.host + url.path

    def call(function: Callable[..., Any], **options: Any) -> Any:
        try:
            return sync(system.loop, function, path, timeout=limits.silence_s, **options)
        except (FileNotFoundError, PermissionError) as error:
            raise FetchAborted(f"{type(error).__name__}: {error}") from error
        except Exception as error:  # of whatever kind the store's own library has
            raise Interrupted(f"{type(error).__name__}: {error}") from error

    def look() -> tuple[str, int]:
        about = call(system._info)
        tags = (about.get(name) for name in ("ETag", "etag", "generation"))
        return str(next(filter(None, tags), "")), about["size"]

    def chunks() -> Iterator[bytes]:
        for at in range(start, size, PART_BYTES):
            end = min(at + PART_BYTES, size)
            chunk = call(system._cat_file, start=at, end=end)
            if len(chunk) != end - at:
                raise Interrupted(f"{len(chunk)} bytes; {end - at} were asked for")
            yield chunk
        if look() != (version, size):
            raise Interrupted("another version of it came meanwhile")

    try:
        system = fsspec.filesystem(url.scheme, skip_instance_cache=True, use_listings_cache=False)
    except Exception as error:  # what the environment says of the store makes no sense to it
        raise FetchAborted(f"{type(error).__name__}: {error}") from error
    version, size = look()
    start = start if start < size else 0
    yield Part(version, start, size, chunks())
