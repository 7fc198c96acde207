import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.attribution import (
    Attribution,
    AttributionRequest,
    ForwardFunction,
    sums_of,
)
from modelyard.handlers.explain.attribute.methods import METHODS

WITHOUT_LAYER = [
    name
    for name, method in METHODS.items()
    if not method.looks_at_layer and method.stand_in is None
]
"""Those that ask any function."""
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
        ("deep_lift", {}, SHARES),
        ("saliency", {}, [2.0, 3.0, 0.5]),
        ("input_x_gradient", {}, [2.0, -6.0, 2.0]),
        ("smoothgrad", {"n_samples": 20}, [2.0, -3.0, 0.5]),
        ("gradient_shap", {"n_samples": 20}, SHARES),
        ("occlusion", {}, SHARES),
        ("feature_ablation", {}, SHARES),
        ("kernel_shap", {"n_samples": 100}, SHARES),
    ],
)
def test_linear_function_is_explained_exactly_and_without_captum(
    method: str,
    settings: Mapping[str, Any],
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("captum", "captum.attr"):  # whose import would hold up a first explanation
        monkeypatch.setitem(sys.modules, name, None)
    request = ask(linear, X, [BASELINE])
    found = run(request, method, **settings)
    assert found.attributions[0][0].tolist() == pytest.approx(expected, abs=1e-6)
    if expected is SHARES:
        total = request.f_input - request.f_baseline
        assert float(sums_of(found.attributions)) == pytest.approx(float(total), abs=1e-6)


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
    for method in WITHOUT_LAYER:
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


def test_falls_are_captums_where_windows_reach_over_the_end() -> None:
    from captum.attr import FeatureAblation, Occlusion

    torch.manual_seed(1)
    picture, row = torch.rand(2, 3, 5, 4).double(), torch.rand(2, 3).double()
    starts = torch.rand(2, 3, 5, 4).double(), torch.rand(2, 3).double()
    weight = torch.rand(63, 1).double()

    def f(picture: Tensor, row: Tensor) -> Tensor:
        flat = torch.cat([picture.flatten(1), row], 1)
        return (flat @ weight).sin()[:, 0] * flat[:, 7].exp()

    request = AttributionRequest(
        ForwardFunction(f, torch.tensor([0, 0])),
        (picture, row),
        tuple((starts[0][at : at + 1], starts[1][at : at + 1]) for at in range(2)),
        f(picture, row),
        f(*starts),
        chunk_rows=7,
    )
    shapes, strides = ((3, 2, 3), (2,)), ((3, 1, 2), (1,))
    for stride, steps in ((None, 4 * 2 + 2), (2, 3 * 2 + 2)):
        found = run(request, "occlusion", shapes=shapes, stride=stride)
        expected = Occlusion(f).attribute(
            (picture, row),
            shapes,
            strides if stride is None else ((3, 2, 2), (2,)),
            baselines=starts,
        )
        assert found.n_steps.tolist() == [steps, steps]
        for one, other in zip(found.attributions, expected, strict=True):
            assert torch.allclose(one, other.double(), rtol=0, atol=1e-5)  # captum's are float32
    blocks = torch.tensor([0, 0, 1, 1, 2]).view(1, 5, 1) * 2 + torch.tensor([0, 0, 0, 1])
    masks = blocks.expand(3, 5, 4)[None], torch.tensor([[6, 6, 7]])
    found = run(request, "feature_ablation", shapes=shapes)
    expected = FeatureAblation(f).attribute((picture, row), starts, feature_mask=masks)
    for one, other in zip(found.attributions, expected, strict=True):
        assert torch.allclose(one, other.double(), rtol=0, atol=1e-5)
    # Each window counts once in the sum, however many values it has.
    falls = [0.0, 0.0]
    for each, mask in zip(found.attributions, masks, strict=True):
        for feature in range(int(mask.min()), int(mask.max()) + 1):
            holds = mask[0].expand(each.shape[1:]) == feature
            falls = [sum_ + float(row[holds][0]) for sum_, row in zip(falls, each, strict=True)]
    assert found.total is not None
    assert found.total.tolist() == pytest.approx(falls)


def test_total_of_overlapping_windows_is_that_of_a_linear_function() -> None:
    request = ask(lambda x: x.sum(1), [1.0] * 8, [[0.0] * 8])
    found = run(request, "occlusion", shapes=((4,),), stride=2)
    assert found.attributions[0].tolist() == [[4.0] * 8]
    assert found.total is not None
    assert found.total.tolist() == pytest.approx([8.0])


@pytest.mark.parametrize("method", ["occlusion", "feature_ablation"])
def test_window_as_in_the_baseline_is_not_asked_about(method: str) -> None:
    asked: list[int] = []

    def counting(x: Tensor) -> Tensor:
        asked.append(len(x))
        return x.exp().sum(1)

    request = ask(counting, [1.0, 0.5, 0.5, 2.0], [[0.0, 0.5, 0.5, 2.0]])
    asked.clear()
    found = run(request, method)
    assert found.attributions[0][0].tolist() == pytest.approx([math.e - 1, 0, 0, 0])
    assert (sum(asked), found.n_steps.tolist()) == (2, [1])  # the input, and the one
