import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelyard.archiver.reference import Reference
from modelyard.handlers import BadInput, Context, LoadError, TabularHandler
from tests.answer_schema import wrong_in
from tests.shared import FURTHER

Initialized = Callable[..., tuple[TabularHandler, Context]]

FEATURES = [
    {"name": "age", "mean": 40.0, "std": 10.0},
    {"name": "income", "mean": 3000.0, "std": 1000.0},
    {"name": "smoker", "values": {"no": 0, "yes": 1}},
]


class Two(nn.Module):
    """Logits: age + 2 · income − smoker, and nothing."""

    def forward(self, row: Tensor) -> Tensor:
        """(N, 3) to (N, 2)."""
        first = row[:, 0] + 2 * row[:, 1] - row[:, 2]
        return torch.stack([first, first * 0], 1)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("tabular") / "two.pt2"
    batch = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(torch.export.export(Two(), (torch.rand(3, 3),), dynamic_shapes=batch), file)
    return file.read_bytes()


@pytest.fixture
def initialized(tmp_path: Path, program: bytes) -> Initialized:
    """Build the handler of an archive with some `features.json` and labels."""

    def make(
        features: Any = FEATURES,
        labels: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
    ) -> tuple[TabularHandler, Context]:
        (tmp_path / "two.pt2").write_bytes(program)
        if features is not None:
            (tmp_path / "features.json").write_text(json.dumps({"features": features}))
        if labels:
            (tmp_path / "index_to_name.json").write_text(json.dumps(labels))
        context = Context(
            "two",
            str(tmp_path),
            {"model": {"serializedFile": "two.pt2"}},
            model_yaml_config=config,
        )
        context.reset(["a"])
        handler = TabularHandler()
        handler.initialize(context)
        return handler, context

    return make


ROW = {"age": 50, "income": 5000.0, "smoker": "yes"}


@pytest.mark.parametrize("as_values", [False, True], ids=["objects", "lists"])
@pytest.mark.parametrize("as_bytes", [False, True], ids=["parsed", "bytes"])
def test_a_list_of_rows_is_answered_with_a_list(
    initialized: Initialized, as_values: bool, as_bytes: bool
) -> None:
    handler, context = initialized()
    rows: list[Any] = [{**ROW, "age": age} for age in (50, 60, 70)]
    alone = [handler.handle([{"body": row}], context)[0] for row in rows]
    body: Any = [list(row.values()) for row in rows] if as_values else rows
    context.reset(["a", "b"])
    sent = json.dumps(body).encode() if as_bytes else body
    assert handler.handle([{"body": sent}, {"body": rows[0]}], context) == [alone, alone[0]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            [ROW, {**ROW, "age": "old"}],
            r'row 1 of the list: age is "old"; expected a finite number',
        ),
        ([ROW, {"age": 1}], "row 1 of the list: income is missing, smoker is missing; expected"),
        ([[1, 2, "no"], [1]], "row 1 of the list: the row has 1 values; expected 3: age, income"),
        ([ROW] * 257, "the list holds 257 rows; expected 1 to 256"),
    ],
    ids=["value", "missing", "short", "too many"],
)
def test_a_wrong_row_of_a_list_is_named(initialized: Initialized, body: Any, said: str) -> None:
    handler, context = initialized()
    with pytest.raises(BadInput, match=said):
        handler.handle([{"body": body}], context)


def test_a_list_of_rows_is_not_explained(initialized: Initialized) -> None:
    handler, context = initialized()
    with pytest.raises(BadInput, match="the body is a list of 2 rows; expected one row"):
        handler.explain([{"body": [ROW, ROW]}], context)


@pytest.mark.parametrize(
    "body", [ROW, list(ROW.values()), json.dumps(ROW).encode()], ids=["object", "list", "bytes"]
)
def test_row_is_scaled_by_name(initialized: Initialized, body: Any) -> None:
    handler, context = initialized()
    assert handler.preprocess([{"body": body}]).tolist() == [[1.0, 2.0, 1.0]]  # type: ignore[union-attr]
    assert handler.handle([{"body": body}], context) == [[4.0, 0.0]]


