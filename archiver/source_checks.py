"""Warn of what an author's code does that goes wrong elsewhere: found in the source, never run."""

import ast
import functools
import importlib.metadata
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from modelyard.archiver.requirements import Pin, own_distributions
from modelyard.archiver.untrusted.names import quoted
from modelyard.base.plugins import registered

# At least two parts, as /home/me; a route or a separator has fewer, most of the time.
_ABSOLUTE = re.compile(r"(/(?!dev/|proc/|sys/)[\w.@+-]+(/[\w.@+ -]+)+/?|[A-Za-z]:[\\/][\w. -]+.*)")


@functools.cache
def brought_modules() -> frozenset[str]:
    """Return the full names of the modules that plug-ins bring to workers, for handlers of old."""
    brought = (entry.load().modules for entry in registered("policies").values())
    return frozenset[str]().union(*brought)


def our_modules() -> set[str]:
    """Return the names that a worker has before the archive's own folder is on its path."""
    return {"modelyard", *(name.partition(".")[0] for name in brought_modules())}


def parse_source(name: str, code: bytes) -> ast.Module | None:
    """Return what a file says; None for a file of another Python, or a template."""
    try:
        return ast.parse(code, filename=name)
    except (SyntaxError, ValueError, RecursionError):
        return None


def source_warnings(
    names: Collection[str], sources: Iterable[tuple[str, bytes]], pins: Collection[Pin]
) -> list[str]:
    """Return one sentence per thing that is likely to fail in a worker.

    Args:
        names: names of all files of the archive.
        sources: name and content of the Python files among them.
        pins: the packages that the archive's requirements pin.
    """
    packages = [pin.name for pin in pins]
    warnings = [*_shadows(names, _import_names(packages))]
    known = known_modules(names, packages)
    for name, code in sources:
        if (tree := parse_source(name, code)) is not None:  # the handler itself was parsed before
            warnings += map(_describe, unmet_imports(name, tree, known))
            warnings += _absolute_paths(name, tree)
    return warnings


@dataclass(frozen=True)
class Unmet:
    """An import that neither the archive nor every server meets."""

    file: str
    line: int
    module: str
    """Its first part; in full where a plug-in brings others of that."""


def known_modules(names: Iterable[str], packages: Iterable[str]) -> set[str]:
    """Return the modules that a worker of an archive can import whatever the server has.

    Args:
        names: names of the archive's files.
        packages: packages that its requirements name.
    """
    own = {
        name.partition("/" if "/" in name else ".")[0]
        for name in names
        if name.endswith((".py", ".so", ".pyd"))
    }
    required = _import_names(map(canonicalize_name, packages))
    return {*own, *our_modules(), *sys.stdlib_module_names, *required}


def _shadows(names: Iterable[str], packages: Mapping[str, str]) -> Iterator[str]:
    """Warn of modules that other code would find instead of the one it asks for."""
    ours = our_modules()
    for name in names:
        module, dot, suffix = name.partition(".")
        if not dot or suffix != "py":
            continue
        if module in ours:
            yield (
                f"{name} has the name of a module of modelyard; in the worker, your own "
                f"`import {module}` finds your file"
            )
        elif module in sys.stdlib_module_names:
            yield (
                f"{name} hides the standard library's {module} from every library that the "
                "worker imports later; rename it"
            )
        elif module in packages:
            yield (
                f"{name} hides the required package {packages[module]}: `import {module}` finds "
                "your file; rename it"
            )


def _import_names(packages: Iterable[str]) -> dict[str, str]:
    """Return what packages are imported as → package.

    A package says so where it is installed; of the others, the package's own name is taken.
    """
    required = set(packages)
    names = {name.replace("-", "_"): name for name in required}
    for module, distributions in _installed().items():
        for distribution in distributions:
            if distribution in required:
                names[module] = distribution
    return names


def unmet_imports(name: str, tree: ast.Module, known: Collection[str]) -> Iterator[Unmet]:
    """Yield the imports of a file that nothing meets, each module once.

    Args:
        name: name of the file.
        tree: what it says.
        known: modules that are there, of `known_modules`.
    """
    unknown: dict[str, int] = {}
    brought = brought_modules()
    for imported, line in _imports(tree.body):
        module = imported.partition(".")[0]
        if module not in known:
            unknown.setdefault(module, line)
        elif module in brought and imported not in brought:
            yield Unmet(name, line, imported)
    if not unknown:
        return
    own = own_distributions()  # every server has these, because Modelyard needs them
    provided = {module for module, packages in _installed().items() if own.keys() & set(packages)}
    yield from (Unmet(name, line, each) for each, line in unknown.items() if each not in provided)


def _describe(unmet: Unmet) -> str:
    where = f"{unmet.file}:{unmet.line} imports {unmet.module}"
    package = unmet.module.partition(".")[0]
    if package in brought_modules():
        return (
            f"{where}, a module of {package} that workers do not have; do without it, or pack a "
            "copy under a name of your own"
        )
    return (
        f"{where}, which is neither in the archive nor in every server: add its file with "
        "--extra-files, or its package with --requirements"
    )


def _imports(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield the full names of modules that must be importable, and their lines.

    Left out is what code itself expects to be missing: imports in `try`, and for type checkers.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level and node.module:
                yield node.module, node.lineno
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.dump(node.test):
                yield from _imports(node.body)
            yield from _imports(node.orelse)
        elif not isinstance(node, ast.Try):
            for field in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, field, ()))


@functools.cache
def _installed() -> Mapping[str, list[str]]:
    """Return each module of this environment with the packages that bring it; half a second."""
    return {
        module: [canonicalize_name(each) for each in distributions]
        for module, distributions in importlib.metadata.packages_distributions().items()
    }


def _absolute_paths(name: str, tree: ast.Module) -> Iterator[str]:
    described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in described:
                if _ABSOLUTE.fullmatch(text):
                    yield (
                        f"{name}:{node.lineno} names the path {quoted(text)}, which other machines "
                        "may not have; pack the file, and open it by its name: the archive is the "
                        "worker's working folder"
                    )
