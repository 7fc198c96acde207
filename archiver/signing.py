"""Sign an archive, and check whose signature it carries.

The signature's file states the digest of every other file (`statement`) and lies beside the
manifest; it changes neither the manifest nor the digest that names the archive.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from packaging.version import InvalidVersion, Version

from modelyard.archiver.errors import NotTrusted, WrongUsage
from modelyard.archiver.read import Archive
from modelyard.archiver.statement import (
    MAX_BUNDLE_BYTES,
    Statement,
    format_bundle,
    format_statement,
    parse_bundle,
    parse_date,
    parse_statement,
    signed_bytes,
)
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import SIGNING_NAME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    PrivateKey: TypeAlias = EllipticCurvePrivateKey | Ed25519PrivateKey
    PublicKey: TypeAlias = EllipticCurvePublicKey | Ed25519PublicKey

ENVIRONMENT_KEY = "MODELYARD_SIGNING_KEY"

_KEYS = "Ed25519 or ECDSA on the curve P-256"
_MAX_FILE_BYTES = 64 * 1024
_PEM_BEGIN, _PEM_END = "-----BEGIN ", "-----END "


@dataclass(frozen=True)
class TrustedKey:
    """A public key, and what the file of trusted keys says of it."""

    id: str
    key: "PublicKey"
    name: str = ""
    """Name of its holder."""
    expires: datetime | None = None
    """Time when it ends to be trusted."""

    def __str__(self) -> str:
        return f"{self.name} ({self.id[:12]})" if self.name else self.id[:12]


@dataclass(frozen=True)
class Trust:
    """What a file of trusted keys says."""

    keys: Mapping[str, TrustedKey]
    """Id → key."""
    lowest: Mapping[str, str] = field(default_factory=dict)
    """Model → the lowest version that is accepted."""


def generate_keys() -> tuple[bytes, bytes]:
    """Make a new key pair (ECDSA, P-256); return the private and the public key as PEM."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, _pem(key.public_key())


def read_signing_key(file: Path | None) -> "PrivateKey | None":
    """Read the key of `file`, else of the environment: PEM itself, or the path of a file.

    Returns:
        None where neither names a key.

    Raises:
        NotTrusted: it is not a private key that can sign.
    """
    text = os.environ.get(ENVIRONMENT_KEY, "")
    if file is None and text.lstrip().startswith(_PEM_BEGIN):
        data, where = text.strip().encode() + b"\n", ENVIRONMENT_KEY
    elif file or text:
        data, where = _read(file or Path(text)), str(file or text)
    else:
        return None
    key: PrivateKey = _key(data, where, is_private=True)
    return key


def read_expiry(text: str | None, key: "PrivateKey | None") -> datetime | None:
    """Read `--expires`.

    Raises:
        WrongUsage: it is not a date, or there is no key to sign with.
    """
    if text is None:
        return None
    try:
        end = parse_date(text)
    except ValueError as error:
        raise WrongUsage(f"--expires: {error}") from error
    if key is None:
        raise WrongUsage(f"--expires is said of a signature; give --sign or {ENVIRONMENT_KEY}")
    return end


def read_trusted_keys(file: Path) -> Trust:
    """Read public keys in PEM, one after the other, and what is said of them on lines between.

    `name WHO` and `expires DATE` are said of the key that follows; `lowest MODEL VERSION` of a
    model, whoever signed it; `#` begins a remark.

    Raises:
        NotTrusted: the file cannot be read, or holds something else.
    """
    keys: dict[str, TrustedKey] = {}
    lowest: dict[str, str] = {}
    said: dict[str, str] = {}
    block: list[str] = []
    for number, line in enumerate(_read(file).decode("utf-8", "replace").splitlines(), 1):
        words = line.split()
        if block or line.startswith(_PEM_BEGIN):
            block.append(line)
            if line.startswith(_PEM_END):
                key = _key(
                    "\n".join([*block, ""]).encode(),
                    f"{file}: key {len(keys) + 1}",
                    is_private=False,
                )
                expires = _date(said["expires"], file) if "expires" in said else None
                name = said.get("name", "")
                keys[key_id(key)] = TrustedKey(key_id(key), key, name, expires)
                block, said = [], {}
        elif words[:1] == ["lowest"] and len(words) == 3:
            lowest[words[1]] = words[2]
        elif words[:1] in (["name"], ["expires"]) and len(words) > 1:
            said[words[0]] = " ".join(words[1:])
        elif words and not line.startswith("#"):
            raise NotTrusted(
                f"{file}, line {number}: expected a key in PEM, `name WHO`, `expires DATE` or "
                "`lowest MODEL VERSION`"
            )
    if not keys or block:
        raise NotTrusted(f"{file} holds no public key; expected PEM as `modelyard keygen` writes")
    return Trust(keys, lowest)


