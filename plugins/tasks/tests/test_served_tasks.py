"""Every handler of a task through HTTP: models made by the examples, archived by `--handler auto`.

One server serves those that the tests at hand ask for: a text and a picture in `make test`, all of
them at night. Programs are exported without the proof, which others test.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from examples.tasks import pictures, series, shapes, sounds, text
from modelyard.archiver import write_archive
from tests.handlers.folders import Tensors, save_program
from tests.serve.live import LiveServer
from tests.test_docs import free_ports

pytestmark = pytest.mark.timeout(600)
NIGHTLY = pytest.mark.nightly  # a worker of a .pt2 file imports for five seconds
EXAMPLES = Path(__file__).parents[3] / "examples"
IDS = ["input_ids", "token_type_ids", "attention_mask"]
ROWS = [f"{name}:int64[batch=1..4,length=2..64]" for name in IDS]


def plain(net: nn.Module, weights: Path) -> nn.Module:
    net.load_state_dict(torch.load(weights))
    return net


def write_report(artifact: Path, model: str, outputs: list[dict[str, Any]]) -> None:
    """Write what `modelyard export` would beside an artifact, but for the proof."""
    signature = json.loads(artifact.with_suffix(".signature").read_text())
    report = {
        "format": "pt2",
        "artifact_sha256": hashlib.sha256(artifact.read_bytes()).hexdigest(),
        "checkpoint": {"sha256": "0" * 64},
        "signature": {**signature, "outputs": outputs},
        "model": model,
    }
    artifact.with_name(f"{artifact.name}.report.json").write_text(json.dumps(report))


def output(name: str, *shape: str | int) -> dict[str, Any]:
    return {"name": name, "dtype": "float32", "shape": list(shape)}


LOGITS = output("logits", "batch", "length", 3)
TRANSFORMERS: dict[str, tuple[Any, str, list[str], list[str], list[dict[str, Any]]]] = {
    "pairs": (text, "BertForSequenceClassification", IDS, ROWS, [output("logits", "batch", 3)]),
    "answers": (text, "BertForQuestionAnswering", IDS, ROWS,
                [output("start_logits", "batch", "length"),
                 output("end_logits", "batch", "length")]),
    "gaps": (text, "BertForMaskedLM", IDS, ROWS, [LOGITS]),
    "vit": (pictures, "ViTModel", ["pixel_values"], ["pixel_values:float32[batch=1..4,3,32,32]"],
            [output("last_hidden_state", "batch", 17, 32), output("pooler_output", "batch", 32)]),
    "clip": (pictures, "CLIPModel", ["input_ids", "pixel_values", "attention_mask"],
             ["input_ids:int64[texts=1..6,length=2..16]",
              "pixel_values:float32[images=1..4,3,32,32]", "attention_mask:int64[texts,length]"],
             [output("logits_per_image", "images", "texts")]),
}  # fmt: skip
NETS: dict[str, tuple[Any, nn.Module, str, list[dict[str, Any]]]] = {
    "detector": (shapes, shapes.Detector(), "image:float32[batch=1..4,3,32,32]",
                 [output("logits", "batch", 64, 3), output("pred_boxes", "batch", 64, 4)]),
    "segmenter": (shapes, shapes.Segmenter(), "image:float32[batch=1..4,3,32,32]",
                  [output("logits", "batch", 3, 16, 16)]),
    "tone": (sounds, sounds.Namer(), "wave:float32[batch=1..4,samples=160..40000]",
             [output("logits", "batch", 4)]),
    "speller": (sounds, sounds.Speller(), "wave:float32[batch=1..4,samples=160..40000]",
                [output("logits", "batch", "frames", 6)]),
    "series": (series, series.Quantiles(), "values:float32[batch=1..4,24,2]",
               [output("forecast", "batch", 6, 2, 3)]),
}  # fmt: skip


class Tasks:
    """The examples on one server; each is made, archived and served when it is first asked for."""

    def __init__(self, server: LiveServer, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._made: set[Any] = set()
        self._served: set[str] = set()

    def make(self, example: Any) -> Path:
        """Return the folder of the files that an example makes."""
        if example not in self._made:
            example.make(self._folder)
            self._made.add(example)
        return self._folder

    def serve(self, name: str) -> LiveServer:
        """Return the server, with a model on it whose handler and files `auto` has chosen."""
        if name not in self._served:
            self._archive(name)
            self.server.register_all(name, initial_workers=1)
            self._served.add(name)
        return self.server

    def _archive(self, name: str) -> None:
        import transformers

        made = self.make((TRANSFORMERS.get(name) or NETS[name])[0])
        artifact = made / f"{name}.pt2"
        if name in TRANSFORMERS:
            _, class_name, inputs, specs, outputs = TRANSFORMERS[name]
            model = getattr(transformers, class_name).from_pretrained(made / name)
            module: nn.Module = Tensors(model, inputs, [each["name"] for each in outputs])
            class_name = f"transformers.models:{class_name}"
        else:
            _, net, spec, outputs = NETS[name]
            module, specs, class_name = plain(net, made / f"{name}.pt"), [spec], "net.py:Net"
        save_program(module, specs, artifact)
        write_report(artifact, class_name, outputs)
        config = made / name / "model-config.yaml"
        write_archive(name, version="1.0", artifact=artifact, handler="auto",
                      source_folder=made / name, output_dir=self.server.store,
                      config_file=config if config.is_file() else None)  # fmt: skip


@pytest.fixture(scope="module")
def tasks(shared_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    return Tasks(shared_server, tmp_path_factory.mktemp("tasks"))


def ask(tasks: Tasks, name: str, content: Any, **options: Any) -> Any:
    answer = tasks.serve(name).predict(name, content, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def as_json(tasks: Tasks, name: str, body: Any) -> Any:
    return ask(tasks, name, json.dumps(body), headers={"content-type": "application/json"})


@pytest.mark.nightly
def test_a_gap_in_a_text_is_filled(tasks: Tasks) -> None:
    gaps = ask(tasks, "gaps", "in [MASK] we met Anna", headers={"content-type": "text/plain"})
    assert [each["score"] for each in gaps] == sorted(
        (each["score"] for each in gaps), reverse=True
    )


@NIGHTLY
def test_pairs_and_questions_are_answered(tasks: Tasks) -> None:
    pair = as_json(tasks, "pairs", {"text": "Anna lives in Rome", "text_pair": "in Rome"})
    assert set(pair) == set(text.RELATIONS)
    context = "Anna lives in New York and Bruno went to Rome"
    found = as_json(tasks, "answers", {"question": "where?", "context": context})
    assert context[found["start"] : found["end"]] == found["answer"] != ""


@pytest.mark.parametrize(
    ("name", "size"),
    [("detector", (320, 240)), pytest.param("segmenter", shapes.PICTURE, marks=NIGHTLY)],
)
def test_a_picture_is_answered_as_data_and_as_a_picture(
    tasks: Tasks, name: str, size: tuple[int, int]
) -> None:
    picture = (tasks.make(shapes) / "shapes.png").read_bytes()
    found = ask(tasks, name, picture)
    if name == "detector":
        assert {each["label"] for each in found} <= set(shapes.SHAPES)
        assert found
    else:
        width, height = size
        assert found["size"] == [height, width]
        assert sum(each["area"] for each in found["segments"]) == width * height
    answer = tasks.server.predict(name, picture, headers={"accept": "image/png"})
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).size == size
    drawn = tasks.server.predict(name, picture, params={"format": "png"})
    assert drawn.content == answer.content


@NIGHTLY
def test_a_picture_becomes_a_vector(tasks: Tasks) -> None:
    picture = (tasks.make(shapes) / "shapes.png").read_bytes()
    assert np.linalg.norm(ask(tasks, "vit", picture)) == pytest.approx(1, abs=1e-5)


@NIGHTLY
def test_a_picture_and_texts_come_as_a_form_or_as_json(tasks: Tasks) -> None:
    picture = (tasks.make(shapes) / "shapes.png").read_bytes()
    form = tasks.serve("clip").client.post(
        "/predictions/clip",
        files={"image": ("shapes.png", picture, "image/png")},
        data={"texts": json.dumps(pictures.TEXTS)},
    )
    assert form.status_code == 200, form.text
    assert sum(form.json().values()) == pytest.approx(1)
    body = {"image": base64.b64encode(picture).decode(), "texts": list(pictures.TEXTS)}
    assert as_json(tasks, "clip", body) == form.json()


@NIGHTLY
def test_sounds_and_series_are_answered(tasks: Tasks) -> None:
    made = tasks.make(sounds)
    tone = ask(tasks, "tone", (made / "tone.wav").read_bytes())
    assert next(iter(tone)) == "b"
    assert ask(tasks, "speller", (made / "tune.wav").read_bytes())["text"] == sounds.TUNE
    answer = ask(tasks, "series", (tasks.make(series) / "window.json").read_bytes())
    low, high = (np.array(answer["quantiles"][name]) for name in ("0.1", "0.9"))
    assert low.shape == (series.HORIZON, series.SERIES)
    assert (low < high).mean() > 0.9


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        pytest.param(
            "pairs", {"question": "?"}, "an object of question; expected text", marks=NIGHTLY
        ),
        pytest.param(
            "answers", {"question": "where?"}, '{"question": "…", "context": "…"}', marks=NIGHTLY
        ),
        ("gaps", {"text": "no gap"}, 'the text has no "[MASK]"'),
        ("detector", {"a": 1}, 'input "image" holds something else than numbers'),
        pytest.param(
            "clip", {"image": "", "texts": "[]"}, "texts is expected as a JSON list", marks=NIGHTLY
        ),
        pytest.param(
            "tone", "bm8gc291bmQ=", "is not a sound; send one file of WAV, FLAC, OGG", marks=NIGHTLY
        ),
        pytest.param(
            "series", [[1, 2]], "the body holds 1 values; expected at least 24", marks=NIGHTLY
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_request_at_fault_is_answered_400(tasks: Tasks, name: str, body: Any, said: str) -> None:
    headers = {"content-type": "application/json"}
    answer = tasks.serve(name).predict(name, json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["message"]


@pytest.mark.parametrize(
    ("name", "target"),
    [("gaps", "rome"), ("detector", "circle"),
     *(pytest.param(*each, marks=NIGHTLY) for each in (
         ("pairs", "neutral"), ("segmenter", "square"), ("tone", "b"), ("speller", "a"),
         ("series", "0,1,2")))],
)  # fmt: skip
def test_each_is_explained_for_a_target(tasks: Tasks, name: str, target: str) -> None:
    server = tasks.serve(name)
    made = tasks.make((TRANSFORMERS.get(name) or NETS[name])[0])
    files = {"detector": "shapes.png", "segmenter": "shapes.png", "tone": "tone.wav",
             "speller": "tune.wav", "series": "window.json"}  # fmt: skip
    content = (made / files[name]).read_bytes() if name in files else b"in [MASK] we met"
    query = {"target": target, "n_steps": "5"}
    answer = server.client.post(f"/explanations/{name}", content=content, params=query)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert target in found["label"] or name == "series"
    assert np.abs(np.array(found["attributions"], dtype=float)).max() > 0


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at", [0, 1], ids=["Hugging Face", "network"])
def test_the_commands_of_the_examples_lead_to_an_answer(tmp_path: Path, at: int) -> None:
    """The two ways of examples/tasks/README.md, with a user's commands and their proof."""
    blocks = re.findall(r"(?:^    .*\n)+", (EXAMPLES / "tasks" / "README.md").read_text(), re.M)
    ports = dict(zip(("PORT", "MANAGEMENT_PORT", "METRICS_PORT"), map(str, free_ports(3)),
                     strict=True))  # fmt: skip
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    lines = blocks[at].replace("modelyard ", f"{sys.executable} -P -m modelyard ")
    lines = lines.replace("python -m examples", f"{sys.executable} -m examples")
    lines = lines.replace("8080", ports["PORT"]).replace("curl ", "curl -sSf ")
    settings = {**ports, "STATE_DIR": str(tmp_path / "state"), "WORKERS": "1"}
    environment = {f"MODELYARD_{name}": value for name, value in settings.items()}
    python = {"PYTHONPATH": f"{tmp_path}:{EXAMPLES.parent}"}
    done = subprocess.run(["bash", "-euc", lines], cwd=tmp_path, check=True, timeout=800,
                          text=True, stdout=subprocess.PIPE,
                          env={**os.environ, **environment, **python})  # fmt: skip
    assert ("New York" in done.stdout) if at == 0 else ('"xmin"' in done.stdout)
    for name in ("boxes", "why") if at else ():
        assert (tmp_path / "build" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
