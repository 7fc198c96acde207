"""Each package within its budget: lines for a feature are bought by deleting others."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("size", ROOT / "scripts" / "size.py")
assert _spec is not None and _spec.loader is not None
size = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(size)
BUDGET = size.read_budget()


@pytest.mark.parametrize("package", BUDGET["packages"])
def test_no_package_is_above_its_budget(package: str) -> None:
    most = BUDGET["packages"][package]
    if package.startswith("plugins/") and not (ROOT / package).exists():
        pytest.skip("this checkout lacks it")
    found = size.size_of(package)
    assert found.lines <= most, (
        f"{package} has {found.lines} code lines, {found.lines - most} above its budget: delete as "
        "many, or lower another package's budget in budget.toml by as much"
    )


def test_every_package_has_a_budget_and_the_sums_hold() -> None:
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"plugins"}
    plugins = {f"plugins/{file.parent.name}" for file in ROOT.glob("plugins/*/__init__.py")}
    assert packages | plugins <= set(BUDGET["packages"])
    for name, parts in BUDGET["parts"].items():
        of = [most for each, most in BUDGET["packages"].items() if each.startswith(tuple(parts))]
        assert sum(of) <= BUDGET["sums"][name], name


@pytest.mark.parametrize(
    ("text", "lines", "statements"),
    [
        ('"""A module."""\n\nx = 1  # one\n', 1, 1),
        ('def f():\n    """Of two\n    lines."""\n    return (1,\n            2)\n', 3, 2),
        ("a = 1; b = 2\n", 1, 2),
        ("# nothing\n\n", 0, 0),
    ],
)
def test_what_counts(text: str, lines: int, statements: int) -> None:
    assert size.measure(text) == (lines, statements)
