from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribution import (
    Attribution,
    AttributionRequest,
    ForwardFunction,
    sums_of,
)
from modelyard.handlers.explain.methods import METHODS
from modelyard.handlers.explain.quality import measure

WEIGHTS = torch.tensor([2.0, -3.0, 0.5], dtype=torch.float64)
X, BASELINE = [1.0, 2.0, 4.0], [0.5, 0.0, 1.0]


def ask(
    f: Callable[[Tensor], Tensor], x: list[float], baselines: list[list[float]]
) -> AttributionRequest:
    """Ask about a function of float64 rows (N, S) → (N,) at one point, with a set of baselines."""
    inputs, starts = torch.tensor([x]).double(), torch.tensor(baselines).double()
    return AttributionRequest(
        ForwardFunction(f, torch.tensor([0])),
        (inputs,),
        ((starts,),),
        f(inputs),
        f(starts).mean(0, keepdim=True),
        chunk_rows=8,
    )


def linear(x: Tensor) -> Tensor:
    return x @ WEIGHTS


def run(request: AttributionRequest, method: str, **settings: Any) -> Attribution:
    if METHODS[method].needs_windows:
        settings.setdefault("shapes", ((1,),))
    return METHODS[method].run(request, **settings)


SHARES = [1.0, -6.0, 1.5]
"""Of a linear function: weight × (input − baseline)."""


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("integrated_gradients", {"n_steps": 1}, SHARES),
        ("saliency", {}, [2.0, 3.0, 0.5]),
        ("input_x_gradient", {}, [2.0, -6.0, 2.0]),
        ("smoothgrad", {"n_samples": 20}, [2.0, -3.0, 0.5]),
        ("gradient_shap", {"n_samples": 20}, SHARES),
        ("occlusion", {}, SHARES),
        ("feature_ablation", {}, SHARES),
        ("kernel_shap", {"n_samples": 100}, SHARES),
    ],
)
def test_linear_function_is_explained_exactly(
    method: str, settings: Mapping[str, Any], expected: list[float]
) -> None:
    request = ask(linear, X, [BASELINE])
    found = run(request, method, **settings)
    assert found.attributions[0][0].tolist() == pytest.approx(expected, abs=1e-6)
    if expected is SHARES:
        total = request.f_input - request.f_baseline
        assert float(sums_of(found.attributions)) == pytest.approx(float(total), abs=1e-6)


def test_shapley_values_of_a_product_are_equal() -> None:
    request = ask(lambda x: x[:, 0] * x[:, 1], [3.0, 4.0], [[0.0, 0.0]])
    found = run(request, "kernel_shap", n_samples=5000).attributions[0]
    assert found[0].tolist() == pytest.approx([6.0, 6.0], abs=0.2)  # its draws are random
    assert float(found.sum()) == pytest.approx(12.0, abs=1e-3)
    alone = run(request, "feature_ablation")
    assert alone.attributions[0][0].tolist() == [12.0, 12.0]


def test_expected_gradients_draw_from_the_whole_set() -> None:
    request = ask(linear, X, [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    found = run(request, "gradient_shap", n_samples=2000).attributions[0][0]
    assert found[1:].tolist() == pytest.approx([-6.0, 2.0])
    mean_of_the_set = 1.0
    assert float(found[0]) == pytest.approx(2.0 * (1.0 - mean_of_the_set), abs=0.15)


@pytest.mark.parametrize("method", ["smoothgrad", "gradient_shap", "kernel_shap"])
def test_seed_decides_over_random_methods_and_disturbs_no_other_numbers(method: str) -> None:
    request = ask(lambda x: (x**3).prod(1), X, [BASELINE])
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    one, same, other = (
        run(request, method, seed=seed, n_samples=30).attributions[0] for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(2), expected)


def test_window_is_replaced_as_a_whole() -> None:
    request = ask(lambda x: x.prod(1), [2.0, 3.0, 5.0, 7.0], [[0.0] * 4])
    found = run(request, "feature_ablation", shapes=((2,),))
    assert found.attributions[0].tolist() == [[210.0] * 4]
    assert found.n_steps.tolist() == [2]


def test_overlapping_windows_share_by_their_mean() -> None:
    request = ask(linear, X, [[0.0, 0.0, 0.0]])
    found = run(request, "occlusion", shapes=((2,),), stride=1)
    # Windows (0, 1) and (1, 2) take 2 − 6 = −4 and −6 + 2 = −4 away.
    assert found.attributions[0].tolist() == [[-4.0, -4.0, -4.0]]
    assert found.n_steps.tolist() == [2]


def test_pass_is_no_larger_than_a_chunk() -> None:
    rows: list[int] = []

    def counting(x: Tensor) -> Tensor:
        rows.append(len(x))
        return (x**2).sum(1)

    request = ask(counting, [1.0] * 30, [[0.0] * 30])
    for method in METHODS:
        rows.clear()
        run(request, method)
        assert max(rows) <= 8, method


def test_stride_beyond_the_window_is_refused() -> None:
    with pytest.raises(BadInput, match="stride is 3; expected at most the window, 2"):
        run(ask(linear, X, [BASELINE]), "occlusion", shapes=((2,),), stride=3)


def test_too_many_evaluations_are_refused() -> None:
    request = ask(lambda x: x.sum(1), [0.0] * 30_000, [[0.0] * 30_000])
    with pytest.raises(BadInput, match="would be asked 30000 times; the limit is 20000"):
        run(request, "feature_ablation")


def test_fewer_samples_than_features_are_refused() -> None:
    with pytest.raises(BadInput, match="n_samples is 4; expected at least 5 for 3 features"):
        run(ask(linear, X, [BASELINE]), "kernel_shap", n_samples=4)


def test_explanation_of_a_linear_function_is_faithful() -> None:
    request = ask(linear, X, [BASELINE])
    found = run(request, "integrated_gradients", n_steps=1).attributions
    good = measure(request, found, METHODS["integrated_gradients"], {"n_steps": 1}, 0)
    assert good.infidelity == pytest.approx(0.0, abs=1e-9)
    assert 0 < good.sensitivity < 0.1
    bad = measure(request, (found[0] * 0,), METHODS["integrated_gradients"], {"n_steps": 1}, 0)
    assert bad.infidelity > 0.01
    again = measure(request, found, METHODS["integrated_gradients"], {"n_steps": 1}, 0)
    assert again == good


@pytest.mark.parametrize("method", METHODS)
def test_quality_of_every_method_is_measured(method: str) -> None:
    request = ask(lambda x: (x**2).sum(1), X, [BASELINE])
    settings: dict[str, Any] = {"shapes": ((1,),)} if METHODS[method].needs_windows else {}
    found = run(request, method, **settings).attributions
    quality = measure(request, found, METHODS[method], settings, 0)
    assert 0 < quality.infidelity < 100
    assert 0 <= quality.sensitivity < 1


def test_sensitivity_is_by_how_much_the_explanation_moves() -> None:
    request = ask(lambda x: (x**2).sum(1), [1.0, 1.0], [[0.0, 0.0]])
    # The gradient 2x moves by at most 2 · 0.02 (the range of equal values counts as 1) of 2.
    quality = measure(request, (request.inputs[0] * 2,), METHODS["saliency"], {}, 0)
    assert 0.01 < quality.sensitivity <= 0.02
