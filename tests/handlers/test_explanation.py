import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, Size, TensorSpec
from modelyard.base import explain_words
from modelyard.handlers import BadInput, NoGradients, TwinDiffers
from modelyard.handlers.explain.attribute.attribution import (
    MOST_ROWS,
    ForwardFunction,
    free_bytes,
    gradient_rows,
)
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.explanation import Explanation, explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.models.backends import Artifact, Output
from modelyard.handlers.proof.agree import Rule
from tests.shared import FURTHER

SPEC = TensorSpec("x", "float64", (Dim("batch"), 3))


class Function(nn.Module):
    """A function of rows as a module."""

    def __init__(self, f: Callable[..., Output]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *inputs: Tensor) -> Output:
        """What the function gives."""
        return self.f(*inputs)


def artifact(f: Callable[..., Output], *specs: TensorSpec, differentiable: bool = True) -> Artifact:
    module = Function(f)
    inputs = specs or (SPEC,)
    return Artifact("pt2", module, inputs, torch.device("cpu"), module if differentiable else None)


def subject(model: Artifact, **others: Any) -> ExplainedModel:
    def zeros(name: str, inputs: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
        return tuple(each * 0 if each.is_floating_point() else each for each in inputs)

    given = ExplainedModel(
        model, model, None, "class {}".format, zeros, lambda sizes, side: (side or 1,)
    )
    return replace(given, **others)


def explain(model: ExplainedModel, x: Tensor, *queries: dict[str, str]) -> list[list[Explanation]]:
    return explain_batch(model, (x,), [parse_options(query) for query in queries])


X = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]], dtype=torch.float64)


def grid(x: Tensor) -> Tensor:
    """(N, 3) to (N, 2, 3): row 1 is twice row 0."""
    return torch.stack([x, 2 * x], 1)


def test_a_model_that_gives_probabilities_has_no_logit_to_explain() -> None:
    of_probabilities = subject(artifact(lambda x: x.softmax(1)), is_of_probabilities=True)
    ((found,),) = explain(of_probabilities, X[:1], {})
    assert found.as_json()["output"] == "probability"
    ((plain,),) = explain(subject(artifact(lambda x: x)), X[:1], {})
    assert plain.as_json()["output"] == "logit"


def test_place_in_an_output_of_more_dims_is_a_target() -> None:
    ((one,), (likeliest,)) = explain(
        subject(artifact(grid)), X, {"target": "1,2"}, {"target": "predicted"}
    )
    assert (one.target, one.label, one.f_input) == ((1, 2), "1,2", 6.0)
    assert one.attributions[0].tolist() == [0.0, 0.0, 6.0]
    assert (likeliest.target, likeliest.f_input) == ((1, 0), 6.0)
    assert one.probability is None
    assert one.as_json()["target"] == [1, 2]


@pytest.mark.parametrize("target", ["2,0", "0,3", "1", "0,0,0", "class 1", "0,-1"])
def test_place_that_the_output_does_not_have_is_refused(target: str) -> None:
    with pytest.raises(
        BadInput, match="expected predicted, top-N, sum:CLASS, or a place up to 1,2"
    ):
        explain(subject(artifact(grid)), X[:1], {"target": target})


def test_likeliest_targets_come_in_their_order() -> None:
    first, second = explain(
        subject(artifact(lambda x: x**2)), X, {"target": "top-2"}, {"target": "class 1"}
    )
    assert [each.target for each in first] == [2, 1]
    assert [each.label for each in first] == ["class 2", "class 1"]
    assert [each.target for each in second] == [1]
    assert first[1].attributions[0].tolist() == pytest.approx([0.0, 4.0, 0.0])


@pytest.mark.parametrize(
    ("function", "shape"), [(grid, "2, 3"), (lambda x: x[:, :1], "1")], ids=["grid", "one number"]
)
def test_probability_of_outputs_that_are_not_classes_is_refused(function: Any, shape: str) -> None:
    message = rf"expected logit: this model gives \[N, {shape}\] numbers"
    with pytest.raises(BadInput, match=message):
        explain(subject(artifact(function)), X[:1], {"output": "probability"})


@pytest.mark.parametrize("target", ["top-0", "top-4"])
def test_more_targets_than_there_are_are_refused(target: str) -> None:
    with pytest.raises(BadInput, match=f'"{target}"; expected top-1 to top-3'):
        explain(subject(artifact(lambda x: x)), X[:1], {"target": target})


