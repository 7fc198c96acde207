"""Two workers of a model hold its weights once: what Linux says of the processes."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.procfs import Mapped, mapped
from modelyard.archiver import write_archive
from tests.handlers.conftest import export_all
from tests.serve.live import LiveServer, is_alive, poll

WIDTH = 2048
WEIGHT_BYTES = 2 * WIDTH * WIDTH * 4
FILES = {"pt2": "wide.pt2", "torchscript": "wide.pt", "onnx": "wide.onnx"}
SMALL = "small"
NIGHTLY = [pytest.param("pt2", marks=pytest.mark.nightly)]
"""What tests/handlers/test_sharing.py shares between two processes without a server, by day."""

HANDLER = f"""
import os, time, torch
from {{base}} import BaseHandler

class Editing(BaseHandler):
    def handle(self, data, context):
        if any(row.get("body") == b"edit" for row in data):
            module = getattr(self.model, "module", self.model)
            with torch.no_grad():
                for weight in module.parameters():
                    weight.zero_()
        time.sleep(0.05)  # requests that come together reach different workers
        with torch.inference_mode():
            total = self.model(torch.linspace(0, 1, {WIDTH})[None]).double().sum().item()
        return [f"{{{{os.getpid()}}}} {{{{total!r}}}}"] * len(data)
"""


def wide_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    export_all(wide_net(), torch.rand(5, WIDTH), folder / "wide")
    small = nn.Linear(WIDTH, 1, bias=False).eval().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        traced: Any = torch.jit.trace(small, torch.rand(5, WIDTH))  # type: ignore[no-untyped-call]
    traced.save(folder / f"{SMALL}.pt")
    handler = folder / "handler.py"
    handler.write_text(HANDLER.format(base="modelyard.handlers"))
    artifacts = {**FILES, SMALL: f"{SMALL}.pt"}
    for name, file in artifacts.items():
        write_archive(
            name,
            version="1.0",
            artifact=folder / file,
            handler=f"{handler}:Editing",
            output_dir=folder / "store",
            dry_run=False,
        )
    return folder / "store"


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, store: Path) -> LiveServer:
    for archive in store.glob("*.mar"):
        archive.rename(shared_server.store / archive.name)
    return shared_server


def ask_both(server: LiveServer, model: str) -> dict[int, float]:
    """Return what each of a model's two workers answers, by process id; start them if need be."""
    if server.management.get(f"/models/{model}").status_code == 404:
        answer = server.register(f"{model}.mar", initial_workers="2", synchronous="true")
        assert answer.status_code == 200, answer.text
    found: dict[int, float] = {}

    def asked() -> bool:
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda _: server.predict(model), range(4)))
        for answer in answers:
            assert answer.status_code == 200, answer.text
            pid, total = answer.text.split()
            found[int(pid)] = float(total)
        return len(found) == 2

    poll(asked, "both workers answer")
    assert set(found) == set(server.worker_pids(model))
    return found


def weights_of(server: LiveServer, pid: int) -> Mapped:
    """Return what a worker maps of the unpacked archives."""
    return mapped(pid, server.state_dir / "unpacked")


@pytest.mark.parametrize("model", ["onnx", "torchscript", *NIGHTLY])
def test_two_workers_share_the_weights_and_answer_as_copies_would(
    server: LiveServer, model: str
) -> None:
    check_shared(server, model)


def check_shared(server: LiveServer, model: str) -> None:
    """Fail unless two workers of a model map its weights once, and answer right."""
    answers = ask_both(server, model)
    with torch.inference_mode():
        expected = wide_net()(torch.linspace(0, 1, WIDTH)[None]).double().sum().item()
    assert len(set(answers.values())) == 1
    assert next(iter(answers.values())) == pytest.approx(expected, abs=1e-3)
    for pid in answers:
        weights = weights_of(server, pid)
        assert weights.resident_mb >= 0.95 * WEIGHT_BYTES / 1e6
        assert weights.own_mb == 0
        assert weights.pss_mb <= 0.6 * weights.resident_mb


def test_worker_of_a_large_model_owns_little_more_than_one_of_a_small(server: LiveServer) -> None:
    check_owned(server, "torchscript")


def check_owned(server: LiveServer, model: str) -> None:
    """Fail unless workers of a model own about what one of a small model does."""
    ask_both(server, model)
    answer = server.register(f"{SMALL}.mar", initial_workers="1", synchronous="true")
    assert answer.status_code == 200, answer.text
    server.predict(SMALL)
    (small,) = (own_mb(pid) for pid in server.worker_pids(SMALL))
    for pid in server.worker_pids(model):
        assert own_mb(pid) - small < 0.5 * WEIGHT_BYTES / 1e6


def own_mb(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    (anonymous,) = (line for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return int(anonymous.split()[1]) * 1024 / 1e6


@pytest.mark.parametrize("model", ["torchscript", *NIGHTLY])
def test_weights_that_a_worker_edits_are_its_own(server: LiveServer, model: str) -> None:
    check_edited(server, model)


def check_edited(server: LiveServer, model: str) -> None:
    """Fail unless the weights that one worker changes stay as they were for the other."""
    before = ask_both(server, model)
    files = {
        file: file.read_bytes()
        for file in (server.state_dir / "unpacked").rglob("wide*")
        if file.is_file()
    }
    edited = int(server.predict(model, b"edit").text.split()[0])
    after = ask_both(server, model)
    (other,) = set(after) - {edited}
    assert after[edited] != before[edited]
    assert after[other] == before[other]
    assert weights_of(server, edited).own_mb >= 0.95 * WEIGHT_BYTES / 1e6
    assert weights_of(server, other).own_mb == 0
    assert files and all(file.read_bytes() == content for file, content in files.items())


def test_unregistered_while_mapped_ends_its_workers_and_no_others(server: LiveServer) -> None:
    options = {"model_name": "leaving", "initial_workers": "1", "synchronous": "true"}
    assert server.register("onnx.mar", **options).status_code == 200
    server.predict("leaving")
    (leaving,) = server.worker_pids("leaving")
    kept = ask_both(server, "onnx")
    folders = set((server.state_dir / "unpacked").glob("*-*"))
    assert weights_of(server, leaving).resident_mb >= 0.95 * WEIGHT_BYTES / 1e6
    assert server.management.delete("/models/leaving").status_code == 200
    poll(lambda: not is_alive(leaving), "its worker ends")
    poll(lambda: len(folders - set((server.state_dir / "unpacked").glob("*-*"))) == 1, "it is gone")
    assert ask_both(server, "onnx") == kept
