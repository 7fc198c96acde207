"""TorchServe's arguments → a plan, written as TorchServe's readers expect it.

The archive has TorchServe's keys only: no digests, no golden requests. Facts: `docs/archive.md`.
"""

import argparse
import glob
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from modelyard.archiver.collect import Part, Plan, created_on
from modelyard.archiver.errors import ArchiveExists, BadName, CannotArchive
from modelyard.archiver.manifest import ARCHIVER_VERSION, Manifest
from modelyard.archiver.untrusted import names
from modelyard.archiver.untrusted.container import MAX_ENTRIES, SUFFIXES
from modelyard.archiver.untrusted.names import quoted as quote
from modelyard.archiver.write import write_plan

# What `--archive-format` says → how we call it.
FORMATS = {"default": "zip-deflate"} | {each: each for each in ("tgz", "no-archive", "zip-store")}

BUILTIN_HANDLERS = (
    *("base_handler", "text_classifier", "image_classifier", "object_detector"),
    *("image_segmenter", "dali_image_classifier", "vllm_handler", "trt_llm_handler"),
)
# Built into TorchServe's C++ backend (runtime LSP).
_LSP_HANDLERS = ("BaseHandler", "TorchScriptHandler")

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_\-.]*$")

_EXTRA = "extra file"

_LEFT_OUT = ("__MACOSX", "__pycache__")
_WILDCARDS = frozenset("*?[")

Warn = Callable[[str], None]
"""Called with one line for the user."""


@dataclass
class ModelArchiverConfig:
    """What to pack: the command's arguments, under its names; TorchServe's class of this name."""

    model_name: str
    handler: str
    version: str
    serialized_file: str | None = None
    model_file: str | None = None
    extra_files: str | None = None
    runtime: str = "python"
    export_path: str = field(default_factory=lambda: str(Path.cwd()))
    archive_format: str = "default"
    force: bool = False
    requirements_file: str | None = None
    config_file: str | None = None
    keep_tree: bool = False
    check: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "ModelArchiverConfig":
        """Take the arguments that a parser read."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


def archive_for_torchserve(config: ModelArchiverConfig, warn: Warn) -> Path:
    """Write the archive, whole or not at all; return its path.

    Raises:
        FileNotFoundError: a file is not there.
        ArchiveError: a name breaks the rule, the archive exists, or files do not fit together.
    """
    check_model_name(config.model_name)
    names.check_version(config.version)
    folder, archive_format = Path(config.export_path), FORMATS[config.archive_format]
    if folder.is_file():
        raise CannotArchive(
            f"Given export-path {folder} is not a directory. "
            "Point to a valid export-path directory."
        )
    if not folder.exists():
        warn(f"Given export-path {folder} does not exist; it is created.")
    target = folder / f"{config.model_name}{SUFFIXES[archive_format]}"
    if target.exists() and not config.force:
        raise ArchiveExists(
            f"{target} already exists.\n"
            "Please specify --force/-f option to overwrite the model archive output file.\n"
            "See -h/--help for more details."
        )
    if target.exists():
        warn(f"Overwriting {target} ...")
    more: dict[str, Any] = {"dry_run": config.check, "force": config.force}
    plan = plan_for_torchserve(config, warn)
    return write_plan(plan, folder, archive_format=archive_format, **more).path


def check_model_name(name: str) -> None:
    """Refuse a name as TorchServe does, and one that is too long for the rule used everywhere.

    Raises:
        BadName: the name breaks the rule.
    """
    if not _NAME.match(name):
        raise BadName(
            "Model name contains special characters.\n"
            f"The allowed regular expression filter for model name is: {_NAME.pattern}"
        )
    names.check_name(name)


def plan_for_torchserve(config: ModelArchiverConfig, warn: Warn) -> Plan:
    """Find the files that are to be packed.

    Raises:
        FileNotFoundError: one of them is not there.
        CannotArchive: their names cannot be unpacked everywhere.
    """
    parts: list[Part] = []
    for name, flag, role in (
        (_handler_file(config.handler, config.runtime), "--handler", "handler"),
        (config.model_file, "--model-file", "model file"),
        (config.serialized_file, "--serialized-file", "weights"),
        (None, "--extra-files", ""),
        (config.requirements_file, "--requirements-file", "requirements"),
        (config.config_file, "--config-file", "configuration"),
    ):
        if not role:
            parts += expand_extra_files(config.extra_files or "", config.keep_tree, warn)
        elif name and not Path(name).is_file():
            raise FileNotFoundError(f"{flag}: [Errno 2] No such file or directory: '{name}'")
        elif name:
            parts.append(Part(Path(name).name, Path(name), role))
    return Plan(_manifest(config), _checked(parts, warn))


def _handler_file(handler: str, runtime: str) -> str | None:
    """Return the file of a handler: `path.py`, `path`, either with `:function`, or none."""
    builtin = _LSP_HANDLERS if runtime == "LSP" else BUILTIN_HANDLERS
    if handler in builtin:
        return None
    path = handler.rpartition(":")[0] or handler
    suffix = ".so" if runtime == "LSP" else ".py"
    is_complete = Path(path).suffix in ((".so", ".dylib") if runtime == "LSP" else (".py",))
    return path if is_complete else path + suffix


def _checked(parts: list[Part], warn: Warn) -> tuple[Part, ...]:
    """Keep the last file of each name, as TorchServe does, and say so; check the names."""
    kept: dict[str, Part] = {}
    for part in parts:
        before = kept.get(part.name)
        if before is not None and not before.is_of(part.source):
            warn(f"{part.label} is packed as {part.name}, in place of {before.label}")
        kept[part.name] = part
    problems = []
    for part in kept.values():
        problem = names.file_name_problem(part.name)
        if part.name.partition("/")[0].lower() == "mar-inf":
            problem = f"{quote(part.name)}: MAR-INF is where the archive's own files lie"
        if problem:
            problems.append(f"{part.label}: {problem}")
    problems += names.collisions([*kept, names.MANIFEST_NAME])
    if len(kept) >= MAX_ENTRIES:
        problems.append(f"{len(kept)} files; an archive holds {MAX_ENTRIES - 1}")
    if problems:
        raise CannotArchive("these files cannot be packed", problems)
    return tuple(kept[name] for name in sorted(kept))


def _manifest(config: ModelArchiverConfig) -> Manifest:
    """Return the manifest; of a handler it has the base name, as TorchServe reads it."""
    path, colon, function = config.handler.rpartition(":")
    handler = Path(config.handler).name
    if colon:
        handler = f"{Path(path).name.removesuffix('.py')}:{function}"
    files = ("serialized_file", "model_file", "requirements_file", "config_file")
    named: dict[str, Any] = {
        key: Path(file).name for key in files if (file := getattr(config, key))
    }
    return Manifest(
        model_name=config.model_name,
        model_version=config.version,
        handler=handler,
        runtime=config.runtime,
        created_on=created_on(),
        archiver_version=ARCHIVER_VERSION,
        **named,
    )


# -- `--extra-files` → files and their names in the archive ---------------------------------------


def expand_extra_files(text: str, keep_tree: bool, warn: Warn) -> list[Part]:
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
                parts.append(Part(name or path.name, path, _EXTRA))
    return parts


def _matches(piece: str, warn: Warn) -> Iterator[tuple[Path, str | None]]:
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
            yield Part(prefix + path.name, path, _EXTRA)
        else:
            raise CannotArchive(f"{path} is neither a file nor a folder")