def key_id(key: "PublicKey") -> str:
    """Name a public key: the SHA-256 of its PEM, of an Ed25519 key of its 32 bytes.

    The first is what OpenSSF's model signing looks for.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else _pem(key)
    return hashlib.sha256(data).hexdigest()


def sign(statement: Statement, key: "PrivateKey") -> bytes:
    """Return the content of the signature's file; the same for the same statement and key."""
    return sign_payload(format_statement(statement), key)


def sign_payload(payload: bytes, key: "PrivateKey") -> bytes:
    """Return a bundle of any in-toto statement, signed as archives are."""
    return format_bundle(payload, key_id(key.public_key()), lambda data: _sign(data, key))


def find_signer(archive: Archive, trust: Trust, now: datetime | None = None) -> TrustedKey:
    """Check that a trusted key signed the archive as it is, and that it still holds.

    Args:
        archive: open, so that its digests agree with its files.
        trust: the keys, and the lowest versions that are accepted.
        now: time that counts as now; the clock's by default.

    Raises:
        NotTrusted: no signature, one of an unknown key or of other files, one that has expired, or
            a version below the lowest that is accepted.
    """
    name = archive.path.name
    if archive.manifest.modelyard is None or SIGNING_NAME not in archive.names:
        raise NotTrusted(
            f"{name} is not signed; write it with `modelyard archive … --sign KEY_FILE`"
        )
    try:
        document = parse_json(archive.read(SIGNING_NAME), MAX_BUNDLE_BYTES)
        signer, expires = _check_statement(archive, document, trust)
    except ValueError as error:
        raise NotTrusted(f"{name}: {SIGNING_NAME} cannot be read: {error}") from error
    check_expiry(name, signer, expires, now)
    _check_version(archive, trust)
    return signer


def check_expiry(
    name: str, signer: TrustedKey, expires: datetime | None, now: datetime | None = None
) -> None:
    """Raise NotTrusted where a key, or what it signed, holds no longer."""
    now = now or datetime.now(UTC)
    for what, end in ((f"the key {signer}", signer.expires), ("its signature", expires)):
        if end is not None and end <= now:
            raise NotTrusted(
                f"{name}: {what} expired on {end:%Y-%m-%d}; sign the archive anew, with a key that "
                "is trusted"
            )


def find_signed(name: str, document: object, trust: Trust) -> tuple[TrustedKey, Statement]:
    """Return which trusted key signed a bundle, and what it states.

    Args:
        name: name of what it belongs to, for messages.

    Raises:
        NotTrusted: the key is not known, or what it signed was changed.
        ValueError: it is not a bundle, or states something else.
    """
    signer, payload = open_signed(name, document, trust)
    return signer, parse_statement(payload)


def open_signed(name: str, document: object, trust: Trust) -> tuple[TrustedKey, bytes]:
    """Return which trusted key signed a bundle, and its payload; errors as `find_signed`."""
    envelope = parse_bundle(document)
    signer = _known(name, envelope.key_id, trust)
    _verify(name, signer, envelope.signature, signed_bytes(envelope.payload))
    return signer, envelope.payload


