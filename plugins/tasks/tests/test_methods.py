"""Methods of drawn points and sets, and the quality of every method."""

import itertools
import math
import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from modelyard_client.options import Method
from torch import Tensor

from modelyard.archiver.untrusted.names import builtin_handlers
from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import Attribution, sums_of
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.plugins.tasks.methods.quality import measure
from tests.handlers.test_methods import BASELINE, WEIGHTS, WITHOUT_LAYER, X, ask, linear, run
from tests.test_docs import rows


def test_shapley_values_of_a_product_are_equal() -> None:
    request = ask(lambda x: x[:, 0] * x[:, 1], [3.0, 4.0], [[0.0, 0.0]])
    found = run(request, "kernel_shap", n_samples=5000)
    assert found.attributions[0][0].tolist() == pytest.approx([6.0, 6.0], abs=1e-12)
    assert found.n_steps.tolist() == [2]  # each of the two alone: there are no others
    assert float(error_of(found)) == 0.0
    alone = run(request, "feature_ablation")
    assert alone.attributions[0][0].tolist() == [12.0, 12.0]


TEN = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.2, 1.5, -0.7, 2.0, 0.3], dtype=torch.float64)


def of_ten(x: Tensor) -> Tensor:
    """Sums, products of up to four and a kink, so that sets of every size matter."""
    return (x @ TEN).tanh() + x[:, 0] * x[:, 3] * x[:, 6] * x[:, 8] + (x[:, 1] + x[:, 4] - 1).relu()


@pytest.fixture(scope="module")
def shapley_of_ten() -> Tensor:
    """By definition: the mean over who came before, of what each one adds."""
    sets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=10))).double()
    worth = of_ten(sets)
    place = 2 ** torch.arange(9, -1, -1)
    values = []
    for player in range(10):
        without = sets[sets[:, player] == 0]
        at = (without.long() * place).sum(1)
        size = without.sum(1).long().tolist()
        weight = torch.tensor([1 / (10 * math.comb(9, s)) for s in size], dtype=torch.float64)
        values.append((weight * (worth[at + place[player]] - worth[at])).sum())
    return torch.stack(values)


def test_all_sets_of_ten_features_are_exact(shapley_of_ten: Tensor) -> None:
    request = ask(of_ten, [1.0] * 10, [[0.0] * 10])
    for settings in ({"n_samples": 1024}, {}):
        found = run(request, "kernel_shap", **settings)
        assert torch.allclose(found.attributions[0][0], shapley_of_ten, rtol=0, atol=1e-12)
        assert found.n_steps.tolist() == [1022]
        assert float(error_of(found)) == 0.0


def drawn_set(seed: int, features: int, count: int = 20) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    starts: list[list[float]] = torch.rand(count, features, generator=generator).tolist()
    return starts


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_of_a_set_of_baselines_the_worth_is_the_mean(seed: int) -> None:
    """The mean of what each of them gives alone; how far that is off depends on how many."""
    starts = drawn_set(seed, 10)
    together = run(ask(of_ten, [1.0] * 10, starts), "kernel_shap")
    alone = [
        run(ask(of_ten, [1.0] * 10, [each]), "kernel_shap").attributions[0][0] for each in starts
    ]
    each = torch.stack(alone)
    assert torch.allclose(together.attributions[0][0], each.mean(0), rtol=0, atol=1e-12)
    assert float(error_of(together)) == 0.0
    assert together.n_steps.tolist() == [1022 * 20]
    off = (each.std(0) / 20**0.5).norm() / each.mean(0).norm()
    assert together.set_error is not None
    assert float(together.set_error) == pytest.approx(float(off))


def test_a_feature_that_is_as_in_one_of_the_baselines_plays() -> None:
    found = run(ask(linear, X, [X, [0.0, X[1], 0.0]]), "kernel_shap").attributions[0][0]
    assert found.tolist() == pytest.approx([1.0, 0.0, 1.0])


