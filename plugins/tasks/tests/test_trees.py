"""Tree ensembles: what shap's TreeExplainer says of eleven models, and how they are explained."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from modelyard.handlers import BadInput, BaseHandler, Context, TabularHandler, TwinDiffers
from modelyard.handlers.explain.explanation import explain_batch
from modelyard.handlers.explain.request.options import parse_options
from modelyard.handlers.explain.request.targets import ExplainedModel
from modelyard.handlers.models.backends import open_artifact
from modelyard.handlers.models.rows import probabilities_of
from modelyard.plugins.tasks.methods.trees import TreeArtifact, of_trees, suits

TREES = Path(__file__).parent / "trees"
CASES: dict[str, dict[str, Any]] = json.loads((TREES / "cases.json").read_text())


def rows_of(case: dict[str, Any], name: str) -> torch.Tensor:
    return torch.tensor(np.array(case[name], np.float32))


def model_of(path: Path, background: torch.Tensor) -> ExplainedModel:
    artifact = open_artifact(path, "onnx")
    return ExplainedModel(
        artifact, None, None, str, lambda name, inputs, seed: (background,),
        lambda sizes, side: (side or 1,), probabilities=partial(probabilities_of, "probabilities"),
        is_of_probabilities=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_shap(name: str) -> None:
    case = CASES[name]
    model = model_of(TREES / f"{name}.onnx", rows_of(case, "background"))
    rows = rows_of(case, "rows")
    values, expected = np.array(case["values"]), np.atleast_1d(case["expected"])
    if values.ndim == 2:
        values = values[:, :, None]
    # Of two classes shap has the margin of the second alone.
    is_second = name in ("boosting_classifier", "xgboost_classifier", "scaled")
    for output in range(values.shape[2]):
        target = str(1 if is_second else output)
        options = parse_options({"method": "tree_shap", "target": target, "baseline": "file:x"})
        for at, (found,) in enumerate(explain_batch(model, (rows,), [options] * len(rows))):
            scale = abs(values[at, :, output]).max()
            off = abs(found.attributions[0].double().numpy() - values[at, :, output]).max()
            assert off <= 1e-6 * scale, (at, off, scale)
            assert found.f_baseline == pytest.approx(expected[output], rel=1e-6, abs=1e-6)
            assert (found.error, found.tolerance_met) == (0.0, True)
            assert found.relative_delta is not None and found.relative_delta < 1e-5


@pytest.mark.parametrize("name", ["extra_trees", "xgboost_regressor"])
def test_sampled_values_of_all_sets_are_those_of_shap(name: str) -> None:
    """With ten features all sets are asked about, each with 20 rows."""
    case = CASES[name]
    model = model_of(TREES / f"{name}.onnx", rows_of(case, "background"))
    model = replace(model, probabilities=lambda scores: None, is_of_probabilities=False)
    options = parse_options({"method": "kernel_shap", "baseline": "file:x"})
    ((found,),) = explain_batch(model, (rows_of(case, "rows")[:1],), [options])
    values = np.array(case["values"][0])
    assert abs(found.attributions[0].numpy() - values).max() <= 1e-6 * abs(values).max()
    assert (found.n_steps, found.error) == (1022 * 20, 0.0)


def graph_of(nodes: list[onnx.NodeProto], width: int, outputs: int, path: Path) -> Path:
    """Write a file of these nodes, from `row` to `y`."""
    row = onnx.helper.make_tensor_value_info("row", onnx.TensorProto.FLOAT, ["n", width])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", outputs])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    graph = onnx.helper.make_graph(nodes, "g", [row], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def drawn_trees(random: np.random.Generator, width: int, **others: Any) -> onnx.NodeProto:
    """Return a node of trees of all comparisons that there are, two sums, drawn."""
    nodes: list[tuple[Any, ...]] = []
    leaves: list[tuple[Any, ...]] = []

    def grow(tree: int, number: int, depth: int) -> int:
        """Add a node and what is below it; return the next free number."""
        if depth == 0 or random.random() < 0.15:
            nodes.append((tree, number, 0, "LEAF", 0.0, 0, 0, 0))
            leaves.extend((tree, number, each, float(random.normal())) for each in range(2))
            return number + 1
        mode = random.choice([f"BRANCH_{each}" for each in ("LEQ", "LT", "GTE", "GT", "EQ", "NEQ")])
        place, at = len(nodes), int(random.integers(width))
        value, missing = float(random.integers(4)) / 2, int(random.integers(2))
        nodes.append(())
        false = grow(tree, number + 1, depth - 1)
        end = grow(tree, false, depth - 1)
        nodes[place] = (tree, number, at, str(mode), value, number + 1, false, missing)
        return end

    for tree in range(4):
        grow(tree, 0, 5)
    names = ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids",
             "missing_value_tracks_true")  # fmt: skip
    given: dict[str, Any] = dict(others)
    given |= zip((f"nodes_{name}" for name in names), zip(*nodes, strict=True), strict=True)
    targets = ("treeids", "nodeids", "ids", "weights")
    given |= zip((f"target_{name}" for name in targets), zip(*leaves, strict=True), strict=True)
    return onnx.helper.make_node(
        "TreeEnsembleRegressor", ["row"], ["y"], domain="ai.onnx.ml", n_targets=2,
        **given,
    )  # fmt: skip


GROUPS = torch.tensor([0, 1, 1, 2, 3])


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (4, 5))]
)
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["columns", "groups"])
def test_values_are_those_of_the_definition(
    seed: int, groups: torch.Tensor | None, tmp_path: Path
) -> None:
    """By all sets of features, on rows that lie on thresholds or miss values."""
    random = np.random.default_rng(seed)
    others: dict[str, Any] = {"aggregate_function": "AVERAGE"} if seed % 2 else {}
    others |= {"base_values": [0.5, -1.0]} if seed % 3 else {}
    path = graph_of([drawn_trees(random, 5, **others)], 5, 2, tmp_path / "drawn.onnx")
    drawn = random.integers(0, 4, (9, 5)) / 2
    drawn[random.random(drawn.shape) < 0.1] = np.nan
    rows, starts = torch.tensor(drawn[:2]).float(), torch.tensor(drawn[2:]).float()
    model = replace(model_of(path, starts), groups=lambda row, sizes: groups)
    options = parse_options({"method": "tree_shap", "target": "0", "against": "1"})
    masks = groups if groups is not None else torch.arange(5)
    count = int(masks.max()) + 1
    for row, (found,) in zip(rows, explain_batch(model, (rows,), [options] * 2), strict=True):

        def worth(inside: tuple[int, ...], row: torch.Tensor = row) -> float:
            kept = torch.tensor([int(each) in inside for each in masks])
            outputs = model.artifact(torch.where(kept, row, starts))
            assert isinstance(outputs, torch.Tensor)
            return float((outputs[:, 0] - outputs[:, 1]).double().mean())

        for player in range(count):
            rest = [each for each in range(count) if each != player]
            value = sum(
                (worth((*inside, player)) - worth(inside)) / (count * math.comb(count - 1, size))
                for size in range(count)
                for inside in itertools.combinations(rest, size)
            )
            own = found.attributions[0][masks == player]
            assert float(own.sum()) == pytest.approx(value, abs=1e-6)


def votes(
    labels: list[int], ids: list[int], weights: list[float], transform: str
) -> onnx.NodeProto:
    """Return a node of one tree of two leaves, which vote for classes."""
    base: dict[str, Any] = {"base_values": [0.25] * len(labels)} if len(labels) == 3 else {}
    if ids == [0, 0]:
        base = {"base_values": [0.25]}
    return onnx.helper.make_node(
        "TreeEnsembleClassifier", ["row"], ["label", "y"], domain="ai.onnx.ml",
        nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], nodes_featureids=[1, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], class_treeids=[0] * len(ids),
        class_nodeids=[1, 2] if len(ids) == 2 else [1, 1, 2, 2], class_ids=ids,
        class_weights=weights, post_transform=transform,
        classlabels_int64s=labels, **base,
    )  # fmt: skip


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize(
    ("labels", "ids", "weights"),
    [
        ([0, 1], [0, 0], [0.3, 0.9]),
        ([0, 1], [0, 0], [-0.3, 0.9]),
        ([0, 1], [0, 1, 0, 1], [0.2, 0.8, 0.7, 0.3]),
        ([0, 1], [0, 1, 0, 1], [-0.2, 0.8, 0.7, -0.3]),
        ([4, 5, 9], [0, 1], [-0.3, 0.9]),  # nobody votes for the last
    ],
)
def test_a_classifier_is_read_as_it_is_run(
    labels: list[int], ids: list[int], weights: list[float], transform: str, tmp_path: Path
) -> None:
    node = votes(labels, ids, weights, transform)
    path = graph_of([node], 2, len(labels), tmp_path / "votes.onnx")
    model = model_of(path, torch.zeros(1, 2))
    options = [parse_options({"method": "tree_shap", "target": "1"})]
    ((found,),) = explain_batch(model, (torch.ones(1, 2),), options)
    assert found.attributions[0][0] == 0
    change = float(found.attributions[0][1])
    assert change == pytest.approx(found.f_input - found.f_baseline, rel=1e-5, abs=1e-7) != 0


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([("Neg", "row", "x"), ("trees", "x", "y")], "Neg behind or before trees"),
        ([("trees", "row", "x"), ("Exp", "x", "y")], "Exp behind or before trees"),
        ([("Exp", "row", "y")], "comes of no trees at all"),
        ([("trees MAX", "row", "y")], "TreeEnsembleRegressor behind or before trees"),
    ],
)
def test_what_does_not_add_up_is_refused(
    nodes: list[tuple[str, str, str]], said: str, tmp_path: Path
) -> None:
    made = []
    for name, taken, given in nodes:
        if name.startswith("trees"):
            others = {"aggregate_function": "MAX"} if name.endswith("MAX") else {}
            node = drawn_trees(np.random.default_rng(0), 2, **others)
            node.input[0], node.output[0] = taken, given
            made.append(node)
        else:
            made.append(onnx.helper.make_node(name, [taken], [given]))
    path = graph_of(made, 2, 2, tmp_path / "other.onnx")
    model = model_of(path, torch.zeros(1, 2))
    with pytest.raises(BadInput, match=said):
        explain_batch(model, (torch.ones(1, 2),), [parse_options({"method": "tree_shap"})])
    assert not suits(model.artifact, "y")


def test_trees_that_are_read_otherwise_than_they_are_run_are_not_explained() -> None:
    model = of_trees(model_of(TREES / "boosting_classifier.onnx", torch.zeros(1, 30)))
    artifact = model.artifact
    assert isinstance(artifact, TreeArtifact)
    rows = rows_of(CASES["boosting_classifier"], "rows")
    artifact(rows)
    artifact.trees.thresholds[0] += 20
    with pytest.raises(TwinDiffers, match="its trees add up to"):
        artifact(rows)


HANDLERS = {"tabular": TabularHandler, "base": BaseHandler}


def loaded(name: str, folder: Path, kind: str = "tabular") -> tuple[BaseHandler, Context]:
    """Load a file as an unpacked archive of it, whose background is a packed file."""
    case = CASES[name]
    shutil.copy(TREES / f"{name}.onnx", folder)
    features = [{"name": f"f{at}"} for at in range(len(case["rows"][0]))]
    (folder / "features.json").write_text(json.dumps({"features": features}))
    (folder / "index_to_name.json").write_text(json.dumps(dict(enumerate(("a", "b", "c")))))
    (folder / "background.json").write_text(json.dumps(case["background"]))
    config = {"handler": {"output_kind": "probabilities"}} if "regress" not in name else {}
    context = Context(
        name,
        str(folder),
        {"model": {"serializedFile": f"{name}.onnx"}},
        model_yaml_config=config,
    )
    context.reset(["a"])
    handler = HANDLERS[kind]()
    handler.initialize(context)
    return handler, context


@pytest.mark.parametrize("kind", HANDLERS)
def test_trees_are_explained_by_themselves_and_their_probabilities_come_first(
    kind: str, tmp_path: Path
) -> None:
    """The file gives the label's number, int64, before the probabilities."""
    handler, context = loaded("xgboost_classes", tmp_path, kind)
    row = CASES["xgboost_classes"]["rows"][0]
    (answer,) = handler.explain([{"body": row}], context)
    assert (answer["method"], answer["output"]) == ("tree_shap", "logit")
    assert answer["sum_attributions"] == pytest.approx(answer["f_input"] - answer["f_baseline"])
    (predicted,) = handler.handle([{"body": row}], context)
    if kind == "tabular":
        assert predicted[answer["label"]] == pytest.approx(answer["probability"], rel=1e-5)
    context.reset(["a"], queries=[{"output": "probability"}])
    with pytest.raises(BadInput, match="expected logit, or the method kernel_shap"):
        handler.explain([{"body": row}], context)


def test_a_forest_is_explained_in_probabilities(tmp_path: Path) -> None:
    handler, context = loaded("random_forest", tmp_path)
    row = CASES["random_forest"]["rows"][0]
    (answer,) = handler.explain([{"body": row}], context)
    assert (answer["output"], answer["probability"]) == ("probability", answer["f_input"])
    assert answer["f_served"] == answer["f_input"]
    assert answer["baseline"] == "file:background.json"
    assert 0 < answer["baseline_error"] < 1
    context.reset(["a"], queries=[{"baseline": "zero"}])
    (alone,) = handler.explain([{"body": row}], context)
    assert (alone["baseline"], "baseline_error" in alone) == ("zero", False)


def test_what_onnxruntime_makes_of_a_leaf_without_a_vote_is_not_explained(tmp_path: Path) -> None:
    """Of two classes it has a rule of its own there, which no converter's file comes to."""
    path = graph_of([votes([0, 1], [0, 1], [-0.3, 0.9], "NONE")], 2, 2, tmp_path / "votes.onnx")
    options = [parse_options({"method": "tree_shap"})]
    with pytest.raises(TwinDiffers, match="its trees add up to"):
        explain_batch(model_of(path, torch.zeros(1, 2)), (torch.ones(1, 2),), options)
