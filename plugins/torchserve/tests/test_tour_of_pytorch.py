"""A tour of PyTorch: the document's own commands, from training to the last curl."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import cmake_prefix_path

from tests.shared import DIGITS

TOUR = Path(__file__).with_name("tour_of_pytorch")
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
}
LIGHTNING = "train_lightning.py"
APIS = ("inference", "management", "metrics")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the trip asks with curl")
missing = [tool for tool in ("cmake", "c++", "make") if shutil.which(tool) is None]
needs_compiler = pytest.mark.skipif(bool(missing), reason=f"no {', '.join(missing)} here")


@pytest.fixture(
    scope="module", params=["train.py", pytest.param(LIGHTNING, marks=pytest.mark.nightly)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Walk the trip once; return the folder where it was walked.

    Its text is the document's but for the port of the two calls, and for who trains: to import
    Lightning takes longer than all the rest.
    """
    folder = tmp_path_factory.mktemp("tour")
    shutil.copytree(TOUR, folder, dirs_exist_ok=True)
    shutil.copytree(DIGITS / "scans", folder / "scans")
    (folder / "temp").mkdir()
    ports = free_ports(3)
    pairs = zip(APIS, ports, strict=True)
    addresses = (f"{api}_address=http://127.0.0.1:{port}\n" for api, port in pairs)
    lines = [*addresses, "grpc_inference_port=0\n", "grpc_management_port=0\n",
             "default_workers_per_model=1\n"]  # fmt: skip
    (folder / "ports.properties").write_text("".join(lines))
    text = (TOUR / "trip.sh").read_text()
    text = text.replace("localhost:8080", f"localhost:{ports[0]}")
    (folder / "trip.sh").write_text(text.replace("python train.py", f"python {request.param}"))
    environment = {
        **ENVIRONMENT,
        "TS_CONFIG_FILE": str(folder / "ports.properties"),
        "TMPDIR": str(folder / "temp"),
        "TEMP": str(folder / "temp"),
    }
    run("trip.sh", folder, environment)
    return folder


def run(script: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a script to its end; its servers go on writing where it wrote."""
    printed = folder / f"{script}.txt"
    with printed.open("w") as output:
        ran = subprocess.run(["sh", script], cwd=folder, env=environment, stdout=output,
                             stderr=output, stdin=subprocess.DEVNULL)  # fmt: skip
    assert ran.returncode == 0, printed.read_text()[-4000:]


def free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [
            open_sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def expected(folder: Path) -> np.ndarray:
    """Return what the trained network answers to the eight inputs: logarithms of probabilities."""
    return np.fromfile(folder / "answers.f32", dtype=np.float32).reshape(8, 10)


@needs_curl
def test_the_served_answer_is_the_trained_networks(folder: Path) -> None:
    answer: dict[str, float] = json.loads((folder / "prediction.json").read_text())
    logits = torch.from_numpy(expected(folder)[0])
    likely = torch.softmax(logits, 0).topk(3)
    assert answer == {
        str(int(digit)): pytest.approx(float(probability), abs=0.01)
        for probability, digit in zip(*likely, strict=True)
    }


@needs_curl
def test_the_explanation_has_a_value_for_each_pixel(folder: Path) -> None:
    explanation = np.asarray(json.loads((folder / "explanation.json").read_text()))
    assert explanation.shape[-2:] == (28, 28)
    assert np.abs(explanation).sum() > 0


@pytest.mark.nightly
@pytest.mark.parametrize("folder", [LIGHTNING], indirect=True)
@needs_curl
def test_the_checkpoint_is_exported_in_every_format(folder: Path) -> None:
    run("export.sh", folder, ENVIRONMENT)
    names = {file.name for file in (folder / "build").iterdir()}
    assert names >= {f"best.{suffix}" for suffix in ("pt2", "onnx", "pt")}
    with pytest.warns(DeprecationWarning, match="`torch.jit.load` is deprecated"):
        scripted = torch.jit.load(folder / "build" / "best.pt")  # type: ignore[no-untyped-call]
    inputs = np.fromfile(folder / "inputs.f32", dtype=np.float32).reshape(8, 1, 28, 28)
    with torch.no_grad():
        answers = scripted(torch.from_numpy(inputs)).numpy()
    np.testing.assert_allclose(answers, expected(folder), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("folder", [LIGHTNING], indirect=True)
@needs_curl
@needs_compiler
def test_the_torchscript_file_runs_in_cpp_with_the_same_numbers(folder: Path) -> None:
    build = folder / "cpp"
    prefix = f"-DCMAKE_PREFIX_PATH={cmake_prefix_path}"
    subprocess.run(["cmake", "-S", folder, "-B", build, prefix], check=True, timeout=60)
    subprocess.run(["cmake", "--build", build], check=True, timeout=600)
    command = [str(build / "loader"), "checkpoints/jit_model.pt", "inputs.f32", "8"]
    ran = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    answers = np.array([line.split() for line in ran.stdout.splitlines()], dtype=np.float32)
    np.testing.assert_allclose(answers, expected(folder), rtol=1e-5, atol=1e-6)
