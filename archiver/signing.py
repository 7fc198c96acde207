"""Sign an archive's manifest, and check whose signature it carries.

The manifest holds the digest of every other file, so its signature (Ed25519, RFC 8032, over its
bytes as they are) stands for the whole archive. It lies beside the manifest and changes neither
the manifest nor the digest that names the archive.
"""

import base64
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from modelyard.archiver.errors import NotTrusted
from modelyard.archiver.read import Archive
from modelyard.archiver.untrusted.json import Fields, format_json, parse_json
from modelyard.archiver.untrusted.names import MANIFEST_NAME, SIGNING_NAME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    PrivateKey: TypeAlias = Ed25519PrivateKey
    PublicKey: TypeAlias = Ed25519PublicKey

ENVIRONMENT_KEY = "MODELYARD_SIGNING_KEY"
SCHEMA = 1

_ALGORITHM = "Ed25519"
_MAX_FILE_BYTES = 64 * 1024
_PEM_BEGIN = "-----BEGIN "


def generate_keys() -> tuple[bytes, bytes]:
    """Make a new key pair; return the private and the public key as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


def read_signing_key(file: Path | None) -> "PrivateKey | None":
    """Read the key of `file`, else of the environment: PEM itself, or the path of a file.

    Returns:
        None where neither names a key.

    Raises:
        NotTrusted: it is not an Ed25519 private key.
    """
    text = os.environ.get(ENVIRONMENT_KEY, "")
    if file is None and not text:
        return None
    if file is not None:
        return _private_key(_read(file), str(file))
    if text.lstrip().startswith(_PEM_BEGIN):
        return _private_key(text.strip().encode() + b"\n", ENVIRONMENT_KEY)
    return _private_key(_read(Path(text)), text)


def read_trusted_keys(file: Path) -> "dict[str, PublicKey]":
    """Read one or more public keys in PEM, one after the other; return them by their ids.

    Raises:
        NotTrusted: the file cannot be read, or holds something else.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    text = _read(file).decode("utf-8", "replace")
    keys: dict[str, PublicKey] = {}
    for block in text.split(_PEM_BEGIN)[1:]:
        try:
            key = load_pem_public_key((_PEM_BEGIN + block).encode())
        except ValueError as error:
            raise NotTrusted(f"{file}: key {len(keys) + 1} is not a public key in PEM") from error
        if not isinstance(key, Ed25519PublicKey):
            raise NotTrusted(f"{file}: key {len(keys) + 1} is not an {_ALGORITHM} key")
        keys[key_id(key)] = key
    if not keys:
        raise NotTrusted(f"{file} holds no public key; expected PEM as `modelyard keygen` writes")
    return keys


def key_id(key: "PublicKey") -> str:
    """Name a public key: the SHA-256 of its 32 bytes, in hexadecimal."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def sign(manifest: bytes, key: "PrivateKey") -> bytes:
    """Return the content of the signature's file for a manifest."""
    return format_json(
        {
            "schema": SCHEMA,
            "algorithm": _ALGORITHM,
            "key_id": key_id(key.public_key()),
            "signature": base64.b64encode(key.sign(manifest)).decode("ascii"),
        }
    )


def find_signer(archive: Archive, keys: "Mapping[str, PublicKey]") -> str:
    """Check that one of the keys signed the archive; return that key's id.

    Raises:
        NotTrusted: no signature, one of an unknown key, or one of another manifest.
    """
    from cryptography.exceptions import InvalidSignature

    name = archive.path.name
    if archive.manifest.modelyard is None or SIGNING_NAME not in archive.names:
        raise NotTrusted(
            f"{name} is not signed; write it with `modelyard archive … --sign KEY_FILE`"
        )
    signer, signature = _parse(archive.read(SIGNING_NAME), name)
    if signer not in keys:
        trusted = ", ".join(sorted(known[:12] for known in keys))
        raise NotTrusted(
            f"{name} is signed by the key {signer[:12]}…, which is not trusted; trusted: {trusted}"
        )
    try:
        keys[signer].verify(signature, archive.read(MANIFEST_NAME))
    except InvalidSignature as error:
        raise NotTrusted(
            f"{name}: the signature of the key {signer[:12]}… is wrong: the manifest was changed "
            "after it was signed"
        ) from error
    return signer


def _parse(data: bytes, name: str) -> tuple[str, bytes]:
    problems: list[str] = []
    try:
        fields = Fields(parse_json(data, _MAX_FILE_BYTES), "", problems)
        algorithm, signer = fields.text("algorithm"), fields.text("key_id")
        schema = fields.integer("schema")
        signature = base64.b64decode(fields.text("signature"), validate=True)
    except ValueError as error:
        raise NotTrusted(f"{name}: {SIGNING_NAME} cannot be read: {error}") from error
    if algorithm and algorithm != _ALGORITHM:
        problems.append(f"algorithm: expected {_ALGORITHM}, found {algorithm}")
    if schema != SCHEMA and not problems:
        problems.append(
            f"schema: this version reads {SCHEMA}, found {schema}; update modelyard, or sign the "
            "archive anew"
        )
    if problems:
        raise NotTrusted(f"{name}: {SIGNING_NAME} cannot be read", problems)
    return signer, signature


def _private_key(data: bytes, where: str) -> "PrivateKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise NotTrusted(
            f"{where} holds no private key in PEM without a password; "
            "write one with `modelyard keygen`"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise NotTrusted(f"{where}: the key is not an {_ALGORITHM} key")
    return key


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise NotTrusted(f"cannot read the key file {file}: {error.strerror}") from error
