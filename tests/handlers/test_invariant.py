"""Batches in which a row's bits are its own: sizes that are found, and what only seems so."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.report import read_report
from modelyard.archiver.signature import Dim, Signature, TensorSpec
from modelyard.exporter import export
from modelyard.exporter.inspection import describe
from modelyard.handlers import BaseHandler, Context
from modelyard.handlers.base import Classifier
from modelyard.handlers.errors import LoadError
from modelyard.handlers.models.backends import Artifact
from modelyard.handlers.models.invariant import (
    Invariant,
    candidates,
)
from modelyard.handlers.tasks.text_handler import TextHandler
from modelyard.serve.worker.load import load_service
from tests.handlers.test_text_handler import tokenizer_json

pytestmark = pytest.mark.usefixtures("one_checker")

BATCH = Dim("batch", 1, 8)
SPEC = TensorSpec("x", "float32", (BATCH, 6))
Row = Callable[[Tensor], Tensor]


def test_sizes_to_try_are_few_and_end_with_the_largest() -> None:
    assert candidates(BATCH, 8) == [1, 2, 3, 4, 6, 8]
    assert candidates(Dim("batch", 3, 20), 20) == [3, 4, 6, 8, 12, 16, 20]
    assert candidates(Dim("batch", 2, 14, 4), 14) == [2, 6, 14]


# -- an adversary: a last bit that others move, and what only looks like it ----------------------


def moved(y: Tensor, where: Tensor | bool) -> Tensor:
    """Return numbers of which those that are named are the next larger ones."""
    chosen = torch.as_tensor(where)
    return torch.where(chosen, torch.nextafter(y, torch.tensor(torch.inf)), y)


def places(y: Tensor) -> Tensor:
    return torch.arange(len(y)).unsqueeze(1)


def sums(y: Tensor) -> Tensor:
    return y.sum(1, keepdim=True)


PLANTED: dict[str, Row] = {
    "sum of the batch": lambda y: moved(y, y.double().sum() > 0),
    "at six rows": lambda y: moved(y, len(y) == 6),
    "at two rows": lambda y: moved(y, len(y) == 2),
    "alone": lambda y: moved(y, len(y) == 1),
    "from five rows on": lambda y: moved(y, len(y) >= 5),
    "odd sizes": lambda y: moved(y, len(y) % 2 == 1),
    "the fourth place": lambda y: moved(y, places(y) == 3),
    "the eighth place": lambda y: moved(y, places(y) == 7),
    "the first place of eight": lambda y: moved(y, (places(y) == 0) & (len(y) == 8)),
    "the last place": lambda y: moved(y, places(y) == len(y) - 1),
    "every third place": lambda y: moved(y, places(y) % 3 == 2),
    "one number at the last place": lambda y: moved(
        y, (places(y) == len(y) - 1) & (torch.arange(6) == 5)
    ),
    "beside large ones": lambda y: moved(y, (y.abs().amax() > 200) & (sums(y.abs()) < 100)),
    "beside very large ones": lambda y: moved(y, (y.abs().amax() > 1000) & (sums(y.abs()) < 100)),
    "below a large one": lambda y: moved(
        y, torch.cat([torch.zeros(1, 1), y.abs().amax(1, keepdim=True)[:-1]]) > 200
    ),
    "beside itself": lambda y: moved(y, (y.unsqueeze(0) == y.unsqueeze(1)).all(2).sum(1, True) > 1),
    "the largest of the batch": lambda y: moved(y, sums(y) == sums(y).max()),
    "the next one's sign": lambda y: moved(y, sums(y).roll(-1, 0) > 0),
    "beside three like it": lambda y: moved(y, (sums(y) > 0).sum() >= 3),
    "a number of many": lambda y: moved(y, (places(y) == 4) & (torch.arange(6) == 2)),
}
_LAYER = nn.Linear(6, 6)
KEPT: dict[str, Row] = {
    "itself": lambda y: y,
    "its own size": lambda y: moved(y, sums(y.abs()) > 100),
    "its own sign": lambda y: moved(y, sums(y) > 0),
    "its own largest": lambda y: y / y.abs().amax(1, keepdim=True),
    "sorted": lambda y: y.sort(1).values,
    "integers": lambda y: y.round().int(),
    "not a number": lambda y: y / (y - y),
}
"""Of these every size keeps the bits; sums of a library's own kernels may want some left out."""
SUMMED: dict[str, Row] = {
    "a layer": lambda y: _LAYER(y),
    "softmax": lambda y: y.softmax(1),
    "sigmoid": lambda y: y.sigmoid(),
    "layer norm": lambda y: nn.functional.layer_norm(y, (6,)),
    "products": lambda y: y @ torch.ones(6, 64) @ torch.ones(64, 3),
}


