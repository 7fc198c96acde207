"""What a signature stands for: every file of an archive, as OpenSSF's model signing states it.

A signature is a Sigstore bundle that holds a signed in-toto statement, so that the archive, once
unpacked, is checked by others too: `model_signing verify key --public_key KEY --signature
MAR-INF/MANIFEST.sig.json FOLDER`. What Modelyard adds stands under `modelyard` in the predicate,
which others pass over.

Formats: https://github.com/ossf/model-signing-spec, https://github.com/secure-systems-lab/dsse,
https://in-toto.io/Statement/v1, https://docs.sigstore.dev/about/bundle/
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from modelyard.archiver.untrusted.json import Fields, format_json, parse_json
from modelyard.archiver.untrusted.names import SIGNING_NAME

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


def format_statement(statement: Statement) -> bytes:
    """Write what is signed of an archive's files."""
    return json.dumps(_statement_to_json(statement), separators=(",", ":")).encode()


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
    key = fields.object("verificationMaterial").object("publicKey")
    texts = [envelope.text("payload"), *(each.text("sig") for each in signatures)]
    found = Envelope(key.text("hint"), *_decoded(texts, fields.problems))
    fields.check()
    return found


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
    own = predicate.object("modelyard") if "modelyard" in predicate.values else None
    expires = own.text_or_none("expires") if own else None
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


def _statement_to_json(statement: Statement) -> dict[str, object]:
    resources = sorted(statement.digests.items())
    together = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in resources))
    own = {"expires": statement.expires.isoformat()} if statement.expires else None
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
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": statement.name, "digest": {"sha256": together.hexdigest()}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate | ({"modelyard": own} if own else {}),
    }


def _expect(fields: Fields, key: str, value: str) -> None:
    found = fields.text(key)
    if found and found != value:
        fields.wrong(key, value, found)


def _decoded(texts: list[str], problems: list[str]) -> tuple[bytes, bytes]:
    try:
        payload, signature = (base64.b64decode(text, validate=True) for text in texts)
    except ValueError:
        problems.append("dsseEnvelope: payload or signature is not Base64")
        return b"", b""
    return payload, signature


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
