"""Certificate and private key of the addresses that start with https."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

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
from modelyard.serve.torchserve.settings import TorchServeSettings

logger = logging.getLogger(__name__)

SELF_SIGNED_LIFE = timedelta(days=365)


def tls_context(settings: TorchServeSettings) -> ssl.SSLContext:
    """Return what the listeners need; TLS 1.2 or later.

    The material is a PEM pair, else a PKCS12 keystore, else a new certificate that signs itself.

    Raises:
        StartError: a file cannot be read, the password is wrong, or the two do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if settings.certificate_file is not None and settings.private_key_file is not None:
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(
                settings.certificate_file, settings.private_key_file, password=lambda: ""
            )
        else:
            chain = _from_keystore(settings) if settings.keystore else _self_signed(settings)
            with _as_file(chain) as file:
                context.load_cert_chain(file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        source = settings.certificate_file or settings.keystore
        raise StartError(f"cannot use the TLS key or certificate in {source}: {error}") from error
    return context


def _from_keystore(settings: TorchServeSettings) -> Sequence[bytes]:
    assert settings.keystore is not None
    content = settings.keystore.read_bytes()
    key, certificate, others = pkcs12.load_key_and_certificates(
        content, settings.keystore_pass.encode()
    )
    if key is None or certificate is None:
        raise ValueError("the keystore holds no private key with its certificate")
    certificates = [certificate, *others]
    return [
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        *(each.public_bytes(Encoding.PEM) for each in certificates),
    ]


def _self_signed(settings: TorchServeSettings) -> Sequence[bytes]:
    """Make a key and a certificate for the hosts of the addresses."""
    logger.warning(
        "no certificate is named: clients must accept one that signs itself, new at every start; "
        "name yours with certificate_file and private_key_file"
    )
    addresses = (settings.inference_address, settings.management_address, settings.metrics_address)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    hosts = {"localhost", *(address.host for address in addresses if address.is_tls)}
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + SELF_SIGNED_LIFE)
        .add_extension(x509.SubjectAlternativeName([*map(_host, sorted(hosts))]), critical=False)
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
