"""What is measured: archives of no model, a tiny network, the digits model and ResNet-50.

Everything is made by the product's own commands, in a temporary folder.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits"
PEERS = ROOT / "benchmarks" / "peers"
NETWORKS = ROOT / "tests" / "networks.py"
MODELYARD = Path(sys.executable).with_name("modelyard")

FORMATS = ("onnx", "pt2")
ECHO = "echo"
ECHO_HANDLER = '''\
"""Answer at once: what is left is the server's own cost."""


def handle(data, context):
    return None if data is None else ["ok"] * len(data)
'''
ECHO_BATCH_SIZE = 32
TINY = "tiny"
TINY_BATCH_SIZE = 32
SUFFIXES = {"torchscript": "pt", "onnx": "onnx"}
"""Nothing waits for a batch to fill, so one size suits every load."""
RESNET = "resnet50"
RESNET_CONFIG = "batchSize: 1\njobQueueSize: 100\n"
"""On a CPU a batch gains nothing for a large network; single requests are spread best."""
PHOTO_SIZE = (500, 375)
PHOTO_QUALITY = 95
"""About 100 KB, as photographs of that size are in ImageNet."""
SEED = 0
COMMAND_TIMEOUT_S = 300


class CommandFailed(Exception):
    """A command of the product ended with an error."""


@dataclass(frozen=True)
class Subject:
    """One archive of the store and the requests that are sent to it."""

    name: str
    archive: Path
    content_type: str
    requests: tuple[Path, ...]
    artifact: Path | None = None
    """Where other servers load it too."""


def modelyard(*arguments: str | Path) -> str:
    """Run a command of the product and return what it printed.

    Raises:
        CommandFailed: with the command's own error.
    """
    command = [str(MODELYARD), *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=COMMAND_TIMEOUT_S,
    )
    if done.returncode:
        raise CommandFailed(
            f"modelyard {arguments[0]} ended with code {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout


def modelyard_json(*arguments: str | Path) -> Any:
    """Run a command with `--json` and return its output, parsed."""
    return json.loads(modelyard(*arguments, "--json"))


def build_digits(folder: Path, formats: tuple[str, ...] = FORMATS) -> list[Subject]:
    """Export the digits model and archive each artifact as `digits-<format>`."""
    modelyard("export", DIGITS / "digits.pt", "--model", f"{DIGITS / 'net.py'}:DigitsNet",
              "--input", "image:float32[batch,1,8,8]", "--output", "logits",
              "--format", "pt2", "--format", "onnx", "-o", folder / "artifacts")  # fmt: skip
    return [archive_digits(folder, format, f"digits-{format}") for format in formats]


def archive_digits(folder: Path, format: str, name: str, more_config: str = "") -> Subject:
    """Archive what `build_digits` has exported.

    Args:
        folder: folder that was given to it.
        format: format of the artifact.
        name: name of the archive.
        more_config: lines after those of the example's model-config.yaml.
    """
    config = folder / "artifacts" / f"{name}.yaml"
    config.write_text((DIGITS / "model-config.yaml").read_text() + more_config)
    scans = scan_files()
    modelyard("archive", name, "--artifact", folder / "artifacts" / f"digits.{format}",
              "--handler", "image_classifier", "--version", "1.0",
              "--extra-files", DIGITS / "index_to_name.json", "--config-file", config,
              "--example", f"{scans[7]}=7", "-o", folder / "store")  # fmt: skip
    return Subject(name, folder / "store" / f"{name}.mar", "image/png", scans)


def scan_files() -> tuple[Path, ...]:
    """Return the digits example's pictures."""
    return tuple(sorted((DIGITS / "scans").glob("*.png")))


def build_echo(folder: Path) -> Subject:
    """Archive a handler that answers at once."""
    config = f"batchSize: {ECHO_BATCH_SIZE}\n"
    return build_bare(folder, ECHO, ECHO_HANDLER, config, scan_files())


def build_bare(
    folder: Path, name: str, handler: str, config: str, requests: tuple[Path, ...] = ()
) -> Subject:
    """Archive a handler without a model; its artifact is never opened."""
    sources = folder / name
    sources.mkdir()
    (sources / "handler.py").write_text(handler)
    (sources / "nothing.bin").write_bytes(b"nothing")
    (sources / "model-config.yaml").write_text(config)
    modelyard("archive", name, "--artifact", sources / "nothing.bin", "--handler",
              sources / "handler.py", "--version", "1.0", "--config-file",
              sources / "model-config.yaml", "-o", folder / "store")  # fmt: skip
    return Subject(name, folder / "store" / f"{name}.mar", "application/octet-stream", requests)


def build_tiny(folder: Path, format: str = "torchscript") -> Subject:
    """Export the peers' network and archive it with the handler that calls the peers' work."""
    import torch
    from PIL import Image

    artifacts = folder / "artifacts"
    artifacts.mkdir(exist_ok=True)
    network = runpy.run_path(str(PEERS / "net.py"))["TinyNet"]()
    weights = artifacts / "weights" / f"{TINY}.pt"
    weights.parent.mkdir()
    torch.save(network.state_dict(), weights)
    image = f"image:float32[batch=1..{TINY_BATCH_SIZE},1,28,28]"
    modelyard("export", weights, "--model", f"{PEERS / 'net.py'}:TinyNet", "--input",
              image, "--format", format, "-o", artifacts)  # fmt: skip
    artifact = artifacts / f"{TINY}.{SUFFIXES[format]}"
    scans = []
    for file in scan_files():
        scan = artifacts / file.name
        Image.open(file).resize((28, 28)).convert("L").save(scan)
        scans.append(scan)
    config = artifacts / "tiny.yaml"
    config.write_text(f"batchSize: {TINY_BATCH_SIZE}\n")
    modelyard("archive", TINY, "--artifact", artifact, "--handler",
              PEERS / "modelyard_handler.py", "--version", "1.0", "--extra-files",
              PEERS / "work.py", "--config-file", config, "-o", folder / "store")  # fmt: skip
    return Subject(TINY, folder / "store" / f"{TINY}.mar", "image/png", tuple(scans), artifact)


def build_resnet(folder: Path) -> Subject:
    """Export ResNet-50 of random weights, archive it with `image_classifier`, and make a photo.

    ONNX is the fastest format here: on one thread of an AMD EPYC a call takes 78 ms of CPU, beside
    124 of pt2 and 121 of TorchScript.
    """
    import torch
    from PIL import Image, ImageOps
    from sklearn.datasets import load_sample_image

    artifacts = folder / "artifacts"
    artifacts.mkdir(exist_ok=True)
    torch.manual_seed(SEED)
    network = runpy.run_path(str(NETWORKS))["ResNet50"]()
    torch.save(network.state_dict(), artifacts / f"{RESNET}.pt")
    modelyard("export", artifacts / f"{RESNET}.pt", "--model", f"{NETWORKS}:ResNet50", "--input",
              "image:float32[batch,3,224,224]", "--output", "logits", "--format", "onnx",
              "-o", artifacts)  # fmt: skip
    config = artifacts / f"{RESNET}.yaml"
    config.write_text(RESNET_CONFIG)
    modelyard("archive", RESNET, "--artifact", artifacts / f"{RESNET}.onnx", "--handler",
              "image_classifier", "--version", "1.0", "--config-file", config,
              "-o", folder / "store")  # fmt: skip
    photo = artifacts / "photo.jpg"
    picture = ImageOps.fit(Image.fromarray(load_sample_image("china.jpg")), PHOTO_SIZE)
    picture.save(photo, quality=PHOTO_QUALITY)
    return Subject(RESNET, folder / "store" / f"{RESNET}.mar", "image/jpeg", (photo,))
