"""Write a folder that builds a container image with archives inside."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from modelyard.archiver.read import open_archive
from modelyard.archiver.untrusted.names import check_name
from modelyard.serve.errors import BadRequest

MODELS = "models"


@dataclass(frozen=True)
class Packed:
    """An archive that goes into the image."""

    path: Path
    name: str
    """Name under which it is served."""
    version: str
    digest: str
    """SHA-256 of its manifest."""
    has_requirements: bool


def base_image() -> str:
    """Return the image that this version of Modelyard builds of itself."""
    return f"modelyard:{version('modelyard')}"


def dockerize(archives: Sequence[Path], folder: Path, base: str, is_forced: bool) -> list[Packed]:
    """Check the archives and write `folder`: Dockerfile, compose.yaml, and copies of them.

    Args:
        base: name of the image to build on.
        is_forced: replaces a folder that an earlier call has written.

    Raises:
        ArchiveError: an archive is refused.
        BadRequest: two of them have one name, or the folder is not one of ours.
    """
    packed = [_look_at(path) for path in archives]
    for index, each in enumerate(packed):
        for other in packed[:index]:
            if each.path.name == other.path.name:
                raise BadRequest(
                    f"{other.path} and {each.path} would be one file of the image; rename one"
                )
            if (each.name, each.version) == (other.name, other.version):
                raise BadRequest(
                    f"{other.path.name} and {each.path.name} both hold {each.name} {each.version}; "
                    "leave one out, or archive it again under another name or version"
                )
    if folder.exists() and not (is_forced and _is_ours(folder)):
        advice = "--force replaces it" if _is_ours(folder) else "name a new folder"
        raise BadRequest(f"{folder} is there already; {advice}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".dockerize-") as scratch:
            made = Path(scratch) / folder.name
            (made / MODELS).mkdir(parents=True)
            for each in packed:
                shutil.copy(each.path, made / MODELS / each.path.name)
                (made / MODELS / each.path.name).chmod(0o644)
            (made / "Dockerfile").write_text(_dockerfile(packed, base), encoding="utf-8")
            (made / ".dockerignore").write_text(f"*\n!{MODELS}\n", encoding="utf-8")
            compose = Path(__file__).with_name("compose.yaml").read_text(encoding="utf-8")
            compose = compose.replace("NAME", packed[0].name)
            (made / "compose.yaml").write_text(compose, encoding="utf-8")
            if folder.exists():
                folder.rename(Path(scratch) / "replaced")
            made.rename(folder)
    except OSError as error:
        raise BadRequest(f"cannot write {folder}: {error.strerror or error}") from error
    return packed


def _look_at(path: Path) -> Packed:
    if not path.is_file():
        raise BadRequest(f"{path} is not a file; expected an archive of `modelyard archive`")
    check_name(path.name)  # it stands in the Dockerfile
    with open_archive(path) as archive:
        manifest = archive.manifest
        required = manifest.modelyard.requirements if manifest.modelyard else ()
        name = manifest.model_name or path.name.partition(".")[0]
        return Packed(
            path,
            name,
            manifest.model_version,
            archive.digest,
            bool(required or manifest.requirements_file),
        )


def _is_ours(folder: Path) -> bool:
    """Return whether an earlier call has written the folder, which may then be replaced."""
    try:
        return (folder / "Dockerfile").read_text(encoding="utf-8").startswith(_HEAD)
    except (OSError, UnicodeDecodeError):
        return False


_HEAD = "# Written by `modelyard dockerize`"


def _dockerfile(packed: Sequence[Packed], base: str) -> str:
    served = ",".join(f"{each.name}={each.path.name}" for each in packed)
    lines = [
        f"{_HEAD}: docker build -t {packed[0].name.lower()} .",
        f"ARG BASE={base}",
        "# hadolint ignore=DL3006",
        "FROM ${BASE}",
        *(f"# {each.path.name}: {each.name} {each.version}, {each.digest}" for each in packed),
        f"COPY --chown=0:0 {MODELS} /models",
        f"ENV MODELYARD_MODELS={served}",
    ]
    if any(each.has_requirements for each in packed):
        lines.append("ENV MODELYARD_INSTALL_REQUIREMENTS=1")
    return "\n".join(lines) + "\n"
