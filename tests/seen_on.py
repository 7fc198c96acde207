"""docs/seen-on.md, which `pytest -m gpu --record` writes on a machine with a device."""

from __future__ import annotations

import hashlib
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "seen-on.md"
PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "torch-tensorrt")
NOTHING = """\
# Seen on devices

Nothing of Modelyard has run on a CUDA device yet. What these pages say of GPUs is by reading and
by tests on CPUs; none of it is measured. `scripts/gpu` measures it in ten minutes on a machine that
has one, and `pytest -m gpu --record` writes this page there.
"""
_SEEN = """\
# Seen on devices

Written by `pytest -m gpu --record`, never by hand. What stands below has passed or failed on this
device; what does not is not measured.

{about}

{tests}
"""
_DIGEST = "<!-- sha256 {} -->\n"


def render(about: dict[str, str], outcomes: dict[str, str]) -> str:
    """Return the page of a device.

    Args:
        about: what it is and what ran on it, by name.
        outcomes: test → passed, failed or skipped.
    """

    def table(head: str, rows: dict[str, str]) -> str:
        return "\n".join([head, "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows.items())])

    text = _SEEN.format(
        about=table("| what | seen |", about), tests=table("| test | outcome |", outcomes)
    )
    return text + _DIGEST.format(_digest(text))


def is_recorded(page: str) -> bool:
    """Return whether a page is as `render` wrote it, or says that there is nothing."""
    text, mark, rest = page.rpartition("<!-- sha256 ")
    return page == NOTHING or (bool(mark) and mark + rest == _DIGEST.format(_digest(text)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Recorder:
    """Keeps the outcome of each test of a device, and writes the page at the end.

    Raises:
        pytest.UsageError: there is none.
    """

    def __init__(self, page: Path = PAGE) -> None:
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError(
                f"--record writes {page.name} of what a CUDA device shows, and torch sees none here"
            )
        self._page = page
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gpu" in report.keywords and (report.when == "call" or not report.passed):
            self._outcomes[f"`{report.nodeid}`"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if self._outcomes:
            self._page.write_text(render(_about(), self._outcomes))


def _about() -> dict[str, str]:
    import torch

    ask = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    commit = ("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return {
        "device": torch.cuda.get_device_name(0),
        "driver": _said(ask),
        "CUDA": str(torch.version.cuda),
        **{name: _version(name) for name in PACKAGES},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _said(commit),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _said(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