@pytest.mark.parametrize("n_samples", [200, pytest.param(500, marks=pytest.mark.nightly)])
def test_fewer_sets_of_several_baselines_are_within_their_standard_error(n_samples: int) -> None:
    starts = drawn_set(0, 10)
    truth = run(ask(of_ten, [1.0] * 10, starts), "kernel_shap").attributions[0][0]
    found = [
        run(ask(of_ten, [1.0] * 10, starts), "kernel_shap", n_samples=n_samples, seed=seed)
        for seed in range(12)
    ]
    off = torch.stack([each.attributions[0][0] - truth for each in found]).abs()
    errors = torch.stack([each.errors[0][0] for each in found if each.errors])
    assert 0.87 < float((off < 2 * errors).double().mean()) < 0.995
    with pytest.raises(BadInput, match="each with 20 rows of the baseline; expected 100000 points"):
        run(ask(lambda x: x.prod(1), X * 6, drawn_set(0, 18)), "kernel_shap", n_samples=6000)


@pytest.mark.parametrize("n_samples", [60, 200, pytest.param(700, marks=pytest.mark.nightly)])
def test_fewer_sets_are_within_their_standard_error(shapley_of_ten: Tensor, n_samples: int) -> None:
    request = ask(of_ten, [1.0] * 10, [[0.0] * 10])
    apart, errors = [], []
    for seed in range(40):
        found = run(request, "kernel_shap", n_samples=n_samples, seed=seed)
        assert float(sums_of(found.attributions)) == pytest.approx(float(shapley_of_ten.sum()))
        assert found.errors is not None
        apart.append(found.attributions[0][0] - shapley_of_ten)
        errors.append(found.errors[0][0])
    # Of a normal distribution 68 % lie within one and 95 % within two.
    share = (torch.stack(apart).abs() / torch.stack(errors)).flatten()
    assert 0.55 < float((share < 1).double().mean()) < 0.9
    assert float((share < 2).double().mean()) > 0.87
    # Nor are they idly large: the mean square of the errors is that of the differences.
    ratio = torch.stack(errors).square().mean() / torch.stack(apart).square().mean()
    assert 0.6 < float(ratio) < 2


def test_features_as_in_the_baseline_get_exactly_zero() -> None:
    asked: list[int] = []

    def counting(x: Tensor) -> Tensor:
        asked.append(len(x))
        return (2 * x[:, 0] + x[:, 1]).exp() + x[:, 2] * x[:, 3] + 0 * x.sum(1)

    x = [1.0, 0.6, 0.0, 5.0, *[0.7] * 60]
    request = ask(counting, x, [[0.0, 0.0, 0.0, 5.0, *[0.7] * 60]])
    asked.clear()
    found = run(request, "kernel_shap")
    truth = [math.exp(2.6) - 1 - (math.exp(2) - math.exp(0.6)), math.exp(2) - math.exp(0.6)]
    shapley = [(math.exp(2.6) - 1 + truth[1]) / 2, (math.exp(2.6) - 1 - truth[1]) / 2]
    assert found.attributions[0][0].tolist() == pytest.approx([*shapley, *[0.0] * 62])
    assert torch.count_nonzero(found.attributions[0]) == 2
    assert sum(asked) == 4  # both ends, and each alone


@pytest.mark.parametrize(("same", "expected"), [(3, [0.0] * 3), (2, [0.0, 0.0, 3.5])])
def test_less_than_two_features_take_part(same: int, expected: list[float]) -> None:
    request = ask(lambda x: x @ (WEIGHTS + 3), [1.0] * 3, [[1.0] * same + [0.0] * (3 - same)])
    found = run(request, "kernel_shap")
    assert found.attributions[0][0].tolist() == pytest.approx(expected)
    assert float(error_of(found)) == 0.0


def test_value_of_a_window_is_shared_among_its_values() -> None:
    request = ask(lambda x: x[:, :3].prod(1) + x[:, 3], [2.0, 3.0, 5.0, 7.0, 1.0], [[0.0] * 5])
    found = run(request, "kernel_shap", shapes=((2,),))
    assert found.attributions[0][0].tolist() == pytest.approx([7.5, 7.5, 11.0, 11.0, 0.0])