def test_labels_make_a_classifier(initialized: Initialized) -> None:
    handler, context = initialized(labels={"0": "buys", "1": "leaves"})
    (answer,) = handler.handle([{"body": ROW}], context)
    assert list(answer) == ["buys", "leaves"]
    assert answer["buys"] == pytest.approx(1 / (1 + 2.718281828**-4))


@pytest.mark.parametrize("function", [None, "softmax", "sigmoid"])
def test_an_explanation_has_the_probability_of_the_prediction(
    initialized: Initialized, function: str | None
) -> None:
    handler, context = initialized(
        labels={"0": "buys", "1": "leaves"},
        config={"handler": {"function": function}} if function else None,
    )
    (predicted,) = handler.handle([{"body": ROW}], context)
    for output in ("logit", "probability"):
        context.reset(["a"], queries=[{"target": "top-2", "output": output, "n_steps": "100"}])
        (answer,) = handler.explain([{"body": ROW}], context)
        assert wrong_in(answer) == []
        for each in answer["explanations"]:
            assert each["probability"] == pytest.approx(predicted[each["label"]], abs=1e-6)
            if output == "probability":
                assert each["f_input"] == each["probability"]
                assert each["convergence_delta"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("labels", [None, {"0": "buys", "1": "leaves"}])
def test_values_have_no_probability(
    initialized: Initialized, labels: dict[str, str] | None
) -> None:
    config = {"handler": {"function": "none"}} if labels else None
    handler, context = initialized(labels=labels, config=config)
    (answer,) = handler.explain([{"body": ROW}], context)
    assert wrong_in(answer) == []
    assert (answer["probability"], answer["output_kind"]) == (None, "values")
    context.reset(["a"], queries=[{"output": "probability"}])
    with pytest.raises(BadInput, match="its predictions make no probabilities"):
        handler.explain([{"body": ROW}], context)


def test_noise_follows_each_feature_not_the_largest(initialized: Initialized) -> None:
    handler, _ = initialized(
        [*FEATURES[:2], {"name": "smoker", "std": 0.5, "values": {"no": 0, "yes": 3}}]
    )
    rows = torch.tensor([[1.0, 2.0, 300.0]])
    assert handler.scales(rows).tolist() == [[1.0, 1.0, 6.0]]


@pytest.mark.parametrize("method", ["integrated_gradients", "kernel_shap", "feature_ablation"])
def test_each_feature_gets_its_share(initialized: Initialized, method: str) -> None:
    handler, context = initialized(labels={"0": "buys", "1": "leaves"})
    context.reset(["a"], queries=[{"method": method, "target": "buys"}])
    (answer,) = handler.explain([{"body": ROW}], context)
    assert answer["features"] == pytest.approx({"age": 1, "income": 4, "smoker": -1}, abs=1e-4)
    assert (answer["f_baseline"], answer["label"]) == (0.0, "buys")


@FURTHER
def test_rows_of_the_archive_are_a_baseline_set(initialized: Initialized, tmp_path: Path) -> None:
    rows = [{**ROW, "smoker": answer} for answer in ("yes", "no")]
    (tmp_path / "others.json").write_text(json.dumps(rows))
    handler, context = initialized()
    query = {"method": "gradient_shap", "baseline": "file:others.json", "target": "0"}
    context.reset(["a"], queries=[query])
    (answer,) = handler.explain([{"body": ROW}], context)
    assert answer["features"]["age"] == 0.0
    assert answer["features"]["smoker"] == pytest.approx(-0.5, abs=0.2)
    assert answer["f_baseline"] == 4.5
    context.reset(["a"], queries=[{"baseline": "file:others.json"}])
    with pytest.raises(BadInput, match="holds 2 rows; integrated_gradients takes one"):
        handler.explain([{"body": ROW}], context)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"age": 1, "smoker": "no", "sex": 0}, "income is missing, sex is unknown; expected"),
        ([1, 2], "the row has 2 values; expected 3: age, income, smoker"),
        ("[", "the body is not JSON"),
        ("3", "the body is not a JSON object"),
        ({**ROW, "smoker": "maybe"}, 'smoker is "maybe"; expected one of no, yes'),
        ({**ROW, "age": None}, "age is null; expected a finite number"),
        ({**ROW, "age": "old"}, 'age is "old"; expected a finite number'),
        ({**ROW, "age": True}, "age is true; expected a finite number"),
    ],
)
def test_unusable_row_is_refused(initialized: Initialized, body: Any, message: str) -> None:
    handler, _ = initialized()
    with pytest.raises(BadInput) as error:
        handler.preprocess([{"body": body}])
    assert message in str(error.value)


