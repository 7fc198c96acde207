"""Texts of mixed length: served together with their like, answered as if they were alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from examples.minilm.make import train_tokenizer
from modelyard.archiver import write_archive
from tests.serve.live import LiveServer, build_archive, make_notes_folder, poll
from tests.test_docs import free_ports

MINILM = Path(__file__).parents[2] / "examples" / "minilm"
TOLERANCE = 1e-5
pytestmark = pytest.mark.slow
"""It exports encoders: a minute and a half."""
TEXTS = [" ".join(["word", "after", "word"] * (1 + at**2 % 23)) + f" {at}" for at in range(40)]


class Encoder(torch.nn.Module):
    """A BERT that takes a moment, so that requests gather."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        config = BertConfig(
            vocab_size=300, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=128,
        )  # fmt: skip
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(N, L) and (N, L) to (N, L, 256)."""
        return self.bert(input_ids, attention_mask).last_hidden_state  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(shared_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Serve an encoder, and a handler that tells who shared its batch; both by length."""
    folder = tmp_path_factory.mktemp("text")
    example = (torch.randint(0, 300, (3, 7)), torch.ones(3, 7, dtype=torch.int64))
    dims = {0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("length", max=128)}
    program = torch.export.export(Encoder().eval(), example, dynamic_shapes=(dims, dims))
    torch.export.save(program, folder / "encoder.pt2")
    train_tokenizer(TEXTS).save(str(folder / "tokenizer.json"))
    write_archive("encoder", version="1.0", artifact=folder / "encoder.pt2",
                  handler="text_encoder", extra_files=[folder / "tokenizer.json"],
                  output_dir=shared_server.store)  # fmt: skip
    build_archive(shared_server.store, "slow", config="batchSize: 4\nbatchBy: length\n")
    shared_server.register_all("encoder", "slow", initial_workers=1)
    return shared_server


def test_a_text_gets_the_same_vector_alone_and_in_company(server: LiveServer) -> None:
    text = {"headers": {"content-type": "text/plain"}}
    alone = [server.predict("encoder", each, **text).json() for each in TEXTS]
    series = {"model": "encoder", "kind": "predict"}
    calls = server.metric("modelyard_batch_size_count", **series)
    with ThreadPoolExecutor(20) as threads:
        together = list(
            threads.map(lambda each: server.predict("encoder", each, **text).json(), TEXTS)
        )
    assert server.metric("modelyard_batch_size_count", **series) - calls < len(TEXTS), "no batches"
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=0, atol=TOLERANCE)


def test_requests_that_wait_run_with_those_of_like_length(server: LiveServer) -> None:
    def handed_over() -> float:
        return server.metric("modelyard_queue_time_seconds_count", model="slow", kind="predict")

    gate = make_notes_folder() / "gate"
    bodies = ["a" * length for length in (10, 300, 12, 310, 11, 900)]
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(server.predict, "slow", str(gate))
        poll(gate.with_name("gate.began").exists, "the worker is busy")
        waiting = [threads.submit(server.predict, "slow", body) for body in bodies]
        poll(lambda: handed_over() == 7, "the others wait at the worker")
        gate.touch()
    assert first.result().json() == {"batch": [str(gate)]}
    batches = {tuple(sorted(map(len, each.result().json()["batch"]))) for each in waiting}
    assert batches == {(10, 11, 12), (300, 310), (900,)}


@pytest.mark.timeout(900)
def test_the_commands_of_the_example_lead_to_a_vector(tmp_path: Path) -> None:
    """From a folder as Hugging Face's to 384 numbers of length 1."""
    shutil.copytree(MINILM.parent, tmp_path / "examples")
    shutil.copytree(MINILM.parents[1] / "docs", tmp_path / "docs")
    commands = re.search(r"(?:^    .*\n)+", (MINILM / "README.md").read_text(), re.M)
    assert commands is not None
    port, management, metrics = map(str, free_ports(3))
    lines = commands[0].replace("modelyard ", f"{sys.executable} -P -m modelyard ")
    lines = lines.replace("python -m examples", f"{sys.executable} -m examples")
    lines = re.sub(r"(?=curl)", "answer=$(", lines.replace("8080", port), count=1)
    lines = lines.replace("'A sentence'\n", "'A sentence')\n") + 'echo "$answer" > answer.json\n'
    settings = {"PORT": port, "MANAGEMENT_PORT": management, "METRICS_PORT": metrics,
                "STATE_DIR": str(tmp_path / "state"), "WORKERS": "1"}  # fmt: skip
    environment = {f"MODELYARD_{name}": value for name, value in settings.items()}
    python = {"PYTHONPATH": f"{tmp_path}:{MINILM.parents[1]}"}
    subprocess.run(["bash", "-euc", lines], cwd=tmp_path, check=True, timeout=600,
                   env={**os.environ, **environment, **python})  # fmt: skip
    vector = torch.tensor(json.loads((tmp_path / "answer.json").read_text()))
    assert vector.shape == (384,)
    torch.testing.assert_close(vector.norm(), torch.tensor(1.0))
