"""`index_to_name.json`, as people write it by mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver.labels import count_problem, doubled_labels, parse_labels


@pytest.mark.parametrize(
    "content",
    [
        {"0": "cat", "1": "dog"},
        {"0": ["n02123045", "cat"], "1": ["n02084071", "dog"]},
        {"object_type_names": ["cat", "dog"]},
    ],
    ids=["names", "lists", "object_type_names"],
)
def test_torchserves_forms_are_read(content: Any) -> None:
    assert parse_labels(json.dumps(content).encode()) == {"0": "cat", "1": "dog"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"cat": 0, "dog": 1}',
            r'the wrong way round.*expected \{"0": "cat", "1": "dog"\}; write',
        ),
        ('{"cat": "0"}', "the wrong way round"),
        ('["cat", "dog"]', 'holds a list; expected indices from "0"'),
        ('{"0": "cat", "0": "dog"}', 'the key "0" is given twice; expected'),
        ('{"0": null}', 'names output "0" null; expected'),
        ('{"00": "cat"}', 'has the key "00"; expected'),
        ('{"cat": "Cat"}', 'has the key "cat"; expected'),
        ('{"0": "cat"', r"not JSON: .*char 11\); expected"),
        ("{}", "holds nothing; expected"),
    ],
)
def test_what_is_wrong_and_expected_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^index_to_name.json.*{said}"):
        parse_labels(text.encode())


def test_the_command_that_turns_labels_round_does(tmp_path: Path) -> None:
    file = tmp_path / "index_to_name.json"
    file.write_text(json.dumps({f"name {at}": at for at in range(11)}))
    with pytest.raises(ValueError, match="turn it with") as caught:
        parse_labels(file.read_bytes())
    command = str(caught.value).partition("turn it with python -c '")[2].rstrip("'")
    subprocess.run([sys.executable, "-c", command], cwd=tmp_path, check=True)
    assert parse_labels(file.read_bytes()) == {str(at): f"name {at}" for at in range(11)}


def test_a_name_of_two_outputs_is_found() -> None:
    said = doubled_labels(b'{"0": "cat", "1": "dog", "2": "cat"}')
    assert said is not None
    assert 'outputs 0 and 2 both "cat"' in said and '"cat (2)"' in said


def test_imagenets_two_cranes_stay() -> None:
    assert doubled_labels(b'{"134": ["n02012849", "crane"], "517": ["n03126707", "crane"]}') is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (range(3), None),
        (range(2), "names 2 of the model's 3 outputs; 2 has none; name each of 0 to 2, or"),
        (
            range(1, 4),
            "0 has none; the model does not have 3; name each of 0 to 2, counting from 0",
        ),
        (range(4), "the model does not have 3; name each of 0 to 2, or"),
    ],
)
def test_labels_are_as_many_as_the_outputs(names: range, said: str | None) -> None:
    problem = count_problem({str(at): f"name {at}" for at in names}, 3)
    assert (problem is None) if said is None else (problem is not None and said in problem)