@pytest.mark.parametrize("method", ["smoothgrad", "gradient_shap", "kernel_shap"])
def test_answer_of_a_random_method_does_not_depend_on_its_neighbours(method: str) -> None:
    model = subject(artifact(lambda x: torch.stack([x.prod(1), (x**2).sum(1)], 1)))
    query = {"method": method, "n_samples": "20", "seed": "4", "target": "top-2"}
    together = explain(model, X, query, query)
    for row, found in enumerate(together):
        (alone,) = explain(model, X[row : row + 1], query)
        for one, other in zip(found, alone, strict=True):
            assert torch.equal(one.attributions[0], other.attributions[0])


def test_what_is_explained_may_be_in_any_place_among_the_inputs() -> None:
    specs = (TensorSpec("mask", "int64", SPEC.shape), TensorSpec("x"))
    model = artifact(lambda mask, x: (x * mask).sum(1), *specs)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    for method in ("integrated_gradients", "feature_ablation", "occlusion"):
        options = parse_options({"method": method})
        ((one,), (other,)) = explain_batch(subject(model), (mask, X), [options] * 2)
        assert one.names == ("x",)
        assert one.attributions[0].tolist() == pytest.approx([1.0, 0.0, 3.0])
        assert other.attributions[0].tolist() == pytest.approx([0.0, 1.0, 2.0])


def test_the_first_output_of_real_numbers_is_explained() -> None:
    """As of scikit-learn's classifiers, whose labels come first."""
    named = {"output_names": ("label", "scores", "more"), "output_name": "scores"}
    model = subject(artifact(lambda x: (x.argmax(1), x**2, x)), **named)
    ((found,),) = explain(model, X[:1], {"target": "1", "n_steps": "3"})
    assert (found.output_name, found.f_input) == ("scores", 4.0)
    whole = subject(artifact(lambda x: (x.argmax(1), x.long())))
    with pytest.raises(NoGradients, match=r"gives 0:int64\[1\], 1:int64\[1,3\]; only real-valued"):
        explain(whole, X[:1], {})


def test_model_without_real_inputs_needs_a_method_without_gradients() -> None:
    model = subject(artifact(lambda x: x.double(), TensorSpec("ids", "int64", SPEC.shape)))
    with pytest.raises(NoGradients, match="real-valued inputs, this model takes ids:int64"):
        explain(model, X.long(), {}, {})


def test_without_a_twin_methods_without_gradients_are_named() -> None:
    model = subject(artifact(lambda x: 2 * x, differentiable=False), twin=None)
    with pytest.raises(NoGradients, match="choose one of feature_ablation, occlusion"):
        explain(model, X[:1], {})
    ((found,),) = explain(model, X[:1], {"method": "occlusion", "target": "2"})
    assert found.attributions[0].tolist() == [0.0, 0.0, 6.0]


SLIGHTLY_OFF = artifact(lambda x: x + 1e-3)


def test_input_for_which_the_twin_answers_otherwise_is_not_explained() -> None:
    model = subject(
        artifact(lambda x: x, differentiable=False), twin=SLIGHTLY_OFF, agreement=Rule(2e-4)
    )
    with pytest.raises(TwinDiffers) as error:
        explain(model, X[:1], {})
    assert "the artifact gives 1 at output 0 and its twin 1.001" in str(error.value)
    assert "expected a scaled difference of 0.0002, seen 0.0012" in str(error.value)
    assert explain(replace(model, agreement=Rule(2e-3)), X[:1], {})
    assert explain(model, X[:1], {"method": "occlusion"})


def test_quantised_artifact_may_be_further_off_its_twin() -> None:
    model = subject(
        artifact(lambda x: x, differentiable=False),
        twin=SLIGHTLY_OFF,
        agreement=Rule(2e-4, is_quantized=True),
    )
    assert explain(model, X[:1], {})
    other = replace(model, twin=artifact(lambda x: -x))
    with pytest.raises(TwinDiffers, match=r"an error of at most 0.15, seen "):
        explain(other, X[:1], {})


def test_requests_that_share_no_pass_are_explained_beside_their_own_prediction() -> None:
    model = subject(artifact(lambda x: x**2))
    queries = {"method": "occlusion", "target": "0"}, {"target": "0"}
    for (each,), row in zip(explain(model, X, *queries), X, strict=True):
        assert each.f_served == each.f_input == float(row[0] ** 2)