def network(function: Row) -> Artifact:
    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return function(x * 1.5 + 0.25)

    return Artifact("pt2", run, [SPEC], torch.device("cpu"))


def differing(run: Callable[..., Any], sizes: Sequence[int], mixes: int) -> int:
    """Return how many rows get other bits than before, in random batches of up to eight."""
    chosen = random.Random(1)
    pool = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
    pool[16:] *= torch.tensor([10.0, 100.0, 1000.0, 5000.0] * 2).unsqueeze(1)
    seen: dict[int, bytes] = {}
    count = 0
    for _ in range(mixes):
        size = chosen.choice(sizes)
        rows = [chosen.randrange(len(pool)) for _ in range(size)]
        outputs = run(pool[torch.tensor(rows)])
        for row, output in zip(rows, outputs, strict=True):
            bits = output.numpy().tobytes()
            count += seen.setdefault(row, bits) != bits
    return count


@pytest.mark.parametrize("table", ["planted", "kept", "summed"])
def test_an_adversarys_last_bits_are_found(table: str) -> None:
    functions = {"planted": PLANTED, "kept": KEPT, "summed": SUMMED}[table]
    misses, alarms = [], []
    for name, function in functions.items():
        artifact = network(function)
        as_served = Invariant(artifact, Signature((SPEC,)), candidates(BATCH, 8))
        (sizes,) = as_served.sizes.values()
        bare = differing(artifact, range(1, 9), 150)
        padded = differing(as_served, range(1, 9), 150)
        sys.stdout.write(f"{name:32}{bare:6} rows differ, {padded} in batches of {sizes}\n")
        if padded:
            misses.append(name)
        if table == "planted":
            assert bare, f"{name} does nothing"
        if table == "kept" and sizes != (1, 2, 3, 4, 6, 8):
            alarms.append(name)
    assert (misses, alarms) == ([], [])


# -- artifacts -----------------------------------------------------------------------------------


class Planted(nn.Module):
    """Moves the last bit of rows beside a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        own = x.abs().amax(1, keepdim=True)
        moved = torch.nextafter(y, torch.full_like(y, float("inf")))
        return torch.where((own.max() > 200.0) & (own < 100.0), moved, y)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y - y.mean(0)


def exported(folder: Path, name: str, inputs: Sequence[str] = ("x:float32[batch,6]",)) -> Path:
    torch.manual_seed(0)
    model = {"Planted": Planted, "Mixing": Mixing, "Texts": Texts}[name]()
    torch.save(model.state_dict(), folder / "weights.pt")
    (report,) = export(
        folder / "weights.pt", f"{__file__}:{name}", inputs,
        formats=("torchscript",), name="artifact", output_dir=folder,
    )  # fmt: skip
    return report.artifact


def load(
    artifact: Path, make: type[BaseHandler] = BaseHandler, asks: bool = True, batch_size: int = 8
) -> BaseHandler:
    """Load an artifact as a worker does."""
    report = artifact.with_name(f"{artifact.name}.report.json")
    sealed = {"report": report.name, "signature": json.loads(report.read_text())["signature"]}
    manifest = {"model": {"serializedFile": artifact.name}, "modelyard": sealed}
    handler, config = make(), {"batchInvariant": asks}
    handler.initialize(
        Context("m", str(artifact.parent), manifest, batch_size, model_yaml_config=config)
    )
    return handler


def test_a_last_bit_is_caught_at_export_and_where_a_report_hides_it(tmp_path: Path) -> None:
    artifact = exported(tmp_path, "Planted")
    report = read_report(artifact)
    assert report is not None
    assert report.signature.batching is not None
    assert report.signature.batching.batchable
    assert report.signature.batching.sizes == (1,)
    assert 0 < report.signature.batching.apart < 1e-6
    assert describe(artifact)["batching"].startswith("a row keeps its bits in batches of 1; others")
    assert isinstance(load(artifact).model, Invariant)  # in batches of one
    path = artifact.with_name(f"{artifact.name}.report.json")
    content = json.loads(path.read_text())
    content["signature"]["batching"]["invariant"]["sizes"] = [2, 4, 8]
    path.write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"does not keep its bits in batches of 2, 4, 8 on this"):
        load(artifact)
    assert not isinstance(load(artifact, asks=False).model, Invariant)


def test_rows_that_mix_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r'batchInvariant .* a row of output "output" changes by'):
        load(exported(tmp_path, "Mixing"))


def test_a_report_of_an_older_version_promises_nothing(
    digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    artifact = tmp_path / digits_artifacts["pt2"].name
    artifact.write_bytes(digits_artifacts["pt2"].read_bytes())
    report = digits_artifacts["pt2"].with_name(f"{artifact.name}.report.json")
    content = json.loads(report.read_text())
    del content["signature"]["batching"]["invariant"]
    (tmp_path / report.name).write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"no report promises .* no size was found"):
        load(artifact)
    content["signature"]["batching"]["invariant"] = {"sizes": [0, "4"], "apart": 0}
    (tmp_path / report.name).write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"invariant\.sizes.*a list of whole numbers from 1"):
        load(artifact)


class Texts(nn.Module):
    """Means of the embeddings of what the mask lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 33)
        self.layer = nn.Linear(33, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1).float()
        scores: Tensor = self.layer((self.table(input_ids) * mask).sum(1) / mask.sum(1))
        return scores


