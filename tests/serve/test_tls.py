"""Certificate and key of the addresses that ask for TLS."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    pkcs12,
)
from cryptography.x509.oid import NameOID

from modelyard.serve.errors import StartError
from modelyard.serve.http.tls import tls_context


def make_pair() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "models.example")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("models.example")]), False)
        .sign(key, SHA256())
    )
    return key, certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = make_pair()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    for name, encryption in (
        ("key.pem", NoEncryption()),
        ("locked.pem", BestAvailableEncryption(b"secret")),
    ):
        content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        (folder / name).write_bytes(content)
    other, _ = make_pair()
    (folder / "other.pem").write_bytes(
        other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    (folder / "store.p12").write_bytes(
        pkcs12.serialize_key_and_certificates(
            b"models", key, certificate, None, BestAvailableEncryption(b"changeit")
        )
    )
    return folder


def shake_hands(context: ssl.SSLContext, *speaks: str) -> ssl.SSLObject:
    """Shake hands in memory, with a client that offers these protocols, and return its side."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    if speaks:
        trusting.set_alpn_protocols(speaks)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client


def certificate_of(context: ssl.SSLContext) -> x509.Certificate:
    """Return what the server shows."""
    shown = shake_hands(context).getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown)


@pytest.mark.parametrize("names", [("cert.pem", "key.pem"), ("store.p12",)], ids=["pem", "pkcs12"])
def test_the_named_certificate_is_shown(folder: Path, names: tuple[str, ...]) -> None:
    files = [folder / name for name in names]
    keys = ("certificate_file", "private_key_file") if len(files) == 2 else ("keystore",)
    named = dict(zip(keys, files, strict=True))
    context = tls_context((), **named, keystore_pass="changeit")
    shown = certificate_of(context)
    assert shown.public_bytes(Encoding.PEM) == (folder / "cert.pem").read_bytes()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("speaks", "chosen"),
    [(("h2", "http/1.1"), "http/1.1"), (("http/1.1",), "http/1.1"), ((), None)],
    ids=["curl", "HTTP/1.1", "says nothing"],
)
def test_only_http1_is_chosen(folder: Path, speaks: tuple[str, ...], chosen: str | None) -> None:
    context = tls_context((), folder / "cert.pem", folder / "key.pem")
    assert shake_hands(context, *speaks).selected_alpn_protocol() == chosen


def test_without_any_a_certificate_for_the_addresses_is_made() -> None:
    shown = certificate_of(tls_context(["10.0.0.1"]))
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("10.0.0.1")]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


@pytest.mark.parametrize(
    "names",
    [
        {"certificate_file": "cert.pem", "private_key_file": "other.pem"},
        {"certificate_file": "cert.pem", "private_key_file": "locked.pem"},
        {"certificate_file": "cert.pem", "private_key_file": "cert.pem"},
        {"certificate_file": "cert.pem", "private_key_file": "absent.pem"},
        {"keystore": "cert.pem"},
    ],
    ids=["another key", "a locked key", "no key", "no file", "no keystore"],
)
def test_what_cannot_be_used_is_named(folder: Path, names: dict[str, str]) -> None:
    with pytest.raises(StartError, match="cannot use the TLS key or certificate"):
        tls_context((), **{key: folder / name for key, name in names.items()})  # type: ignore[arg-type]


def test_a_wrong_password_is_an_error(folder: Path) -> None:
    with pytest.raises(StartError, match="password"):
        tls_context((), keystore=folder / "store.p12", keystore_pass="wrong")