@FURTHER
def test_requests_that_share_passes_differ_in_what_they_are_told() -> None:
    model = subject(artifact(lambda x: x**2))
    (plain,), (measured,) = explain(model, X, {"target": "0"}, {"target": "1", "quality": "true"})
    assert not plain.measures
    assert measured.as_json()["quality"].keys() == {
        *("infidelity", "sensitivity", "shares", "deletion", "insertion"),
    }


def test_baseline_of_another_shape_is_refused() -> None:
    model = subject(artifact(lambda x: x), baselines=lambda name, x, seed: (x[0][:, :2],))
    with pytest.raises(BadInput, match=r"baseline file:a has the shape \[2\]; expected .* \[3\]"):
        explain(model, X[:1], {"baseline": "file:a"})


@FURTHER
def test_layer_must_be_named() -> None:
    with pytest.raises(BadInput, match="layer is not given"):
        explain(subject(artifact(lambda x: x)), X[:1], {"method": "layer_integrated_gradients"})


@FURTHER
def test_layers_of_a_module_are_found_by_name() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double().requires_grad_(False)
    model = subject(Artifact("eager", net, (SPEC,), torch.device("cpu"), net))
    query = {"method": "layer_integrated_gradients", "layer": "2"}
    ((found,),) = explain(model, X[:1], {**query, "target": "1"})
    expected = (net(X[:1]) - net(X[:1] * 0))[0]
    assert found.attributions[0].tolist() == pytest.approx([0.0, float(expected[1])])
    with pytest.raises(BadInput, match='layer is "3"; expected one of 0, 1, 2'):
        explain(model, X[:1], {**query, "layer": "3"})


@FURTHER
def test_layers_of_a_model_without_any_are_not_listed() -> None:
    net = nn.Tanh()
    model = subject(Artifact("eager", net, (SPEC,), torch.device("cpu"), net))
    query = {"method": "layer_integrated_gradients", "layer": "nope"}
    with pytest.raises(BadInput, match='layer is "nope", and the model has none'):
        explain(model, X[:1], query)


@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion"])
def test_numbers_that_overflow_are_the_requests_fault(method: str) -> None:
    model = subject(artifact(lambda x: x * 1e10))
    with pytest.raises(BadInput, match=r"f_input = inf.*; an explanation needs finite outputs"):
        explain(model, X[:1] * 1e300, {"method": method})


@FURTHER
def test_no_pass_is_larger_than_what_the_artifact_takes() -> None:
    rows: list[int] = []

    def counting(x: Tensor) -> Tensor:
        rows.append(len(x))
        return x**2

    spec = replace(SPEC, shape=(Dim("batch", 1, 5), 3))
    model = subject(artifact(counting, spec))
    for method in ("integrated_gradients", "saliency", "kernel_shap", "smoothgrad"):
        explain(model, X, {"method": method}, {"method": method, "target": "top-3"})
    assert max(rows) == 5
    rows.clear()
    explain(model, X[:1], {"internal_batch_size": "2"})
    assert max(rows) == 2


def test_larger_activations_make_smaller_passes() -> None:
    def chunk(width: int) -> int:
        spec = TensorSpec("x", "float32", (Dim("batch"), width))
        model = artifact(lambda x: (x**2).exp().sum(1), spec)
        request = torch.zeros(1, width)
        return gradient_rows(model, ForwardFunction(model, torch.zeros(2).long()), (request,))

    assert free_bytes(torch.device("cpu")) > 1 << 20
    small, large = chunk(10), chunk(30_000_000)
    assert small == MOST_ROWS
    assert large < 16


