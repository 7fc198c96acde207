"""What of an output is explained: by name, by place, by region, and one against another."""

from typing import Any

import pytest
import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.handlers import BadInput
from modelyard.handlers.explain.attribute.attribution import Tensors
from modelyard.handlers.explain.explanation import Explanation, explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.models.backends import Artifact

LABELS = ("sky", "sea")


class Two(nn.Module):
    """Scores (N, 3), a map (N, 2, 2, 3), and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.map = nn.Linear(4, 3), nn.Linear(4, 12)
        self.double().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, 4) to both."""
        return self.scores(x).tanh(), self.map(x).tanh().view(-1, 2, 2, 3), (x > 0).sum(1)


NET = Two()
X = torch.tensor([[1.0, 2.0, -0.5, 0.3], [0.2, -1.0, 0.7, 1.5]], dtype=torch.float64)


def zeros(name: str, inputs: Tensors, seed: int) -> Tensors:
    return tuple(map(torch.zeros_like, inputs))


def explain(*queries: dict[str, str], **known: Any) -> list[list[Explanation]]:
    spec = TensorSpec("x", "float64", (Dim("batch"), 4))
    model = Artifact("eager", NET, (spec,), torch.device("cpu"), NET)
    version = ExplainedModel(
        model,
        model,
        None,
        lambda index: LABELS[index] if index < len(LABELS) else str(index),
        zeros,
        lambda sizes, side: (side or 1,),
        output_names=("scores", "map", "count"),
        output_name="scores",
        **known,
    )
    options = [parse_options(query) for query in queries]
    return explain_batch(version, (X[: len(queries)],), options)


def by_captum(weights: Tensor, output: int) -> list[float]:
    """Explain a weighted sum of an output's numbers, with as many midpoints as we use."""

    def forward(x: Tensor) -> Tensor:
        numbers: Tensor = (NET(x)[output] * weights).flatten(1)
        return numbers.sum(1)

    found: Tensor = IntegratedGradients(forward).attribute(
        X[:1], n_steps=30, method="riemann_middle"
    )
    return found[0].tolist()


def test_an_output_is_explained_by_its_name() -> None:
    ((found,),) = explain({"output_name": "map", "target": "1,0,2", "n_steps": "30"})
    weights = torch.zeros(2, 2, 3).double()
    weights[1, 0, 2] = 1
    assert found.attributions[0].tolist() == pytest.approx(by_captum(weights, 1))
    answer = found.as_json()
    assert (answer["output_name"], answer["target"]) == ("map", [1, 0, 2])
    # What the handler knows of the output of predictions is not true of another.
    assert (found.label, found.probability) == ("1,0,2", None)


def test_without_a_name_the_output_of_predictions_is_named() -> None:
    ((found,),) = explain({"target": "sea"})
    assert (found.output_name, found.label, found.target) == ("scores", "sea", 1)
    assert found.probability is not None


def test_several_outputs_come_in_the_order_of_each_request() -> None:
    both = {"output_name": "scores,map"}
    first, second = explain(both, {"output_name": "map,scores", "target": "top-2"})
    assert [each.output_name for each in first] == ["scores", "map"]
    assert [each.output_name for each in second] == ["map", "map", "scores", "scores"]
    ((alone,),) = explain({"output_name": "map"})
    assert torch.equal(first[1].attributions[0], alone.attributions[0])


def test_a_contrast_is_the_difference_in_one_pass() -> None:
    ((found,),) = explain({"target": "sea", "against": "0", "n_steps": "30"})
    expected = by_captum(torch.tensor([-1.0, 1.0, 0.0]).double(), 0)
    assert found.attributions[0].tolist() == pytest.approx(expected)
    f = NET(X[:1])[0][0]
    assert found.f_input == pytest.approx(float(f[1] - f[0]))
    assert found.n_steps == 30
    answer = found.as_json()
    assert (answer["target"], answer["against"]) == (1, 0)
    assert answer["label"] == "sea rather than sky"
    ((chances,),) = explain({"target": "sea", "against": "sky", "output": "probability"})
    p = f.softmax(0)
    assert chances.f_input == pytest.approx(float(p[1] - p[0]))
    assert chances.probability == pytest.approx(float(p[1]))


