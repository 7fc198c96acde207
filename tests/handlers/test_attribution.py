import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from captum.attr import IntegratedGradients
from PIL import Image
from torch import Tensor, nn

from modelyard.handlers.errors import NoGradients
from modelyard.handlers.explain.attribute.attribution import (
    AttributionRequest,
    ForwardFunction,
    Model,
    evaluate,
    is_met,
    norms_of,
    ranges_of,
    sums_of,
)
from modelyard.handlers.explain.attribute.path import integrated_gradients
from modelyard.handlers.models.backends import open_artifact
from tests.shared import DIGITS

Function = Callable[[Tensor], Tensor]

ENDS = 2
"""Each time that a row gets points, both ends of its path are asked, too."""


class CountingModel:
    """Pass calls on and note how many rows each had."""

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        self.model = model
        self.rows: list[int] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        self.rows.append(len(inputs))
        return self.model(inputs)


def ask(
    model: Model, inputs: Tensor, baselines: Tensor, targets: list[int], chunk_rows: int = 8
) -> AttributionRequest:
    """Ask about rows (N, *S) of one input, one target each; baselines (N or 1, *S)."""
    with torch.no_grad():
        ends, starts = (
            evaluate(model, (each,), chunk_rows).double().expand(len(inputs), -1)
            for each in (inputs, baselines)
        )
    places = torch.tensor(targets)
    rows = torch.arange(len(inputs))
    return AttributionRequest(
        ForwardFunction(model, places),
        (inputs,),
        tuple((each[None],) for each in baselines.expand_as(inputs)),
        ends[rows, places],
        starts[rows, places],
        chunk_rows,
    )


def deltas(request: AttributionRequest, attributions: tuple[Tensor, ...]) -> Tensor:
    return sums_of(attributions) - (request.f_input - request.f_baseline)


def attribute(f: Function, x: list[float], baseline: list[float] | None = None) -> list[float]:
    """Attribute a function of float64 rows (N, S) → (N,) at one point."""
    inputs = torch.tensor([x], dtype=torch.float64)
    start = torch.zeros_like(inputs) if baseline is None else torch.tensor([baseline]).to(inputs)
    request = ask(f, inputs, start, [0], chunk_rows=1000)
    found = integrated_gradients(request, n_steps=6000).attributions
    assert abs(float(deltas(request, found))) < 1e-6
    shares: list[float] = found[0][0].tolist()
    return shares


def scan(digit: int) -> Tensor:
    with Image.open(DIGITS / "scans" / f"{digit}.png") as image:
        return torch.tensor(list(image.tobytes())).view(1, 8, 8) / 255


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
    request = ask(conv_net, inputs, baselines, [4, 0, 2], chunk_rows=5)
    ours = integrated_gradients(request, n_steps=n_steps)
    theirs, delta = IntegratedGradients(conv_net).attribute(
        inputs,
        baselines,
        target=torch.tensor([4, 0, 2]),
        n_steps=n_steps,
        method="riemann_middle",
        return_convergence_delta=True,
    )
    assert torch.allclose(ours.attributions[0], theirs, rtol=0, atol=1e-6)
    found = deltas(request, ours.attributions)
    assert torch.allclose(found.float(), delta, rtol=0, atol=1e-5)
    assert ours.n_steps.tolist() == [n_steps] * 3


@pytest.mark.parametrize(
    ("name", "format"), [("digits.pt2", "pt2"), ("digits.pt", "torchscript")], ids=["pt2", "jit"]
)
def test_artifact_gives_the_attributions_that_captum_gives_of_the_checkpoint(
    digits_net: nn.Module, digits_folder: Path, name: str, format: str
) -> None:
    torch.manual_seed(0)
    inputs = torch.rand(3, 1, 8, 8)
    artifact = open_artifact(digits_folder / name, format)
    request = ask(artifact, inputs, torch.zeros(1, 1, 8, 8), [7, 0, 3])
    ours = integrated_gradients(request, n_steps=30)
    theirs = IntegratedGradients(digits_net).attribute(
        inputs, target=torch.tensor([7, 0, 3]), n_steps=30, method="riemann_middle"
    )
    assert theirs.abs().max() > 0.1
    assert torch.allclose(ours.attributions[0], theirs.float(), rtol=0, atol=1e-5)