CATEGORIES = [
    {"name": "colour", "one_hot": ["red", "green"]},
    {"name": "smoker", "values": {"no": 0, "yes": 1}},
]
PLACES = [
    {"name": "latitude", "group": "place"},
    {"name": "age", "mean": 40.0, "std": 10.0},
    {"name": "longitude", "group": "place"},
]


@pytest.mark.parametrize(
    "method", ["kernel_shap", "feature_ablation", "occlusion", "integrated_gradients"]
)
def test_columns_of_a_category_are_one_feature(initialized: Initialized, method: str) -> None:
    handler, context = initialized(CATEGORIES)
    body = {"colour": "green", "smoker": "yes"}
    assert handler.preprocess([{"body": body}]).tolist() == [[0.0, 1.0, 1.0]]  # type: ignore[union-attr]
    context.reset(["a"], queries=[{"method": method, "target": "0"}])
    (answer,) = handler.explain([{"body": body}], context)
    # age + 2 · income − smoker of the network, for red, green and smoker
    assert answer["features"] == pytest.approx({"colour": 2.0, "smoker": -1.0}, abs=1e-6)
    context.reset(["a"], queries=[{"method": method, "target": "0", "errors": "true"}])
    if method in ("kernel_shap", "integrated_gradients"):
        (answer,) = handler.explain([{"body": body}], context)
        assert answer["feature_errors"] == pytest.approx({"colour": 0, "smoker": 0}, abs=1e-5)
    if method != "integrated_gradients":
        assert answer["attributions"] == pytest.approx([1.0, 1.0, -1.0], abs=1e-6)
    with pytest.raises(BadInput, match='colour is "blue"; expected one of red, green'):
        handler.preprocess([{"body": {**body, "colour": "blue"}}])


@pytest.mark.parametrize("method", ["kernel_shap", "feature_ablation", "saliency"])
def test_features_of_a_group_are_one(initialized: Initialized, method: str) -> None:
    handler, context = initialized(PLACES)
    context.reset(["a"], queries=[{"method": method, "target": "0"}])
    (answer,) = handler.explain([{"body": [3, 50, 1]}], context)
    slopes = method == "saliency"
    expected = {"place": 1 + 1, "age": 2} if slopes else {"place": 3 - 1, "age": 2 * 1.0}
    assert answer["features"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("features", "means"),
    [
        (FEATURES, "the average row, but 0 for smoker"),
        ([*FEATURES[:2], {"name": "b", "mean": 0.0}], "the average row"),
        ([*CATEGORIES[:1], {"name": "b", "mean": 1.0}], "the average row, without a category"),
        ([{"name": each} for each in "abc"], "0 for every number"),
        ([{"name": each, "std": 2.0} for each in "abc"], "0 for every number"),
    ],
)
def test_zeros_of_the_model_are_named_as_what_they_are(
    initialized: Initialized, features: Any, means: str
) -> None:
    handler, context = initialized(features)
    row = [0.0 if "one_hot" not in each and "values" not in each else "red" for each in features]
    row = ["yes" if "values" in each else value for each, value in zip(features, row, strict=True)]
    (answer,) = handler.explain([{"body": row}], context)
    assert (answer["baseline"], answer["baseline_means"]) == ("zero", means)


