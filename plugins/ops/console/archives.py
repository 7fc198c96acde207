"""What pages show of archives: read once from the store, checked as at registration, and kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver import Archive, open_archive
from modelyard.archiver.errors import RefusedArchive
from modelyard.archiver.handler_files import FEATURES_FILE
from modelyard.archiver.signing import read_trusted_keys
from modelyard.archiver.untrusted.json import parse_json
from modelyard.plugins.ops.console.certificate import Certificate, read_certificate
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.settings import Settings

KEPT = 8
"""Archives; each takes the golden requests and the components that a page shows, 2 MB at most."""
MAX_FEATURES_BYTES = 1 << 20


@dataclass(frozen=True)
class Known:
    """What an archive says."""

    certificate: Certificate
    features: object
    """Of a table, as JSON; None where the archive names none."""


class Archives:
    """Reads the archives of registered versions, one at a time: each is hashed from end to end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._kept: OrderedDict[tuple[str, float], Known] = OrderedDict()
        """By digest, and by the time of the trusted keys: one may have been taken out."""
        self._lock = asyncio.Lock()

    async def read(self, model: ModelVersion) -> Known:
        """Return what the archive of a version says.

        Raises:
            ArchiveError: it is gone from the store, or is no longer what was registered.
        """
        async with self._lock:
            keys = self._settings.trusted_keys
            key = model.digest, keys.stat().st_mtime if keys is not None and keys.exists() else 0.0
            known = self._kept.get(key)
            if known is None:
                path = self._settings.model_store / model.file
                known = await asyncio.to_thread(self._open, path, model.digest)
                if len(self._kept) >= KEPT:
                    self._kept.popitem(last=False)
                self._kept[key] = known
            self._kept.move_to_end(key)
            return known

    def _open(self, path: Path, digest: str) -> Known:
        keys = self._settings.trusted_keys
        trust = read_trusted_keys(keys) if keys is not None else None
        with open_archive(path) as archive:
            if archive.digest != digest:
                raise RefusedArchive(
                    f"{path.name} has changed in the store since it was registered: its digest is "
                    f"{archive.digest[:12]}…, that of the version {digest[:12]}…"
                )
            return Known(read_certificate(archive, trust), _features(archive))


def _features(archive: Archive) -> object:
    size = next((file.size_bytes for file in archive.files if file.name == FEATURES_FILE), None)
    if size is None or size > MAX_FEATURES_BYTES:
        return None
    try:
        return parse_json(archive.read(FEATURES_FILE))
    except ValueError:  # which the handler says when it loads
        return None