def test_chunks_do_not_change_the_result(conv_net: nn.Module) -> None:
    inputs = torch.rand(3, 2, 6, 6).double()
    conv_net.double()
    results = [
        integrated_gradients(ask(conv_net, inputs, inputs[:1] * 0, [1, 1, 2], size), n_steps=10)
        for size in (1, 7, 64)
    ]
    (first,) = results[0].attributions
    for result in results[1:]:
        assert torch.allclose(result.attributions[0], first, rtol=0, atol=1e-12)


def test_no_pass_has_more_rows_than_a_chunk(conv_net: nn.Module) -> None:
    model = CountingModel(conv_net)
    inputs = torch.rand(5, 2, 6, 6)
    integrated_gradients(ask(model, inputs, inputs[:1] * 0, [0] * 5, chunk_rows=4))
    assert max(model.rows) == 4


def test_tripled_steps_reuse_every_earlier_point() -> None:
    model = CountingModel(lambda x: x[:, :1] ** 3)
    inputs = torch.ones(1, 1, dtype=torch.float64)
    request = ask(model, inputs, inputs * 0, [0])
    model.rows.clear()
    result = integrated_gradients(request, tolerance=1e-12)
    assert result.n_steps.tolist() == [270]
    assert sum(model.rows) == 270 + 3 * ENDS
    at_once = integrated_gradients(request, n_steps=270)
    assert torch.allclose(result.attributions[0], at_once.attributions[0], rtol=0, atol=1e-14)


def test_row_that_met_the_tolerance_costs_no_further_passes() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)

    def linear_in_one_and_steep_in_the_other(x: Tensor) -> Tensor:
        return (x @ weights) ** torch.tensor([1, 12])

    model = CountingModel(linear_in_one_and_steep_in_the_other)
    inputs = torch.ones(2, 2, dtype=torch.float64)
    request = ask(model, inputs, inputs[:1] * 0, [0, 1])
    model.rows.clear()
    result = integrated_gradients(request, tolerance=0.001)
    assert result.n_steps.tolist() == [30, 270]
    assert is_met(request, result, 0.001).tolist() == [True, True]
    assert sum(model.rows) == 30 + 270 + 4 * ENDS


@pytest.mark.parametrize(("most", "steps"), [(89, 30), (90, 90), (269, 90)])
def test_steps_end_at_the_most_that_are_allowed(most: int, steps: int) -> None:
    inputs = torch.ones(1, 1, dtype=torch.float64)
    request = ask(lambda x: x**3, inputs, inputs * 0, [0])
    result = integrated_gradients(request, tolerance=1e-9, max_steps=most)
    assert result.n_steps.tolist() == [steps]
    assert is_met(request, result, 1e-9).tolist() == [False]
    assert abs(float(deltas(request, result.attributions))) > 1e-9


def test_values_of_which_nothing_is_known_range_from_their_smallest_to_their_largest() -> None:
    values = torch.tensor([[[1.0, 4.0], [-2.0, 0.0]], [[3.0, 3.0], [3.0, 3.0]]])
    assert ranges_of(values).flatten(1).tolist() == [[6.0], [0.0]]
    assert ranges_of(values[:, 0, 0]).tolist() == [0.0, 0.0]  # single numbers do not vary


def test_fewer_steps_than_the_first_may_be_the_most() -> None:
    inputs = torch.ones(1, 1, dtype=torch.float64)
    result = integrated_gradients(ask(lambda x: x**3, inputs, inputs * 0, [0]), max_steps=10)
    assert result.n_steps.tolist() == [10]


