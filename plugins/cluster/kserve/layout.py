"""What lies in the folder that KServe's storage initializer has filled, and how it is served.

The folder is read-only to us: nothing is written there. Of the layouts below, the first that is
found counts:

    config/config.properties, model-store/     TorchServe's
    MAR-INF/                                   one archive, unpacked
    *.mar, *.tar.gz                            archives
    one *.onnx, *.pt2, *.pt, *.pts             an artifact without an archive
    one folder, and nothing else               what that folder holds
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver import ArchiveError, write_archive
from modelyard.archiver.choose import AUTO
from modelyard.archiver.report import REPORT
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.serve.control.store import list_archives
from modelyard.serve.errors import StartError

CONFIG = Path("config", "config.properties")
TORCHSERVES_STORE = "model-store"
ARTIFACTS = (".onnx", ".pt2", ".pt", ".pts")
SETTINGS_FILE = "model-config.yaml"


@dataclass(frozen=True)
class TorchServes:
    """TorchServe's two folders."""

    config: Path
    store: Path


@dataclass(frozen=True)
class Archives:
    """A model store, and what of it is served, as the setting `models` says it."""

    store: Path
    models: tuple[str, ...]


def find_layout(folder: Path, name: str | None, scratch: Path) -> TorchServes | Archives:
    """Find out what to serve; an artifact without an archive gets one in `scratch`.

    Args:
        folder: filled by the storage initializer.
        name: name of the InferenceService: what a single model is served as.
        scratch: a folder of our own, made if need be.

    Raises:
        StartError: there is nothing to serve, or more than one thing it could be.
    """
    if not folder.is_dir():
        raise StartError(
            f"there is no folder {folder}; set the storageUri of the InferenceService, or the "
            "variable STORAGE_URI of an explainer's container"
        )
    if (folder / CONFIG).is_file():
        store = folder / TORCHSERVES_STORE
        if not store.is_dir():
            raise StartError(f"{folder} holds {CONFIG} but no folder {TORCHSERVES_STORE}")
        if not any(store.iterdir()):
            raise StartError(f"{store} is empty; expected the archives that {CONFIG} names")
        return TorchServes(folder / CONFIG, store)
    if (folder / MANIFEST_NAME).is_file():
        return Archives(folder.parent, (_named(name, folder.name),))
    if archives := list_archives(folder):
        models = (_named(name, archives[0]),) if len(archives) == 1 else ("ALL",)
        return Archives(folder, models)
    files = sorted(folder.iterdir())
    artifacts = [file for file in files if file.suffix in ARTIFACTS]
    if not artifacts:
        if len(files) == 1 and files[0].is_dir():  # as `tar czf models.tar.gz models` packs them
            return find_layout(files[0], name, scratch)
        there = ", ".join(file.name for file in files) or "nothing"
        raise StartError(
            f"{folder} holds {there}; expected archives (.mar, .tar.gz), one model "
            f"({', '.join(ARTIFACTS)}), or TorchServe's {CONFIG} and {TORCHSERVES_STORE}"
        )
    if len(artifacts) > 1:
        names = ", ".join(file.name for file in artifacts)
        raise StartError(
            f"{folder} holds {names}: it cannot be known which one is meant; keep one, or archive "
            "them with `modelyard archive`"
        )
    return _archive(artifacts[0], name or artifacts[0].stem, scratch)


def _named(name: str | None, file: str) -> str:
    return file if name is None else f"{name}={file}"


def _archive(artifact: Path, name: str, scratch: Path) -> Archives:
    """Give an artifact an archive, with the files beside it that a handler reads."""
    settings = artifact.with_name(SETTINGS_FILE)
    has_report = artifact.with_name(artifact.name + REPORT).is_file()
    try:
        path = write_archive(
            name,
            version="1",
            output_dir=scratch,
            artifact=artifact,
            # Without a report nothing says what the numbers mean.
            handler=AUTO if has_report else "base_handler",
            source_folder=artifact.parent if has_report else None,
            config_file=settings if settings.is_file() else None,
            force=True,
        )
    except (ArchiveError, OSError) as error:
        raise StartError(f"{artifact} cannot be served without an archive: {error}") from error
    return Archives(path.parent, (path.name,))