def test_sets_are_drawn_until_the_tolerance_is_met(shapley_of_ten: Tensor) -> None:
    request = ask(lambda x: of_ten(x[:, :10]) + of_ten(x[:, 10:]), [1.0] * 20, [[0.0] * 20])
    few = run(request, "kernel_shap", tolerance=0.2)
    more = run(request, "kernel_shap", tolerance=0.03, max_samples=10_000)
    most = run(request, "kernel_shap", tolerance=1e-6, max_samples=600)
    assert float(error_of(few)) <= 0.2
    assert float(error_of(more)) <= 0.03
    assert int(few.n_steps) < int(more.n_steps) < 10_000
    assert (int(most.n_steps), float(error_of(most)) > 0.03) == (600, True)
    truth = torch.cat([shapley_of_ten] * 2)
    assert float((more.attributions[0][0] - truth).norm() / truth.norm()) < 0.06


@pytest.mark.parametrize("method", ["smoothgrad", "gradient_shap"])
def test_points_are_drawn_until_the_tolerance_is_met(method: str) -> None:
    request = ask(lambda x: (x**3).sum(1), X, [BASELINE])
    rough = run(request, method, tolerance=0.5)
    fine = run(request, method, tolerance=0.02, max_samples=20_000)
    most = run(request, method, tolerance=0.001)
    assert int(rough.n_steps) == 50
    assert 50 < int(fine.n_steps) < 20_000
    assert float(error_of(fine)) <= 0.02
    assert int(most.n_steps) == 200
    one = run(request, method, n_samples=1)
    assert one.errors is None


@pytest.mark.parametrize("method", ["smoothgrad", "gradient_shap"])
def test_standard_errors_of_random_points_are_true(method: str) -> None:
    request = ask(lambda x: (x**3).prod(1), [1.0, 1.2, 0.9], [[0.0] * 3])
    truth = run(request, method, n_samples=8000).attributions[0][0]
    apart, errors = [], []
    for seed in range(1, 31):
        found = run(request, method, n_samples=40, seed=seed)
        assert found.errors is not None
        apart.append(found.attributions[0][0] - truth)
        errors.append(found.errors[0][0])
    ratio = torch.stack(errors).square().mean(0) / torch.stack(apart).square().mean(0)
    assert bool((ratio > 0.4).all())
    assert bool((ratio < 2.5).all())


@pytest.mark.parametrize("method", ["smoothgrad", "gradient_shap", "kernel_shap"])
def test_draws_do_not_depend_on_how_many_share_a_pass(method: str) -> None:
    request = ask(lambda x: (x**3).sum(1).exp() / 1e3, [0.9] * 12, [[0.1] * 12])
    one, other = (
        run(replace(request, chunk_rows=rows), method, n_samples=60).attributions[0]
        for rows in (7, 64)
    )
    assert torch.allclose(one, other, rtol=1e-12, atol=0)


def error_of(found: Attribution) -> Tensor:
    assert found.error is not None
    return found.error


