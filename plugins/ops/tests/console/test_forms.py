"""What can be entered for a model, and the body that it becomes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelyard.plugins.ops.console.forms import Entry, Form, form_of, write_body
from modelyard.serve.control.registry import ModelVersion
from modelyard.serve.errors import BadRequest


def form(handler: str, inputs: Any = None, features: object = None) -> Form:
    seal = {} if inputs is None else {
        "signature": {"inputs": inputs, "outputs": [], "dims": {"batch": {"min": 1, "max": 8}}}
    }  # fmt: skip
    manifest = {"model": {"handler": handler}, "modelyard": seal}
    return form_of(cast("ModelVersion", SimpleNamespace(manifest=manifest)), features)


def test_a_picture_is_chosen_from_the_disk_or_written_as_json() -> None:
    found = form("image_classifier")
    assert (found.ways, found.accept) == (["file", "json"], "image/*")


def test_a_text_is_typed() -> None:
    found = form("text")
    assert found.ways == ["entries", "json"]
    assert write_body(found.entries, {"entry.": "a “fine” film"}, {}) == '"a “fine” film"'.encode()


def test_values_by_name_have_a_field_each() -> None:
    found = form("question_answering")
    assert [entry.name for entry in found.entries] == ["question", "context"]
    body = write_body(found.entries, {"entry.question": "Who?", "entry.context": "Anna."}, {})
    assert json.loads(body) == {"question": "Who?", "context": "Anna."}


def test_what_is_optional_may_stay_empty() -> None:
    entries = form("generate").entries
    body = write_body(entries, {"entry.prompt": "Once", "entry.max_new_tokens": "20"}, {})
    assert json.loads(body) == {"prompt": "Once", "max_new_tokens": 20}
    with pytest.raises(BadRequest, match="prompt: nothing is entered"):
        write_body(entries, {}, {})


def test_a_picture_among_other_values_is_a_file_that_travels_as_base64() -> None:
    entries = form("image_text").entries
    assert [entry.kind for entry in entries] == ["file", "lines"]
    body = write_body(entries, {"entry.texts": "a cat\r\na dog"}, {"entry.image": b"\x89PNG"})
    assert json.loads(body) == {"image": "iVBORw==", "texts": ["a cat", "a dog"]}


FEATURES = {"features": [{"name": "age", "mean": 41.5}, {"name": "smoker", "values": {"no": 0}},
                         {"name": "colour", "one_hot": ["red", "blue"]}]}  # fmt: skip


def test_a_table_has_its_features() -> None:
    found = form("tabular", features=FEATURES)
    assert [(entry.name, entry.kind, entry.choices) for entry in found.entries] == [
        ("age", "number", ()), ("smoker", "choice", ("no",)), ("colour", "choice", ("red", "blue")),
    ]  # fmt: skip
    said = {"entry.age": "-41.5", "entry.smoker": "no", "entry.colour": "blue"}
    body = json.loads(write_body(found.entries, said, {}))
    assert body == {"age": -41.5, "smoker": "no", "colour": "blue"}
    assert json.loads(found.example) == {"age": 0, "smoker": "no", "colour": "red"}


@pytest.mark.parametrize("text", ["many", "nan", "inf", "1e999", "0x10", " "])
def test_what_is_not_a_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadRequest, match="age: expected a number"):
        write_body([Entry("age", "number")], {"entry.age": text}, {})


@pytest.mark.parametrize(
    "features",
    [None, [], 3, {"features": 3}, {"features": [3]}, {"features": [{"name": 3}]},
     {"features": [{"name": "a", "values": 3}]}],
    ids=str,
)  # fmt: skip
def test_features_of_any_shape_make_a_form(features: object) -> None:
    assert "json" in form("tabular", features=features).ways


def test_rows_of_numbers_begin_with_zeros_of_the_signature() -> None:
    row = {"name": "row", "dtype": "float32", "shape": ["batch", 2, 2]}
    assert json.loads(form("base_handler", [row]).example) == [[0.0, 0.0], [0.0, 0.0]]
    mask = {"name": "mask", "dtype": "bool", "shape": ["batch", 1]}
    both = json.loads(form("base_handler", [row, mask]).example)
    assert both == {"row": [[0.0, 0.0], [0.0, 0.0]], "mask": [False]}


def test_a_row_that_is_too_long_is_not_made_up() -> None:
    picture = {"name": "image", "dtype": "float32", "shape": ["batch", 3, 224, 224]}
    assert form("base_handler", [picture]).example == ""


def test_more_entries_than_a_page_takes_are_left_to_json() -> None:
    many = {"features": [{"name": f"feature {at}"} for at in range(101)]}
    assert form("tabular", features=many).ways == ["json"]


def test_a_handler_of_an_authors_own_takes_files_and_json() -> None:
    assert form("handler.py:Own").ways == ["file", "json"]
