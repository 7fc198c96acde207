"""Predictions on a real CUDA device: `pytest -m gpu`."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from modelyard.archiver import write_archive
from modelyard.exporter import export
from modelyard.exporter.errors import ExportError
from modelyard.handlers import BaseHandler, Context
from tests.serve.live import LiveServer, poll, running
from tests.shared import DIGITS, ROOT, archive_digits

pytestmark = pytest.mark.gpu

CUDA_IN_ONNX = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
FORMATS = ("pt2", "torchscript", "aoti", *(["onnx"] if CUDA_IN_ONNX else []))
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="of a device itself")
BATCH_SIZE = 8
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory, device: str
) -> dict[str, Path | ExportError]:
    """The digits model, traced and compiled on the device; or why a format was not to be had."""
    folder = tmp_path_factory.mktemp("artifacts")
    artifacts: dict[str, Path | ExportError] = {}
    for format in FORMATS:
        try:
            (report,) = export(
                DIGITS / "digits.pt",
                f"{DIGITS / 'net.py'}:DigitsNet",
                ["image:float32[batch,1,8,8]"],
                output_names=["logits"],
                formats=(format,),
                device=device,
                output_dir=folder,
            )
        except ExportError as error:  # the tests of the others go on
            artifacts[format] = error
        else:
            artifacts[format] = report.artifact
    return artifacts


@pytest.fixture(scope="module")
def digits(exported: dict[str, Path | ExportError]) -> dict[str, Path]:
    """The artifacts of the formats that there are."""
    return {name: each for name, each in exported.items() if isinstance(each, Path)}


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_exported_on_the_device(
    exported: dict[str, Path | ExportError], format: str
) -> None:
    assert isinstance(exported[format], Path), exported[format]


@pytest.fixture(scope="module")
def gpu(device: str) -> int | None:
    """The device's number, as a worker is told it."""
    return None if device == "cpu" else 0


def load(artifact: Path, gpu: int | None) -> BaseHandler:
    """Load an artifact as a worker on that device does; None is the CPU."""
    report = artifact.with_name(f"{artifact.name}.report.json")
    sealed: dict[str, Any] = {
        "report": report.name,
        "signature": json.loads(report.read_text())["signature"],
    }
    manifest = {"model": {"serializedFile": artifact.name}, "modelyard": sealed}
    loaded = BaseHandler()
    loaded.initialize(Context("m", str(artifact.parent), manifest, BATCH_SIZE, gpu))
    return loaded


def rows(count: int, shape: tuple[int, ...], seed: int = 0) -> list[dict[str, Any]]:
    numbers = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    return [{"body": row} for row in numbers.tolist()]


def context_of(count: int) -> Context:
    context = Context("m", ".", None, BATCH_SIZE)
    context.reset([""] * count)
    return context


def assert_close(found: list[Any], expected: list[Any], tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


# -- a handler ---------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_predictions_are_those_of_the_cpu(
    digits: dict[str, Path], gpu: int | None, format: str
) -> None:
    mine, expecting = load(digits[format], gpu), load(digits["pt2"], None)
    for count in (1, 3, BATCH_SIZE):
        data = rows(count, (1, 8, 8), count)
        expected = expecting.handle(data, context_of(count))
        assert_close(mine.handle(data, context_of(count)), expected)


@pytest.mark.parametrize("tf32", [False, True])
def test_what_is_proven_with_tf32_is_served_with_it(
    tmp_path: Path, device: str, gpu: int | None, tf32: bool
) -> None:
    if tf32 and gpu is None:
        pytest.skip("a CPU has no TF32")
    (report,) = export(
        DIGITS / "digits.pt", f"{DIGITS / 'net.py'}:DigitsNet", ["image:float32[batch,1,8,8]"],
        formats=("pt2",), device=device, tf32=tf32, tolerance=1e-2, output_dir=tmp_path,
    )  # fmt: skip
    assert json.loads(report.path.read_text())["tf32"] is tf32
    load(report.artifact, gpu)
    rounds = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    assert gpu is None or rounds == (tf32, tf32)


