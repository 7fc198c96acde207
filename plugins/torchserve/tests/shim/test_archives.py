"""Archives of `torch-model-archiver`, loaded and called as a worker does."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from modelyard.plugins.torchserve.archiver.archive import (
    ModelArchiverConfig,
    archive_for_torchserve,
)
from tests.serve.forks import Run, forks

Serve = Callable[..., dict[str, Any]]

LINEAR = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x.flatten(1))
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(3, 4))
            self.fc.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x.flatten(1))
        return out


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with forks() as run:
        yield run


@pytest.fixture
def serve(tmp_path: Path, run: Run) -> Serve:
    """Write the files, archive them, unpack that, load it, send the batches."""

    def serve(
        handler: str,
        *batches: tuple[str, list[dict[str, Any]]],
        files: dict[str, str] | None = None,
        envelope: str | None = None,
        config: str | None = None,
        model: bool = False,
        **wanted: str,
    ) -> dict[str, Any]:
        sources = dict(files or {})
        if config is not None:
            sources["model-config.yaml"] = config
            wanted["config_file"] = str(tmp_path / "model-config.yaml")
        if model:
            sources["net.py"] = LINEAR
            torch.save(Net().state_dict(), tmp_path / "net.pth")
            wanted["model_file"] = str(tmp_path / "net.py")
            wanted["serialized_file"] = str(tmp_path / "net.pth")
        for name, text in sources.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
        if "extra_files" in wanted:
            names = wanted["extra_files"].split(",")
            wanted["extra_files"] = ",".join(str(tmp_path / name) for name in names)
        named = handler if handler.isidentifier() else str(tmp_path / handler)
        out = tmp_path / "store"
        out.mkdir()
        path = archive_for_torchserve(
            ModelArchiverConfig("m", named, "1.0", export_path=str(out), **wanted),  # type: ignore[arg-type]
            lambda line: None,
        )
        folder = tmp_path / "unpacked"
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        manifest = json.loads((folder / "MAR-INF" / "MANIFEST.json").read_text(encoding="utf-8"))
        return run(
            {
                "folder": str(folder),
                "name": "m",
                "manifest": manifest,
                "handler": manifest["model"]["handler"],
                "config_file": manifest["model"].get("configFile"),
                "device": "cpu",
                "batch_size": 8,
                "worker": 1,
                "envelope": envelope,
                "batches": batches,
            }
        )

    return serve


def predict(*rows: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    return "predict", list(rows)


def explain(*rows: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    return "explain", list(rows)


DIGITS = """
import torch
from ts.torch_handler.image_classifier import ImageClassifier

def as_tensor(image):
    return torch.tensor(list(image.tobytes()), dtype=torch.float32).view(1, 2, 2) / 255

class Digits(ImageClassifier):
    image_processing = staticmethod(as_tensor)

    def postprocess(self, data):
        return data.argmax(1).tolist()
"""


def grey(*values: int) -> dict[str, str]:
    file = io.BytesIO()
    Image.frombytes("L", (2, 2), bytes(values)).save(file, "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}


def test_a_classifier_of_digits_predicts_and_explains(serve: Serve) -> None:
    pictures = [{"body": grey(0, 255, 0, 0)}, {"data": grey(255, 0, 0, 9)}]
    found = serve(
        "digits.py",
        predict(*pictures),
        explain({"body": grey(0, 255, 51, 0), "target": 2}),
        files={"digits.py": DIGITS},
        model=True,
    )
    predicted, (explained,) = found["answers"]
    assert predicted == [1, 0]
    assert explained == [[[0.0, 0.0], [pytest.approx(0.2), 0.0]]]  # weight · input, shape 1 × 2 × 2
    assert {record["name"] for record in found["metrics"]} == {"HandlerTime"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_built_in_name_needs_no_file(serve: Serve, tmp_path: Path) -> None:
    class Colours(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(dim=(2, 3))

    scripted = torch.jit.trace(Colours(), torch.zeros(1, 3, 8, 8))  # type: ignore[no-untyped-call]
    scripted.save(str(tmp_path / "model.pt"))
    file = io.BytesIO()
    Image.new("RGB", (300, 300), (255, 0, 0)).save(file, "PNG")
    found = serve(
        "image_classifier",
        predict({"body": {"b64": base64.b64encode(file.getvalue()).decode()}}),
        files={"index_to_name.json": '{"0": "red", "1": ["n1", "green"], "2": "blue"}'},
        extra_files="index_to_name.json",
        serialized_file=str(tmp_path / "model.pt"),
    )
    assert list(found["answers"][0][0]) == ["red", "blue", "green"]


FUNCTION = """
import words
from toolkit.parts import join

