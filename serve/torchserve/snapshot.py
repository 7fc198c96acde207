"""Snapshots: configuration files that the server writes itself after each change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from serve.errors import StartError

SNAPSHOT_FOLDER = "config"
"""In the folder of the logs."""
NAME = re.compile(r"\d{17}-(startup|snapshot|shutdown)\.cfg")
REQUIRED = {
    "defaultVersion": bool,
    "marName": str,
    "minWorkers": int,
    "maxWorkers": int,
    "batchSize": int,
    "maxBatchDelay": int,
}
"""What a snapshot says of each version; time limits and runtime have defaults."""


def find_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((file for file in folder.iterdir() if NAME.fullmatch(file.name)), reverse=True)


def parse_model_snapshot(snapshot: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, version and what is said of each version that a `model_snapshot` loads.

    Raises:
        StartError: it has not the form of a snapshot; the message names the model and key.
    """
    models = snapshot.get("models") if isinstance(snapshot, dict) else None
    if not isinstance(models, dict):
        raise StartError('model_snapshot: expected a JSON object with "models"')
    if snapshot.get("modelCount", 0) <= 0:
        return []
    found = []
    for name, versions in models.items():
        if not isinstance(versions, dict):
            raise StartError(f"model_snapshot: {name}: expected an object of versions")
        for version, entry in versions.items():
            for key, kind in REQUIRED.items():
                value = entry.get(key) if isinstance(entry, dict) else None
                if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                    raise StartError(
                        f"model_snapshot: {name} {version}: {key}: expected {kind.__name__}, "
                        f"got {value!r}"
                    )
            found.append((name, version, entry))
    return found