def test_explanations_are_those_of_the_cpu(digits: dict[str, Path], gpu: int | None) -> None:
    data = rows(2, (1, 8, 8))
    mine, expected = (
        load(digits["pt2"], each).explain(data, context_of(2)) for each in (gpu, None)
    )
    for one, other in zip(mine, expected, strict=True):
        assert one["target"] == other["target"]
        found, wanted = (torch.tensor(each["attributions"]) for each in (one, other))
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("resnet50")
    networks = ROOT / "tests" / "networks.py"
    net: nn.Module = runpy.run_path(str(networks))["ResNet50"]()
    torch.save(net.state_dict(), folder / "weights.pt")
    (report,) = export(folder / "weights.pt", f"{networks}:ResNet50",
                       ["image:float32[batch,3,224,224]"], output_names=["logits"],
                       formats=("pt2",), output_dir=folder)  # fmt: skip
    return report.artifact


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_large_network_predicts_as_on_the_cpu(
    resnet50: Path, gpu: int | None, count: int
) -> None:
    data = rows(count, (3, 224, 224))
    found, expected = (load(resnet50, each).handle(data, context_of(count)) for each in (gpu, None))
    assert_close(found, expected, 1e-3)


# -- a server ----------------------------------------------------------------------------------

GREEDY = """\
import torch
from modelyard.handlers import BaseHandler


class Greedy(BaseHandler):
    def postprocess(self, outputs):
        if float(outputs.abs().max()) > 1e6:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        return super().postprocess(outputs)
"""
TABLE = """\
from torch import nn


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, 2)

    def forward(self, index):
        return self.rows(index).sum(1)
"""


@pytest.fixture(scope="module")
def server(
    digits: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, device: str
) -> Iterator[LiveServer]:
    store = tmp_path_factory.mktemp("store")
    for format, artifact in digits.items():
        archive_digits(format, artifact, store)
    sources = tmp_path_factory.mktemp("sources")
    (sources / "greedy.py").write_text(GREEDY)
    (sources / "table.py").write_text(TABLE)
    net = runpy.run_path(str(sources / "table.py"))["Table"]()
    torch.save(net.state_dict(), sources / "table.pt")
    (report,) = export(sources / "table.pt", f"{sources / 'table.py'}:Table",
                       ["index:int64[batch,3]"], output_names=["sums"], formats=("pt2",),
                       device=device, output_dir=sources)  # fmt: skip
    write_archive("table", version="1.0", artifact=report.artifact, handler="base_handler",
                  output_dir=store)  # fmt: skip
    write_archive("greedy", version="1.0", artifact=digits["pt2"],
                  handler=str(sources / "greedy.py"), output_dir=store)  # fmt: skip
    kind = device.partition(":")[0]
    with running(tmp_path_factory.mktemp("state"), store, f"--device={kind}") as live:
        live.register_all(*(f"{name}.mar" for name in (*digits, "table", "greedy")))
        yield live


@pytest.mark.parametrize("format", FORMATS)
def test_a_server_answers_on_the_device(server: LiveServer, format: str) -> None:
    scans = {digit: (DIGITS / "scans" / f"{digit}.png").read_bytes() for digit in range(10)}
    with ThreadPoolExecutor(16) as threads:
        digits = [digit for _ in range(20) for digit in scans]
        answers = list(threads.map(lambda each: server.predict(format, scans[each]), digits))
    assert {answer.status_code for answer in answers} == {200}
    best = [max(answer.json(), key=answer.json().get) for answer in answers]
    assert best == [str(digit) for digit in digits]


@needs_device
def test_workers_are_spread_over_the_devices(server: LiveServer) -> None:
    count = torch.cuda.device_count()
    answer = server.management.put("/models/pt2", params={"min_worker": count + 1})
    assert answer.status_code in (200, 202), answer.text
    poll(lambda: len(server.worker_pids("pt2")) == count + 1, "workers are ready", 120)
    assert server.predict("pt2", (DIGITS / "scans" / "2.png").read_bytes()).status_code == 200


@needs_device
def test_out_of_memory_is_507_and_the_worker_goes_on(server: LiveServer) -> None:
    pids = server.worker_pids("greedy")
    answer = server.predict("greedy", json.dumps([[[1e9] * 8] * 8]))
    assert (answer.status_code, answer.json()["message"]) == (507, "Out of resources")
    assert server.predict("greedy", json.dumps([[[0.1] * 8] * 8])).status_code == 200
    assert server.worker_pids("greedy") == pids


@needs_device
def test_a_request_that_loses_the_device_takes_no_other_with_it(server: LiveServer) -> None:
    bodies = [[at % 4] * 3 for at in range(30)]
    bodies[13] = [999, 0, 0]  # CUDA answers nothing more in a process that met this
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda body: server.predict("table", json.dumps(body)), bodies))
    codes = [answer.status_code for answer in answers]
    assert codes.pop(13) >= 500
    assert set(codes) == {200}


@pytest.mark.parametrize("format", FORMATS[:2])
def test_a_server_explains_on_the_device(server: LiveServer, format: str) -> None:
    answer = server.client.post(
        f"/explanations/{format}", content=(DIGITS / "scans" / "2.png").read_bytes()
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["label"] == "2"
