"""What many modules share: the digits model, exported and archived once, and a live server."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, get_args

import pytest
from modelyard_client.options import Method

from modelyard.archiver import write_archive
from modelyard.base.explain_options import EXPLAIN_OPTIONS
from tests import seen_on
from tests.serve.live import LiveServer, running

if TYPE_CHECKING:
    from modelyard.exporter.prove.checker import Checker

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits"
FILES = {"pt2": "digits.pt2", "onnx": "digits.onnx", "torchscript": "digits.pt"}
"""Format → artifact of the digits model."""


EXPORT = (
    *("export", "examples/digits/digits.pt", "--model", "examples/digits/net.py:DigitsNet"),
    *("--input", "image:float32[batch,1,8,8]", "--output", "logits"),
)
"""The export of the README, which the whole test run shares."""

LONGEST = (
    *("cluster", "test_docs.py", "serve", "test_architecture.py", "trips"),
    *("handlers", "exporter", "archiver", "benchmarks"),
)
"""Folders and files whose tests take longest; `trips` needs what `test_docs.py` exports."""

METHODS = EXPLAIN_OPTIONS["method"].choices
FURTHER = pytest.mark.skipif("saliency" not in METHODS, reason="a plug-in brings the method")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import without looking for garbage, and leave what is there by then out of every later look.

    It stays, and is so much that looking through it took a quarter of the time of collecting.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that no process is left with one of them at the end."""
    places = {name: place for place, name in enumerate(LONGEST)}

    def place(item: pytest.Item) -> int:
        return places.get(item.path.relative_to(ROOT).parts[1], len(places))

    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write docs/seen-on.md; needs a device")
    parser.addoption("--dry-run", action="store_true", help="let tests of a device take the CPU")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to record what no device has shown, and look on where one is there."""
    if config.getoption("--record"):
        config.pluginmanager.register(seen_on.Recorder(), "seen-on")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """What tests of CUDA run on: a device, or the CPU where that is asked for."""
    return "cpu" if pytestconfig.getoption("--dry-run") else "cuda:0"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device, or a method that a plug-in brings, where it is not there."""
    callspec = getattr(item, "callspec", None)
    method = callspec.params.get("method") if callspec else None
    if isinstance(method, str) and method in {*get_args(Method)} - {*METHODS}:
        pytest.skip(f"a plug-in brings {method}")
    if item.get_closest_marker("gpu"):
        import torch

        asks = "device" in getattr(item, "fixturenames", ())
        if not torch.cuda.is_available() and not (asks and item.config.getoption("--dry-run")):
            pytest.skip("this machine has no CUDA device that torch can use")


@contextmanager
def made_once(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a folder that all processes of a test run share, and whether it is still to be filled.

    Whoever comes second waits until the first has filled it.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder.with_suffix(".done")
        folder.mkdir(exist_ok=True)
        yield folder, not done.exists()
        done.touch()


@pytest.fixture(scope="session")
def digits_artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export the digits checkpoint; give format → artifact, each with its report beside it.

    What the command printed is in `stdout` and `stderr` beside their folder.
    """
    command = [
        *(sys.executable, "-P", "-W", "error"),
        *("-W", "ignore:Guards may run slower on Python 3.13.0"),  # as in pyproject.toml
        *("-c", "from modelyard.cli import main; main()"),
        *(word.replace("examples/", f"{ROOT}/examples/") for word in EXPORT),
        *(word for format in FILES for word in ("--format", format)),
    ]
    with made_once(tmp_path_factory, "digits") as (folder, is_empty):
        if is_empty:
            ran = subprocess.run(
                [*command, "-o", str(folder / "artifacts"), "--json"],
                capture_output=True,
                text=True,
            )
            assert ran.returncode == 0, ran.stderr
            (folder / "stdout").write_text(ran.stdout)
            (folder / "stderr").write_text(ran.stderr)
    return {format: folder / "artifacts" / file for format, file in FILES.items()}


def archive_digits(name: str, artifact: Path, store: Path, *, dry_run: bool = False) -> Path:
    """Archive an artifact of the digits model as its example does, with two golden requests."""
    return write_archive(
        name,
        version="1.0",
        artifact=artifact,
        handler="image_classifier",
        output_dir=store,
        extra_files=[DIGITS / "index_to_name.json"],
        config_file=DIGITS / "model-config.yaml",
        examples=[f"{DIGITS / 'scans' / f'{digit}.png'}={digit}" for digit in (2, 7)],
        dry_run=dry_run,
    )


@pytest.fixture(scope="session")
def digits_store(
    digits_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Archive each artifact of the digits model under its format's name; give the model store."""
    with made_once(tmp_path_factory, "store") as (store, is_empty):
        for format, artifact in digits_artifacts.items() if is_empty else ():
            archive_digits(format, artifact, store)
    return store


@pytest.fixture(scope="session")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    """Start one process that checks artifacts, for all tests, with the first question."""
    from modelyard.exporter.prove.checker import Checker  # imports torch

    class Kept(Checker):
        """A checker that no export starts or ends."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    kept = Kept(tmp_path_factory.mktemp("exchange"))
    yield kept
    Checker.__exit__(kept)


@pytest.fixture(scope="module")
def one_checker(checker: Checker) -> Iterator[None]:
    """Have a module's exports ask that process; commands start one for each export."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modelyard.exporter.trip.Checker", lambda folder: checker)
        yield


@pytest.fixture(scope="session")
def server_without_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Start one server for all modules that need no settings; it starts without a model."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "store").mkdir()
    with running(folder / "state", folder / "store") as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(server_without_options: LiveServer) -> Iterator[LiveServer]:
    """Lend that server to a module, which puts archives in its store and registers them."""
    yield server_without_options
    server_without_options.unregister_all()
