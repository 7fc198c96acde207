"""Archive → server → explanation: the numbers are captum's, and the error bar is true."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients
from PIL import Image

from examples.digits.net import DigitsNet
from tests.serve.live import LiveServer, modelyard, running

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
FORMATS = ("pt2", "onnx", "torchscript")
STEPS = 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, digits_store: Path) -> Iterator[LiveServer]:
    """Serve the three archives of the digits model, each under its artifact's format."""
    with running(tmp_path_factory.mktemp("explain"), digits_store) as server:
        server.register_all(*FORMATS, initial_workers=1)
        yield server


@pytest.fixture(scope="module")
def checkpoint() -> DigitsNet:
    model = DigitsNet()
    model.load_state_dict(torch.load(DIGITS / "digits.pt", weights_only=True))
    return model.eval()


def scan(digit: int) -> bytes:
    return (DIGITS / "scans" / f"{digit}.png").read_bytes()


def tensor(digit: int) -> torch.Tensor:
    """Return a committed scan as the network's input (1, 1, 8, 8)."""
    with Image.open(DIGITS / "scans" / f"{digit}.png") as image:
        values = torch.tensor(list(image.tobytes()), dtype=torch.float32)
    return values.view(1, 1, 8, 8) / 255


def explain(server: LiveServer, model: str, digit: int, query: str = "") -> dict[str, Any]:
    answer = server.client.put(f"/explanations/{model}?{query}", content=scan(digit))
    assert answer.status_code == 200, answer.text
    explanation: dict[str, Any] = answer.json()
    return explanation


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("baseline", ["zero", "black", "white"])
def test_attributions_are_captums_on_the_checkpoint(
    server: LiveServer, checkpoint: DigitsNet, format: str, baseline: str
) -> None:
    for digit in (0, 3, 7):
        told = explain(server, format, digit, f"n_steps={STEPS}&baseline={baseline}")
        image = tensor(digit)
        start = torch.full_like(image, 1.0 if baseline == "white" else 0.0)
        expected, delta = IntegratedGradients(checkpoint).attribute(
            image,
            baselines=start,
            target=told["target"],
            n_steps=STEPS,
            method="riemann_middle",
            return_convergence_delta=True,
        )
        served = torch.tensor(told["attributions"])
        assert list(served.shape) == told["shape"] == [1, 8, 8]
        torch.testing.assert_close(served, expected[0].float(), rtol=0, atol=1e-5)
        assert told["convergence_delta"] == pytest.approx(float(delta), abs=1e-4)
        with torch.inference_mode():
            logits = checkpoint(torch.cat([image, start]))[:, told["target"]].tolist()
        assert [told["f_input"], told["f_baseline"]] == pytest.approx(logits, abs=1e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("query", ["", "n_steps=1", "target=3", "tolerance=0.001&baseline=white"])
def test_attributions_sum_to_the_difference_within_the_delta_that_is_stated(
    server: LiveServer, format: str, query: str
) -> None:
    for digit in range(10):
        told = explain(server, format, digit, query)
        total = sum(value for row in told["attributions"][0] for value in row)
        difference = told["f_input"] - told["f_baseline"]
        assert total == pytest.approx(told["sum_attributions"], abs=1e-4)
        assert abs(total - difference) <= abs(told["convergence_delta"]) + 1e-4
        assert told["convergence_delta"] == pytest.approx(total - difference, abs=1e-4)
        met = abs(told["convergence_delta"]) <= told["tolerance"] * abs(difference)
        assert told["tolerance_met"] is met
        assert told["target"] == (3 if "target" in query else digit)
        assert told["label"] == str(told["target"])


def test_a_smaller_tolerance_takes_more_steps_until_it_is_met(server: LiveServer) -> None:
    rough = explain(server, "pt2", 8, "tolerance=1")
    fine = explain(server, "pt2", 8, "tolerance=0.0001")
    assert rough["n_steps"] == 10
    assert fine["n_steps"] > rough["n_steps"]
    assert abs(fine["convergence_delta"]) < abs(rough["convergence_delta"])


def test_an_explanation_says_what_it_explains(server: LiveServer) -> None:
    told = explain(server, "onnx", 7, "target=predicted&n_steps=10")
    assert told["model"] == "onnx"
    assert told["version"] == "1.0"
    assert told["method"] == "integrated_gradients"
    assert told["baseline"] == "zero"
    assert told["n_steps"] == 10
    assert (told["target"], told["label"]) == (7, "7")


def test_requests_that_ask_differently_in_one_batch_get_what_they_asked_for(
    server: LiveServer,
) -> None:
    asked = [(digit, target) for digit in range(10) for target in (0, 5)]

    def ask(pair: tuple[int, int]) -> dict[str, Any]:
        digit, target = pair
        return explain(server, "torchscript", digit, f"target={target}&n_steps={10 + target}")

    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(ask, asked))
    for pair, told in zip(asked, together, strict=True):
        alone = ask(pair)
        assert (told["target"], told["n_steps"]) == (pair[1], 10 + pair[1])
        torch.testing.assert_close(
            torch.tensor(told["attributions"]),
            torch.tensor(alone["attributions"]),
            rtol=0,
            atol=1e-5,
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("query", "accept"),
    [("format=png", "*/*"), ("", "image/png"), ("", "text/html, image/png;q=0.9, */*;q=0.1")],
)
def test_the_heat_map_is_a_picture_of_sensible_size(
    server: LiveServer, format: str, query: str, accept: str
) -> None:
    answer = server.client.put(
        f"/explanations/{format}?{query}", content=scan(7), headers={"Accept": accept}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/png"
    picture = Image.open(io.BytesIO(answer.content))
    picture.load()
    assert picture.format == "PNG"
    assert 200 <= picture.width <= 2000
    assert 200 <= picture.height <= 2000
    colours = picture.convert("RGB").getcolors(maxcolors=1 << 24) or []
    assert len(colours) > 20


def test_json_is_the_default_and_wins_over_accept_when_it_is_asked_for(
    server: LiveServer,
) -> None:
    for query, accept in (("", "*/*"), ("format=json", "image/png"), ("", "application/json")):
        answer = server.client.put(
            f"/explanations/pt2?{query}", content=scan(7), headers={"Accept": accept}
        )
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["target"] == 7


def test_the_command_line_explains(server: LiveServer, tmp_path: Path) -> None:
    where = f"--state-dir={server.state_dir}"
    file = DIGITS / "scans" / "7.png"
    ran = modelyard("explain", "onnx", file, where, "--json", "--n-steps=10", "--target=3")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["target"], told["n_steps"]) == (3, 10)

    shown = modelyard("explain", "onnx", file, where)
    assert shown.returncode == 0, shown.stderr
    assert "convergence_delta" in shown.stdout

    heatmap = tmp_path / "heatmap.png"
    drawn = modelyard("explain", "onnx", file, where, "-o", heatmap)
    assert drawn.returncode == 0, drawn.stderr
    with Image.open(heatmap) as picture:
        assert picture.format == "PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["heatmap.png"]

    wrong = modelyard("explain", "onnx", file, where, "--baseline=grey")
    assert wrong.returncode == 1
    assert "400 BadRequestException: " in wrong.stderr
    assert "baseline" in wrong.stderr

    nowhere = modelyard("explain", "onnx", file, where, "-o", tmp_path / "no" / "h.png")
    assert nowhere.returncode == 1
    assert "cannot write" in nowhere.stderr
