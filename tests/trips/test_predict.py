"""Archive → server → curl and command line: what is served is what the checkpoint says."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from PIL import Image

from examples.digits.net import DigitsNet
from examples.digits.train import held_out, to_input
from tests.serve.live import LiveServer, modelyard
from tests.shared import DIGITS

FORMATS = ("onnx", "torchscript")
AT_NIGHT = pytest.param("pt2", marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def probabilities() -> torch.Tensor:
    """Return the checkpoint's softmax (450, 10) of the held-out scans."""
    model = DigitsNet()
    model.load_state_dict(torch.load(DIGITS / "digits.pt", weights_only=True))
    model.eval()
    pixels, _ = held_out()
    with torch.inference_mode():
        answers: torch.Tensor = model(to_input(pixels)).softmax(1)
    return answers


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    """Return the held-out scans as PNG files."""
    pixels, _ = held_out()
    written = []
    for scan in pixels:
        file = io.BytesIO()
        Image.fromarray(scan).save(file, "png")
        written.append(file.getvalue())
    return written


@pytest.mark.parametrize("format", [*FORMATS, AT_NIGHT], indirect=True)
def test_every_held_out_digit_gets_the_checkpoints_label_and_probabilities(
    server: LiveServer, format: str, probabilities: torch.Tensor, files: list[bytes]
) -> None:
    with (
        httpx.Client(base_url=server.about["inference"], timeout=60) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(file: bytes) -> dict[str, float]:
            answer = client.put(f"/predictions/{format}", content=file)
            assert answer.status_code == 200, answer.text
            labels: dict[str, float] = answer.json()
            return labels

        answers = list(threads.map(ask, files))
    assert len(answers) == 450
    labels = [next(iter(answer)) for answer in answers]
    assert labels == [str(label) for label in probabilities.argmax(1).tolist()]
    served = torch.tensor([[answer[str(k)] for k in range(10)] for answer in answers])
    torch.testing.assert_close(served, probabilities, rtol=0, atol=1e-5)


def test_the_server_reads_at_least_97_of_100_held_out_digits(
    server: LiveServer, files: list[bytes]
) -> None:
    _, labels = held_out()
    right = [
        next(iter(server.predict("onnx", file).json())) == str(label)
        for file, label in zip(files[:100], labels[:100].tolist(), strict=True)
    ]
    assert sum(right) >= 97


@pytest.mark.parametrize(
    "format",
    ["onnx", pytest.param("torchscript", marks=pytest.mark.nightly), AT_NIGHT],
    indirect=True,
)
def test_the_command_line_predicts(server: LiveServer, format: str) -> None:
    where = f"--state-dir={server.state_dir}"
    ran = modelyard("predict", format, DIGITS / "scans" / "7.png", where, "--json")
    assert ran.returncode == 0, ran.stderr
    labels = json.loads(ran.stdout)
    assert max(labels, key=labels.__getitem__) == "7"
    shown = modelyard("predict", f"{format}/1.0", DIGITS / "scans" / "7.png", where)
    assert shown.stdout.split()[0] == "7"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cats", "7.png"], "404 ModelNotFoundException: Model not found: cats"),
        pytest.param(
            *(["onnx/9", "7.png"], "Model version: 9 does not exist for model: onnx"),
            marks=pytest.mark.nightly,
        ),
        (["onnx", "labels.json"], "400 BadRequestException: "),
        (["onnx", "nowhere.png"], "cannot read "),
    ],
)
def test_the_command_line_says_what_is_wrong(
    server: LiveServer, arguments: list[str], message: str
) -> None:
    model, file = arguments
    scan = DIGITS / "scans" / file
    ran = modelyard("predict", model, scan, f"--state-dir={server.state_dir}")
    assert ran.returncode == 1
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_command_line_asks_a_server_by_its_address(server: LiveServer) -> None:
    scan = DIGITS / "scans" / "3.png"
    ran = modelyard("predict", "onnx", scan, f"--url={server.about['inference']}", "--json")
    assert next(iter(json.loads(ran.stdout))) == "3"
    ran = modelyard("predict", "onnx", scan, "--url=http://127.0.0.1:9")
    assert ran.returncode == 1
    assert "no answer from http://127.0.0.1:9" in ran.stderr
