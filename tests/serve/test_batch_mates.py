"""An answer does not depend on what else is in its batch, beyond the certificate's tolerance."""

from __future__ import annotations

import io
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from modelyard.archiver import write_archive
from tests.serve.live import LiveServer
from tests.shared import DIGITS

FORMATS = ("onnx", "pt2")
BATCH_SIZE = 8
BATCHES = 12
DELAY_MS = 100


@pytest.fixture(scope="module")
def server(
    digits_artifacts: dict[str, Path],
    shared_server: LiveServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> LiveServer:
    """Each artifact served in batches of eight, for which it waits a moment."""
    folder = tmp_path_factory.mktemp("mates")
    config = folder / "model-config.yaml"
    text = (DIGITS / "model-config.yaml").read_text()
    config.write_text(f"{text}minWorkers: 1\nmaxBatchDelay: {DELAY_MS}\n")
    for format in FORMATS:
        write_archive(
            format, version="1.0", artifact=digits_artifacts[format],
            handler="image_classifier", config_file=config,
            output_dir=shared_server.store, force=True,
        )  # fmt: skip
    shared_server.register_all(*FORMATS)
    return shared_server


def report_of(artifact: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        artifact.with_name(f"{artifact.name}.report.json").read_text()
    )
    return content


def png(pixels: np.ndarray) -> bytes:
    saved = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(saved, "PNG")
    return saved.getvalue()


def requests() -> list[bytes]:
    """Return digits, extremes, noise, and a body that is not an image."""
    chosen = np.random.default_rng(0)
    return [
        *(file.read_bytes() for file in sorted((DIGITS / "scans").glob("*.png"))),
        png(np.zeros((8, 8))),
        png(np.full((8, 8), 255)),
        *(png(chosen.integers(0, 256, (8, 8))) for _ in range(4)),
        b"no image",
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_an_answer_does_not_depend_on_its_batch_mates(
    server: LiveServer, digits_artifacts: dict[str, Path], format: str
) -> None:
    tolerance = report_of(digits_artifacts[format])["parity"]["tolerance"]
    bodies = requests()
    clients = [
        httpx.Client(base_url=server.about["inference"], timeout=60, verify=False)
        for _ in range(BATCH_SIZE)
    ]
    alone = [clients[0].post(f"/predictions/{format}", content=body) for body in bodies]
    assert [answer.status_code for answer in alone] == [200] * (len(bodies) - 1) + [400]
    chosen = random.Random(0)
    with ThreadPoolExecutor(BATCH_SIZE) as threads:
        for _ in range(BATCHES):
            batch = [chosen.randrange(len(bodies)) for _ in range(BATCH_SIZE)]
            sent = [
                threads.submit(client.post, f"/predictions/{format}", content=bodies[at])
                for client, at in zip(clients, batch, strict=True)
            ]
            for at, answer in zip(batch, (each.result() for each in sent), strict=True):
                assert answer.status_code == alone[at].status_code
                if answer.status_code == 200:
                    assert answer.json() == pytest.approx(alone[at].json(), rel=0, abs=tolerance)
    for client in clients:
        client.close()
    batches = server.metric("modelyard_batch_size_count", model=format) - len(bodies)
    assert BATCHES <= batches < 2 * BATCHES
