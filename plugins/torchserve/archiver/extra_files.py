"""`--extra-files` of TorchServe's archiver → files and their names in the archive."""

import glob
from collections.abc import Callable, Iterator
from pathlib import Path

from modelyard.archiver.collect import Part
from modelyard.archiver.errors import CannotArchive

ROLE = "extra file"

_LEFT_OUT = ("__MACOSX", "__pycache__")
_WILDCARDS = frozenset("*?[")


def expand_extra_files(text: str, keep_tree: bool, warn: Callable[[str], None]) -> list[Part]:
    """Find the files of a comma list of files, wildcards, folders and FILE=NAME.

    A folder's content lands at the archive's root with its sub-folders; with `keep_tree`, under
    the folder's own name.

    Raises:
        FileNotFoundError: there is no such file.
        CannotArchive: a folder holds something that is neither a file nor a folder, or a link
            that leads out of it.
    """
    parts: list[Part] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        for path, name in _matches(piece, warn):
            if path.is_dir():
                parts += folder_parts(path, path.resolve().name if keep_tree else "")
            else:
                parts.append(Part(name or path.name, path, ROLE))
    return parts


def _matches(piece: str, warn: Callable[[str], None]) -> Iterator[tuple[Path, str | None]]:
    """Yield the paths that a piece names, with the name to pack them under, if it says so."""
    if Path(piece).exists():
        yield Path(piece), None
    elif _WILDCARDS & set(piece):
        found = sorted(glob.glob(piece))  # noqa: PTH207 (a pattern may be an absolute path)
        if not found:
            warn(f"Given wildcard pattern did not match any file: {piece}")
        yield from ((Path(path), None) for path in found)
    else:
        path, equals, name = piece.rpartition("=")
        if not equals or not Path(path).is_file():
            raise FileNotFoundError(f"--extra-files: File does not exist: {piece}")
        yield Path(path), name


def folder_parts(folder: Path, prefix: str = "") -> Iterator[Part]:
    """Yield the files below a folder, sorted, without those that tools leave there.

    Raises:
        CannotArchive: one is neither a file nor a folder, or a link that leads out.
    """
    yield from _below(folder, folder.resolve(), f"{prefix}/" if prefix else "")


def _below(folder: Path, root: Path, prefix: str) -> Iterator[Part]:
    for path in sorted(folder.iterdir()):
        if not path.resolve().is_relative_to(root):
            raise CannotArchive(f"{path} is a link that leads out of {root.name}; name its target")
        if path.is_dir():
            if path.name not in _LEFT_OUT and not path.name.startswith("."):
                yield from _below(path, root, f"{prefix}{path.name}/")
        elif path.is_file():
            yield Part(prefix + path.name, path, ROLE)
        else:
            raise CannotArchive(f"{path} is neither a file nor a folder")