def claimed_key(archive: Archive) -> str:
    """Return the id of the key that an archive's signature names; nothing of it is believed.

    Raises:
        NotTrusted: there is no signature that can be read.
    """
    try:
        return parse_bundle(parse_json(archive.read(SIGNING_NAME), MAX_BUNDLE_BYTES)).key_id
    except (KeyError, ValueError) as error:
        name = archive.path.name
        raise NotTrusted(f"{name}: {SIGNING_NAME} cannot be read: {error}") from error


def _check_statement(
    archive: Archive, document: object, trust: Trust
) -> tuple[TrustedKey, datetime | None]:
    """Return who signed what the archive holds, and until when."""
    signer, statement = find_signed(archive.path.name, document, trust)
    found = {file.name: file.sha256 for file in archive.files if file.name != SIGNING_NAME}
    if found != dict(statement.digests):
        differing = sorted(dict(found.items() ^ statement.digests.items()))
        raise NotTrusted(
            f"{archive.path.name}: the key {signer} signed other files: {', '.join(differing[:5])} "
            "changed after it was signed"
        )
    return signer, statement.expires


def _known(name: str, signer: str, trust: Trust) -> TrustedKey:
    if signer not in trust.keys:
        trusted = ", ".join(sorted(str(key) for key in trust.keys.values()))
        raise NotTrusted(
            f"{name} is signed by the key {signer[:12]}…, which is not trusted; trusted: {trusted}"
        )
    return trust.keys[signer]


def _check_version(archive: Archive, trust: Trust) -> None:
    """Refuse a version below the lowest that is accepted: an old archive keeps its signature."""
    manifest = archive.manifest
    lowest = trust.lowest.get(manifest.model_name or "")
    if lowest is None:
        return
    try:
        is_below = Version(manifest.model_version) < Version(lowest)
    except InvalidVersion as error:
        raise NotTrusted(
            f"{archive.path.name}: version {manifest.model_version} cannot be compared with "
            f"{lowest}, the lowest that is accepted ({error}); expected numbers as in 2.1"
        ) from error
    if is_below:
        raise NotTrusted(
            f"{archive.path.name}: version {manifest.model_version} of {manifest.model_name} is "
            f"below {lowest}, the lowest that is accepted; see `lowest` in the file of trusted keys"
        )


def _sign(data: bytes, key: "PrivateKey") -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256

    if isinstance(key, Ed25519PrivateKey):
        return key.sign(data)
    try:  # RFC 6979: the same bytes for the same key
        return key.sign(data, ec.ECDSA(SHA256(), deterministic_signing=True))
    except UnsupportedAlgorithm:  # OpenSSL before 3.2
        return key.sign(data, ec.ECDSA(SHA256()))


def _verify(name: str, signer: TrustedKey, signature: bytes, data: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256

    try:
        if isinstance(signer.key, Ed25519PublicKey):
            signer.key.verify(signature, data)
        else:
            signer.key.verify(signature, data, ec.ECDSA(SHA256()))
    except InvalidSignature as error:
        raise NotTrusted(
            f"{name}: the signature of the key {signer} is wrong: what was signed was "
            "changed after it"
        ) from error


def _pem(key: "PublicKey") -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _key(data: bytes, where: str, *, is_private: bool) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        if is_private:
            key: Any = serialization.load_pem_private_key(data, password=None)
        else:
            key = serialization.load_pem_public_key(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        lacks = (
            "holds no private key in PEM without a password; write one with `modelyard keygen`"
            if is_private
            else "is not a public key in PEM"
        )
        raise NotTrusted(f"{where} {lacks}") from error
    if not _can_sign(key):
        raise NotTrusted(f"{where} is not a key of {_KEYS}")
    return key


def _can_sign(key: object) -> bool:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric import ed25519 as ed

    if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        return key.curve.name == ec.SECP256R1.name
    return isinstance(key, ed.Ed25519PrivateKey | ed.Ed25519PublicKey)


def _date(text: str, file: Path) -> datetime:
    try:
        return parse_date(text)
    except ValueError as error:
        raise NotTrusted(f"{file}: expires {error}") from error


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise NotTrusted(f"cannot read the key file {file}: {error.strerror}") from error
