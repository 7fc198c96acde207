"""Tokens that outlive a start: each a name, its rights and a hash, on one line, and its quota.

    # name   rights            hash                  requests a second, and at once
    app      predict,explain   sha256:5e884898da28…  rate=50 concurrent=8

The token itself is written nowhere. It has 256 random bits, or 32 characters at least of whoever
chose it, so that one round of SHA-256 hides it as well as many would.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from modelyard.serve.errors import StartError

RIGHTS = ("predict", "explain", "manage", "metrics", "priority", "view")
MOST_TOKENS = 100
"""Each is compared with what a request brings, 0.3 µs."""
MOST_SHOWN = 4
"""Headers `Authorization` of a request that are looked at, each of which is compared with all."""
MOST_BYTES = 1 << 20
LEAST_CHARACTERS = 32
"""Characters of a token that somebody chose."""
ACTOR: ContextVar[str] = ContextVar("actor", default="the server")
"""Name of the token of the operator for whom something is done; the server does the rest itself."""
PROXIES = frozenset(
    b"forwarded via x-real-ip x-client-ip x-cluster-client-ip x-original-forwarded-for "
    b"true-client-ip cf-connecting-ip cdn-loop x-envoy-external-address".split()
)
"""Headers, beside `X-Forwarded-…`, by which proxies say that the request is another's."""
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
QUOTAS = ("rate", "concurrent")
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class Grant:
    """What one token may do."""

    name: str
    """Name for logs and messages; two tokens may share one while one takes the other's place."""
    rights: frozenset[str]
    digest: bytes
    rate: float = 0
    """Requests a second for a model's answer that it may send; 0: any number."""
    at_once: int = 0
    """The same at once."""

    def __str__(self) -> str:
        """Return its line."""
        rights = ",".join(right for right in RIGHTS if right in self.rights)
        rate = f" rate={self.rate:g}" if self.rate else ""
        at_once = f" concurrent={self.at_once}" if self.at_once else ""
        return f"{self.name} {rights} sha256:{self.digest.hex()}{rate}{at_once}"


Grants = Callable[[], Sequence[Grant]]
"""Returns the tokens that are known now."""


def digest_of(token: bytes) -> bytes:
    """Return a token's SHA-256."""
    return hashlib.sha256(token).digest()


def make_grant(name: str, rights: str, token: str, quota: Iterable[str] = ()) -> Grant:
    """Return what stands for a token; the rights are separated by commas.

    Args:
        quota: `rate=NUMBER`, `concurrent=NUMBER`, or one of them.

    Raises:
        ValueError: the name, a right, the token or a quota is not one; says what is expected.
    """
    if len(token) < LEAST_CHARACTERS or not _TOKEN.fullmatch(token):
        raise ValueError(
            f"a token has {LEAST_CHARACTERS} characters or more, visible ones of ASCII; without "
            "--stdin one is made"
        )
    return _grant(name, rights, digest_of(token.encode()), quota)


def parse_grant(line: str) -> Grant:
    """Read a line.

    Raises:
        ValueError: it is not one; says what is expected, and shows nothing that may be a token.
    """
    words = line.split()
    if len(words) < 3:
        raise ValueError(f"{len(words)} words; expected name, rights and hash")
    name, rights, hash, *quota = words
    if not _HASH.fullmatch(hash):
        raise ValueError(
            "the third word is not sha256: and 64 hexadecimal digits; tokens themselves are not "
            "kept, `modelyard token new --stdin` writes the line of one"
        )
    return _grant(name, rights, bytes.fromhex(hash.removeprefix("sha256:")), quota)


def _grant(name: str, rights: str, digest: bytes, quota: Iterable[str]) -> Grant:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!a} is not a name; expected letters, digits, '_', '.' or '-'")
    given = rights.split(",")
    for right in given:
        if right not in RIGHTS:
            raise ValueError(f"{right!r} is not a right; expected some of {','.join(RIGHTS)}")
    limits: dict[str, float] = {}
    for word in quota:
        key, _, value = word.partition("=")
        if not _NUMBER.fullmatch(value) or key not in QUOTAS or key in limits or not float(value):
            raise ValueError(
                f"{word[:40]!a} is not a quota; expected rate=REQUESTS_A_SECOND and "
                "concurrent=REQUESTS, each at most once and more than 0"
            )
        limits[key] = float(value)
    at_once = limits.get("concurrent", 0)
    if at_once != int(at_once):
        raise ValueError(f"concurrent={at_once:g} is not a whole number")
    return Grant(name, frozenset(given), digest, limits.get("rate", 0), int(at_once))


def parse_grants(lines: Iterable[str]) -> tuple[Grant, ...]:
    """Read lines; empty ones, and those that begin with `#`, are passed over.

    Raises:
        ValueError: says which line is wrong.
    """
    grants = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            grants.append(parse_grant(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    if len(grants) > MOST_TOKENS:
        raise ValueError(f"{len(grants)} tokens; expected {MOST_TOKENS} at most")
    return tuple(grants)


def read_token_file(file: Path) -> tuple[Grant, ...]:
    """Return the tokens of a file.

    Raises:
        StartError: it cannot be read, or a line is wrong.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        return parse_grants(content.decode("utf-8").splitlines())
    except OSError as error:
        raise StartError(f"cannot read the token file {file}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"the token file {file}: {error}") from error


def bearer_tokens(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Yield the tokens that a request shows, `MOST_SHOWN` at most."""
    shown = (value.partition(b" ") for name, value in headers if name == b"authorization")
    for scheme, _, token in islice(shown, MOST_SHOWN):
        if scheme.lower() == b"bearer":
            yield token.lstrip(b" ")


def find_grant(grants: Sequence[Grant], token: bytes) -> Grant | None:
    """Return what a token may do. It takes as long for every token, known or not."""
    digest, found = digest_of(token), None
    for grant in grants:
        if secrets.compare_digest(grant.digest, digest):
            found = grant
    return found


def why_checked(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the header for which a request is asked for a token where this machine's need none.

    It shows a token, or came through a proxy, whose own address says nothing of whose it is. Empty
    where there is no such header.
    """
    for name, _ in headers:
        if name == b"authorization" or name in PROXIES or name.startswith(b"x-forwarded"):
            return name
    return b""
