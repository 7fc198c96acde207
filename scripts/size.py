#!/usr/bin/env python3
"""How much there is to read: code lines and statements of each package, beside its budget.

A code line is neither blank nor a comment nor part of a docstring; statements tell joined lines.
"""

import ast
import functools
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Size(NamedTuple):
    """What there is to read."""

    lines: int
    statements: int


def measure(text: str) -> Size:
    """Return the size of a module."""
    docstrings: set[int] = set()
    lines = {
        number
        for number, line in enumerate(text.split("\n"), 1)
        if (code := line.strip()) and not code.startswith("#")
    }
    statements = 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # a text may hold lines as of a comment
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if not isinstance(node, ast.stmt):
            continue
        bare = node.value if isinstance(node, ast.Expr) else None
        if isinstance(bare, ast.Constant) and isinstance(bare.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        else:
            statements += 1
    return Size(len(lines - docstrings), statements)


def files_of(package: str) -> Iterator[Path]:
    """Yield the modules of a folder, without tests and what a build has left."""
    for file in sorted((ROOT / package).rglob("*.py")):
        inside = file.relative_to(ROOT).parts
        if not {"tests", "build", "__pycache__"} & {*inside} and not file.is_symlink():
            yield file


@functools.cache
def size_of(package: str) -> Size:
    """Return the size of a package."""
    sizes = [measure(file.read_text(encoding="utf-8")) for file in files_of(package)]
    return Size(sum(size.lines for size in sizes), sum(size.statements for size in sizes))


def read_budget() -> dict[str, dict[str, int]]:
    """Return what each package, and each sum of packages, may have."""
    return tomllib.loads((ROOT / "budget.toml").read_text(encoding="utf-8"))


def main() -> int:
    """Print the table; 1 where a budget is exceeded."""
    budget = read_budget()
    sizes = {package: size_of(package) for package in budget["packages"]}
    rows = [(name, sizes[name], most) for name, most in budget["packages"].items()]
    for name, most in budget["sums"].items():
        parts = budget["parts"][name]
        members = [sizes[each] for each in sizes if any(each.startswith(part) for part in parts)]
        total = Size(sum(size.lines for size in members), sum(size.statements for size in members))
        rows.append((name, total, most))
    print(f"{'lines':>7} {'budget':>7} {'statements':>11}  of")
    for name, size, most in rows:
        over = f"  {size.lines - most} too many" if size.lines > most else ""
        print(f"{size.lines:7} {most:7} {size.statements:11}  {name}{over}")
    return int(any(size.lines > most for _, size, most in rows))


if __name__ == "__main__":
    sys.exit(main())
