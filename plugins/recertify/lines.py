"""Rows → lines of an archive, which say on which further versions it is proven."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.archiver.collect import Part
from modelyard.archiver.errors import ArchiveError, NotTrusted
from modelyard.archiver.proven import DIFFERS, SAME, WITHIN, read_lines
from modelyard.archiver.read import Archive, open_archive
from modelyard.archiver.replay import UNPACKED
from modelyard.archiver.signing import MAX_BUNDLE_BYTES, Trust, TrustedKey, find_signed, find_signer
from modelyard.archiver.untrusted.json import format_json, parse_json
from modelyard.archiver.untrusted.names import PROVEN_NAME, SIGNING_NAME
from modelyard.archiver.write import put
from modelyard.plugins.recertify.certify import Row

if TYPE_CHECKING:
    from modelyard.archiver.keys import PrivateKey

MOST = 1e99
"""Stands for what is not finite, which JSON does not hold."""


def to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON holds it."""
    return vars(row) | {"archive": str(row.archive), "share": min(row.share, MOST),
                        "max_abs": min(row.max_abs, MOST)}  # fmt: skip


def signed_until(archive: Archive, key: PrivateKey | None, trust: Trust | None) -> datetime | None:
    """Return when the archive's signature expires; None where it has none, or never.

    Raises:
        NotTrusted: it is signed and would lose that, or by nobody who is trusted: whoever signs it
            anew vouches for all that is in it.
    """
    if SIGNING_NAME not in archive.names:
        return None
    if key is None:
        raise NotTrusted(
            f"{archive.path.name} is signed, and a line changes what was signed; give --sign KEY"
        )
    from modelyard.archiver.keys import key_id

    public = key.public_key()
    trust = trust or Trust({key_id(public): TrustedKey(key_id(public), public)})
    find_signer(archive, trust)
    document = parse_json(archive.read(SIGNING_NAME), MAX_BUNDLE_BYTES)
    return find_signed(archive.path.name, document, trust)[1].expires


def writable(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield what a line can be written of: what ran, beside the versions that proved it."""
    return (
        row for row in rows if row.verdict in (SAME, WITHIN, DIFFERS) and row.there and not row.note
    )


def write(
    path: Path, digest: str, rows: Sequence[Row], key: PrivateKey | None, trust: Trust | None
) -> str:
    """Write lines into an archive, in the place of those about the same artifact and version.

    Args:
        path: the archive.
        digest: what it must be: the one that was run.
        rows: what came of it.
        key: signs it anew.
        trust: one of whose keys signed it before; by default `key`'s own.

    Returns:
        Its new digest.

    Raises:
        ArchiveError: it is another by now, or cannot be written.
        NotTrusted: as `signed_until`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="modelyard-")))
        archive = stack.enter_context(open_archive(path, staging=folder))
        if archive.digest != digest:
            raise ArchiveError(f"{path.name} was changed while it was run; recertify it again")
        expires = signed_until(archive, key, trust)
        new = [_line(row) for row in rows]
        about = [_about(line) for line in new]
        kept = [dict(line) for line in read_lines(archive.read) if _about(line) not in about]
        archive.unpack(folder / UNPACKED)
        data = format_json({"lines": [*kept, *new]})
        part = Part(PROVEN_NAME, data, "versions it was proven on later")
        put(archive, folder / UNPACKED, part, key, expires)
    with open_archive(path) as written:
        return written.digest


def _about(line: Any) -> tuple[str, str, str]:
    return line["artifact"], line["runtime"], line["version"]


def _line(row: Row) -> dict[str, Any]:
    return {
        "artifact": row.artifact,
        "artifact_sha256": row.artifact_sha256,
        "runtime": row.runtime,
        "version": row.there,
        "verdict": row.verdict,
        "share": min(row.share, MOST),
        "cases": row.cases,
        "golden": row.golden,
        "beside": row.here,
        "versions": dict(row.versions),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