def test_expected_gradients_draw_from_the_whole_set() -> None:
    request = ask(linear, X, [[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    found = run(request, "gradient_shap", n_samples=2000).attributions[0][0]
    assert found[1:].tolist() == pytest.approx([-6.0, 2.0])
    mean_of_the_set = 1.0
    assert float(found[0]) == pytest.approx(2.0 * (1.0 - mean_of_the_set), abs=0.15)


@pytest.mark.parametrize("method", ["smoothgrad", "gradient_shap", "kernel_shap"])
def test_seed_decides_over_random_methods_and_disturbs_no_other_numbers(method: str) -> None:
    x = [*X, 1.5, 0.7, 1.1]
    request = ask(lambda x: (x**3).prod(1), x, [[0.5, 0.0, 1.0, 0.2, 0.1, 0.3]])
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    one, same, other = (
        run(request, method, seed=seed, n_samples=30).attributions[0] for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.rand(2), expected)


def test_fewer_samples_than_features_are_refused() -> None:
    with pytest.raises(BadInput, match="n_samples is 4; expected at least 6 for 3 features"):
        run(ask(linear, X, [BASELINE]), "kernel_shap", n_samples=4)


def test_explanation_of_a_linear_function_is_faithful() -> None:
    request = ask(linear, X, [BASELINE])
    found = run(request, "integrated_gradients", n_steps=1).attributions
    good = measure(request, found, METHODS["integrated_gradients"], {"n_steps": 1}, 0)
    assert good.infidelity == pytest.approx(0.0, abs=1e-9)
    assert 0 < good.sensitivity < 0.1
    bad = measure(request, (found[0] * 0,), METHODS["integrated_gradients"], {"n_steps": 1}, 0)
    assert bad.infidelity is not None
    assert bad.infidelity > 0.01
    again = measure(request, found, METHODS["integrated_gradients"], {"n_steps": 1}, 0)
    assert again == good


@pytest.mark.parametrize("method", WITHOUT_LAYER)
def test_quality_of_every_method_is_measured(method: str) -> None:
    request = ask(lambda x: (x**2).sum(1), X, [BASELINE])
    settings: dict[str, Any] = {"shapes": ((1,),)} if METHODS[method].needs_windows else {}
    found = run(request, method, **settings).attributions
    quality = measure(request, found, METHODS[method], settings, 0)
    if method == "saliency":
        assert quality.infidelity is None, "it has no sign"
    else:
        assert quality.infidelity is not None
        assert 0 < quality.infidelity < 100
    assert 0 <= quality.sensitivity < 1


def test_sensitivity_is_by_how_much_the_explanation_moves() -> None:
    request = ask(lambda x: (x**2).sum(1), [1.0, 1.0], [[0.0, 0.0]])
    # The gradient 2x moves by at most 2 · 0.02 (the range of equal values counts as 1) of 2.
    quality = measure(request, (request.inputs[0] * 2,), METHODS["saliency"], {}, 0)
    assert 0.01 < quality.sensitivity <= 0.02


def test_noise_is_a_share_of_what_each_value_varies_by() -> None:
    def f(x: Tensor) -> Tensor:
        return x[:, 0] ** 2 * x[:, 1] + x[:, 2] ** 3

    found = {}
    for d in (0.0, 30.0):
        request = ask(f, [0.5, 0.5, 0.0, d], [[0.0] * 4])
        request = replace(request, known_scales=(torch.ones(1, 4).double(),))
        for method in ("smoothgrad", "gradient_shap"):
            at = run(request, method, n_samples=2000, noise=0.1).attributions[0][0]
            found[method, d] = at.tolist()
        quality = measure(request, (request.inputs[0] * 0,), METHODS["saliency"], {}, 0)
        found["quality", d] = [quality.sensitivity]
    for name in ("smoothgrad", "gradient_shap", "quality"):
        assert found[name, 0.0] == pytest.approx(found[name, 30.0])
    # E[2ab], E[a²] and 3 E[c²] of a, b and c with a deviation of 0.1.
    assert found["smoothgrad", 30.0] == pytest.approx([0.5, 0.26, 0.03, 0], abs=0.01)
    wild = run(ask(f, [0.5, 0.5, 0.0, 30.0], [[0.0] * 4]), "smoothgrad", n_samples=2000, noise=0.1)
    assert float(wild.attributions[0][0, 2]) > 20


def test_measures_of_an_explanation_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.delitem(sys.modules, "captum.metrics", raising=False)
    message = r"quality=true: captum is not installed; pip install 'modelyard\[explain\]'"
    with pytest.raises(BadInput, match=message):
        measure(None, (), None, {}, 0)  # type: ignore[arg-type]


def test_every_method_and_handler_is_in_the_pages_and_in_the_client() -> None:
    assert {row[0] for row in rows("explain.md", "## Methods")} == set(METHODS)
    bodies = rows("calling.md", "## Bodies for every built-in handler", marks=True)
    assert {row[0].strip("`") for row in bodies} == set(builtin_handlers())
    assert {*get_args(Method)} == set(METHODS)
