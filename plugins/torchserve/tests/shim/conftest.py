"""What handlers written for TorchServe are told, without a server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from ts.metrics.metric_cache_yaml_impl import WorkerMetrics

from modelyard.handlers.context import Context

MakeContext = Callable[..., Context]


@pytest.fixture
def make_context(tmp_path: Path) -> MakeContext:
    """Return a context for the files in `tmp_path`; keywords are the manifest's model entries."""

    def make(
        config: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        requests: int = 1,
        **model: str,
    ) -> Context:
        manifest = {"model": {"modelName": "m", "modelVersion": "1.0", **model}}
        context = Context("m", str(tmp_path), manifest, 8, None, model_yaml_config=config)
        context.metrics = WorkerMetrics(context, None)
        ids = [f"id{index}" for index in range(requests)]
        context.reset(ids, [headers or {}] * requests)
        return context

    return make


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Linear:
    """Leave a model file and checkpoint, `linear_net.py` and `linear.pth`; give the model."""
    source = "from torch import nn\n\n\nclass Net(nn.Linear):\n"
    source += "    def __init__(self):\n        super().__init__(3, 2)\n"
    (tmp_path / "linear_net.py").write_text(source, encoding="utf-8")
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.0]]))
        model.bias.copy_(torch.tensor([0.5, -0.5]))
    torch.save(model.state_dict(), tmp_path / "linear.pth")
    monkeypatch.syspath_prepend(str(tmp_path))
    return model.eval()


@pytest.fixture(autouse=True)
def forget_the_authors_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has files of its own under the same names."""
    for name in ("linear_net", "handler", "sibling"):
        monkeypatch.delitem(sys.modules, name, raising=False)
