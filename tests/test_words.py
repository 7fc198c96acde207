"""The docstring below a field names a thing: "Age of its connections.", never "Of its ..."."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("archiver", "base", "client", "exporter", "handlers", "modelyard", "plugins", "serve")


def headless(source: str) -> list[str]:
    """Return the docstrings of fields and constants that begin with "Of" or "By"."""
    return [
        text
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for above, each in pairwise(node.body)
        if isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(each, ast.Expr)
        if isinstance(each.value, ast.Constant) and isinstance(text := each.value.value, str)
        if text.startswith(("Of ", "By "))
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('class A:\n    age_s: float\n    """Of its connections."""', ["Of its connections."]),
        ('AGE_S = 5.0\n"""Age of its connections."""', []),
    ],
)
def test_only_a_docstring_without_a_noun_is_caught(source: str, found: list[str]) -> None:
    assert headless(source) == found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_of_fields_name_a_thing(folder: str) -> None:
    files = [each for each in (REPO / folder).rglob("*.py") if "tests" not in each.parts]
    assert {str(each): lines for each in files if (lines := headless(each.read_text()))} == {}
