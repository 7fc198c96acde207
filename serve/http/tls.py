"""Certificate and private key of the addresses that start with https."""

import contextlib
import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import NameOID

from modelyard.serve.errors import StartError
from modelyard.serve.http.watched import Watched

logger = logging.getLogger(__name__)

SELF_SIGNED_LIFE = timedelta(days=365)


class TlsContext(ssl.SSLContext):
    """What a listener of ours needs, with the PEM that it is of, for those that are not ours."""

    key: bytes
    chain: bytes
    """The certificate, and those that lead to its root."""


def tls_context(
    hosts: Iterable[str],
    certificate_file: Path | None = None,
    private_key_file: Path | None = None,
    keystore: Path | None = None,
    keystore_pass: str = "",
) -> TlsContext:
    """Return what the listeners need; TLS 1.2 or later.

    The material is a PEM pair, else a PKCS12 keystore, else a new certificate for `hosts` that
    signs itself.

    Raises:
        StartError: a file cannot be read, the password is wrong, or the two do not belong together.
    """
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        if certificate_file is not None and private_key_file is not None:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate_file, private_key_file, password=lambda: "")
            context.key = private_key_file.read_bytes()
            context.chain = certificate_file.read_bytes()
        else:
            pem = _from_keystore(keystore, keystore_pass) if keystore else _self_signed(hosts)
            context.key, context.chain = pem[0], b"".join(pem[1:])
            with _as_file(pem) as file:
                context.load_cert_chain(file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        source = certificate_file or keystore
        if isinstance(error, ssl.SSLError) and error.reason == "EE_KEY_TOO_SMALL":
            raise StartError(
                f"the TLS key of {source} is too short to be safe; expected an RSA key of 2048 "
                "bits or more, as `openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out "
                "cert.pem` makes one"
            ) from error
        raise StartError(f"cannot use the TLS key or certificate in {source}: {error}") from error
    return context


def watched_tls(hosts: Iterable[str], *material: Any) -> Callable[[], TlsContext]:
    """Return what returns the context for the next client: of files, as they are by now.

    Args:
        material: further arguments of `tls_context`.

    Raises:
        StartError: as `tls_context`; later on the certificate stays, and the log says why.
    """
    files = [each for each in material if isinstance(each, Path)]
    return Watched(files, partial(tls_context, tuple(hosts), *material)).get


def _from_keystore(keystore: Path, password: str) -> Sequence[bytes]:
    key, certificate, others = pkcs12.load_key_and_certificates(
        keystore.read_bytes(), password.encode()
    )
    if key is None or certificate is None:
        raise ValueError("the keystore holds no private key with its certificate")
    certificates = [certificate, *others]
    return [
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        *(each.public_bytes(Encoding.PEM) for each in certificates),
    ]


def _self_signed(hosts: Iterable[str]) -> Sequence[bytes]:
    """Make a key and a certificate for these hosts and this machine."""
    logger.warning(
        "no certificate is named: clients must accept one that signs itself, new at every start; "
        "name yours with certificate_file and private_key_file"
    )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + SELF_SIGNED_LIFE)
        .add_extension(
            x509.SubjectAlternativeName([*map(_host, sorted({"localhost", *hosts}))]),
            critical=False,
        )
        .sign(key, SHA256())
    )
    return [
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate.public_bytes(Encoding.PEM),
    ]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


@contextlib.contextmanager
def _as_file(pem: Sequence[bytes]) -> Iterator[Path]:
    """Lend a file that only its owner can read: OpenSSL takes no bytes through this interface."""
    fd, name = tempfile.mkstemp()
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(pem)
        yield Path(name)
    finally:
        Path(name).unlink()
