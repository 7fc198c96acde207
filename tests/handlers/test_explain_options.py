import json

import pytest

from modelyard.base.explain_options import EXPLAIN_OPTIONS
from modelyard.handlers.errors import BadInput
from modelyard.handlers.explain.attribute.methods import METHODS
from modelyard.handlers.explain.request.options import (
    MEDIA_TYPES,
    ExplainOptions,
    gather_options,
    parse_options,
)
from tests.shared import FURTHER


def test_no_parameters_ask_for_the_defaults() -> None:
    assert parse_options({}) == ExplainOptions()


@FURTHER
def test_every_parameter_is_read() -> None:
    query = {
        "method": "integrated_gradients",
        "target": "cat",
        "against": "dog",
        "output": "probability",
        "baseline": "noise",
        "tolerance": "0.5",
        "max_steps": "90",
        "seed": "7",
        "internal_batch_size": "4",
        "aggregate": "sum",
        "format": "png",
        "quality": "true",
    }
    options = parse_options(query)
    expected: dict[str, object] = {
        **query,
        **{"tolerance": 0.5, "max_steps": 90, "seed": 7, "internal_batch_size": 4, "quality": True},
    }
    assert {name: getattr(options, name) for name in query} == expected
    assert options.settings() == {"tolerance": 0.5, "max_steps": 90}


@FURTHER
def test_methods_take_their_own_options() -> None:
    query = {"method": "kernel_shap", "n_samples": "30", "seed": "1", "window": "2"}
    assert parse_options(query).settings() == {
        "n_samples": 30,
        "seed": 1,
        "tolerance": 0.05,
    }
    query = {"method": "occlusion", "window": "4", "stride": "2"}
    assert parse_options(query).settings() == {"stride": 2}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"steps": "3"}, 'unknown parameter "steps"; expected some of method, output_name, target'),
        ({"method": "magic"}, 'method is "magic"; expected one of integrated_gradients'),
        ({"baseline": "grey"}, 'baseline is "grey"; expected one of zero, black, white, mean'),
        ({"baseline": "file:"}, "expected one of zero, black"),
        ({"max_steps": "9"}, 'max_steps is "9"; expected a whole number from 10 to 7290'),
        ({"seed": "-1"}, 'seed is "-1"; expected a whole number from 0 to 4294967295'),
        ({"internal_batch_size": "0"}, "expected a whole number from 1 to 1024"),
        ({"method": "occlusion", "window": "0"}, "expected a whole number from 1 to 1024"),
        ({"method": "occlusion", "stride": "0"}, "expected a whole number from 1 to 1024"),
        pytest.param(
            {"method": "smoothgrad", "n_samples": "20001"}, "from 1 to 20000", marks=FURTHER
        ),
        pytest.param(
            {"method": "smoothgrad", "max_samples": "1"}, "from 2 to 20000", marks=FURTHER
        ),
        pytest.param(
            {"method": "smoothgrad", "noise": "0"},
            "expected a number above 0 and at most 1",
            marks=FURTHER,
        ),
        ({"output": "odds"}, 'output is "odds"; expected one of logit, probability'),
        ({"aggregate": "max"}, 'aggregate is "max"; expected one of none, sum'),
        pytest.param(
            {"quality": "1"}, 'quality is "1"; expected one of true, false', marks=FURTHER
        ),
        ({"n_steps": "9", "max_steps": "90"}, "n_steps and max_steps are given; expected one"),
        pytest.param(
            {"method": "kernel_shap", "n_samples": "90", "max_samples": "90"},
            "n_samples and max_samples are given; expected one",
            marks=FURTHER,
        ),
        ({"seed": "3"}, "seed does not apply: nothing is random in integrated_gradients"),
        ({"output_name": "a,,b"}, 'output_name is "a,,b"; expected the name of an output'),
        ({"output_name": "a,a"}, "different ones with commas between"),
        ({"region": "1,2,3"}, 'region is "1,2,3"; expected predicted, a span START,END, a box'),
        ({"region": "4,4"}, "expected each end after its start"),
        ({"region": "0,5,9,5"}, "expected each end after its start"),
        ({"region": "-1,5"}, "expected predicted, a span"),
        ({"region": '{"size": [2, 2], "counts": [3]}'}, "counts add up to 3; expected 2 × 2"),
        ({"region": '{"size": [2, 2]}'}, "or a mask"),
        ({"region": '{"size": [99999, 99999], "counts": [9999800001]}'}, "at most"),
        ({"region": "{"}, "region is not JSON"),
        ({"n_steps": "0"}, 'n_steps is "0"; expected a whole number from 1 to 1000'),
        ({"n_steps": "1001"}, "from 1 to 1000"),
        ({"n_steps": "ten"}, "from 1 to 1000"),
        ({"n_steps": "٣"}, "from 1 to 1000"),
        ({"tolerance": "0"}, 'tolerance is "0"; expected a number above 0 and at most 1'),
        ({"tolerance": "1.01"}, "at most 1"),
        ({"tolerance": "nan"}, "at most 1"),
        ({"tolerance": "1%"}, "at most 1"),
        ({"format": "svg"}, 'format is "svg"; expected one of json, png'),
        ({"format": "html"}, 'format is "html"; expected one of json, png'),
    ],
    ids=lambda value: (
        "&".join("=".join(pair) for pair in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_unusable_parameter_is_named(query: dict[str, str], message: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_options(query)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("accept", "format"),
    [
        ("image/png", "png"),
        ("image/*", "png"),
        ("image/png, */*;q=0.8", "png"),
        ("IMAGE/PNG;q=0.9, application/json;q=0.5", "png"),
        ("image/png;q=0.5, application/json", "json"),
        ("*/*", "json"),
        ("text/html, image/apng, */*;q=0.8", "json"),
        ("application/*", "json"),
        ("image/png;q=0", "json"),
        ("image/png;q=high", "json"),
        ("", "json"),
    ],
)
def test_accept_header_chooses_the_format(accept: str, format: str) -> None:
    assert parse_options({}, accept).format == format


def test_format_parameter_decides_over_the_accept_header() -> None:
    assert parse_options({"format": "json"}, "image/png").format == "json"


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("saliency", "n_steps", "10"),
        ("saliency", "baseline", "black"),
        ("smoothgrad", "max_steps", "90"),
        ("saliency", "tolerance", "0.1"),
        ("occlusion", "errors", "true"),
        ("integrated_gradients", "n_samples", "10"),
        ("integrated_gradients", "layer", "0"),
        ("feature_ablation", "stride", "1"),
        ("kernel_shap", "noise", "0.1"),
    ],
)
def test_option_that_a_method_does_not_take_is_refused(method: str, name: str, value: str) -> None:
    with pytest.raises(BadInput, match=f"{name} does not apply to {method}; it takes .*method"):
        parse_options({"method": method, name: value})


