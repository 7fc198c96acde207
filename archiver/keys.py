"""Keys that sign archives: Ed25519, or ECDSA on the curve P-256; only what uses one imports it."""

import hashlib
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric import ed25519 as ed
from cryptography.hazmat.primitives.hashes import SHA256

from modelyard.archiver.errors import NotTrusted

PrivateKey = ec.EllipticCurvePrivateKey | ed.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | ed.Ed25519PublicKey


def generate_keys() -> tuple[bytes, bytes]:
    """Make a new key pair (ECDSA, P-256); return the private and the public key as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, _pem(key.public_key())


def read_key(data: bytes, where: str, *, is_private: bool) -> Any:
    """Return a private or a public key in PEM.

    Raises:
        NotTrusted: it is not one that can sign; the message begins with `where`.
    """
    lacks = "is not a public key in PEM"
    if is_private:
        lacks = "holds no private key in PEM without a password; write one with `modelyard keygen`"
    try:
        key: Any = (
            serialization.load_pem_private_key(data, password=None)
            if is_private
            else serialization.load_pem_public_key(data)
        )
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise NotTrusted(f"{where} {lacks}") from error
    is_p256 = isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and (
        key.curve.name == ec.SECP256R1.name
    )
    if not is_p256 and not isinstance(key, ed.Ed25519PrivateKey | ed.Ed25519PublicKey):
        raise NotTrusted(f"{where} is not a key of Ed25519 or ECDSA on the curve P-256")
    return key


def key_id(key: PublicKey) -> str:
    """Name a public key: the SHA-256 of its PEM, of an Ed25519 key of its 32 bytes.

    The first is what OpenSSF's model signing looks for.
    """
    data = key.public_bytes_raw() if isinstance(key, ed.Ed25519PublicKey) else _pem(key)
    return hashlib.sha256(data).hexdigest()


def sign(data: bytes, key: PrivateKey) -> bytes:
    """Return the signature of some bytes; the same for the same key, by RFC 6979."""
    if isinstance(key, ed.Ed25519PrivateKey):
        return key.sign(data)
    try:
        return key.sign(data, ec.ECDSA(SHA256(), deterministic_signing=True))
    except UnsupportedAlgorithm:  # OpenSSL before 3.2
        return key.sign(data, ec.ECDSA(SHA256()))


def is_signature(key: PublicKey, signature: bytes, data: bytes) -> bool:
    """Return whether a key made a signature of these bytes."""
    try:
        if isinstance(key, ed.Ed25519PublicKey):
            key.verify(signature, data)
        else:
            key.verify(signature, data, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def _pem(key: PublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