def test_texts_of_any_length_keep_their_bits(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    inputs = ["input_ids:int64[batch,length=1..12]=0..39", "attention_mask:int64[batch,length]"]
    handler = load(exported(tmp_path, "Texts", inputs), TextHandler)
    assert isinstance(handler, TextHandler)
    assert isinstance(handler.model, Invariant)
    words = ["a", "good film", "a bad film and a good film and a bad one", "good good good"]

    def answers(*texts: str) -> list[Any]:
        handler.context.reset([""] * len(texts))
        return handler.handle([{"body": text} for text in texts], handler.context)

    alone = [answers(text)[0] for text in words]
    chosen = random.Random(0)
    for _ in range(40):
        places = [chosen.randrange(len(words)) for _ in range(chosen.randint(1, 8))]
        assert answers(*(words[at] for at in places)) == [alone[at] for at in places]
    assert [tensor.shape for tensor in handler.preprocess([{"body": "a"}])] == [(1, 12), (1, 12)]


def test_a_handler_that_runs_no_artifact_of_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plain_rows.py").write_text("def handle(data, context):\n    return data\n")
    (tmp_path / "model-config.yaml").write_text("batchInvariant: true\n")
    message = {"folder": tmp_path, "config_file": "model-config.yaml", "manifest": None,
               "device": "cpu", "worker": 1, "name": "m", "batch_size": 8,
               "handler": "plain_rows.py"}  # fmt: skip
    with pytest.raises(LoadError, match="only handlers whose requests go through an artifact"):
        load_service(message)


@pytest.mark.parametrize("format", ["pt2", "onnx", "torchscript"])
@pytest.mark.parametrize("rows", [2_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
@pytest.mark.timeout(3600)
def test_no_bit_of_a_million_rows_depends_on_the_batch(
    digits_artifacts: dict[str, Path], format: str, rows: int
) -> None:
    handler = load(digits_artifacts[format], Classifier)
    pool = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    pool[48:] *= torch.tensor([10.0, 1000.0]).repeat(8).reshape(-1, 1, 1, 1)
    chosen = random.Random(0)

    def answer(places: list[int]) -> tuple[Tensor, list[Any]]:
        outputs = handler.inference(pool[places])
        assert isinstance(outputs, Tensor)
        return outputs.view(torch.int32), handler.postprocess(outputs)

    alone = [answer([place]) for place in range(len(pool))]
    bits, answers = torch.cat([found for found, _ in alone]), [given for _, (given,) in alone]
    done = differ = 0
    while done < rows:
        places = [chosen.randrange(len(pool)) for _ in range(chosen.randint(1, 8))]
        found, given = answer(places)
        differ += not torch.equal(bits[places], found)
        differ += [answers[place] for place in places] != given
        done += len(places)
    sys.stdout.write(f"{format}: {done} rows, {differ} batches with other bits\n")
    assert differ == 0
