"""Exported programs whose JSON somebody has changed: taken, or refused by one class of error."""

import collections
import copy
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.handlers.errors import UnsafeProgram
from modelyard.handlers.judge.check import load_program

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = "models/model.json"
VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 1, 1 << 62, 1.5, True, "", "x", "torch.ops.aten.add.Tensor"),
    *([], {}, [[]], {"as_int": 3}, {"as_none": True}),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(6, 4), nn.Buffer(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.layer(x).softmax(-1) + self.steps
        parts = torch.cat([h, h]).reshape(-1, 2, h.shape[1] // 2)
        return {"a": h[:, :2].median(0)[0], "b": parts, "n": x.shape[0] * 2}


@pytest.fixture(scope="module")
def entries() -> dict[str, bytes]:
    dims = ({0: torch.export.Dim.AUTO},)
    torch.export.save(
        torch.export.export(Net(), (torch.rand(5, 6),), dynamic_shapes=dims), file := io.BytesIO()
    )
    with zipfile.ZipFile(file) as container:
        return {name.partition("/")[2]: container.read(name) for name in container.namelist()}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (holder, key) of everything in a document."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        found += places(value[key]) if isinstance(value[key], dict | list) else []
    return found


def doctored(document: Any, draw: random.Random) -> Any:
    for _ in range(draw.choice((1, 1, 2, 3))):
        if not (known := places(document)):
            break
        holder, key = draw.choice(known)
        way = draw.randrange(5)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif way == 2:
            other, place = draw.choice(known)
            holder[key] = copy.deepcopy(other[place])
        else:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
    return document


def outcomes(entries: dict[str, bytes], folder: Path, seeds: range) -> collections.Counter[str]:
    """Load a program for each seed, with one of its JSON texts changed."""
    names = [name for name in entries if name.endswith(".json")] + [MODEL] * 4
    found: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        draw = random.Random(seed)
        name = draw.choice(names)
        changed = json.dumps(doctored(json.loads(entries[name]), draw)).encode()
        with zipfile.ZipFile(folder / "net.pt2", "w") as container:
            for each, data in {**entries, name: changed}.items():
                container.writestr(zipfile.ZipInfo(f"net/{each}"), data)
        try:
            load_program(folder / "net.pt2")
            found["taken"] += 1
        except UnsafeProgram as error:
            is_torchs = "cannot read it" in str(error)
            found["torch cannot read it" if is_torchs else "refused before"] += 1
    return found


def test_a_doctored_program_is_taken_or_refused_by_one_class(
    entries: dict[str, bytes], tmp_path: Path
) -> None:
    found = outcomes(entries, tmp_path, range(60))
    assert min(found.values()) > 3, found
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_many_doctored_programs(entries: dict[str, bytes], tmp_path: Path) -> None:
    assert outcomes(entries, tmp_path, range(1000, 3000)).total() == 2000
