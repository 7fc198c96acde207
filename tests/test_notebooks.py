"""docs/notebooks.md: its cells run from top to bottom, each shows what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).parent.parent
CELLS = re.findall(
    r"^```python\n(.*?)^```$", (REPO / "docs" / "notebooks.md").read_text(), re.M | re.S
)
RUN = """
import ast, json, os, sys
names, shown = {}, []
for cell in json.load(sys.stdin):
    *body, last = ast.parse(cell).body
    is_shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if is_shown else [*body, last], []), "<cell>", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if is_shown else None
    page, picture = (getattr(value, f"_repr_{kind}_", lambda: None)() for kind in ("html", "png"))
    shown.append([repr(value), page, picture and picture[:8].hex(), "torch" in sys.modules])
print(json.dumps(shown))
"""
"""As a kernel does: the value of a last line is shown by its own methods."""


def run_cells(cells: list[str], folder: Path) -> list[list[Any]]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MODELYARD_")}
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", RUN],
        cwd=folder,
        env={**kept, "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"},
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert ran.returncode == 0, ran.stderr
    shown: list[list[Any]] = json.loads(ran.stdout.splitlines()[-1])
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("with_export", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_cells_run_and_an_explanation_shows_itself(
    with_export: bool, digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """By day the export's artifacts are those of the test run."""
    shutil.copytree(REPO / "examples", tmp_path / "examples")
    cells = [cell for cell in CELLS if with_export or "export(\n" not in cell]
    assert len(cells) == len(CELLS) - (not with_export)
    if not with_export:
        shutil.copytree(digits_artifacts["onnx"].parent, tmp_path / "build")
    shown = run_cells(cells, tmp_path)
    outputs = {cell: out for cell, out in zip(cells, shown, strict=True)}

    def of(text: str) -> list[Any]:
        (found,) = (out for cell, out in outputs.items() if cell.rstrip().endswith(text))
        return found

    assert of("server")[0].startswith("<Server http://127.0.0.1:")
    assert of("check in checked.checks]")[0].count("answered as expected") == 1
    for cell, label in (("why", "7"), ("second", "")):
        text, page, picture, _ = of(f"\n{cell}")
        assert text.startswith("Explanation(")
        assert page.startswith('<iframe sandbox="allow-scripts"') and f"Why “{label}" in page
        assert picture == b"\x89PNG\r\n\x1a\n".hex()
    if not with_export:
        assert not any(torch for *_, torch in shown), "nothing here needs torch"
    assert not (tmp_path / "state" / "modelyard" / "server.json").exists()