@pytest.mark.parametrize(
    ("region", "rows", "columns"),
    [(None, [0, 1], [0, 1, 2]), ("1,0,3,1", [0], [1, 2]), ("0,0,1,2", [0, 1], [0])],
)
def test_a_class_is_summed_over_a_box(
    region: str | None, rows: list[int], columns: list[int]
) -> None:
    query = {"output_name": "map", "target": "sum:1", "n_steps": "30"}
    ((found,),) = explain(query | ({"region": region} if region else {}))
    weights = torch.zeros(2, 2, 3).double()
    for row in rows:
        weights[1, row, columns] = 1
    assert found.attributions[0].tolist() == pytest.approx(by_captum(weights, 1))
    assert found.f_input == pytest.approx(float((NET(X[:1])[1][0] * weights).sum()))
    assert found.label == f"sum of 1 over {len(rows) * len(columns)} places"
    assert found.as_json()["target"] == "sum:1"
    assert found.probability is None


def test_a_class_is_summed_where_it_is_predicted_or_in_a_mask() -> None:
    mask = '{"size": [2, 3], "counts": [1, 2, 2, 1]}'  # by columns: 0,1 and 1,0 and 2,1
    query = {"output_name": "map", "target": "sum:0", "n_steps": "30"}
    ((wins,), (masked,)) = explain({**query, "region": "predicted"}, {**query, "region": mask})
    outputs = NET(X)[1]
    own = outputs[0].argmax(0) == 0
    assert 0 < int(own.sum()) < 6
    assert wins.f_input == pytest.approx(float(outputs[0, 0][own].sum()))
    inside = outputs[1, 0][[1, 0, 1], [0, 1, 2]]
    assert masked.f_input == pytest.approx(float(inside.sum()))
    assert masked.label == "sum of 0 over 3 places"


def test_a_mask_of_a_picture_is_read_at_the_output_s_places() -> None:
    picture = '{"size": [4, 6], "counts": [8, 16]}'  # columns 2 to 5 of a picture twice as large
    ((found,),) = explain({"output_name": "map", "target": "sum:0", "region": picture})
    assert found.f_input == pytest.approx(float(NET(X[:1])[1][0, 0, :, 1:].sum()))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"output_name": "boxes"}, 'output_name is "boxes"; expected some of scores, map, count'),
        ({"output_name": "count"}, r'output "count" is int64\[1\]; only real numbers'),
        ({"target": "sum:0"}, 'target is "sum:0"; expected an index or a label'),
        ({"region": "0,1"}, "region does not apply: this output has one number for each class"),
        ({"target": "0", "against": "sky"}, 'against is "sky", which is the target'),
        ({"against": "top-2"}, 'against is "top-2"; expected one target'),
        ({"against": "land"}, 'against is "land"; expected predicted, top-N, an index from 0'),
        ({"output_name": "map", "region": "0,0,1,1"}, 'does not apply to the target "predicted"'),
        ({"output_name": "map", "target": "sum:2"}, "and an index from 0 to 1, or a label: 0, 1"),
        (
            {"output_name": "map", "target": "sum:0", "region": "0,2"},
            r"expected LEFT,TOP,RIGHT,BOTTOM or predicted, as the output has the sizes \[2, 3\]",
        ),
        (
            {"output_name": "map", "target": "sum:0", "region": "9,9,12,12"},
            "no place of the output has its centre there",
        ),
    ],
)
def test_what_the_outputs_do_not_have_is_refused(query: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        explain(query)


def test_a_baseline_that_is_a_class_itself_is_said() -> None:
    ((calm,),) = explain({"target": "0"})
    ((sure,),) = explain({"target": "0"}, probabilities=lambda scores: (50 * scores).softmax(1))
    scores = NET(X[:1] * 0)[0][0]
    label = [*LABELS, "2"][int(scores.argmax())]
    assert (calm.baseline_label, calm.warnings) == (label, ())
    assert calm.baseline_probability == pytest.approx(float(scores.softmax(0).max()))
    assert sure.baseline_probability == pytest.approx(float((50 * scores).softmax(0).max()))
    (warning,) = sure.as_json()["warnings"]
    assert warning.startswith(f'the baseline "zero" is itself "{label}" with probability 0.9')
    ((numbers,),) = explain({"target": "0"}, probabilities=lambda scores: None)
    assert (numbers.baseline_label, numbers.baseline_probability) == (None, None)
