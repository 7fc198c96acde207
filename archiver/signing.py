"""Sign an archive, and check whose signature it carries.

The signature's file states the digest of every other file (`Statement`) and lies beside the
manifest; it changes neither the manifest nor the digest that names the archive. It is a Sigstore
bundle that holds a signed in-toto statement, so that the archive, once unpacked, is checked by
others too: `model_signing verify key --public_key KEY --signature MAR-INF/MANIFEST.sig.json
FOLDER`. What Modelyard adds stands under `modelyard` in the predicate, which others pass over.

Formats: https://github.com/ossf/model-signing-spec, https://github.com/secure-systems-lab/dsse,
https://in-toto.io/Statement/v1, https://docs.sigstore.dev/about/bundle/
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from modelyard.archiver.errors import NotTrusted, WrongUsage
from modelyard.archiver.read import Archive
from modelyard.archiver.untrusted.json import Fields, format_json, parse_json
from modelyard.archiver.untrusted.names import SIGNING_NAME

if TYPE_CHECKING:
    from modelyard.archiver.keys import PrivateKey, PublicKey

ENVIRONMENT_KEY = "MODELYARD_SIGNING_KEY"


_MAX_FILE_BYTES = 64 * 1024
_PEM_BEGIN, _PEM_END = "-----BEGIN ", "-----END "
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
MAX_BUNDLE_BYTES = 8 << 20


@dataclass(frozen=True)
class Statement:
    """What is signed."""

    name: str
    """The model's."""
    digests: Mapping[str, str]
    """SHA-256 of every file of the archive but the signature."""
    expires: datetime | None = None
    """Time when the signature ends to stand for anything."""


@dataclass(frozen=True)
class Envelope:
    """A signed statement before anything is believed of it."""

    key_id: str
    payload: bytes
    signature: bytes


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


def read_signing_key(file: Path | None) -> "PrivateKey | None":
    """Read the key of `file`, else of the environment: PEM itself, or the path of a file.

    Returns:
        None where neither names a key.

    Raises:
        NotTrusted: it is not a private key that can sign.
    """
    text = os.environ.get(ENVIRONMENT_KEY, "")
    if file is None and not text:
        return None
    from modelyard.archiver.keys import read_key

    if file is None and text.lstrip().startswith(_PEM_BEGIN):
        data, where = text.strip().encode() + b"\n", ENVIRONMENT_KEY
    else:
        data, where = _read(file or Path(text)), str(file or text)
    key: PrivateKey = read_key(data, where, is_private=True)
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
    from modelyard.archiver.keys import key_id, read_key

    keys: dict[str, TrustedKey] = {}
    lowest: dict[str, str] = {}
    said: dict[str, str] = {}
    block: list[str] = []
    for number, line in enumerate(_read(file).decode("utf-8", "replace").splitlines(), 1):
        words = line.split()
        if block or line.startswith(_PEM_BEGIN):
            block.append(line)
            if line.startswith(_PEM_END):
                data, where = "\n".join([*block, ""]).encode(), f"{file}: key {len(keys) + 1}"
                key = read_key(data, where, is_private=False)
                try:
                    expires = parse_date(said["expires"]) if "expires" in said else None
                except ValueError as error:
                    raise NotTrusted(f"{file}: expires {error}") from error
                keys[key_id(key)] = TrustedKey(key_id(key), key, said.get("name", ""), expires)
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


def sign(statement: Statement, key: "PrivateKey") -> bytes:
    """Return the content of the signature's file; the same for the same statement and key."""
    return sign_payload(format_statement(statement), key)


def sign_payload(payload: bytes, key: "PrivateKey") -> bytes:
    """Return a bundle of any in-toto statement, signed as archives are."""
    from modelyard.archiver import keys

    return format_bundle(payload, keys.key_id(key.public_key()), lambda data: keys.sign(data, key))


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
        signer, statement = find_signed(name, document, trust)
    except ValueError as error:
        raise NotTrusted(f"{name}: {SIGNING_NAME} cannot be read: {error}") from error
    found = {file.name: file.sha256 for file in archive.files if file.name != SIGNING_NAME}
    if differing := sorted(dict(found.items() ^ statement.digests.items())):
        raise NotTrusted(
            f"{name}: the key {signer} signed other files: {', '.join(differing[:5])} "
            "changed after it was signed"
        )
    check_expiry(name, signer, statement.expires, now)
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
    from modelyard.archiver.keys import is_signature

    envelope = parse_bundle(document)
    signer = trust.keys.get(envelope.key_id)
    if signer is None:
        trusted = ", ".join(sorted(str(key) for key in trust.keys.values()))
        raise NotTrusted(
            f"{name} is signed by the key {envelope.key_id[:12]}…, which is not trusted; trusted: "
            f"{trusted}"
        )
    if not is_signature(signer.key, envelope.signature, signed_bytes(envelope.payload)):
        raise NotTrusted(
            f"{name}: the signature of the key {signer} is wrong: what was signed was "
            "changed after it"
        )
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


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise NotTrusted(f"cannot read the key file {file}: {error.strerror}") from error


