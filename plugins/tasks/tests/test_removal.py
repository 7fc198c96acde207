"""What the output loses without the features that an explanation ranks first."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from modelyard.handlers.explain.explanation import Explanation, explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.plugins.tasks.methods.features import Check
from tests.handlers.test_explanation import SPEC, artifact, subject

COUNT = 40
WEIGHTS = torch.linspace(-1, 3, COUNT, dtype=torch.float64)
X = torch.linspace(0.5, 2, COUNT, dtype=torch.float64)[None]


def linear(x: Tensor) -> Tensor:
    return x @ WEIGHTS


def explain(query: dict[str, str], x: Tensor = X, f: Any = linear) -> Explanation:
    spec = SPEC.__class__("x", "float64", (SPEC.shape[0], x.shape[1]))
    ((found,),) = explain_batch(subject(artifact(f, spec)), (x,), [parse_options(query)])
    return found


def test_removing_the_top_tenth_is_compared_with_a_random_tenth() -> None:
    found = explain({"check": "true", "n_steps": "3"})
    shares = (X[0] * WEIGHTS).sort(descending=True).values
    answer = found.as_json()["check"]
    assert (answer["removed"], answer["features"], answer["draws"]) == (4, COUNT, 16)
    assert answer["top"] == pytest.approx(float(shares[:4].sum()))
    # The mean of a random four is four times the mean of all.
    mean = 4 * float(shares.mean())
    assert answer["random"] == pytest.approx(mean, abs=3 * answer["random_spread"] / 4)
    assert answer["summary"].startswith(
        f"removing the top 10 % (4 of 40 features) lowers the output by {answer['top']:.4g}, random"
    )
    assert found.warnings == ()
    assert explain({"check": "true", "n_steps": "3"}).measures == found.measures
    assert explain({"check": "true", "n_steps": "3", "seed": "1"}).measures != found.measures


@pytest.mark.parametrize(
    ("top", "random", "said"),
    [
        (3.2, 0.4, "lowers the output by 3.2, random 10 % by 0.4 ± 0.1"),
        (3.2, -0.4, "lowers the output by 3.2, random 10 % raises the output by 0.4 ± 0.1"),
        (-0.2, -0.4, "raises the output by 0.2, random 10 % by 0.4 ± 0.1"),
    ],
)
def test_a_check_says_in_words_where_the_output_went(top: float, random: float, said: str) -> None:
    check = Check(4, 40, top, random, 0.1)
    assert check.summary == f"removing the top 10 % (4 of 40 features) {said}"


def test_only_what_differs_from_the_baseline_is_removed() -> None:
    x = X.clone()
    x[0, 10:] = 0
    check = explain({"check": "true", "n_steps": "3"}, x).measures["check"]
    assert (check["removed"], check["features"]) == (1, 10)
    nothing = explain({"check": "true", "n_steps": "3"}, 0 * X).measures["check"]
    assert (nothing["removed"], nothing["top"], nothing["random"]) == (0, 0.0, 0.0)


def test_an_explanation_that_ranks_idly_is_warned_of() -> None:
    """The largest slopes are where nothing happens: far up a sigmoid's tail they are least."""
    x = torch.full((1, COUNT), 2.0, dtype=torch.float64)
    x[0, :20] = 0.1

    def f(x: Tensor) -> Tensor:
        return torch.cat(((8 * x[:, :20]).sin() / 8, (4 * x[:, 20:]).tanh()), 1).sum(1)

    bad = explain({"check": "true", "method": "saliency"}, x, f)
    assert bad.measures["check"]["top"] < bad.measures["check"]["random"]
    (warning,) = bad.warnings
    assert warning.startswith("what this explanation ranks first matters no more")
    good = explain({"check": "true", "n_steps": "100"}, x, f)
    assert good.warnings == ()


def test_curves_of_a_linear_function_are_sums_of_its_shares() -> None:
    quality = explain({"quality": "true", "n_steps": "3"}).as_json()["quality"]
    shares = (X[0] * WEIGHTS).sort(descending=True).values
    sums = torch.cat((torch.zeros(1), shares.cumsum(0))).tolist()[::4]
    assert quality["shares"] == pytest.approx([step / 10 for step in range(11)])
    assert quality["insertion"]["outputs"] == pytest.approx(sums)
    deletion = [sums[-1] - each for each in sums]
    assert quality["deletion"]["outputs"] == pytest.approx(deletion)
    area = sum((a + b) / 20 for a, b in itertools.pairwise(deletion))
    assert quality["deletion"]["area"] == pytest.approx(area)
    assert quality["insertion"]["area"] > quality["deletion"]["area"]


@pytest.mark.parametrize("method", ["kernel_shap", "occlusion", "feature_ablation"])
def test_windows_of_a_method_are_what_is_removed(method: str) -> None:
    found = explain({"method": method, "window": "8", "check": "true"})
    check = found.measures["check"]
    assert (check["removed"], check["features"]) == (1, 5)
    shares = (X[0] * WEIGHTS).view(5, 8).sum(1)
    if method != "occlusion":  # whose windows overlap
        assert check["top"] == pytest.approx(float(shares.max()))
