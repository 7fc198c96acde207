"""Why not X: the smallest change of a row, held against all that there are."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.reference import Range, Reference, ranges_of
from modelyard.archiver.signature import Dim, TensorSpec
from modelyard.handlers import BadInput, Context, TabularHandler
from modelyard.handlers.explain.attribute.method import Choice
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.models.backends import Artifact, open_artifact
from modelyard.handlers.models.rows import probabilities_of
from modelyard.plugins.tasks.methods.change import GRID, MOST_PREDICTIONS
from modelyard.plugins.tasks.methods.trees import cuts_of
from plugins.tasks.tests.test_trees import CASES, TREES, drawn_trees, graph_of

RANGES = (Range(-1, 2, False), Range(0, 3, True), Range(-0.5, 1.5, False))
TEXTS = ("a", "b", "c")
SEEDS = [pytest.param(seed, marks=pytest.mark.nightly if seed % 3 else ()) for seed in range(24)]
"""Models and rows that are drawn; a third of them by day."""


def one_hot(value: Any) -> list[float]:
    return [float(value == each) for each in TEXTS]


def choices_of(row: Sequence[Any]) -> list[Choice]:
    """Return three numbers, and a category of three columns."""
    numbers = [
        Choice(f"n{at}", at, at + 1, value, range=each)
        for at, (value, each) in enumerate(zip(row, RANGES, strict=False))
    ]
    return [*numbers, Choice("letter", 3, 6, row[3], TEXTS, None, one_hot)]


def encoded(row: Sequence[Any]) -> Tensor:
    return torch.tensor([[*map(float, row[:3]), *one_hot(row[3])]], dtype=torch.float32)


def model_of(artifact: Artifact, row: Sequence[Any], **others: Any) -> ExplainedModel:
    given = ExplainedModel(
        artifact, None, None, "class {}".format, lambda name, inputs, seed: (inputs[0] * 0,),
        lambda sizes, side: (side or 1,), probabilities=partial(probabilities_of, "logits"),
        choices=lambda at: choices_of(row),
    )  # fmt: skip
    return replace(given, **others)


def ask(model: ExplainedModel, row: Sequence[Any], against: int) -> dict[str, Any]:
    options = parse_options(
        {"method": "feature_ablation", "change": "true", "against": str(against)}
    )
    ((found,),) = explain_batch(model, (encoded(row),), [options])
    told: dict[str, Any] = json.loads(json.dumps(found.as_json()))["change"]
    return told


def network(seed: int) -> Artifact:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)).requires_grad_(False)
    next(net.parameters()).mul_(2)
    spec = TensorSpec("row", "float32", (Dim("batch"), 6))
    return Artifact("eager", net, (spec,), torch.device("cpu"), net)


def forest(seed: int, folder: Path) -> Artifact:
    node = drawn_trees(np.random.default_rng(seed), 6)
    return open_artifact(graph_of([node], 6, 2, folder / f"{seed}.onnx"), "onnx")


def drawn_row(seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    one, two = (float(random.uniform(each.low, each.high)) for each in RANGES[::2])
    return [one, int(random.integers(4)), two, str(random.choice(TEXTS))]


def predicted(artifact: Artifact, row: Sequence[Any]) -> int:
    return int(scores(artifact, [row]).argmax())


def scores(artifact: Artifact, rows: Sequence[Sequence[Any]]) -> Tensor:
    output = artifact(torch.cat([encoded(row) for row in rows]))
    return output if isinstance(output, Tensor) else output[0]


def cost_of(row: Sequence[Any], other: Sequence[Any]) -> tuple[int, float]:
    """Return how many features differ, and the sum of how far they moved."""
    total = float(row[3] != other[3])
    for one, two, each in zip(row, other, RANGES, strict=False):
        total += abs(one - two) / (each.high - each.low)
    return sum(one != two for one, two in zip(row, other, strict=True)), total


def by_brute_force(
    artifact: Artifact,
    row: Sequence[Any],
    wanted: int,
    values: Sequence[Sequence[Any]],
    sizes: Sequence[int],
) -> tuple[int, float] | None:
    """Return the smallest of all changes of so many features, to any of some values."""
    best: tuple[int, float] | None = None
    for places in (each for size in sizes for each in itertools.combinations(range(4), size)):
        rows = []
        for chosen in itertools.product(*(values[at] for at in places)):
            changed = list(row)
            for at, value in zip(places, chosen, strict=True):
                changed[at] = value
            rows.append(changed)
        for changed, label in zip(rows, scores(artifact, rows).argmax(1).tolist(), strict=True):
            if label == wanted:
                best = min(best or (9, 0.0), cost_of(row, changed))
    return best


def refute(
    told: dict[str, Any], artifact: Artifact, row: Sequence[Any], wanted: int,
    known: tuple[int, float] | None,
) -> str | None:  # fmt: skip
    """Return what is wrong with a change; None where nothing is.

    Args:
        told: the answer.
        artifact: what predicts.
        row: the row that is to be changed.
        wanted: the class that it is to be.
        known: a change that is known to be enough.
    """
    changed, names = list(row), [each.name for each in choices_of(row)]
    for each in told["changes"]:
        at = names.index(each["feature"])
        if each["from"] != row[at]:
            return "from another value"
        changed[at] = each["to"]
        if at == 3 and each["to"] not in TEXTS:
            return "no category"
        if at < 3 and not RANGES[at].low <= each["to"] <= RANGES[at].high:
            return "out of range"
        if at < 3 and RANGES[at].is_whole and each["to"] != int(each["to"]):
            return "not whole"
    if predicted(artifact, changed) != wanted:
        return "another prediction"
    count, cost = cost_of(row, changed)
    if abs(cost - told["size"]) > 1e-9:
        return "another size"
    # Numbers are rounded outwards by a thousandth of their ranges.
    if known is not None and (count, cost) > (known[0], known[1] + 0.002 * known[0]):
        return "a smaller one is known"
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_change_of_trees_is_the_smallest_there_is(seed: int, tmp_path: Path) -> None:
    """Against each value of each stretch between two thresholds."""
    artifact, row = forest(seed, tmp_path), drawn_row(seed)
    wanted = 1 - predicted(artifact, row)
    told = ask(model_of(artifact, row), row, wanted)
    cuts = cuts_of(artifact, None)
    assert cuts is not None
    values: list[Sequence[Any]] = []
    for at, each in enumerate(RANGES):
        near = [*cuts[at].tolist(), *np.nextafter(cuts[at], np.float32(-9)).tolist()]
        inside = {float(one) for one in near if each.low <= one <= each.high}
        values.append(range(4) if each.is_whole else [*inside, each.low, each.high])
    known = by_brute_force(artifact, row, wanted, [*values, TEXTS], (1, 2, 3, 4))
    assert told["is_found"] == (known is not None)
    if known:
        assert refute(told, artifact, row, wanted, known) is None
        assert (told["sureness"], len(told["changes"])) == ("smallest", known[0])
    else:
        assert "there is none" in told["summary"]
    assert 0 < told["predictions"] <= MOST_PREDICTIONS + 1000


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_change_of_a_network_is_none_larger_than_on_a_grid(seed: int) -> None:
    artifact, row = network(seed), drawn_row(seed)
    first = predicted(artifact, row)
    wanted = (first + 1 + seed % 2) % 3
    told = ask(model_of(artifact, row), row, wanted)
    values = [
        range(4) if each.is_whole else np.linspace(each.low, each.high, GRID).tolist()
        for each in RANGES
    ]
    known = by_brute_force(artifact, row, wanted, [*values, TEXTS], (1, 2, 3, 4))
    assert told["is_found"] == (known is not None)
    if told["is_found"]:
        assert refute(told, artifact, row, wanted, known) is None
        assert told["sureness"] == "smallest tried"
        assert told["holds"]["low"] <= told["holds"]["share"] <= told["holds"]["high"]
    else:
        assert "no change within the reference's ranges" in told["summary"]


WRONGS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another prediction": lambda told: told.update(changes=[]),
    "out of range": lambda told: told["changes"][0].update(to=7.0),
    "from another value": lambda told: told["changes"][0].update({"from": 0.123}),
    "another size": lambda told: told.update(size=told["size"] / 2),
    "no category": lambda told: told["changes"].append(
        {"feature": "letter", "from": drawn_row(9)[3], "to": "d"}
    ),
    "not whole": lambda told: told["changes"].append(
        {"feature": "n1", "from": drawn_row(9)[1], "to": 1.5}
    ),
    "a smaller one is known": lambda told: None,
}


@pytest.mark.parametrize("wrong", [None, *WRONGS])
def test_a_wrong_change_is_refused(wrong: str | None) -> None:
    artifact, row = network(9), drawn_row(9)
    wanted = (predicted(artifact, row) + 2) % 3
    told = ask(model_of(artifact, row), row, wanted)
    assert told["is_found"] and told["changes"][0]["feature"] in ("n0", "n2")
    known = (1, 0.0) if wrong == "a smaller one is known" else None
    if wrong:
        WRONGS[wrong](told)
    assert refute(told, artifact, row, wanted, known) == wrong


class Wide(nn.Module):
    """Class 1 where many features are high at once, which no two features are enough for."""

    def forward(self, row: Tensor) -> Tensor:
        """(N, 40) to (N, 2)."""
        return torch.stack([row[:, 0] * 0 + 4.5, row[:, :8].clip(0, 1).sum(1)], 1)


def test_of_many_features_not_all_changes_are_tried_and_it_says_so() -> None:
    net = Wide()
    spec = TensorSpec("row", "float32", (Dim("batch"), 40))
    artifact = Artifact("eager", net, (spec,), torch.device("cpu"), net)
    choices = [Choice(str(at), at, at + 1, range=Range(0, 1, False)) for at in range(40)]
    model = model_of(artifact, drawn_row(0), choices=lambda at: choices)
    options = parse_options({"method": "feature_ablation", "change": "true", "against": "1"})
    ((found,),) = explain_batch(model, (torch.zeros(1, 40),), [options])
    told = found.as_json()["change"]
    assert (told["is_found"], told["sureness"]) == (True, "best found")
    assert {each["feature"] for each in told["changes"]} <= set(map(str, range(8)))
    assert (len(told["changes"]), told["predictions"] <= MOST_PREDICTIONS + 1000) == (5, True)
    assert told["size"] == pytest.approx(4.5, abs=0.01)
    few = replace(model, choices=lambda at: choices[:4])
    ((found,),) = explain_batch(few, (torch.zeros(1, 40),), [options])
    told = found.as_json()["change"]
    assert (told["is_found"], "changes" in told) == (False, False)


def test_a_change_of_three_features_is_found_where_pairs_are_too_many(tmp_path: Path) -> None:
    """Other values of one promising set of features do not crowd out other sets."""
    case = CASES["xgboost_classes"]
    rows = np.array(case["background"])
    row = torch.tensor([case["rows"][0]], dtype=torch.float32)
    artifact = open_artifact(TREES / "xgboost_classes.onnx", "onnx")
    choices = [
        Choice(str(at), at, at + 1, range=Range(column.min(), column.max(), False))
        for at, column in enumerate(rows.T)
    ]
    model = model_of(artifact, drawn_row(0), choices=lambda at: choices)
    options = parse_options({"method": "tree_shap", "change": "true", "against": "0"})
    ((found,),) = explain_batch(model, (row,), [options])
    told = found.as_json()["change"]
    assert (told["is_found"], len(told["changes"])) == (True, 3)
    for each in told["changes"]:
        row[0, int(each["feature"])] = each["to"]
    output = artifact(row)
    assert isinstance(output, tuple) and int(output[1].argmax()) == 0


ASKED = {"method": "feature_ablation", "change": "true", "target": "0"}


@pytest.mark.parametrize(
    ("query", "others", "said"),
    [
        ({}, {}, "name it, against="),
        ({"against": "1"}, {"choices": lambda at: ()}, "archived with --reference FILE"),
        ({"against": "1"}, {"probabilities": lambda scores: None}, "are not of classes"),
    ],
)
def test_where_there_is_nothing_to_look_for_it_says_what_to_do(
    query: dict[str, str], others: dict[str, Any], said: str
) -> None:
    row = drawn_row(1)
    model = model_of(network(1), row, **others)
    with pytest.raises(BadInput, match=said):
        explain_batch(model, (encoded(row),), [parse_options({**ASKED, **query})])


def test_a_row_that_is_predicted_so_needs_no_change() -> None:
    row = drawn_row(1)
    first = predicted(network(1), row)
    query = ASKED | {"target": str((first + 1) % 3), "against": str(first)}
    ((found,),) = explain_batch(model_of(network(1), row), (encoded(row),), [parse_options(query)])
    assert found.as_json()["change"]["changes"] == []


def test_ranges_of_the_reference_bound_the_change_of_a_table(tmp_path: Path) -> None:
    """They are in the units of what was sent, though the handler scales numbers."""
    shutil.copy(TREES / "scaled.onnx", tmp_path)
    case = CASES["scaled"]
    features = [{"name": f"f{at}", "mean": 1.0, "std": 2.0} for at in range(30)]
    (tmp_path / "features.json").write_text(json.dumps({"features": features}))
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": "bad", "1": "good"}))
    context = Context(
        "scaled", str(tmp_path), {"model": {"serializedFile": "scaled.onnx"}},
        model_yaml_config={"handler": {"output_kind": "probabilities"}},
    )  # fmt: skip
    context.reset(["a"])
    handler = TabularHandler()
    handler.initialize(context)
    rows = [[2 * each + 1 for each in row] for row in case["background"] + case["rows"]]
    numbers = [handler.numbers({"body": row}) for row in rows]
    handler.reference = Reference(1, {"f0": 1.0}, ranges=ranges_of(numbers))
    for row in rows[-3:]:
        (before,) = handler.handle([{"body": row}], context)
        other = "bad" if before["good"] > 0.5 else "good"
        context.reset(["a"], queries=[{"change": "true", "against": other}])
        (answer,) = handler.explain([{"body": row}], context)
        changed = dict(numbers[rows.index(row)])
        for each in answer["change"]["changes"]:
            assert changed[each["feature"]] == each["from"]
            changed[each["feature"]] = each["to"]
            low, high, _ = handler.reference.ranges[each["feature"]]
            assert low <= each["to"] <= high
        context.reset(["a"])
        (after,) = handler.handle([{"body": changed}], context)
        assert after[other] == pytest.approx(answer["change"]["probability"]) and after[other] > 0.5
