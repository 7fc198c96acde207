"""Inputs as they are: graphs, packed sequences, and models that only real inputs fit."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.choose import choose
from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.report import read_report
from modelyard.archiver.verify import Check, verify_archive
from modelyard.exporter import ModelError, UsageError, export
from modelyard.exporter.bench.measure import read_signature
from modelyard.exporter.inspection import describe

NETS = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Graph(nn.Module):
    '''Weighs messages by both nodes, as GAT does; loops count once, as in GCN.'''

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.score = nn.Linear(6, 1)

    def forward(self, x, edge_index):
        nodes = self.linear(x)
        source, target = edge_index[0], edge_index[1]
        pairs = torch.cat([nodes[source], nodes[target]], 1)
        weights = self.score(pairs).exp() * (source != target).unsqueeze(1)
        total = torch.ones_like(nodes[:, :1]).index_add(0, target, weights)
        return nodes.index_add(0, target, nodes[source] * weights) / total


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, ids, lengths):
        rows = pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        padded, _ = pad_packed_sequence(self.lstm(rows)[0], batch_first=True)
        return padded.sum(1)


class Known(nn.Module):
    '''Takes nothing but what it has seen.'''

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x):
        if not torch.compiler.is_compiling() and not bool((x.sum(1) == 1).all()):
            raise ValueError("rows must sum to 1")
        return self.layer(x)


class Spectrum(nn.Module):
    '''A filter in the domain of frequencies, and its power.'''

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(64, dtype=torch.complex64))

    def forward(self, spectrum):
        filtered = spectrum * self.gain
        return filtered, filtered.abs().square().sum(1)
"""
GRAPH = ["x:float32[nodes=2..7,4]", "edge_index:int64[2,edges=2..9]<nodes"]
PACKED = ["ids:int64[batch=1..4,length=2..5]<20", "lengths:int64[batch]=1..length"]


def net(name: str, folder: Path | None = None) -> nn.Module:
    """Build a class of `NETS`; with the weights of its checkpoint, if that is in a folder."""
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    built: nn.Module = namespace[name]()
    if folder is not None:
        built.load_state_dict(torch.load(folder / f"{name}.ckpt"))
    return built.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "nets.py").write_text(NETS)
    torch.manual_seed(0)
    for name in ("Graph", "Packed", "Known", "Spectrum"):
        torch.save(net(name).state_dict(), folder / f"{name}.ckpt")
    parts = np.random.default_rng(0).integers(0, 9, 3) / 8
    np.savez(folder / "known.npz", x=np.stack([parts, 1 - parts], 1))
    return folder


def run(folder: Path, name: str, inputs: Sequence[str], **options: Any) -> list[Any]:
    model = f"{folder / 'nets.py'}:{name}"
    return export(folder / f"{name}.ckpt", model, inputs, output_dir=folder / "out", **options)


def verified(archive: Path, *, has_golden: bool = True) -> dict[str, Check]:
    with open_archive(archive) as opened:
        checks = verify_archive(opened, device="cpu")
    assert [c.subject for c in checks if c.problem] == ([] if has_golden else ["nothing"])
    return {check.subject: check for check in checks}


@pytest.mark.nightly
def test_a_graph_is_exported_archived_and_answered(folder: Path) -> None:
    reports = run(folder, "Graph", GRAPH)
    for report in reports:
        stated = report.to_json()["signature"]
        assert stated["inputs"][1]["values"] == {"min": 0, "max": "nodes-1"}
        assert report.parity.scope["integers"] == {}
        assert report.parity.max_abs < 1e-5
        assert not report.signature.batching.batchable
    graph = {
        "x": [[1.0, 0, 0, 2], [0, 3, 0, 0], [2, 0, 1, 0]],
        "edge_index": [[0, 0, 1], [1, 2, 1]],
    }
    with torch.no_grad():
        answer = net("Graph", folder)(*map(torch.tensor, graph.values())).tolist()
    (folder / "graph.json").write_text(json.dumps(graph))
    (folder / "answer.json").write_text(json.dumps(answer))

    archive = write_archive(
        "graph",
        version="1.0",
        artifact=reports[1].artifact,
        handler="base_handler",
        examples=[f"{folder / 'graph.json'}={folder / 'answer.json'}"],
        output_dir=folder / "store",
        dry_run=True,
    )

    takes = ["x:float32[nodes=2..7,4]", "edge_index:int64[2,edges=2..9]<nodes"]
    assert describe(archive)["takes"] == describe(reports[0].artifact)["takes"] == takes
    checks = verified(archive)
    assert checks["golden 0"].result == "answered as expected"
    assert f"agree in {reports[1].parity.cases} cases" in checks["parity"].result