@pytest.mark.parametrize(
    ("most", "tried"),
    [(1, [1]), (Dim("batch", 1, 1), [1]), (Dim("batch", 1, 2), [1, 2]), (Dim("batch"), [1, 2])],
    ids=str,
)
def test_what_a_row_takes_is_tried_with_no_more_than_the_artifact_takes(
    most: Size, tried: list[int]
) -> None:
    rows: list[int] = []

    def counting(x: Tensor) -> Tensor:
        rows.append(len(x))
        return (x**2).exp().sum(1)

    model = artifact(counting, TensorSpec("x", "float32", (most, 3)))
    forward = ForwardFunction(model, torch.zeros(2).long())
    assert gradient_rows(model, forward, (torch.zeros(1, 3),)) == MOST_ROWS
    assert rows == tried


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            {"n_steps": "30"},  # 8 / 4n²
            "integrated gradients, 30 points · error 0.038 % · sum off by 0.028 %",
        ),
        ({"method": "saliency"}, "saliency"),
        ({"n_steps": "2"}, "integrated gradients, 2 points · sum off by 6.2 %"),
        ({"target": "1"}, "integrated gradients, 30 points · exact"),
    ],
)
@FURTHER
def test_an_explanation_says_how_it_was_made_and_how_far_off_it_is(
    query: dict[str, str], expected: str
) -> None:
    model = artifact(lambda x: torch.stack([(x**3).sum(1), 0 * x[:, 0]], 1))
    ((found,),) = explain(subject(model), X[:1], query)
    assert explain_words.made(found.facts()) == expected


NOTHING_KNOWN = ["deep_lift", "saliency", "input_x_gradient", "occlusion", "feature_ablation"]


