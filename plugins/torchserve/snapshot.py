"""Snapshots: configuration files that the server writes itself after each change."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.archiver.untrusted.json import is_number
from modelyard.plugins.torchserve import TORCHSERVE_VERSION
from modelyard.plugins.torchserve.properties import format_properties
from modelyard.plugins.torchserve.settings import TorchServeSettings
from modelyard.serve.control.state import write_file
from modelyard.serve.errors import StartError

if TYPE_CHECKING:  # what reads snapshots at the start does without all that
    from modelyard.serve.control.registry import ModelVersion, Registry

logger = logging.getLogger(__name__)

SNAPSHOT_FOLDER = "config"
"""Folder of snapshots, in that of the logs."""
NAME = re.compile(r"\d{17}-(startup|snapshot|shutdown)\.cfg")
KEYS = ("name", "modelCount", "created", "models")
"""What TorchServe writes in a `model_snapshot`."""
REQUIRED = {
    **{"defaultVersion": bool, "marName": str},
    **dict.fromkeys(("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay"), int),
}
"""Keys of each version in a snapshot; time limits and runtime have defaults."""


class Snapshots:
    """Writes snapshots, unless the settings name no folder for them."""

    def __init__(self, settings: TorchServeSettings) -> None:
        self._settings = settings
        self._has_started = False

    def take(self, kind: str, registry: "Registry") -> Callable[[], None]:
        """Return what writes what is registered now, as the newest snapshot.

        A file that cannot be written is logged and no more: the change itself was made.

        Args:
            kind: startup; snapshot after each change; shutdown. Without a startup before it nothing
                is written: a start that failed must not become what the next one restores.
            registry: the models.
        """
        folder = self._settings.snapshot_dir
        self._has_started = self._has_started or kind == "startup"
        if folder is None or not self._has_started:
            return lambda: None
        models: dict[str, dict[str, Any]] = {}
        for model in registry:
            if not model.is_saved:
                continue
            entry = _describe(model, registry.is_default(model))
            models.setdefault(model.name, {})[model.version] = entry
        return partial(self._write, folder, kind, {"models": models, **registry.noted()})

    def _write(self, folder: Path, kind: str, content: dict[str, Any]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = _next_file(folder, kind)
            write_file(file, self._format(file.name, content).encode())
        except OSError as error:
            logger.error("Error while saving snapshot to file %s: %s", error.filename, error)

    def _format(self, name: str, content: dict[str, Any]) -> str:
        snapshot = {
            "name": name,
            "modelCount": sum(map(len, content["models"].values())),
            "created": time.time_ns() // 1_000_000,
            **content,
        }
        values = {
            **self._settings.properties,
            "model_snapshot": json.dumps(snapshot, indent=2),
            "python": sys.executable,
            "version": TORCHSERVE_VERSION,
        }
        if self._settings.config_file is not None:
            values["tsConfigFile"] = str(self._settings.config_file)
        return f"#Saving snapshot\n#{time.ctime()}\n{format_properties(values)}"


def _next_file(folder: Path, kind: str) -> Path:
    """Return a name whose time is later than that of every other snapshot."""
    stamp = datetime.now().strftime("%Y%m%d%H%M%S%f")[:17]
    newest = next(iter(find_snapshots(folder)), None)
    if newest is not None and newest.name[:17] >= stamp:
        stamp = f"{int(newest.name[:17]) + 1:017d}"
    return folder / f"{stamp}-{kind}.cfg"


def _describe(model: "ModelVersion", is_default: bool) -> dict[str, Any]:
    config = model.config
    return {
        "defaultVersion": is_default,
        "marName": model.file,
        "minWorkers": model.pool.least,
        "maxWorkers": model.pool.most,
        "batchSize": config.batch_size,
        "maxBatchDelay": config.batch_delay_ms,
        "responseTimeout": int(config.response_timeout_s),
        "startupTimeout": int(config.startup_timeout_s),
        "runtimeType": (model.manifest or {}).get("runtime", "python"),
    }


def parse_notes(snapshot: Any) -> dict[str, Any]:
    """Return what a `model_snapshot` remembers beside the models."""
    found = snapshot if isinstance(snapshot, dict) else {}
    return {name: value for name, value in found.items() if name not in KEYS}


def find_snapshots(folder: Path) -> list[Path]:
    """Return the snapshots in a folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((file for file in folder.iterdir() if NAME.fullmatch(file.name)), reverse=True)


def parse_model_snapshot(snapshot: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Return name, version and what is said of each version that a `model_snapshot` loads.

    Raises:
        StartError: it does not have the form of a snapshot; the message names the model and key.
    """
    models = snapshot.get("models") if isinstance(snapshot, dict) else None
    if not isinstance(models, dict):
        raise StartError('model_snapshot: expected a JSON object with "models"')
    count = snapshot.get("modelCount", 0)
    if not is_number(count):
        raise StartError(f"model_snapshot: modelCount: expected int, got {count!r}")
    if count <= 0:
        return []
    entries = []
    for name, versions in models.items():
        if not isinstance(versions, dict):
            raise StartError(f"model_snapshot: {name}: expected an object of versions")
        for version, entry in versions.items():
            for key, kind in REQUIRED.items():
                value = entry.get(key) if isinstance(entry, dict) else None
                if type(value) is not kind:
                    raise StartError(
                        f"model_snapshot: {name} {version}: {key}: expected {kind.__name__}, "
                        f"got {value!r}"
                    )
            entries.append((name, version, entry))
    return entries
