"""What many modules share: the digits model, exported and archived once, and a live server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelyard.archiver import write_archive
from tests.serve.live import LiveServer, running

DIGITS = Path(__file__).parent.parent / "examples" / "digits"
FORMATS = ("pt2", "onnx", "torchscript")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device, asked for or not, on a machine without one."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("this machine has no CUDA device that torch can use")


@pytest.fixture(scope="session")
def digits_artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export the digits checkpoint; give format → artifact, each with its report beside it."""
    from modelyard.exporter import export  # torch, which most tests do without

    reports = export(
        DIGITS / "digits.pt",
        f"{DIGITS / 'net.py'}:DigitsNet",
        ["image:float32[batch,1,8,8]"],
        output_names=["logits"],
        formats=FORMATS,
        output_dir=tmp_path_factory.mktemp("artifacts"),
    )
    return {report.format: report.artifact for report in reports}


@pytest.fixture(scope="session")
def digits_store(
    digits_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Archive each artifact of the digits model under its format's name; give the model store."""
    store = tmp_path_factory.mktemp("store")
    for format, artifact in digits_artifacts.items():
        write_archive(
            format,
            version="1.0",
            artifact=artifact,
            handler="image_classifier",
            output_dir=store,
            extra_files=[DIGITS / "index_to_name.json"],
            config_file=DIGITS / "model-config.yaml",
            examples=[f"{DIGITS / 'scans' / f'{digit}.png'}={digit}" for digit in (2, 7)],
        )
    return store


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
