"""Count the operators of every program that a test saves: `pytest -p tests.breadth.recorded`.

The count lies with the others of `tests.breadth.operators`, and replaces the one before.
"""

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.breadth.operators import OUTPUT, nodes, operator_name

_counted: collections.Counter[str] = collections.Counter()
_programs = 0


def pytest_configure(config: pytest.Config) -> None:
    """Look at each program on its way into a file."""
    save = torch.export.save

    def record(program: torch.export.ExportedProgram, *args: Any, **kwargs: Any) -> None:
        global _programs
        _programs += 1
        _counted.update(operator_name(node.target) for node in nodes(program.graph_module))
        save(program, *args, **kwargs)

    torch.export.save = record  # type: ignore[assignment]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Write the count."""
    Path(OUTPUT).mkdir(parents=True, exist_ok=True)
    found = {"operators": _counted, "programs": _programs}
    Path(OUTPUT, "tests.json").write_text(json.dumps(found), encoding="utf-8")
