"""The trip of the Notes on PyTorch: what `notes_on_pytorch.py` writes goes through Modelyard."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelyard.client import Client
from tests.browser import browsing, find_missing, running_driver
from tests.serve.live import LiveServer, modelyard, poll

SCRIPT = Path(__file__).parent / "notes_on_pytorch.py"


def notes(folder: Path, part: str) -> dict[str, Any]:
    """Run a part of the notes; return what it saw."""
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(SCRIPT), part],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return found


def done(*arguments: str | Path) -> str:
    ran = modelyard(*arguments, timeout_s=600)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.nightly
def test_lightnings_own_files_are_served_with_the_modules_answers(
    shared_server: LiveServer, tmp_path: Path
) -> None:
    saw = notes(tmp_path, "lightning")
    assert np.allclose(saw["session"], saw["output"], atol=1e-6)
    assert "FIT Profiler Report" in saw["profiled"] and "optimizer_step" in saw["profiled"]

    assert "lightning" in done("inspect", tmp_path / "autoencoder.ckpt").lower()
    assert "TorchScript" in done("inspect", tmp_path / "model.pt")
    done("export", tmp_path / "autoencoder.onnx", "-o", tmp_path / "build", "--quick")
    built = tmp_path / "build" / "autoencoder.onnx"
    artifacts = {"lightning_script": tmp_path / "model.pt", "lightning_onnx": built}
    for name, artifact in artifacts.items():
        words = ("--artifact", artifact, "--handler", "base_handler", "-o", shared_server.store)
        done("archive", name, *words)
        assert shared_server.register(f"{name}.mar").status_code == 200
        with Client(shared_server.about["inference"]) as client:
            answer = client.predict(name, saw["input"][0])
        assert np.allclose(np.asarray(answer).ravel(), np.ravel(saw["output"]), atol=1e-5), name


@pytest.mark.nightly
def test_the_notes_profile_and_ours_name_the_same_operators(tmp_path: Path) -> None:
    saw = notes(tmp_path, "profiled")
    assert "Self CPU Mem" in saw["table"] and "model_inference" in saw["table"]
    torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / "net.pt")
    words = ("--model", "torch.nn:Linear", "--model-args", '{"in_features": 4, "out_features": 3}')
    given = ("--input", "x:float32[1,4]", "--rounds", "1", "--seconds", "0.01")
    folder = ("--profile", tmp_path / "traces")
    out = done("bench", "--checkpoint", tmp_path / "net.pt", *words, *given, *folder, "--json")
    report = json.loads(out)
    found = {one["subject"]: one for one in report["footprints"]}
    assert {each["operator"] for each in found["eager"]["operators"]} >= {
        name for name in saw["bytes"] if name in ("aten::linear", "aten::t", "aten::addmm")
    }
    assert found["torch.compile"]["error"] is None and found["torch.compile"]["compile_s"] > 0
    # What pytorch_benchmark.benchmark returns, and where it is here.
    assert report["machine"].keys() >= {"cpu", "cores", "memory_bytes", "system", "devices"}
    assert found["eager"]["parameters"] == 15 and found["eager"]["flops_per_item"] == 24
    cell = report["cells"][0]
    assert cell["p50_ms"] > 0 and cell["items_per_s"] > 0
    assert cell["before_bytes"] and cell["after_bytes"] and found["eager"]["peak_bytes"]
    assert cell.keys() >= {"to_device_ms", "from_device_ms", "joules_per_item"}


@pytest.mark.nightly
def test_compiling_works_as_written_and_tensorrt_is_refused_without_it(tmp_path: Path) -> None:
    saw = notes(tmp_path, "compiled")
    assert saw["max_abs"] < 1e-6
    assert "tensorrt" in saw["refused"]


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("mobilenet")
    return folder, notes(folder, "mobilenet")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_exported_mobilenet_is_proven_and_served(
    mobilenet: tuple[Path, dict[str, Any]], shared_server: LiveServer
) -> None:
    folder, _ = mobilenet
    done("export", folder / "mobilenet.pt2", "-o", folder / "build", "--quick")
    built = folder / "build" / "mobilenet.pt2"
    words = ("--artifact", built, "--handler", "base_handler", "-o", shared_server.store)
    done("archive", "mobilenet", *words)
    assert shared_server.register("mobilenet.mar").status_code == 200
    x = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
    with Client(shared_server.about["inference"]) as client:
        (name,) = (each["name"] for each in client.metadata("mobilenet")["inputs"])
        (found,) = client.infer("mobilenet", {name: x}).values()
    expected = torch.export.load(folder / "mobilenet.pt2").module()(torch.from_numpy(x))
    assert np.allclose(found, expected.detach().numpy(), atol=1e-4)


NETRON = """
import netron, sys
print("PORT", netron.start(sys.argv[1], address=("127.0.0.1", 0), browse=False)[1], flush=True)
sys.stdin.read()
"""
EXPLORER = """
import sys, webbrowser
webbrowser.open_new_tab = lambda url: None
import model_explorer, torch
program = torch.export.load(sys.argv[1])
model_explorer.visualize_pytorch("mobilenet", exported_program=program, port=int(sys.argv[2]))
"""
TEXTS = """
const asked = document.getElementById('message-button');  // whether usage may be reported
if (asked && asked.offsetParent) asked.click();
return [...document.querySelectorAll('svg text')].map(each => each.textContent);
"""
NODES = {
    "onnx": {"Conv": 3, "Relu": 3, "MaxPool": 2, "Gemm": 1, "image": 1, "logits": 1},
    "pt2": {"conv2d": 3, "batch_norm": 3, "relu": 3, "max_pool2d": 2, "linear": 1, "image": 1},
    "torchscript": {"conv2d": 3, "relu": 3, "linear": 1},
}
"""Format → what Netron draws of the digits model, and how often."""


@pytest.fixture(scope="module")
def viewers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with both viewers over this one; return its interpreter."""
    folder = tmp_path_factory.mktemp("viewers")
    venv.create(folder, with_pip=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text("\n".join(each for each in sys.path if "site-packages" in each))
    install = ("-m", "pip", "install", "-q", "netron", "ai-edge-model-explorer==0.1.34")
    subprocess.run([folder / "bin" / "python", *install], check=True, timeout=900)
    return folder / "bin" / "python"


@contextmanager
def running(python: Path, code: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [python, "-W", "ignore", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.network
@pytest.mark.timeout(1200)
def test_model_explorer_reads_the_program_node_by_node(
    viewers: Path, mobilenet: tuple[Path, dict[str, Any]]
) -> None:
    folder, saw = mobilenet
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    with running(viewers, EXPLORER, folder / "mobilenet.pt2", str(port)):
        graphs = f"http://localhost:{port}/api/v1/load_graphs_json?graph_index=0"
        found = json.loads(poll(lambda: try_get(graphs), "Model Explorer answers", 120))
    nodes = [node["id"] for node in found["graphs"][0]["nodes"]]
    assert nodes == saw["nodes"]
    assert sum(name.startswith("conv2d") for name in nodes) == 52


@pytest.mark.network
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_missing() is not None, reason=str(find_missing()))
def test_netron_draws_the_nodes_of_every_format(
    viewers: Path, digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    with running_driver(tmp_path / "driver.log") as driver, browsing(driver) as browser:
        for format, artifact in digits_artifacts.items():
            with running(viewers, NETRON, artifact) as process:
                assert process.stdout is not None
                lines = iter(process.stdout.readline, "")
                port = next(line.split()[1] for line in lines if line.startswith("PORT "))
                browser.open(f"http://127.0.0.1:{port}/")
                texts = browser.wait(lambda: browser.run(TEXTS), "Netron draws a graph", 60)
                assert {each: texts.count(each) for each in NODES[format]} == NODES[format], texts


def try_get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            found: bytes = answer.read()
            return found
    except OSError:
        return None
