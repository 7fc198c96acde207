"""`--handler` → what the manifest records, and the file to pack."""

import ast
from dataclasses import dataclass
from pathlib import Path

from modelyard.archiver.errors import CannotArchive, WrongUsage
from modelyard.archiver.untrusted.names import builtin_handlers, quoted
from modelyard.base.nearest import did_you_mean


@dataclass(frozen=True)
class EntryPoint:
    """A built-in handler's name, or a handler file with or without the class to use."""

    recorded: str
    file: Path | None


def parse_handler(text: str) -> EntryPoint:
    """Read `image_classifier`, `FILE.py` or `FILE.py:Class`; the file is parsed, never run.

    Raises:
        WrongUsage: an unknown name.
        CannotArchive: no such file, no Python, or no such class in it.
    """
    if text in builtin_handlers():
        return EntryPoint(text, None)
    stem, colon, class_name = text.rpartition(":")
    file, class_name = (Path(stem), class_name) if stem.endswith(".py") else (Path(text), "")
    if file.suffix != ".py":
        raise WrongUsage(
            f"handler {quoted(text)}: expected FILE.py, FILE.py:Class, or one of "
            f"{', '.join(builtin_handlers())}{did_you_mean(text, builtin_handlers())}"
        )
    if colon and stem.endswith(".py") and not class_name.isidentifier():
        raise CannotArchive(f"handler {quoted(text)}: {quoted(class_name)} is not a name")
    _check_source(file, class_name)
    return EntryPoint(f"{file.name}:{class_name}" if class_name else file.name, file)


def _check_source(file: Path, class_name: str) -> None:
    if not file.is_file():
        raise CannotArchive(f"handler {file}: there is no such file")
    try:
        tree = ast.parse(file.read_bytes(), filename=file.name)
    except SyntaxError as error:
        raise CannotArchive(f"handler {file}, line {error.lineno}: {error.msg}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CannotArchive(f"handler {file} cannot be read: {error}") from error
    names = _bound_names(tree)
    if class_name and class_name not in names and "*" not in names:
        kinds = (ast.ClassDef, ast.FunctionDef)
        own = [node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_"]
        raise CannotArchive(
            f"handler {file} has no {class_name}; it has: {', '.join(sorted(own)) or 'nothing'}"
        )


def _bound_names(tree: ast.Module) -> set[str]:
    """Collect every name that the file defines, imports or assigns, at whatever depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