def test_what_can_be_chosen_is_what_there_is() -> None:
    assert EXPLAIN_OPTIONS["method"].choices == tuple(METHODS)
    assert EXPLAIN_OPTIONS["format"].choices == tuple(MEDIA_TYPES)


@pytest.mark.parametrize("method", METHODS)
def test_method_is_known(method: str) -> None:
    assert parse_options({"method": method}).method == method


@pytest.mark.parametrize(
    ("accept", "format"),
    [("text/html, */*;q=0.5", "html"), ("*/*", "json"), ("image/png", "json"), ("", "json")],
)
def test_format_is_one_that_the_handler_has(accept: str, format: str) -> None:
    assert parse_options({}, accept, ("json", "html")).format == format


@pytest.mark.parametrize(
    "row",
    [
        {"body": {"data": [1, 2], "explain": {"target": 3, "tolerance": 0.5, "quality": True}}},
        {
            "data": [1, 2],
            "explain": bytearray(b'{"target": "3", "tolerance": 0.5, "quality": true}'),
        },
    ],
    ids=["JSON body", "multipart"],
)
def test_options_come_in_the_body_too(row: dict[str, object]) -> None:
    given, rest = gather_options({"method": "saliency"}, row)
    assert given == {"method": "saliency", "target": "3", "tolerance": "0.5", "quality": "true"}
    assert rest.get("data", rest.get("body")) == [1, 2]


def test_position_may_be_a_list() -> None:
    given, _ = gather_options({}, {"body": b"x", "explain": b'{"target": [3, 7]}'})
    assert given == {"target": "3,7"}


def test_mask_and_names_come_in_the_body_as_json() -> None:
    mask = {"size": [2, 3], "counts": [2, 3, 1]}
    body = json.dumps({"region": mask, "output_name": ["boxes", "scores"]}).encode()
    given, _ = gather_options({}, {"body": b"x", "explain": body})
    options = parse_options(given)
    assert options.output_name == ("boxes", "scores")
    assert options.region is not None
    # Column by column: two outside, three inside, one outside.
    assert options.region.inside((2, 3)).tolist() == [[False, True, True], [False, True, False]]


def test_body_without_options_is_left_alone() -> None:
    row = {"body": {"left": [1], "right": [2]}}
    assert gather_options({}, row) == ({}, row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"explain": b"{"}, 'the part "explain" is not JSON'),
        (
            {"explain": b'{"target": 3, "target": 4}'},
            'the part "explain" is refused: the key "target" is given twice',
        ),
        ({"explain": b'{"n_steps": NaN}'}, 'the part "explain" is refused: NaN is not a JSON'),
        ({"explain": b"[]"}, 'the part "explain" is not a JSON object'),
        ({"body": {"explain": {}, "left": 1, "data": 2}}, 'expected one entry "data"'),
        ({"explain": b'{"target": null}'}, "target is null; expected a text"),
        ({"explain": b'{"n_steps": 3}'}, "n_steps is given in the query and in the body"),
    ],
)
def test_unusable_part_is_refused(row: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput) as error:
        gather_options({"n_steps": "5"}, row)
    assert message in str(error.value)