@pytest.mark.parametrize("n_steps", [3, 4, 5, 10, 30, 50])
def test_error_of_a_smooth_function_is_that_of_its_slopes_at_the_ends(n_steps: int) -> None:
    """By hand: midpoints make x³ (1 − 1 / 4n²) of x³, and what is missing is to be stated."""
    inputs = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    request = ask(lambda x: (x**3).sum(1, keepdim=True), inputs, inputs * 0, [0])
    result = integrated_gradients(request, n_steps=n_steps)
    assert result.errors is not None
    ratios = result.errors[0] / (inputs**3 / (4 * n_steps**2))
    assert ratios.min() > 1
    assert ratios.max() < (6 if n_steps < 8 else 1.6)  # of a few points less is known


@pytest.mark.parametrize("n_steps", [1, 2])
def test_error_of_too_few_points_is_not_known(n_steps: int) -> None:
    inputs = torch.ones(1, 2)
    request = ask(lambda x: x, inputs, inputs * 0, [0])
    assert integrated_gradients(request, n_steps=n_steps).error is None


def steep_contrast(x: Tensor) -> Tensor:
    """Errors of the two large values cancel in the sum."""
    return steep(x[:, 0]) - steep(x[:, 1]) + 0.2 * x[:, 2]


def steep(x: Tensor) -> Tensor:
    return torch.sigmoid(80 * (x - 0.52))


def waves(x: Tensor) -> Tensor:
    """Ten points see nothing but crests."""
    return (20 * torch.pi * x[:, 0]).sin() - (20 * torch.pi * x[:, 1]).sin() + x[:, 2]


@pytest.mark.parametrize(
    ("f", "truth"),
    [
        pytest.param(steep_contrast, [1.0, -1.0, 0.1], id="steep contrast"),
        pytest.param(waves, [0.0, 0.0, 0.5], id="waves"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"tolerance": 1e-6}, {"n_steps": 10}, {"n_steps": 30}])
def test_errors_that_cancel_in_the_sum_are_seen(
    f: Function, truth: list[float], settings: dict[str, float]
) -> None:
    inputs = torch.tensor([[1.0, 1.0, 0.5]], dtype=torch.float64)
    request = ask(f, inputs, inputs * 0, [0])
    result = integrated_gradients(request, **settings)  # type: ignore[arg-type]
    assert result.error is not None
    assert abs(float(deltas(request, result.attributions))) < 1e-9  # it says nothing
    exact = torch.tensor(truth, dtype=torch.float64)
    off = float((result.attributions[0] - exact).norm() / exact.norm())
    if settings.get("n_steps") != 10 or f is steep_contrast:
        assert off <= 1.3 * float(result.error) + 1e-9
    if not bool(is_met(request, result, settings.get("tolerance", 0.05))):
        assert "n_steps" in settings or result.n_steps.tolist() == [270]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("waves", [1, 7, 40])
def test_rounding_alone_is_within_every_tolerance(dtype: torch.dtype, waves: int) -> None:
    """The function is 0 at both ends, and so are the attributions."""
    inputs = torch.ones(1, 2, dtype=dtype)
    request = ask(
        lambda x: (2 * torch.pi * waves * x).sin().sum(1, keepdim=True), inputs, inputs * 0, [0]
    )
    result = integrated_gradients(request, tolerance=1e-6)
    assert float(result.attributions[0].abs().max()) < 1e-3
    assert result.error is not None
    assert result.error.tolist() == [0.0]
    assert is_met(request, result, 1e-6).tolist() == [True]


def test_errors_bound_the_truth_on_scans(digits_net: nn.Module) -> None:
    """150 of them: `python -m benchmarks.explain --truth`."""
    scans = torch.stack([scan(digit) for digit in range(10)]).double()
    net = copy.deepcopy(digits_net).double().requires_grad_(False)
    request = ask(net, scans, scans[:1] * 0, [*range(1, 10), 0], 250)
    truth = integrated_gradients(request, n_steps=900).attributions
    for tolerance in (0.01, 0.001):
        found = integrated_gradients(request, tolerance=tolerance)
        off = norms_of((found.attributions[0] - truth[0],)) / norms_of(truth)
        assert found.error is not None
        assert int((off <= 1.3 * found.error).sum()) >= 9
        assert bool((off > 0.1 * found.error).any())  # nor is it idly large


