"""A statement about an archive's file: by which rule, and how closely, it agrees with its model.

    {"_type": "https://in-toto.io/Statement/v1",
     "subject": [{"name": "digits.mar", "digest": {"sha256": …}}],
     "predicateType": "https://modelyard.dev/parity/v1",
     "predicate": {"model", "version", "archiveDigest", "goldenRequests", "artifacts": […],
                   "recertified": […], "statedAt", "expires"}}

Signed it is a DSSE envelope in a Sigstore bundle, as the signature inside an archive is.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.archiver import signing
from modelyard.archiver.errors import NotProven, NotTrusted, WrongUsage
from modelyard.archiver.proven import find_unproven, read_lines, read_reports
from modelyard.archiver.read import Archive
from modelyard.archiver.report import Report
from modelyard.archiver.signing import Trust, TrustedKey
from modelyard.archiver.untrusted.json import Fields, parse_json

if TYPE_CHECKING:
    from modelyard.archiver.keys import PrivateKey

PREDICATE_TYPE = "https://modelyard.dev/parity/v1"
OF_SIGNING = ("statedAt", "expires")
"""Keys of the predicate that no archive holds."""


def attest(archive: Archive, key: PrivateKey, expires: datetime | None = None) -> bytes:
    """Return a signed statement of what an archive was proven to do.

    Raises:
        NotProven: the archive holds no proof, or that of something else.
        WrongUsage: it is a folder, which has no digest of its own.
    """
    predicate = {**predicate_of(archive), "statedAt": datetime.now(UTC).isoformat("T", "seconds")}
    if expires is not None:
        predicate["expires"] = expires.isoformat()
    statement = {
        "_type": signing.STATEMENT_TYPE,
        "subject": [{"name": archive.path.name, "digest": {"sha256": file_digest(archive.path)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }
    return signing.sign_payload(json.dumps(statement, separators=(",", ":")).encode(), key)


def check_attested(archive: Archive, bundle: bytes, trust: Trust) -> TrustedKey:
    """Return who signed a statement that is true of an archive, and holds still.

    Raises:
        NotTrusted: no trusted key signed it, it has expired, is of another file, or says what the
            archive does not.
    """
    name = archive.path.name
    try:
        signer, payload = signing.open_signed(
            name, parse_json(bundle, signing.MAX_BUNDLE_BYTES), trust
        )
        fields = Fields(parse_json(payload, signing.MAX_BUNDLE_BYTES))
        for key, value in (("_type", signing.STATEMENT_TYPE), ("predicateType", PREDICATE_TYPE)):
            if fields.text(key) != value:
                fields.wrong(key, value, fields.values.get(key))
        subjects = [each.object("digest").sha256("sha256") for each in fields.objects("subject")]
        stated = dict(fields.object("predicate").values)
        expires = fields.object("predicate").text_or_none("expires")
        fields.check()
        signing.check_expiry(name, signer, signing.parse_date(expires) if expires else None)
    except ValueError as error:
        raise NotTrusted(f"{name}: the statement cannot be read: {error}") from error
    if file_digest(archive.path) not in subjects:
        raise NotTrusted(f"{name}: the statement is of another file, with sha256 {subjects}")
    true = predicate_of(archive)
    said = {key: value for key, value in stated.items() if key not in OF_SIGNING}
    if wrong := [key for key in {**true, **said} if true.get(key) != said.get(key)]:
        raise NotTrusted(f"{name}: the statement says otherwise of its {', '.join(sorted(wrong))}")
    return signer


def predicate_of(archive: Archive) -> dict[str, Any]:
    """Return what an archive's reports say, as the predicate has it.

    Raises:
        NotProven: there is no proof, or one of something else than its artifacts.
    """
    manifest, seal = archive.manifest, archive.manifest.modelyard
    unproven = find_unproven(manifest, archive.read)
    if seal is None or (unproven and unproven.reason != "versions"):
        reason = unproven.text if unproven else "it is not sealed"
        raise NotProven(f"{archive.path.name}: {reason}; there is nothing to state")
    return {
        "model": manifest.model_name,
        "version": manifest.model_version,
        "archiveDigest": archive.digest,
        "goldenRequests": len(seal.golden),
        "artifacts": [_artifact(*each) for each in read_reports(manifest, archive.read).items()],
        "recertified": [dict(line) for line in read_lines(archive.read)],
    }


def _artifact(name: str, report: Report) -> dict[str, Any]:
    parity = report.parity
    assert parity is not None  # `find_unproven` looked
    return {
        "name": name,
        "format": report.format,
        "digest": {"sha256": report.artifact_sha256},
        "checkpoint": {
            "name": report.checkpoint,
            "kind": report.checkpoint_kind,
            "digest": {"sha256": report.checkpoint_sha256},
        },
        "extent": parity.extent,
        "cases": parity.cases,
        "outputs": {
            output: {"tolerance": allowed, "worst": parity.largest.get(output)}
            for output, allowed in parity.tolerances.items()
        },
        "versions": dict(report.versions),
    }


def file_digest(path: Path) -> str:
    """Return the SHA-256 of an archive's file.

    Raises:
        WrongUsage: it is a folder.
    """
    if path.is_dir():
        raise WrongUsage(f"{path} is a folder, which cannot be a subject; write it as one file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
