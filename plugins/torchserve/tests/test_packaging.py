"""What a wheel holds of this plug-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_packaging import run_installed
from tests.test_packaging import wheel as wheel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "code",
    [
        "from modelyard.serve.worker import dialect as d; d.find_dialect(); import ts as found",
        "import model_archiver.model_packaging as found",
    ],
    ids=["shim", "archiver"],
)
def test_its_import_names_come_from_the_wheel(wheel: Path, tmp_path: Path, code: str) -> None:
    installed = tmp_path / "installed"
    printed = run_installed(wheel, installed, "-c", f"{code}; print(found.__file__)")
    assert Path(printed.strip()).is_relative_to(installed)