def test_attributions_of_several_inputs_add_up_together() -> None:
    first, second = torch.tensor([[3.0, 1.0]]).double(), torch.tensor([[4.0]]).double()
    score = ForwardFunction(lambda a, b: a[:, :1] * b + a[:, 1:], torch.tensor([0]))
    zeros = (torch.zeros(1, 2).double(), torch.zeros(1, 1).double())
    request = AttributionRequest(
        score, (first, second), (zeros,), torch.tensor([13.0]), torch.tensor([0.0])
    )
    found = integrated_gradients(request, n_steps=1).attributions
    assert [each.tolist() for each in found] == [[[6.0, 1.0]], [[6.0]]]


def test_fixed_inputs_stay_as_they_are() -> None:
    ids, mask = torch.tensor([[1.0, 2.0]] * 2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    score = ForwardFunction(lambda x, m: (x * m).sum(1), torch.tensor([0, 0]), fixed=(mask,))
    request = AttributionRequest(
        score, (ids,), ((ids[:1] * 0,),) * 2, torch.tensor([1.0, 3.0]), torch.zeros(2)
    )
    (found,) = integrated_gradients(request, n_steps=3).attributions
    assert torch.allclose(found, ids * mask)


def test_a_function_of_the_outputs_takes_their_place() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    score = ForwardFunction(lambda x: x, torch.tensor([1]), function=Tensor.sigmoid)
    assert float(score((logits,), torch.tensor([0]))) == float(logits.sigmoid()[0, 1])


def test_work_ends_between_two_chunks_when_it_is_told_to(conv_net: nn.Module) -> None:
    inputs = torch.rand(1, 2, 6, 6)
    asked: list[int] = []

    def end_at_the_third() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise TimeoutError

    request = ask(conv_net, inputs, inputs * 0, [0], chunk_rows=2)
    with pytest.raises(TimeoutError):
        integrated_gradients(replace(request, between_chunks=end_at_the_third), n_steps=10)
    assert len(asked) == 3


def test_runs_inside_inference_mode(conv_net: nn.Module) -> None:
    with torch.inference_mode():
        inputs = torch.rand(1, 2, 6, 6)
        result = integrated_gradients(ask(conv_net, inputs, inputs * 0, [0]), n_steps=30)
    assert result.attributions[0].abs().sum() > 0


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda x: x.detach(), id="detached"),
        pytest.param(lambda x: x.argmax(1, keepdim=True).float(), id="argmax"),
        pytest.param(lambda x: torch.ones(len(x), 2, requires_grad=True), id="input unused"),
    ],
)
def test_output_without_gradient_is_refused(model: Function) -> None:
    with pytest.raises(NoGradients, match="no gradient flows"):
        integrated_gradients(ask(model, torch.ones(1, 2), torch.zeros(1, 2), [0]))


def test_onnx_artifact_is_refused(digits_folder: Path) -> None:
    artifact = open_artifact(digits_folder / "digits.onnx", "onnx")
    image = torch.rand(1, 1, 8, 8)
    with pytest.raises(NoGradients, match="--explain-with"):
        integrated_gradients(ask(artifact, image, image * 0, [0]))


def test_output_that_holds_no_real_numbers_is_refused() -> None:
    with pytest.raises(NoGradients, match=r"the output is torch\.int64"):
        evaluate(lambda x: x.long(), (torch.ones(1, 2),), 8)


def test_target_is_a_place_in_the_flattened_output() -> None:
    inputs = torch.arange(12.0).view(1, 3, 4)
    score = ForwardFunction(lambda x: 2 * x, torch.tensor([7]))
    assert float(score((inputs,), torch.tensor([0]))) == 14.0


def test_a_small_difference_of_large_outputs_is_known_as_rounding() -> None:
    """f is 1e6 and changes by 1e-3: float32 has steps of 0.06 there, whatever the gradients say."""
    inputs = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    request = ask(lambda x: 1e-3 * x.sum(1, keepdim=True) + 1e6, inputs, torch.zeros(1, 8), [0] * 4)
    found = integrated_gradients(request)
    assert found.rounding is not None
    assert (deltas(request, found.attributions).abs() <= found.rounding).all()