# -- what a signature stands for: every file of an archive, as OpenSSF's model signing states it ---


def format_statement(statement: Statement) -> bytes:
    """Write what is signed of an archive's files."""
    resources = sorted(statement.digests.items())
    together = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in resources))
    predicate: dict[str, object] = {
        "serialization": {
            "method": "files",
            "hash_type": "sha256",
            "allow_symlinks": False,
            "ignore_paths": [SIGNING_NAME],
        },
        "resources": [
            {"name": name, "algorithm": "sha256", "digest": digest} for name, digest in resources
        ],
    }
    if statement.expires:
        predicate["modelyard"] = {"expires": statement.expires.isoformat()}
    document = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": statement.name, "digest": {"sha256": together.hexdigest()}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def format_bundle(payload: bytes, key_id: str, sign: Callable[[bytes], bytes]) -> bytes:
    """Write the content of a signature's file; `sign` gives the signature of some bytes.

    Args:
        payload: an in-toto statement.
    """
    return format_json(
        {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key_id}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": _base64(payload),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _base64(sign(signed_bytes(payload))), "keyid": ""}],
            },
        }
    )


def parse_bundle(document: object) -> Envelope:
    """Read a bundle.

    Raises:
        ValueError: it is not one with one signature by a key; the message names the fields.
    """
    fields = Fields(document)
    _expect(fields, "mediaType", MEDIA_TYPE)
    envelope = fields.object("dsseEnvelope")
    _expect(envelope, "payloadType", PAYLOAD_TYPE)
    signatures = envelope.objects("signatures")
    if len(signatures) != 1:
        fields.problems.append(f"dsseEnvelope.signatures: expected one, found {len(signatures)}")
    key = fields.object("verificationMaterial").object("publicKey").text("hint")
    texts = [envelope.text("payload"), *(each.text("sig") for each in signatures)]
    data: list[bytes] = []
    try:
        data += (base64.b64decode(text, validate=True) for text in texts)
    except ValueError:
        fields.problems.append("dsseEnvelope: payload or signature is not Base64")
    fields.check()
    return Envelope(key, *data)


def parse_statement(payload: bytes) -> Statement:
    """Read what a trusted key signed.

    Raises:
        ValueError: it does not state the digests of a model's files; the message names the fields.
    """
    fields = Fields(parse_json(payload, MAX_BUNDLE_BYTES))
    _expect(fields, "_type", STATEMENT_TYPE)
    _expect(fields, "predicateType", PREDICATE_TYPE)
    predicate = fields.object("predicate")
    resources = predicate.objects("resources")
    digests = {each.text("name"): each.sha256("digest") for each in resources}
    if len(digests) != len(resources):
        fields.problems.append("predicate.resources: a name is there twice")
    for each in resources:
        _expect(each, "algorithm", "sha256")
    subjects = fields.objects("subject")
    name = subjects[0].text("name") if subjects else ""
    expires = predicate.object("modelyard", may_lack=True).text_or_none("expires")
    fields.check()
    return Statement(name, digests, parse_date(expires) if expires else None)


def signed_bytes(payload: bytes) -> bytes:
    """Return what is signed for a payload: DSSE's pre-authentication encoding."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def parse_date(text: str) -> datetime:
    """Read a day or a time, in UTC where it does not say: `2027-01-31`, `2027-01-31T12:00:00Z`.

    Raises:
        ValueError: it is neither.
    """
    try:
        date = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f'"{text}" is not a date; expected one as 2027-01-31') from error
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _expect(fields: Fields, key: str, value: str) -> None:
    found = fields.text(key)
    if found and found != value:
        fields.wrong(key, value, found)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
