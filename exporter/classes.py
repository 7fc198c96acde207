"""Classes of networks in Python files, found by reading the files: nothing of them is run.

Where nothing says which class the weights are of, the error ends with a command that names one.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelyard.exporter.errors import UsageError
from modelyard.exporter.ingest import Checkpoint
from modelyard.exporter.request import ExportRequest, paste

MODEL_FORM = "file.py:Class, package.module:Class or package.module:factory"
MAX_SOURCE_BYTES = 1 << 20
MAX_FILES = 200
_SHOWN = 5
_NETWORKS = ("Module", "LightningModule", "Sequential", "PreTrainedModel")
"""What the name of a network's base ends with."""


@dataclass(frozen=True)
class FoundClass:
    """A class of a network, as its file writes it."""

    file: Path
    name: str
    parts: frozenset[str]
    """Attributes that it, or a base of its in the same file, gives itself."""
    takes: tuple[str, ...]
    """Names of forward()'s arguments."""

    def fits(self, weights: Iterable[str]) -> bool:
        """Return whether every weight, by its dotted name, lies in an attribute of the class."""
        return {name.partition(".")[0] for name in weights} <= self.parts


def classes_in(file: Path) -> list[FoundClass]:
    """Return the networks that a file defines, in its order; none of a file that is not Python's.

    Those whose names begin with an underscore are parts of others.
    """
    try:
        if file.stat().st_size > MAX_SOURCE_BYTES:
            return []
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    own = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = []
    for name, node in own.items():
        lineage = _lineage(node, own)
        bases = [_last(base) for each in lineage for base in each.bases]
        if not name.startswith("_") and any(base.endswith(_NETWORKS) for base in bases):
            parts = frozenset(part for each in lineage for part in _parts(each))
            takes = next(filter(None, map(_takes, lineage)), ())
            found.append(FoundClass(file, name, parts, takes))
    return found


def classes_near(folders: Iterable[Path]) -> list[FoundClass]:
    """Return the networks of the Python files that lie in these folders."""
    files = [
        file
        for folder in dict.fromkeys(folders)
        for file in sorted(folder.glob("*.py"))[:MAX_FILES]
    ]
    return [found for file in files for found in classes_in(file)]


def _lineage(node: ast.ClassDef, own: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and its bases, as far as the file defines them."""
    found, waiting = [node], [node]
    while waiting:
        for base in waiting.pop().bases:
            other = own.get(_last(base))
            if other is not None and other not in found:
                found.append(other)
                waiting.append(other)
    return found


def _last(node: ast.expr) -> str:
    """Return the last name of `a.b.C`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _parts(node: ast.ClassDef) -> Iterator[str]:
    """Yield what methods of a class assign to `self`, or register by name."""
    for each in ast.walk(node):
        match each:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Call(func=function, args=[ast.Constant(value=name), *_]):
                if _last(function) in _REGISTERS:
                    yield str(name)


_REGISTERS = ("register_buffer", "register_parameter", "register_module", "add_module")


def _takes(node: ast.ClassDef) -> tuple[str, ...]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "forward":
            return tuple(argument.arg for argument in each.args.args[1:])
    return ()


def _with_class(request: ExportRequest, found: FoundClass) -> str:
    file = found.file
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return paste(replace(request, model=f"{file}:{found.name}"))


def without_class(request: ExportRequest, checkpoint: Checkpoint, problem: str) -> UsageError:
    """Return the error of weights whose class nobody named, with those of the files beside them.

    Args:
        request: without a model.
        checkpoint: the weights.
        problem: what is missing.
    """
    beside = checkpoint.path.absolute().parent
    near = classes_near([beside, Path.cwd(), beside.parent])
    fitting = [found for found in near if found.fits(checkpoint.tensors)]
    if not fitting:
        seen = f"beside it are {_listed(near)}" if near else "no Python file beside it has one"
        return UsageError(f"{problem}; {seen}")
    first, *others = fitting
    takes = f", whose forward() takes {', '.join(first.takes)}" if first.takes else ""
    also = f" (so do {_listed(others)})" if others else ""
    return UsageError(
        f"{problem}. {_place(first)} has their names{takes}{also}{_with_class(request, first)}"
    )


def without_name(request: ExportRequest, file: Path) -> UsageError:
    """Return the error of `--model net.py`, with the classes of the file."""
    found = classes_in(file)
    problem = f'--model "{file}" names no class in the file'
    if not found:
        return UsageError(f"{problem}, which defines none; expected {MODEL_FORM}")
    return UsageError(
        f"{problem}; it has {', '.join(each.name for each in found)}"
        f"{_with_class(request, found[0])}"
    )


def _listed(found: Sequence[FoundClass]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(map(_place, found[:_SHOWN])) + more


def _place(found: FoundClass) -> str:
    return f"{found.name} in {found.file.name}"
