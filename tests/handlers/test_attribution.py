from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from handlers.attribution import (
    ExplainOptions,
    integrated_gradients,
    parse_options,
)
from handlers.backends import open_artifact
from handlers.errors import BadInput, NoGradients

Function = Callable[[Tensor], Tensor]


class CountingModel:
    """Pass calls on and note how many rows each had."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model = model
        self.rows: list[int] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        self.rows.append(len(inputs))
        return self.model(inputs)


def attribute(f: Function, x: list[float], baseline: list[float] | None = None) -> list[float]:
    """Attribute a function of float64 rows (N, S) → (N,) at one point."""
    inputs = torch.tensor([x], dtype=torch.float64)
    start = torch.zeros_like(inputs) if baseline is None else torch.tensor([baseline]).to(inputs)
    result = integrated_gradients(
        f, inputs, start, torch.tensor([0]), n_steps=6000, chunk_rows=1000
    )
    shares: list[float] = result.attributions[0].tolist()
    assert abs(float(result.delta[0])) < 1e-6
    return shares


def relu_network(x: Tensor) -> Tensor:
    return (x[:, 0].relu() - 1 - x[:, 1].relu()).relu()


def same_function_as_another_network(x: Tensor) -> Tensor:
    return ((x[:, 0] - 1).relu() - x[:, 1].relu()).relu()


@pytest.mark.parametrize(
    ("f", "x", "expected"),
    [
        pytest.param(
            lambda x: x @ torch.tensor([2.0, -3.0, 0.5]).double(),
            [1.0, 2.0, 4.0],
            [2.0, -6.0, 2.0],
            id="linear",
        ),
        pytest.param(
            lambda x: (x**2).sum(1), [1.0, -2.0, 3.0], [1.0, 4.0, 9.0], id="sum of squares"
        ),
        pytest.param(lambda x: x[:, 0] * x[:, 1], [3.0, 4.0], [6.0, 6.0], id="product"),
        pytest.param(lambda x: x[:, 0] ** 2 * x[:, 1], [3.0, 4.0], [24.0, 12.0], id="cubic"),
        pytest.param(lambda x: x[:, 0].exp(), [1.0], [1.718281828459045], id="exponential"),
        pytest.param(lambda x: x[:, 0].sigmoid(), [10.0], [0.4999546021], id="saturated sigmoid"),
        pytest.param(
            lambda x: 1 - (1 - x[:, 0]).relu(), [2.0], [1.0], id="where the gradient is 0"
        ),
        pytest.param(relu_network, [3.0, 1.0], [1.5, -0.5], id="relu network"),
        pytest.param(
            same_function_as_another_network, [3.0, 1.0], [1.5, -0.5], id="the same otherwise"
        ),
        pytest.param(
            lambda x: (x[:, 0] + x[:, 1]).tanh(), [1.0, 1.0], [0.4820137900] * 2, id="symmetric"
        ),
    ],
)
def test_attributions_equal_the_exact_integral(
    f: Function, x: list[float], expected: list[float]
) -> None:
    assert attribute(f, x) == pytest.approx(expected, abs=1e-6)


def test_path_starts_at_the_baseline() -> None:
    assert attribute(lambda x: x[:, 0] ** 2, [3.0], [1.0]) == pytest.approx([8.0], abs=1e-6)


def test_input_equal_to_the_baseline_gets_exactly_zero() -> None:
    assert attribute(lambda x: (x**2).sum(1), [2.0, 3.0], [2.0, 3.0]) == [0.0, 0.0]


def test_unused_input_gets_exactly_zero() -> None:
    assert attribute(lambda x: x[:, 0].exp(), [1.0, 5.0])[1] == 0.0


def test_attributions_of_a_sum_are_the_sum_of_attributions() -> None:
    def f(x: Tensor) -> Tensor:
        return x[:, 0] * x[:, 1]

    def g(x: Tensor) -> Tensor:
        return x[:, 0].sin()

    x = [0.7, -1.3]
    both = attribute(lambda x: 2 * f(x) + g(x), x)
    assert both == pytest.approx(
        [2 * a + b for a, b in zip(attribute(f, x), attribute(g, x), strict=True)], abs=1e-12
    )


@pytest.fixture
def conv_net() -> nn.Module:
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)
    )
    return net.eval().requires_grad_(False)


@pytest.mark.parametrize("n_steps", [2, 7, 30])
def test_equals_captum_at_equal_steps(conv_net: nn.Module, n_steps: int) -> None:
    inputs, baselines = torch.rand(3, 2, 6, 6), torch.rand(1, 2, 6, 6)
    targets = torch.tensor([4, 0, 2])
    ours = integrated_gradients(conv_net, inputs, baselines, targets, n_steps=n_steps, chunk_rows=5)
    theirs, delta = IntegratedGradients(conv_net).attribute(
        inputs,
        baselines,
        target=targets,
        n_steps=n_steps,
        method="riemann_middle",
        return_convergence_delta=True,
    )
    assert torch.allclose(ours.attributions, theirs, rtol=0, atol=1e-6)
    assert torch.allclose(ours.delta.float(), delta, rtol=0, atol=1e-5)
    assert ours.n_steps.tolist() == [n_steps] * 3


@pytest.mark.parametrize(
    ("name", "format"), [("digits.pt2", "pt2"), ("digits.pt", "torchscript")], ids=["pt2", "jit"]
)
def test_artifact_gives_the_attributions_that_captum_gives_of_the_checkpoint(
    digits_net: nn.Module, digits_folder: Path, name: str, format: str
) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.rand(3, 1, 8, 8), torch.tensor([7, 0, 3])
    artifact = open_artifact(digits_folder / name, format)
    ours = integrated_gradients(artifact, inputs, torch.zeros(1, 1, 8, 8), targets, n_steps=30)
    theirs = IntegratedGradients(digits_net).attribute(
        inputs, target=targets, n_steps=30, method="riemann_middle"
    )
    assert theirs.abs().max() > 0.1
    assert torch.allclose(ours.attributions, theirs.float(), rtol=0, atol=1e-5)


def test_chunks_do_not_change_the_result(conv_net: nn.Module) -> None:
    inputs, targets = torch.rand(3, 2, 6, 6).double(), torch.tensor([1, 1, 2])
    conv_net.double()
    results = [
        integrated_gradients(conv_net, inputs, inputs[:1] * 0, targets, n_steps=10, chunk_rows=size)
        for size in (1, 7, 64)
    ]
    for result in results[1:]:
        assert torch.allclose(result.attributions, results[0].attributions, rtol=0, atol=1e-12)


def test_no_pass_has_more_rows_than_a_chunk(conv_net: nn.Module) -> None:
    model = CountingModel(conv_net)
    inputs = torch.rand(5, 2, 6, 6)
    integrated_gradients(model, inputs, inputs[:1] * 0, torch.zeros(5).long(), chunk_rows=4)
    assert max(model.rows) == 4


def test_tripled_steps_reuse_every_earlier_point() -> None:
    model = CountingModel(lambda x: x[:, :1] ** 3)
    inputs = torch.ones(1, 1, dtype=torch.float64)
    result = integrated_gradients(
        model, inputs, inputs * 0, torch.tensor([0]), tolerance=1e-12, chunk_rows=8
    )
    assert result.n_steps.tolist() == [270]
    input_and_baseline = 2
    assert sum(model.rows) == 270 + input_and_baseline
    at_once = integrated_gradients(model.model, inputs, inputs * 0, torch.tensor([0]), n_steps=270)
    assert torch.allclose(result.attributions, at_once.attributions, rtol=0, atol=1e-14)


def test_row_that_met_the_tolerance_costs_no_further_passes() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)

    def linear_in_one_and_steep_in_the_other(x: Tensor) -> Tensor:
        return (x @ weights) ** torch.tensor([1, 12])

    model = CountingModel(linear_in_one_and_steep_in_the_other)
    inputs = torch.ones(2, 2, dtype=torch.float64)
    result = integrated_gradients(
        model, inputs, inputs[:1] * 0, torch.tensor([0, 1]), tolerance=0.001
    )
    assert result.n_steps.tolist() == [10, 90]
    assert result.tolerance_met.tolist() == [True, True]
    inputs_and_shared_baseline = 3
    assert sum(model.rows) == 10 + 90 + inputs_and_shared_baseline


def test_tolerance_that_cannot_be_met_is_reported() -> None:
    inputs = torch.ones(1, 1, dtype=torch.float64)
    result = integrated_gradients(
        lambda x: x**3, inputs, inputs * 0, torch.tensor([0]), tolerance=1e-9, max_steps=90
    )
    assert result.n_steps.tolist() == [90]
    assert result.tolerance_met.tolist() == [False]
    assert abs(float(result.delta)) > 1e-9


def test_delta_is_the_sum_less_the_difference_of_outputs(conv_net: nn.Module) -> None:
    inputs = torch.rand(4, 2, 6, 6)
    targets = torch.tensor([0, 1, 2, 3])
    result = integrated_gradients(conv_net, inputs, inputs[:1] * 0, targets)
    sums = result.attributions.double().flatten(1).sum(1)
    expected = sums - (result.f_input - result.f_baseline)
    assert torch.allclose(result.delta, expected, rtol=0, atol=1e-12)
    outputs = conv_net(inputs).double().gather(1, targets[:, None])[:, 0]
    assert torch.allclose(result.f_input, outputs, rtol=0, atol=1e-6)


def test_runs_inside_inference_mode(conv_net: nn.Module) -> None:
    with torch.inference_mode():
        inputs = torch.rand(1, 2, 6, 6)
        result = integrated_gradients(
            conv_net, inputs, torch.zeros(1, 2, 6, 6), torch.tensor([0]), n_steps=30
        )
    assert result.attributions.abs().sum() > 0


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda x: x.detach(), id="detached"),
        pytest.param(lambda x: x.argmax(1, keepdim=True), id="argmax"),
        pytest.param(lambda x: torch.ones(len(x), 2, requires_grad=True), id="input unused"),
    ],
)
def test_output_without_gradient_is_refused(model: Function) -> None:
    with pytest.raises(NoGradients, match="no gradient flows"):
        integrated_gradients(model, torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([0]))


def test_onnx_artifact_is_refused(digits_folder: Path) -> None:
    artifact = open_artifact(digits_folder / "digits.onnx", "onnx")
    image = torch.rand(1, 1, 8, 8)
    with pytest.raises(NoGradients, match="--explain-with"):
        integrated_gradients(artifact, image, image * 0, torch.tensor([0]))


def test_integer_input_is_refused() -> None:
    ids = torch.ones(1, 2, dtype=torch.int64)
    with pytest.raises(NoGradients, match=r"real-valued inputs, this model takes torch\.int64"):
        integrated_gradients(lambda x: x, ids, ids, torch.tensor([0]))


def test_output_that_is_not_one_number_per_class_is_refused() -> None:
    with pytest.raises(NoGradients, match=r"shape \[1, 2, 2\]"):
        integrated_gradients(
            lambda x: x, torch.ones(1, 2, 2), torch.zeros(1, 2, 2), torch.tensor([0])
        )


def test_no_parameters_ask_for_the_defaults() -> None:
    assert parse_options({}) == ExplainOptions()


def test_every_parameter_is_read() -> None:
    query = {
        "method": "integrated_gradients",
        "target": "cat",
        "baseline": "white",
        "n_steps": "1000",
        "tolerance": "0.5",
        "format": "png",
    }
    assert parse_options(query) == ExplainOptions(
        "integrated_gradients", "cat", "white", 1000, 0.5, "png"
    )


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"steps": "3"}, 'unknown parameter "steps"; expected some of method, target'),
        ({"method": "magic"}, 'method is "magic"; expected one of integrated_gradients'),
        ({"baseline": "blur"}, 'baseline is "blur"; expected one of zero, black, white'),
        ({"n_steps": "0"}, 'n_steps is "0"; expected a whole number from 1 to 1000'),
        ({"n_steps": "1001"}, "from 1 to 1000"),
        ({"n_steps": "ten"}, "from 1 to 1000"),
        ({"n_steps": "٣"}, "from 1 to 1000"),
        ({"tolerance": "0"}, 'tolerance is "0"; expected a number above 0 and at most 1'),
        ({"tolerance": "1.01"}, "at most 1"),
        ({"tolerance": "nan"}, "at most 1"),
        ({"tolerance": "1%"}, "at most 1"),
        ({"format": "svg"}, 'format is "svg"; expected one of json, png'),
    ],
    ids=lambda value: "=".join(*value.items()) if isinstance(value, dict) else "",
)
def test_unusable_parameter_is_named(query: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_options(query)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("image/png", "png"),
        ("image/*", "png"),
        ("image/png, */*;q=0.8", "png"),
        ("IMAGE/PNG;q=0.9, application/json;q=0.5", "png"),
        ("image/png;q=0.5, application/json", "json"),
        ("*/*", "json"),
        ("text/html, image/apng, */*;q=0.8", "json"),
        ("application/*", "json"),
        ("image/png;q=0", "json"),
        ("image/png;q=high", "json"),
        ("", "json"),
    ],
)
def test_accept_header_chooses_the_format(accept: str, format: str) -> None:
    assert parse_options({}, accept).format == format


def test_format_parameter_decides_over_the_accept_header() -> None:
    assert parse_options({"format": "json"}, "image/png").format == "json"