@pytest.mark.parametrize("baseline", ["black", "noise", "pad"])
def test_baseline_of_pictures_is_refused(initialized: Initialized, baseline: str) -> None:
    handler, context = initialized()
    context.reset(["a"], queries=[{"baseline": baseline}])
    with pytest.raises(BadInput, match="expected mean, zero or file:NAME for a table"):
        handler.explain([{"body": ROW}], context)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (None, "the archive holds no features.json"),
        (FEATURES[:2], r"names 2 features; expected a model of one float input \[batch, 2\]"),
        ([*FEATURES[:2], FEATURES[0]], "names age twice"),
        ([*FEATURES[:2], {"mean": 1}], r"features\[2\] is .* expected an object with a \"name\""),
        ([*FEATURES[:2], {"name": "b", "scale": 1}], "has scale; expected some of name, mean"),
        ([*FEATURES[:2], {"name": "b", "std": 0}], "expected finite numbers, and std above 0"),
        ({"age": 1}, r"features\[0\] is 'age'; expected an object"),
        ([{"name": "a", "one_hot": ["x"]}], "expected two different texts or more"),
        ([{"name": "a", "one_hot": ["x", "x"]}], "expected two different texts or more"),
        ([{"name": "a", "one_hot": ["x", "y"], "mean": 1}], "has one_hot and mean"),
        ([{"name": "a", "one_hot": ["x", "y"]}], r"names 1 features; expected .* \[batch, 2\]"),
        ([*FEATURES[:2], {"name": "b", "group": 3}], '"group": 3; expected a name'),
        ([*FEATURES[:2], {"name": "b", "group": "age"}], "has age as a feature and as a group"),
        (7, r'cannot be read .* expected \{"features": \[\{"name"'),
    ],
)
def test_unusable_features_are_refused(
    initialized: Initialized, features: Any, message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        initialized(features)


def test_an_answer_has_the_values_that_were_sent(initialized: Initialized) -> None:
    handler, context = initialized()
    (answer,) = handler.explain([{"body": list(ROW.values())}], context)
    assert answer["values"] == ROW


def test_a_row_is_drawn_as_a_way_from_the_baseline(initialized: Initialized) -> None:
    evil = json.loads(json.dumps(FEATURES).replace('"age"', '"<script>alert(1)</script>"'))
    handler, context = initialized(evil, labels={"0": "<i>buys</i>", "1": "leaves"})
    row = [50, 5000.0, "yes"]
    context.reset(["a"], queries=[{"format": "html", "n_steps": "3"}])
    (page,) = handler.explain([{"body": row}], context)
    assert context.get_response_content_type(0) == "text/html; charset=utf-8"
    assert "default-src 'none'" in context.get_response_headers(0)["content-security-policy"]
    text = page.decode()
    assert "<script>alert" not in text and "<i>buys" not in text
    for said in (
        "Why “&lt;i&gt;buys&lt;/i&gt;”?",
        "Why “leaves”?",
        "logit from 0 (baseline zero: the average row, but 0 for smoker) to 4: +5 for, −1 against",
        "income <b>5000.0</b>",
        "no feature changes this output",
    ):
        assert said in text, said
    places = [text.index(each) for each in ("income <b>", "alert(1)", "smoker <b>")]
    assert places == sorted(places), "the largest first"
    context.reset(["a"], queries=[{"format": "png"}])
    (png,) = handler.explain([{"body": row}], context)
    assert png.startswith(b"\x89PNG")


def test_a_page_shows_the_runner_up_of_classes_where_nothing_is_asked_for(
    initialized: Initialized,
) -> None:
    def titles(handler: TabularHandler, context: Context, **query: str) -> int:
        context.reset(["a"], queries=[{"format": "html", **query}])
        (page,) = handler.explain([{"body": ROW}], context)
        return int(page.decode().count("<h2>"))

    assert titles(*initialized()) == 1, "numbers that exclude nothing"
    labelled = initialized(labels={"0": "buys", "1": "leaves"})
    assert titles(*labelled) == 2
    assert titles(*labelled, target="predicted") == 1
    assert titles(*labelled, target="0", against="1") == 1


def test_shares_are_of_all_that_any_feature_did(initialized: Initialized) -> None:
    """Of 1, 4 and −1 each feature has its size's share; a row of means has no reasons."""
    handler, context = initialized(labels={"0": "buys", "1": "leaves"})
    context.reset(["a", "b"])
    mean = {"age": 40, "income": 3000, "smoker": "no"}
    first, second = handler.shares([{"body": ROW}, {"body": mean}], context)
    assert first["class"] == "buys"
    assert first["shares"] == pytest.approx(
        {"age": 1 / 6, "income": 4 / 6, "smoker": 1 / 6}, abs=1e-6
    )
    assert second["shares"] == {}
    handler.reference = Reference(1, {"income": 0.5, "other": 0.5})
    (folded, _) = handler.shares([{"body": ROW}, {"body": mean}], context)
    assert folded["shares"] == pytest.approx({"income": 4 / 6, "other": 2 / 6}, abs=1e-6)