class Service:
    def __init__(self):
        self.initialized = False

    def initialize(self, context):
        self.note = open("note.txt").read()
        context.cache = {"calls": 0}
        self.initialized = True

_service = Service()

def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    import late
    context.cache["calls"] += 1
    return [join(words.GREETING, _service.note, late.WORD, context.cache["calls"])]
"""


def test_a_function_finds_its_files_and_keeps_what_it_attached(serve: Serve) -> None:
    files = {
        "service.py": FUNCTION,
        "words.py": "GREETING = 'hello'\n",
        "late.py": "WORD = 'late'\n",
        "note.txt": "from a file",
        "pack/toolkit/__init__.py": "",
        "pack/toolkit/parts.py": "def join(*parts):\n    return ' '.join(map(str, parts))\n",
    }
    row = {"body": 1}
    extra = "words.py,late.py,note.txt,pack"
    found = serve("service.py", predict(row), predict(row), files=files, extra_files=extra)
    assert found["answers"] == [["hello from a file late 1"], ["hello from a file late 2"]]


def test_a_function_may_be_named_without_the_suffix(serve: Serve) -> None:
    source = (
        "def entry(data, context):\n    return data and [context.manifest['model']['handler']]\n"
    )
    assert serve("service:entry", predict({}), files={"service.py": source})["answers"] == [
        ["service:entry"]
    ]


METRICS = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

class Measured:
    def initialize(self, context):
        self.calls = context.metrics.add_metric_to_cache(
            metric_name="Calls", unit="count", dimension_names=["ModelName"],
            metric_type=MetricTypes.COUNTER)

    def handle(self, data, context):
        self.calls.add_or_update(value=len(data), dimension_values=[context.model_name])
        context.metrics.add_time("Step", 1.5, 0, dimensions=[Dimension("Step", "one")])
        return [None for _ in data]
"""


def test_a_handlers_metrics_are_there_for_the_loop(serve: Serve) -> None:
    found = serve("measured.py", predict({}, {}), files={"measured.py": METRICS})
    calls, step = found["metrics"]
    assert (calls["name"], calls["value"], calls["dimensions"]) == ("Calls", 2, {"ModelName": "m"})
    assert step["dimensions"] == {"Step": "one", "ModelName": "m", "Level": "Model"}
    assert (step["unit"], step["type"], step["request_id"]) == ("Milliseconds", "gauge", "id0")


MICRO = """
from ts.handler_utils.micro_batching import MicroBatching
from ts.torch_handler.base_handler import BaseHandler

class Micro(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        settings = self.model_yaml_config["micro_batching"]
        self.handle = MicroBatching(self, settings["micro_batch_size"], settings["parallelism"])

    def preprocess(self, data):
        import torch
        return torch.tensor([row["body"] for row in data])
"""


def test_micro_batching_may_begin_in_initialize(serve: Serve) -> None:
    config = "micro_batching:\n  micro_batch_size: 2\n  parallelism: {inference: 2}\n"
    rows = [{"body": [float(index), 1.0, 2.0, 3.0]} for index in range(5)]
    found = serve("micro.py", predict(*rows), files={"micro.py": MICRO}, config=config, model=True)
    assert found["answers"] == [[[float(index), 1.0, 2.0] for index in range(5)]]


def test_an_envelope_unpacks_the_requests_of_a_built_in_handler(serve: Serve) -> None:
    rows = [{"body": {"instances": [[1.0, 2.0, 3.0, 4.0]]}}]
    found = serve("base_handler", predict(*rows), model=True, envelope="kserve")
    assert found["answers"] == [[{"predictions": [[1.0, 2.0, 3.0]]}]]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library\n", "No module named 'no_such_library' (bad.py:1)"),
        ("from ts.torch_handler.nothing import X\n", "No module named 'ts.torch_handler.nothing'"),
        ("class A:\n    pass\n\nclass B:\n    pass\n", "Expected only one class in custom service"),
        (
            "class A:\n    handle = 1\n    def initialize(self, c):\n        1 / 0\n",
            "ZeroDivisionError: division by zero (bad.py:4)",
        ),
    ],
    ids=["library", "ts", "classes", "initialize"],
)
def test_why_an_archive_does_not_load_is_said(serve: Serve, source: str, message: str) -> None:
    assert message in serve("bad.py", files={"bad.py": source})["error"]


def test_weights_that_are_a_pickled_module_are_refused(serve: Serve, tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pth")
    (tmp_path / "net.py").write_text(LINEAR, encoding="utf-8")
    found = serve(
        "base_handler",
        model_file=str(tmp_path / "net.py"),
        serialized_file=str(tmp_path / "whole.pth"),
    )
    assert "whole.pth is not made of tensors alone but holds objects of torch.nn" in found["error"]
