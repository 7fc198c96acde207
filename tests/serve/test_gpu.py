"""Predictions on a real CUDA device: `pytest -m gpu`."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelyard.archiver import write_archive
from modelyard.exporter import export
from modelyard.handlers import BUILT_IN, BaseHandler, Context
from modelyard.handlers.cuda import Cuda, Graphs, Launched, can_overlap, open_overlap
from tests.serve.live import LiveServer, poll, running

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
FORMATS = ("pt2", "torchscript", "aoti")
DEVICE = torch.device("cuda", 0)
BATCH_SIZE = 8
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def exact_sums() -> Iterator[None]:
    """Compare with the CPU in float32: TF32 has three digits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The digits model, traced and compiled on the device."""
    folder = tmp_path_factory.mktemp("artifacts")
    artifacts = {}
    for format in FORMATS:
        (report,) = export(
            DIGITS / "digits.pt",
            f"{DIGITS / 'net.py'}:DigitsNet",
            ["image:float32[batch,1,8,8]"],
            output_names=["logits"],
            formats=(format,),
            device="cuda:0",
            output_dir=folder,
        )
        artifacts[format] = report.artifact
    return artifacts


def load(kind: type[BaseHandler], artifact: Path, gpu: int | None, **handler: Any) -> BaseHandler:
    report = artifact.with_name(f"{artifact.name}.report.json")
    manifest = {
        "model": {"serializedFile": artifact.name},
        "modelyard": {
            "report": report.name,
            "signature": json.loads(report.read_text())["signature"],
        },
    }
    config = {"handler": handler}
    loaded = kind()
    loaded.initialize(
        Context("m", str(artifact.parent), manifest, BATCH_SIZE, gpu, model_yaml_config=config)
    )
    return loaded


def rows(count: int, shape: tuple[int, ...], seed: int = 0) -> list[dict[str, Any]]:
    numbers = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    return [{"body": bytearray(json.dumps(row).encode())} for row in numbers.tolist()]


def context_of(count: int) -> Context:
    context = Context("m", ".", None, BATCH_SIZE)
    context.reset([""] * count)
    return context


def assert_close(found: list[Any], expected: list[Any], tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=tolerance)


# -- the halves --------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("format", FORMATS)
def test_answers_are_those_of_the_cpu(
    digits: dict[str, Path], format: str, graphs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mine = load(BaseHandler, digits[format], 0, cuda_graphs=graphs)
    expecting = load(BaseHandler, digits["pt2"], None)
    assert can_overlap(mine, BUILT_IN.values())
    with caplog.at_level("INFO"):
        overlap = open_overlap(mine, mine.context, Cuda(DEVICE))
    assert ("without CUDA graphs" in caplog.text) is (graphs and format == "aoti")
    chance = random.Random(0)
    flights: list[tuple[Launched, list[Any]]] = []
    for seed in range(60):
        data = rows(chance.randint(1, BATCH_SIZE), (1, 8, 8), seed)
        expected = expecting.handle(data, context_of(len(data)))
        flights.append((overlap.launch(data, context_of(len(data))), expected))
        if len(flights) == 2:
            launched, wanted = flights.pop(0)
            assert_close(launched.result(), wanted)
    for launched, wanted in flights:
        assert_close(launched.result(), wanted)


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
def test_graphs_of_a_large_network_give_what_it_gives(resnet50: Path, count: int) -> None:
    mine = load(BaseHandler, resnet50, 0)
    overlap = open_overlap(mine, mine.context, Cuda(DEVICE))
    assert isinstance(overlap._run, Graphs)
    data = rows(count, (3, 224, 224))
    found = overlap.launch(data, context_of(count)).result()
    assert_close(found, mine.handle(data, context_of(count)), 1e-3)


def test_pageable_memory_gives_the_same(digits: dict[str, Path]) -> None:
    mine = load(BaseHandler, digits["pt2"], 0)
    data = rows(5, (1, 8, 8))
    overlaps = [open_overlap(mine, mine.context, Cuda(DEVICE, pinned)) for pinned in (True, False)]
    answers = [overlap.launch(data, context_of(5)).result() for overlap in overlaps]
    assert answers[0] == answers[1]


def test_what_cannot_be_captured_runs_as_it_is(
    digits: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    mine = load(BaseHandler, digits["pt2"], 0)
    run: Callable[..., Any] = mine.model._run

    def waits(image: torch.Tensor) -> Any:
        assert float(image.sum()) >= 0  # which a capture cannot know
        return run(image)

    mine.model._run = waits
    with caplog.at_level("INFO"):
        overlap = open_overlap(mine, mine.context, Cuda(DEVICE))
    assert "the model runs without CUDA graphs: " in caplog.text
    data = rows(3, (1, 8, 8))
    found = overlap.launch(data, context_of(3)).result()
    assert_close(found, mine.handle(data, context_of(3)))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_batch_that_does_not_fit_is_told(digits: dict[str, Path], graphs: bool) -> None:
    mine = load(BaseHandler, digits["pt2"], 0, cuda_graphs=graphs)
    mine.model._run = lambda image: torch.empty(len(image) << 50, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        open_overlap(mine, mine.context, Cuda(DEVICE))


# -- a server ----------------------------------------------------------------------------------

GREEDY = """\
import torch
from modelyard.handlers import BaseHandler