@pytest.mark.nightly
def test_complex_numbers_are_exported_archived_and_answered_as_pairs(folder: Path) -> None:
    reports = run(folder, "Spectrum", ["spectrum:complex64[batch,64]"],
                  output_names=["filtered", "power"])  # fmt: skip
    takes, gives = "spectrum:complex64[batch=1..8,64]", "filtered:complex64[batch=1..8,64]"
    for report in reports:
        assert list(map(str, report.signature.inputs)) == [takes]
        assert str(report.signature.outputs[0]) == gives
    pairs = torch.randn(64, 2)
    with torch.no_grad():
        filtered, power = net("Spectrum", folder)(torch.view_as_complex(pairs)[None])
    answer = {"filtered": torch.view_as_real(filtered[0]).tolist(), "power": power.item()}
    (folder / "pairs.json").write_text(json.dumps(pairs.tolist()))
    (folder / "filtered.json").write_text(json.dumps(answer))
    with pytest.raises(CannotArchive, match=f"this model: the model takes {re.escape(takes)}"):
        choose("auto", read_report(reports[0].artifact), None, [])

    archive = write_archive(
        "spectrum",
        version="1.0",
        artifact=reports[1].artifact,
        handler="base_handler",
        examples=[f"{folder / 'pairs.json'}={folder / 'filtered.json'}"],
        output_dir=folder / "store",
        dry_run=True,
    )

    checks = verified(archive)
    assert checks["golden 0"].result == "answered as expected"
    assert f"agree in {reports[1].parity.cases} cases" in checks["parity"].result


@pytest.mark.nightly
def test_lengths_of_packed_sequences_are_stated_or_found_and_bench_takes_them(folder: Path) -> None:
    (stated,) = run(folder, "Packed", PACKED, formats=["torchscript"])
    assert stated.parity.scope["integers"] == {}
    assert stated.signature.batching.batchable
    (found,) = run(
        folder, "Packed", [text[: text.index("]") + 1] for text in PACKED], formats=["torchscript"]
    )
    assert found.parity.scope["integers"] == {"ids": [0, 19], "lengths": [1, "length"]}
    assert found.parity.cases == stated.parity.cases
    timed = read_signature(found.artifact)
    assert [str(spec.values) for spec in timed.inputs] == ["=0..19", "=1..length"]


@pytest.mark.nightly
def test_samples_alone_prove_a_model_that_nothing_made_up_fits(folder: Path) -> None:
    inputs = ["x:float32[batch,2]"]
    with pytest.raises(ModelError, match="rows must sum to 1"):
        run(folder, "Known", inputs, samples=[folder / "known.npz"])
    with pytest.raises(UsageError, match="--sample-only has nothing to compare on"):
        run(folder, "Known", inputs, sample_only=True)

    reports = run(folder, "Known", inputs, samples=[folder / "known.npz"], sample_only=True)

    for report in reports:
        document = report.to_json()
        assert document["parity"]["kinds"] == ["sample"]
        assert document["parity"]["plan"]["tried"] == "the samples alone; nothing was made up"
        assert document["parity"]["batches"] == [1, 2, 3, 7, 8]
        assert document["signature"]["batching"]["batchable"]
        assert "--sample-only" in document["command"]
        assert "compared on samples alone, 5 cases" in document["warnings"][-1]
    with pytest.raises(UsageError, match="was compared on samples alone"):
        read_signature(reports[0].artifact)
    archive = write_archive(
        "known",
        version="1.0",
        artifact=reports[1].artifact,
        handler="base_handler",
        output_dir=folder / "store",
        dry_run=False,
    )
    parity = verified(archive, has_golden=False)["parity"]
    assert "not compared: their export used samples alone" in parity.result


@pytest.mark.nightly
def test_a_file_says_what_the_model_takes_and_a_single_row_not_whether_rows_mix(
    folder: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "one.npy", np.array([[0.25, 0.75]]))
    (report,) = run(
        folder, "Known", [], samples=[tmp_path / "one.npy"], sample_only=True, formats=["pt2"]
    )
    assert "--input 'x:float32[batch=1..8,2]'" in report.command
    assert not report.signature.batching.batchable
    assert "whether rows mix is unknown" in report.signature.batching.reason


def test_a_picture_does_not_say_what_the_model_takes(folder: Path, tmp_path: Path) -> None:
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(UsageError, match="no --input given"):
        run(folder, "Known", [], samples=[tmp_path / "a.png"])