@pytest.mark.parametrize(
    "method",
    [name for name, each in METHODS.items() if not each.looks_at_layer and each.stand_in is None],
)
def test_a_method_says_of_itself_what_it_promises(method: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double().requires_grad_(False)
    model = subject(Artifact("eager", net, (SPEC,), torch.device("cpu"), net))
    layer = {"layer": "1"} if method.startswith("layer") else {}
    errors = {} if method in NOTHING_KNOWN else {"errors": "true"}
    ((found,),) = explain(model, X[:1], {"method": method, **layer, **errors})
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    is_null = {name for name in ("error", "tolerance_met") if told[name] is None}
    assert is_null == ({"error", "tolerance_met"} if method in NOTHING_KNOWN else set())
    assert (told["convergence_delta"] is None) == (not METHODS[method].adds_up)
    assert (told["relative_delta"] is None) == (not METHODS[method].adds_up)
    if errors:
        assert torch.tensor(told["errors"]).shape == torch.tensor(told["attributions"]).shape
        assert told["tolerance_met"] == (told["error"] <= 0.05)
    assert ("errors" in told) == bool(errors)


@FURTHER
def test_errors_of_a_method_that_knows_none_are_refused() -> None:
    with pytest.raises(BadInput, match="errors does not apply to saliency"):
        parse_options({"method": "saliency", "errors": "true"})


def test_where_nothing_is_to_be_explained_nothing_is_unmet() -> None:
    model = subject(artifact(lambda x: (2 * torch.pi * x).sin()))
    ((found,),) = explain(model, X[:1], {"target": "0", "tolerance": "0.00001"})
    assert abs(found.f_input - found.f_baseline) < 1e-15
    assert (found.error, found.relative_delta, found.tolerance_met) == (0.0, None, True)


def test_error_that_cannot_be_a_share_is_null_and_unmet() -> None:
    """All gradients are +1 or -1, and their mean is 0; that of a third of them is not."""
    model = subject(artifact(lambda x: (x[:, :1] - 0.5).abs()))
    x = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    ((found,),) = explain(model, x, {"n_steps": "4"})
    assert found.attributions[0].tolist() == [0.0, 0.0, 0.0]
    assert (found.error, found.tolerance_met) == (None, False)


def test_answer_says_what_was_asked_and_how_far_it_is_from_what_was_served() -> None:
    served = artifact(lambda x: x**2 + 0.25, differentiable=False)
    twin = artifact(lambda x: x**2)
    served.file, twin.file = "net.onnx", "net.pt2"
    model = subject(served, twin=twin)
    ((found,),) = explain(model, X[:1], {"target": "2", "errors": "true"})
    told = found.as_json()
    assert (told["explained_with"], told["f_input"], told["f_served"]) == ("net.pt2", 9.0, 9.25)
    assert told["served_delta"] == -0.25
    ((alone,),) = explain(subject(twin), X[:1], {"target": "2", "errors": "true"})
    assert (alone.f_served, alone.as_json()["served_delta"]) == (9.0, 0.0)
    assert alone.error is not None and found.error is not None
    # All of the gap lies on the one value that has all of the sum.
    assert found.error == pytest.approx(alone.error + 0.25 / 9, rel=1e-4)
    assert told["errors"] == pytest.approx([0, 0, alone.as_json()["errors"][2] + 0.25], rel=1e-4)
    assert (found.tolerance_met, alone.tolerance_met) == (True, True)
    ((strict,),) = explain(model, X[:1], {"target": "2", "tolerance": "0.02"})
    assert strict.tolerance_met is False
    ((direct,),) = explain(model, X[:1], {"target": "2", "method": "occlusion"})
    assert (direct.explained_with, direct.f_input, direct.f_served) == ("net.onnx", 9.25, 9.25)


def test_gap_of_a_probability_is_one_of_probabilities() -> None:
    model = subject(artifact(lambda x: x + 1, differentiable=False), twin=artifact(lambda x: x))
    ((found,),) = explain(model, X[:1], {"output": "probability"})
    assert found.f_served == pytest.approx(found.f_input, abs=1e-12)
    ((found,),) = explain(model, X[:1], {})
    assert found.f_served == found.f_input + 1


def test_what_cancels_is_said_and_drawn_pale() -> None:
    model = subject(artifact(lambda x: torch.stack([x[:, 0] - x[:, 1], x[:, 0] + x[:, 1]], 1)))
    x = torch.tensor([[30.0, 29.9, 0.0]], dtype=torch.float64)
    ((noise,), (much,)) = explain(model, x.expand(2, 3), {"target": "0"}, {"target": "1"})
    assert noise.net_share == pytest.approx(0.1 / 59.9)
    assert (noise.is_next_to_nothing, noise.strength < 0.5, noise.tolerance_met) == (True,) * 3
    assert "next to nothing beside the sizes of the attributions" in noise.warnings[0]
    assert noise.as_json()["warnings"] == list(noise.warnings)
    assert (much.net_share, much.strength, much.warnings) == (1.0, 1.0, ())
    ((slope,),) = explain(model, x, {"target": "0", "method": "occlusion"})
    assert (slope.net_share, slope.strength, slope.warnings) == (None, 1.0, ())


def test_a_difference_without_slopes_is_said_in_words() -> None:
    model = subject(artifact(lambda x: (4 * x[:, :1]).round() + x[:, 1:2] * x[:, 2:]))
    ((found,),) = explain(model, torch.tensor([[1.0, 1.0, 0.5]], dtype=torch.float64), {})
    assert found.tolerance_met is False
    (warning,) = found.warnings
    assert "f(input) − f(baseline) is 4.5, and the attributions miss it by 4:" in warning
    ((plain,),) = explain(model, torch.tensor([[0.0, 1.0, 0.5]], dtype=torch.float64), {})
    assert (plain.tolerance_met, plain.warnings) == (True, ())


@pytest.mark.parametrize("method", ["integrated_gradients", "gradient_shap", "input_x_gradient"])
def test_value_that_is_as_the_baseline_gets_nothing_even_without_a_slope(method: str) -> None:
    model = subject(artifact(lambda x: (x[:, :1] ** 2).sqrt() + x[:, 1:2] * x[:, 2:]))
    x = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    ((found,),) = explain(model, x, {"method": method})
    whole = 4.0 if method == "input_x_gradient" else 2.0
    assert found.attributions[0][0] == 0
    assert found.sum_attributions == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("method", ["integrated_gradients", "gradient_shap"])
def test_a_cliff_between_two_points_is_found_or_not_met(method: str) -> None:
    model = subject(artifact(lambda x: (1e5 * (x[:, :1] - 0.51234)).sigmoid() + 0.1 * x[:, 1:2]))
    ((found,),) = explain(model, torch.ones(1, 3, dtype=torch.float64), {"method": method})
    off = abs(float(found.attributions[0][0]) - 1)
    assert (off < 0.05) == found.tolerance_met
    assert (off < 0.05) == (method == "integrated_gradients")


@pytest.mark.parametrize("method", ["integrated_gradients", "smoothgrad", "gradient_shap"])
def test_a_budget_of_time_ends_it_with_the_error_that_was_reached(method: str) -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return (400 * x).sin().sum(1, keepdim=True)

    query = {"method": method, "tolerance": "0.0001", "internal_batch_size": "10"}
    x = torch.tensor([[1.0, 0.5, 0.2]], dtype=torch.float64)
    ((short,), (long,)) = (
        explain(subject(artifact(slow)), x, query | {"budget_ms": each})[0]
        for each in ("1", "10000")
    )
    assert short.n_steps in (30, 50)  # the first ones are always asked
    assert short.tolerance_met is False
    assert short.error is not None
    assert long.n_steps > short.n_steps
