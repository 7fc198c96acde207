"""What is measured: archives of the digits model, one per artifact, and of a handler without model.

Everything is made by the product's own commands, in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits"
MODELYARD = Path(sys.executable).with_name("modelyard")

FORMATS = ("onnx", "pt2")
ECHO = "echo"
ECHO_HANDLER = '''\
"""Answer at once: what is left is the server's own cost."""


def handle(data, context):
    return None if data is None else ["ok"] * len(data)
'''
ECHO_BATCH_SIZE = 32
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
    artifacts = folder / "artifacts"
    modelyard("export", DIGITS / "digits.pt", "--model", f"{DIGITS / 'net.py'}:DigitsNet",
              "--input", "image:float32[batch,1,8,8]", "--output", "logits",
              "--format", "pt2", "--format", "onnx", "-o", artifacts)  # fmt: skip
    scans = tuple(sorted((DIGITS / "scans").glob("*.png")))
    subjects = []
    for format in formats:
        name = f"digits-{format}"
        modelyard("archive", name, "--artifact", artifacts / f"digits.{format}",
                  "--handler", "image_classifier", "--version", "1.0",
                  "--extra-files", DIGITS / "index_to_name.json",
                  "--config-file", DIGITS / "model-config.yaml",
                  "--example", f"{scans[7]}=7", "-o", folder / "store")  # fmt: skip
        subjects.append(Subject(name, folder / "store" / f"{name}.mar", "image/png", scans))
    return subjects


def build_echo(folder: Path) -> Subject:
    """Archive a handler that answers at once; its artifact is never opened."""
    sources = folder / "echo"
    sources.mkdir()
    (sources / "echo.py").write_text(ECHO_HANDLER)
    (sources / "nothing.bin").write_bytes(b"nothing")
    (sources / "model-config.yaml").write_text(f"batchSize: {ECHO_BATCH_SIZE}\n")
    modelyard("archive", ECHO, "--artifact", sources / "nothing.bin", "--handler",
              sources / "echo.py", "--version", "1.0", "--config-file",
              sources / "model-config.yaml", "-o", folder / "store")  # fmt: skip
    scans = tuple(sorted((DIGITS / "scans").glob("*.png")))
    return Subject(ECHO, folder / "store" / f"{ECHO}.mar", "application/octet-stream", scans)
