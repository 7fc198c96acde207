"""A project whose own files are called as our packages are: both keep their names."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((".", str(ROOT)))}
"""Lets the project's folder lead the path of whatever runs in it."""


def write_neighbours(folder: Path) -> None:
    """Write modules and a package of our packages' names, which fail on import."""
    (folder / "exporter").mkdir()
    for name in ("serve.py", "handlers.py", "archiver.py", "exporter/__init__.py"):
        (folder / name).write_text(f"raise RuntimeError('{name} of the project was imported')\n")
