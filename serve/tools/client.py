"""Calls to a running server, for the command line."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.serve.control.state import StateDir, read_key
from modelyard.serve.errors import ServeError, StartError, WrongUsage

if TYPE_CHECKING:
    from modelyard_client.retries import Answer

TIMEOUT_S = 600.0
MOST_CERTIFICATE_BYTES = 1 << 20


@dataclass(frozen=True)
class Endpoint:
    """One API of a server, and how it is called."""

    url: str
    token: str | None = None
    tls: ssl.SSLContext | None = None
    """Whom to trust, where the URL starts with https."""


class RequestFailed(ServeError):
    """The server answered with an error; the message is the server's."""


def find_endpoint(
    api: str, state: StateDir, url: str | None = None, token: str | None = None,
    ca: Path | None = None,
) -> Endpoint:  # fmt: skip
    """Return where an API is: the one of a URL, else the one of a state folder.

    The server of a state folder is called with its own token, and trusted by its own certificate,
    whatever names that holds.

    Args:
        api: inference or management.
        ca: certificates to trust in place of the system's.

    Raises:
        StartError: no server runs in the state folder, or a file cannot be read.
    """
    if url is not None:
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise WrongUsage(f"{url} is not a URL; expected http://HOST:PORT or https://HOST:PORT")
        return Endpoint(url.rstrip("/"), token, _trust(ca) if scheme == "https" else None)
    running = state.running()
    if running is None:
        none = state.how_it_died() or "no server is running in this state folder"
        raise StartError(f"{none}; start one with `modelyard serve start`, or name one with --url")
    if not running:
        raise StartError("the server is just starting; try again in a moment")
    url, certificate, tls = str(running[api]), running.get("certificate"), None
    if ca is not None:
        tls = _trust(ca)
    elif certificate:
        tls = _trust_only(Path(certificate))
    return Endpoint(url, token or read_key(state.key_file, api), tls)


def _trust(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise StartError(f"cannot use the certificates in {ca}: {error}") from error


def _trust_only(certificate: Path) -> ssl.SSLContext:
    """Trust who has the key of the first certificate of a file, by any name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        with certificate.open("rb") as file:
            text = file.read(MOST_CERTIFICATE_BYTES).decode("latin-1")
        # Whoever issued it may have issued others, so no more than the first.
        first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
        context.load_verify_locations(cadata=first)
    except (OSError, ValueError) as error:
        raise StartError(
            f"cannot read the server's certificate {certificate}: {error}; --ca names whom to trust"
        ) from error
    return context


def call(
    at: Endpoint,
    method: str,
    path: str,
    *,
    query: dict[str, Any] | None = None,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> "Answer":
    """Send one request, and return its answer of status 200 to 299.

    Args:
        query: parameters; those that are None are left out.

    Raises:
        StartError: nobody answers there, or somebody who is not trusted.
        RequestFailed: the answer is an error.
    """
    import modelyard_client as http

    given = {name: str(value) for name, value in (query or {}).items() if value is not None}
    request = http.Request(method, path, given, headers or {}, body or b"")
    try:
        with http.Client(at.url, token=at.token, ca=at.tls, trust_env=False) as client:
            return client.run(http.Retries(attempts=1, timeout_s=TIMEOUT_S).send(request))
    except http.NotTrusted as error:
        raise StartError(f"{error}; --ca FILE names whom to trust") from error
    except http.NoAnswer as error:
        raise StartError(f"{error}; is the server running? see `modelyard serve status`") from error
    except http.RequestFailed as error:
        raise RequestFailed(str(error)) from error
    except (http.BadAnswer, ValueError) as error:
        raise StartError(str(error)) from error