class Greedy(BaseHandler):
    overlaps = True

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
    digits: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    store = tmp_path_factory.mktemp("store")
    for format, artifact in digits.items():
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
    sources = tmp_path_factory.mktemp("sources")
    (sources / "greedy.py").write_text(GREEDY)
    (sources / "table.py").write_text(TABLE)
    net = runpy.run_path(str(sources / "table.py"))["Table"]()
    torch.save(net.state_dict(), sources / "table.pt")
    (report,) = export(sources / "table.pt", f"{sources / 'table.py'}:Table",
                       ["index:int64[batch,3]"], output_names=["sums"], formats=("pt2",),
                       device="cuda:0", output_dir=sources)  # fmt: skip
    write_archive("table", version="1.0", artifact=report.artifact, handler="base_handler",
                  output_dir=store)  # fmt: skip
    write_archive("greedy", version="1.0", artifact=digits["pt2"],
                  handler=str(sources / "greedy.py"), output_dir=store)  # fmt: skip
    with running(tmp_path_factory.mktemp("state"), store, "--device=cuda") as live:
        live.register_all(*(f"{name}.mar" for name in (*FORMATS, "table", "greedy")))
        yield live


@pytest.mark.parametrize("format", FORMATS)
def test_a_server_answers_on_the_device(server: LiveServer, format: str) -> None:
    """Its workers are ready, so golden requests were answered through both halves."""
    scans = {digit: (DIGITS / "scans" / f"{digit}.png").read_bytes() for digit in range(10)}
    with ThreadPoolExecutor(16) as threads:
        digits = [digit for _ in range(20) for digit in scans]
        answers = list(threads.map(lambda each: server.predict(format, scans[each]), digits))
    assert {answer.status_code for answer in answers} == {200}
    best = [max(answer.json(), key=answer.json().get) for answer in answers]
    assert best == [str(digit) for digit in digits]


def test_workers_are_spread_over_the_devices(server: LiveServer) -> None:
    count = torch.cuda.device_count()
    answer = server.management.put("/models/pt2", params={"min_worker": count + 1})
    assert answer.status_code in (200, 202), answer.text
    poll(lambda: len(server.worker_pids("pt2")) == count + 1, "workers are ready", 120)
    assert server.predict("pt2", (DIGITS / "scans" / "2.png").read_bytes()).status_code == 200


def test_out_of_memory_is_507_and_the_worker_goes_on(server: LiveServer) -> None:
    pids = server.worker_pids("greedy")
    answer = server.predict("greedy", json.dumps([[[1e9] * 8] * 8]))
    assert (answer.status_code, answer.json()["message"]) == (507, "Out of resources")
    assert server.predict("greedy", json.dumps([[[0.1] * 8] * 8])).status_code == 200
    assert server.worker_pids("greedy") == pids


def test_a_request_that_loses_the_device_takes_no_other_with_it(server: LiveServer) -> None:
    bodies = [[at % 4] * 3 for at in range(30)]
    bodies[13] = [999, 0, 0]  # CUDA answers nothing more in a process that met this
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda body: server.predict("table", json.dumps(body)), bodies))
    codes = [answer.status_code for answer in answers]
    assert codes.pop(13) >= 500
    assert set(codes) == {200}
