"""Networks that a minute trains, archived, with requests whose explanations are measured."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from modelyard.archiver import write_archive
from modelyard.archiver.manifest import parse_manifest
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.plugins.tasks.tests.test_served_tasks import output, write_report
from modelyard.serve.worker.load import Service, load_service
from tests.handlers.folders import Tensors, save_program
from tests.shared import DIGITS

ROWS = 20
SEED = 0
GOOD = ("excellent", "lovely", "great", "superb", "friendly", "tasty")
BAD = ("awful", "slow", "rude", "bland", "dirty", "terrible")
THINGS = ("food", "service", "room", "waiter", "soup", "music", "view")


class Network(NamedTuple):
    """An archive that is loaded, and files of requests with their types."""

    service: Service
    requests: list[dict[str, str]]


def train(net: nn.Module, inputs: Any, labels: Tensor, steps: int = 200) -> None:
    """Train a classifier with Adam."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        loss = cross_entropy(net(inputs), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def load(folder: Path) -> Service:
    """Load the archive that is unpacked in a folder, as a worker does."""
    data = (folder / MANIFEST_NAME).read_bytes()
    manifest = parse_manifest(data)
    return load_service(
        {
            "name": "network",
            "folder": str(folder),
            "manifest": json.loads(data),
            "handler": manifest.handler,
            "config_file": manifest.config_file,
            "device": "cpu",
            "worker": 1,
            "batch_size": 4,
        }
    )


def _archived(folder: Path, artifact: str, handler: str, extra: tuple[str, ...]) -> Service:
    path = write_archive(
        "network",
        artifact=folder / artifact,
        handler=handler,
        extra_files=[folder / name for name in extra],
        output_dir=folder,
        archive_format="no-archive",
    )
    return load(path)


def _written(folder: Path, kind: str, bodies: list[str]) -> list[dict[str, str]]:
    files = []
    for at, body in enumerate(bodies):
        file = folder / f"{at:02}.request"
        file.write_text(body)
        files.append({"file": str(file), "content_type": kind})
    return files


def write_table(folder: Path, hidden: int = 16) -> list[dict[str, float]]:
    """Write `table.pt2` of a network on a table of ten features, with its files; give rows of it.

    Labels follow from five of the features, two of which act together.
    """
    random_ = np.random.default_rng(SEED)
    rows = random_.normal(size=(900, 10)) * np.linspace(1, 20, 10) + np.arange(10)
    mean, std = rows.mean(0), rows.std(0)
    scaled = (rows - mean) / std
    score = 2 * scaled[:, 0] - 1.5 * scaled[:, 3] + scaled[:, 5] + scaled[:, 7] * scaled[:, 8]
    inputs, labels = torch.from_numpy(scaled).float(), torch.from_numpy((score > 0).astype(int))
    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
    )
    train(net, inputs[:800], labels[:800])
    folder.mkdir(parents=True, exist_ok=True)
    save_program(net, ["row:float32[batch=1..8,10]"], folder / "table.pt2")
    write_report(folder / "table.pt2", "net.py:Net", [output("logits", "batch", 2)])
    names = [f"f{at}" for at in range(10)]
    features = [
        {"name": name, "mean": float(centre), "std": float(width)}
        for name, centre, width in zip(names, mean, std, strict=True)
    ]
    (folder / "features.json").write_text(json.dumps({"features": features}))
    (folder / "index_to_name.json").write_text(json.dumps({"0": "no", "1": "yes"}))
    return [dict(zip(names, row, strict=True)) for row in rows[800:].tolist()]


def make_table(folder: Path) -> Network:
    """Return the network on a table."""
    rows = write_table(folder)
    service = _archived(folder, "table.pt2", "tabular", ("features.json", "index_to_name.json"))
    bodies = [json.dumps(row) for row in rows[:ROWS]]
    return Network(service, _written(folder, "application/json", bodies))


def make_text(folder: Path) -> Network:
    """Return a transformer of two layers that tells good reviews from bad ones."""
    from transformers import BertConfig, BertForSequenceClassification

    from examples.minilm.make import train_tokenizer

    drawn = random.Random(SEED)
    torch.manual_seed(SEED)
    reviews = [each for each in (_review(drawn) for _ in range(900)) if each[1]]
    tokenizer = train_tokenizer([text for text, _ in reviews])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=64, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
        id2label={0: "bad", 1: "good"},
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    encodings = tokenizer.encode_batch([text for text, _ in reviews])
    ids = torch.zeros(len(reviews), max(map(len, encodings)), dtype=torch.int64)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding)] = torch.tensor(encoding.ids)
    labels = torch.tensor([int(score > 0) for _, score in reviews])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        at = torch.randint(0, len(reviews) - ROWS, (48,))
        loss = cross_entropy(model(ids[at], (ids[at] != 0).long()).logits, labels[at])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    model.config.save_pretrained(folder)
    names = ["input_ids", "attention_mask"]
    specs = [f"{name}:int64[batch=1..8,length=2..64]" for name in names]
    save_program(Tensors(model, names, ["logits"]), specs, folder / "text.pt2")
    kind = "transformers.models:BertForSequenceClassification"
    write_report(folder / "text.pt2", kind, [output("logits", "batch", 2)])
    service = _archived(folder, "text.pt2", "text", ("tokenizer.json", "config.json"))
    return Network(service, _written(folder, "text/plain", [text for text, _ in reviews[-ROWS:]]))


def _review(drawn: random.Random) -> tuple[str, int]:
    """Return a text and how much more good than bad it says."""
    parts, score = [], 0
    for _ in range(drawn.choice((2, 3))):
        is_good, is_denied = drawn.random() < 0.5, drawn.random() < 0.2
        word = drawn.choice(GOOD if is_good else BAD)
        parts.append(f"the {drawn.choice(THINGS)} was {'not ' if is_denied else ''}{word}")
        score += 1 if is_good != is_denied else -1
    return " and ".join(parts), score


def write_scans(folder: Path) -> list[dict[str, str]]:
    """Write scans of the digits' test set; return them as requests."""
    from sklearn.datasets import load_digits

    folder.mkdir(parents=True, exist_ok=True)
    images = load_digits().images[1000 : 1000 + 17 * ROWS : 17]
    for at, image in enumerate(images):
        Image.fromarray((image * 255 / 16).astype("uint8")).save(folder / f"{at:02}.png")
    return [
        {"file": str(file), "content_type": "image/png"} for file in sorted(folder.glob("*.png"))
    ]


def make_digits(artifact: Path, folder: Path, with_twin: bool = True) -> Network:
    """Return the digits network of an artifact, whose twin lies beside it where it needs one."""
    folder.mkdir(parents=True, exist_ok=True)
    if not with_twin:
        for name in (artifact.name, f"{artifact.name}.report.json"):
            (folder / name).write_bytes(artifact.with_name(name).read_bytes())
        artifact = folder / artifact.name
    path = write_archive(
        "network",
        artifact=artifact,
        handler="image_classifier",
        extra_files=[DIGITS / "index_to_name.json"],
        config_file=DIGITS / "model-config.yaml",
        output_dir=folder,
        archive_format="no-archive",
    )
    return Network(load(path), write_scans(folder / "scans"))


Makers = Mapping[str, Callable[[], Network]]
