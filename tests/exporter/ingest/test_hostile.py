"""Nothing that a file holds runs: proven in a child process by an audit hook and a marker file."""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.ingest.honest import WRITERS
from tests.exporter.ingest.hostile import FILES

_WARM = (
    "state dict, zip",
    "state dict, legacy format",
    "sparse tensors",
    "loop with optimizer, scheduler and numpy numbers",
    "safetensors, one file",
    "DCP",
    "TorchScript, scripted",
    "exported program",
    "TorchServe archive, tgz",
    "MLflow, a module pickled by value",
)
_NAIVE = {name: file.naive for name, file in FILES.items() if file.naive}
_MEMORY_BYTES = 12 << 30


def _run(jobs: list[list[str]], warm: Path) -> dict[str, dict[str, Any]]:
    """Read files in a fresh process that may not take more memory than a small machine has."""
    code = "from tests.exporter.ingest.watched import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(warm)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES)),
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Path]]:
    """Write every hostile file; name → its path, and the marker that it would make."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("hostile")
    found = {}
    for number, (name, file) in enumerate(FILES.items()):
        folder = root / str(number)
        folder.mkdir()
        marker = root / f"marker-{number}"
        found[name] = (file.write(folder, marker), marker)
        assert not marker.exists(), f"{name}: writing it made the marker"
    return found


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one honest file of each reader."""
    root = tmp_path_factory.mktemp("honest")
    for number, name in enumerate(_WARM):
        (root / str(number)).mkdir()
        path = WRITERS[name](root / str(number)).path
        if path.is_file():
            path.replace(root / f"{number}.file")
            (root / str(number)).rmdir()
    return root


@pytest.fixture(scope="module")
def results(places: Mapping[str, tuple[Path, Path]], warm: Path) -> dict[str, dict[str, Any]]:
    return _run([[name, str(path), ""] for name, (path, _) in places.items()], warm)


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_does_nothing(
    name: str,
    results: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, tuple[Path, Path]],
) -> None:
    expected = FILES[name]
    assert results[name]["events"] == []
    assert not places[name][1].exists()
    assert expected.says in results[name]["said"]
    assert results[name]["said"].startswith("refused: ") == expected.is_refused


@pytest.mark.nightly
def test_the_same_files_do_harm_to_a_careless_reader(
    results: Mapping[str, Mapping[str, Any]],
    places: Mapping[str, tuple[Path, Path]],
    warm: Path,
) -> None:
    """The audit hook and the markers are no idle promise: they see what these files are for."""
    del results  # after them: these readers do make the markers
    jobs = [[name, str(places[name][0]), how] for name, how in _NAIVE.items()]
    found = _run(jobs, warm)
    harmless = [name for name in _NAIVE if not places[name][1].exists()]
    unseen = [name for name in _NAIVE if not found[name]["events"]]
    assert harmless == []
    assert unseen == []


def test_there_are_at_least_twelve_hostile_files() -> None:
    assert len(_NAIVE) >= 12
    assert len(FILES) >= 40
