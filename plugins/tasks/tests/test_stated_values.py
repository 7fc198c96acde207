"""Every built-in handler holds a request to the values that the signature states."""

from __future__ import annotations

import base64
import io
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from modelyard.handlers import (
    AudioClassifier,
    BadInput,
    BaseHandler,
    Forecaster,
    ImageClassifier,
    TabularHandler,
    TextHandler,
)
from modelyard.plugins.tasks.image_text import ImageText
from tests.handlers.folders import ask, load, save_program
from tests.handlers.test_text_handler import tokenizer_json


class Sums(nn.Module):
    """(N, …) of each input to (N, 2)."""

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        found = first.flatten(1).sum(1).float()
        rest = 0 if second is None else second.flatten(1).sum(1)
        return torch.stack([found, found + rest], 1)


class Fits(nn.Module):
    """Ids (T, L) and a picture (1, 1, 2, 2) to (1, T)."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return pixel_values.flatten(1).sum(1, keepdim=True) * input_ids.sum(1)


@dataclass(frozen=True)
class Case:
    handler: type[BaseHandler]
    inputs: list[str]
    good: Any
    bad: Any
    message: str
    files: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    net: nn.Module = field(default_factory=Sums)


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), shade).save(file, "PNG")
    return file.getvalue()


def form(*texts: str) -> dict[str, Any]:
    return {"image": base64.b64encode(png(9)).decode(), "texts": list(texts)}


TOKENIZER = {"tokenizer.json": tokenizer_json()}
FEATURES = {"features.json": '{"features": [{"name": "a", "std": 10}, {"name": "b"}]}'}
PIXELS = {"image": {"mode": "L", "size": [2, 2], "mean": [0.0], "std": [0.5]}}
CASES = {
    "numbers": Case(
        BaseHandler, ["x:float32[batch,2]=0..1"], [0, 1], [0, 1.5],
        'input "x" holds 1.5; expected values =0..1'),
    "pictures": Case(
        ImageClassifier, ["x:float32[batch,1,2,2]=0..1"], png(9), png(255),
        'input "x" holds 2; expected values =0..1', config=PIXELS),
    "tokens": Case(
        TextHandler, ["input_ids:int64[batch,length=1..9]<8", "mask:int64[batch,length]=0..1"],
        b"a bad one", b"a film",
        'input "input_ids" holds 8; expected values =0..7, as tokenizer.json makes them',
        TOKENIZER),
    "parts of a text": Case(
        TextHandler, ["ids:int64[batch,length=1..9]", "token_type_ids:int64[batch,length]=0"],
        "a film", {"text": "a", "text_pair": "film"},
        'input "token_type_ids" holds 1; expected values =0, as tokenizer.json makes them',
        TOKENIZER),
    "features": Case(
        TabularHandler, ["x:float32[batch,2]=0,0.5,1"], {"a": 5, "b": 1}, {"a": 4, "b": 1},
        'input "x" holds 0.4; expected values =0,0.5,1, as features.json makes them', FEATURES),
    "samples": Case(
        AudioClassifier, ["wave:float32[batch,samples=2..40]=-1..1"], [0.5, -1], [0.5, -1.25],
        'input "wave" holds -1.25; expected values =-1..1'),
    "normalised samples": Case(
        AudioClassifier, ["wave:float32[batch,1,samples=2..40]=-1..1"], [7, 3] * 9, [7, 3, 3, 3],
        'input "wave" holds 1.73205; expected values =-1..1, as handler.audio.normalize makes them',
        config={"audio": {"normalize": True}}),
    "a series": Case(
        Forecaster, ["x:float32[batch,3]=0..1"], [9, 1, 0, 1], [0, 0, 2],
        'input "x" holds 2; expected values =0..1'),
    "a scaled series": Case(
        Forecaster, ["x:float32[batch,3,2]=-2..2,rising"], [[3, 3], [3, 4], [3, 9]],
        [[3, 3], [4, 3], [3, 3]],
        'input "x" is not rising along its last dim; expected values =-2..2,rising, as scaler.json '
        "makes them",
        {"scaler.json": '{"mean": [3.0], "std": [3.0]}'}),
    "a picture and texts": Case(
        ImageText,
        ["input_ids:int64[texts=1..4,length=2..9]<8", "x:float32[images=1..2,1,2,2]=0..1"],
        form("a bad", "good"), form("good", "a film"),
        'input "input_ids" holds 8; expected values =0..7', TOKENIZER, PIXELS, Fits()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_beyond_those_stated_are_refused(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_program(case.net, case.inputs, tmp_path / "model.pt2")
    for name, content in case.files.items():
        (tmp_path / name).write_text(content)
    handler = load(case.handler, tmp_path, config=case.config, batch_size=2)
    assert len(ask(handler, case.good, case.good)) == 2
    with caplog.at_level(logging.INFO), pytest.raises(BadInput) as caught:
        ask(handler, case.good, case.bad)
    assert str(caught.value) == case.message
    assert "request id-1 (index 1 of its batch)" in caplog.text
