"""Archive → server → explanation: the numbers are captum's, and the error bar is true."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import (
    FeatureAblation,
    GradientShap,
    InputXGradient,
    IntegratedGradients,
    KernelShap,
    LayerIntegratedGradients,
    NoiseTunnel,
    Occlusion,
    Saliency,
)
from PIL import Image

from examples.digits.net import DigitsNet
from modelyard.archiver import write_archive
from modelyard.client import Client
from modelyard.handlers.explain.attribute.methods import METHODS
from tests.serve.live import LiveServer, modelyard
from tests.shared import DIGITS, FURTHER

FORMATS = ("onnx", "torchscript")
"""An ONNX artifact is explained through its twin, the .pt2 file that `pt2` serves at night."""
each_format = pytest.mark.parametrize(
    "format", [*FORMATS, pytest.param("pt2", marks=pytest.mark.nightly)], indirect=True
)
STEPS = 20


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


@each_format
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


@each_format
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
        if told["n_steps"] == 1:
            assert told["error"] is told["tolerance_met"] is None
        else:
            assert told["tolerance_met"] is (met and told["error"] <= told["tolerance"])
        assert told["target"] == (3 if "target" in query else digit)
        assert told["label"] == str(told["target"])


CAPTUM: dict[str, Any] = {
    "saliency": lambda net, image, target: Saliency(net).attribute(
        image.requires_grad_(), target=target
    ),
    "input_x_gradient": lambda net, image, target: InputXGradient(net).attribute(
        image.requires_grad_(), target=target
    ),
    "smoothgrad": lambda net, image, target: NoiseTunnel(Saliency(net)).attribute(
        image,
        nt_type="smoothgrad",
        nt_samples=1000,
        nt_samples_batch_size=500,
        stdevs=0.15 * float(image.max() - image.min()),
        abs=False,
        target=target,
    ),
    "gradient_shap": lambda net, image, target: GradientShap(net).attribute(
        image, image * 0, n_samples=1000, target=target
    ),
    "occlusion": lambda net, image, target: Occlusion(net).attribute(
        image, (1, 2, 2), (1, 1, 1), target=target
    ),
    "feature_ablation": lambda net, image, target: FeatureAblation(net).attribute(
        image, target=target
    ),
    "kernel_shap": lambda net, image, target: KernelShap(net).attribute(
        image, n_samples=500, target=target
    ),
}
QUERIES = {
    "smoothgrad": "n_samples=1000&errors=true",
    "gradient_shap": "n_samples=1000&errors=true",
    "occlusion": "window=2&stride=1",
    "kernel_shap": "n_samples=500&errors=true",
}


@pytest.mark.parametrize("method", CAPTUM)
@FURTHER
def test_methods_are_captums_on_the_checkpoint(
    server: LiveServer, checkpoint: DigitsNet, method: str
) -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    expected = CAPTUM[method](checkpoint, tensor(4), 9)[0].float()
    assert expected.abs().max() > 0.01
    for format in FORMATS:
        query = f"method={method}&target=9&{QUERIES.get(method, '')}"
        told = explain(server, format, 4, query)
        assert told["method"] == method
        apart = torch.tensor(told["attributions"]) - expected.detach()
        if "errors" not in told:
            assert float(apart.abs().max()) < 1e-5
        elif method == "kernel_shap":
            # captum's draws are alone and of pixels that cannot matter: several times as far off.
            assert float(apart.norm()) < 10 * float(torch.tensor(told["errors"]).norm())
            assert not torch.tensor(told["attributions"])[tensor(4)[0] == 0].any()
        else:
            # Of two means with the same standard error, the difference has √2 times that.
            ratio = float(apart.norm() / torch.tensor(told["errors"]).norm())
            assert 0.5 < ratio / 2**0.5 < 2


@FURTHER
def test_a_layer_is_explained_as_captum_explains_it(
    server: LiveServer, checkpoint: DigitsNet
) -> None:
    query = "method=layer_integrated_gradients&n_steps=20&target=3&layer=features.0"
    told = explain(server, "onnx", 3, query)
    layer = checkpoint.get_submodule("features.0")
    expected = LayerIntegratedGradients(checkpoint, layer).attribute(
        tensor(3), target=3, n_steps=20, method="riemann_middle"
    )
    assert told["layer"] == "features.0"
    torch.testing.assert_close(
        torch.tensor(told["attributions"]), expected[0].detach(), rtol=0, atol=1e-5
    )
    drawn = server.client.put(f"/explanations/onnx?{query}&format=png", content=scan(3))
    assert drawn.headers["content-type"] == "image/png"


def test_the_likeliest_targets_are_explained_together(server: LiveServer) -> None:
    answer = server.client.put("/explanations/onnx?target=top-3", content=scan(8)).json()
    predicted = list(server.predict("onnx", scan(8)).json())[:3]
    assert [each["label"] for each in answer["explanations"]] == predicted
    for each in answer["explanations"]:
        alone = explain(server, "onnx", 8, f"target={each['target']}")
        assert each["n_steps"] == alone["n_steps"]
        torch.testing.assert_close(
            torch.tensor(each["attributions"]),
            torch.tensor(alone["attributions"]),
            rtol=0,
            atol=1e-5,
        )


def test_a_probability_is_explained_where_it_is_asked_for(server: LiveServer) -> None:
    told = explain(server, "onnx", 8, "output=probability&target=8&baseline=noise&seed=2")
    assert told["f_input"] == pytest.approx(told["probability"], abs=1e-6)
    assert 0 <= told["f_baseline"] <= 1
    again = explain(server, "onnx", 8, "output=probability&target=8&baseline=noise&seed=2")
    assert again == told
    assert explain(server, "onnx", 8, "target=8&baseline=noise&seed=3")["baseline"] == "noise"


def test_options_may_come_in_the_body(server: LiveServer) -> None:
    expected = explain(server, "onnx", 7, "target=1&n_steps=5&aggregate=sum")
    assert expected["shape"] == [8, 8]
    image = tensor(7)[0].tolist()
    options = {"target": 1, "n_steps": 5}
    as_json = server.client.post(
        "/explanations/onnx?aggregate=sum", json={"data": image, "explain": options}
    )
    as_form = server.client.post(
        "/explanations/onnx?aggregate=sum",
        files={"data": ("7.png", scan(7), "image/png"), "explain": (None, json.dumps(options))},
    )
    for answer in (as_json, as_form):
        assert answer.status_code == 200, answer.text
        torch.testing.assert_close(
            torch.tensor(answer.json()["attributions"]), torch.tensor(expected["attributions"])
        )


def test_an_answer_names_its_archive(server: LiveServer, digits_store: Path) -> None:
    with zipfile.ZipFile(digits_store / "onnx.mar") as archive:
        manifest = archive.read("MAR-INF/MANIFEST.json")
    told = explain(server, "onnx", 7)
    assert told["archive_digest"] == hashlib.sha256(manifest).hexdigest()


@FURTHER
def test_quality_is_measured_where_it_is_asked_for(server: LiveServer) -> None:
    told = explain(server, "onnx", 7, "quality=true&n_steps=10")
    assert told["quality"]["infidelity"] > 0
    assert 0 < told["quality"]["sensitivity"] < 1


def test_a_smaller_tolerance_takes_more_steps_until_it_is_met(server: LiveServer) -> None:
    rough = explain(server, "onnx", 8, "tolerance=1")
    fine = explain(server, "onnx", 8, "tolerance=0.0001")
    assert rough["n_steps"] == 30
    assert fine["n_steps"] > rough["n_steps"]
    assert fine["error"] < rough["error"]


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


@each_format
@pytest.mark.parametrize(
    ("query", "accept"),
    [("format=png", "*/*"), ("", "image/png"), ("", "text/html;q=0.5, image/png;q=0.9, */*;q=0.1")],
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
            f"/explanations/onnx?{query}", content=scan(7), headers={"Accept": accept}
        )
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["target"] == 7


@pytest.mark.nightly
@FURTHER
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
    assert "-o FILE.png draws it" in shown.stdout

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

    page = modelyard("explain", "onnx", file, where, "-o", tmp_path / "page.html")
    assert page.returncode == 0, page.stderr
    assert "Why “7”?" in (tmp_path / "page.html").read_text()

    two = modelyard("explain", "onnx", file, where, "--target=top-2", "--quality")
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("infidelity") == two.stdout.count("sensitivity") == 2

    nowhere = modelyard("explain", "onnx", file, where, "-o", tmp_path / "no" / "h.png")
    assert nowhere.returncode == 1
    assert "cannot write" in nowhere.stderr


@pytest.mark.nightly
def test_the_gallery_is_drawn_anew(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, DIGITS / "gallery.py", tmp_path / "gallery"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(DIGITS.parents[1])},
    )
    assert ran.returncode == 0, ran.stderr
    of_scans = {name for name, method in METHODS.items() if method.stand_in is None}
    assert {file.stem for file in (tmp_path / "gallery").iterdir()} >= of_scans


EXACT: dict[str, tuple[list[float], list[float]]] = {
    "linear": ([1, 2, 4], [2, -6, 2]),
    "squares": ([1, -2, 3], [1, 4, 9]),
    "product": ([3, 4, 0], [6, 6, 0]),
    "cubic": ([3, 4, 0], [24, 12, 0]),
    "exponential": ([1, 5, 5], [1.718281828459045, 0, 0]),
    "sigmoid": ([10, 0, 0], [0.4999546021, 0, 0]),
    "flat": ([2, 0, 0], [1, 0, 0]),
    "relu": ([3, 1, 0], [1.5, -0.5, 0]),
    "relu otherwise": ([3, 1, 0], [1.5, -0.5, 0]),
    "symmetric": ([1, 1, 0], [0.4820137900, 0.4820137900, 0]),
    "sum of two": ([3, 4, 0], [30, 18, 0]),
    "scaled": ([3, 4, 0], [48, 24, 0]),
}
"""Output → input and its exact integral from zero, by hand."""


class Exact(torch.nn.Module):
    """One output for each entry of `EXACT`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3) to (N, 12), float64."""
        a, b, c = x.unbind(1)
        columns = [
            2 * a - 3 * b + c / 2,
            (x**2).sum(1),
            a * b,
            a**2 * b,
            a.exp(),
            a.sigmoid(),
            1 - (1 - a).relu(),
            (a.relu() - 1 - b.relu()).relu(),
            ((a - 1).relu() - b.relu()).relu(),
            (a + b).tanh(),
            a * b + a**2 * b,
            2 * a**2 * b,
        ]
        return torch.stack(columns, 1)


@pytest.mark.nightly
def test_exact_integrals_hold_over_http(server: LiveServer, tmp_path: Path) -> None:
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(
        Exact(), (torch.rand(5, 3, dtype=torch.float64),), dynamic_shapes=batch
    )
    program._example_inputs = None
    torch.export.save(program, tmp_path / "exact.pt2")
    labels = tmp_path / "index_to_name.json"
    labels.write_text(json.dumps(dict(enumerate(EXACT))))
    write_archive(
        "exact",
        version="1.0",
        artifact=tmp_path / "exact.pt2",
        handler="base_handler",
        output_dir=server.store,
        extra_files=[labels],
    )
    server.register_all("exact", initial_workers=1)
    for name, (x, expected) in EXACT.items():
        options = {"target": name, "tolerance": 1e-9, "max_steps": 7290}
        answer = server.client.post("/explanations/exact", json={"data": x, "explain": options})
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert told["attributions"] == pytest.approx(expected, abs=1e-6), name
        assert told["sum_attributions"] == pytest.approx(sum(expected), abs=1e-6), name


def test_the_client_gives_explanations_and_outputs_as_arrays(server: LiveServer) -> None:
    scan = DIGITS / "scans" / "7.png"
    with Client(server.about["inference"]) as client:
        first, second = client.explain("onnx", scan, target="top-2", n_steps=STEPS, errors=True)
        image = np.asarray(Image.open(scan).convert("L"), np.float32)[None, None] / 255
        logits = client.infer("onnx", {"image": image})["logits"]
        assert max(client.predict("onnx", scan).items(), key=lambda each: each[1])[0] == "7"
    assert (first.label, second.label != "7") == ("7", True)
    assert isinstance(first.attributions, np.ndarray) and isinstance(first.errors, np.ndarray)
    assert first.attributions.shape == first.errors.shape == (1, 8, 8)
    total = first.fields["sum_attributions"]
    assert first.attributions.sum() == pytest.approx(total, rel=1e-4)
    assert logits[0, 7] == logits.max() == pytest.approx(first.fields["f_served"], rel=1e-4)
