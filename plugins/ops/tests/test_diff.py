"""`modelyard diff`: what it has to catch between two archives, and what it has to pass."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from modelyard.archiver import write_archive
from tests.serve.live import modelyard

BASE = '{"scores": [0.5, -2.0, 1e-9], "label": "cat", "id": 7}'
RANKED = '{"cat": 0.75, "dog": 0.25}'
WRONGS = {
    "a number off": '{"scores": [0.501, -2.0, 1e-9], "label": "cat", "id": 7}',
    "a small number off": '{"scores": [0.5, -2.0, 2e-9], "label": "cat", "id": 7}',
    "a sign": '{"scores": [0.5, 2.0, 1e-9], "label": "cat", "id": 7}',
    "not a number": '{"scores": [NaN, -2.0, 1e-9], "label": "cat", "id": 7}',
    "another label": '{"scores": [0.5, -2.0, 1e-9], "label": "dog", "id": 7}',
    "another id": '{"scores": [0.5, -2.0, 1e-9], "label": "cat", "id": 8}',
    "a missing number": '{"scores": [0.5, -2.0], "label": "cat", "id": 7}',
    "a missing key": '{"scores": [0.5, -2.0, 1e-9], "label": "cat"}',
    "swapped places": '{"scores": [-2.0, 0.5, 1e-9], "label": "cat", "id": 7}',
    "nothing": "null",
    "an error": "raise",
}
RIGHTS = {
    "the same": BASE,
    "another order of keys": '{"id": 7, "label": "cat", "scores": [0.5, -2.0, 1e-9]}',
    "the last digits": '{"scores": [0.50001, -2.00001, 1.0001e-9], "label": "cat", "id": 7.0}',
}
TIE, OTHER_TIE = '{"cat": 0.5000001, "dog": 0.4999999}', '{"dog": 0.5000001, "cat": 0.4999999}'
RANKS = {"ranked otherwise": '{"dog": 0.7501, "cat": 0.2499}', "ranked alike": RANKED}
HANDLER = """
import json
ANSWERS = {answers}

def handle(data, context):
    if data is None:
        return None
    answer = ANSWERS[data[0]["body"]]
    if answer == "raise":
        raise ValueError("no answer")
    return [json.loads(answer)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two archives whose answers to the name of a change are as it was, and as it is."""
    folder = tmp_path_factory.mktemp("diff")
    changes = {**WRONGS, **RIGHTS, **RANKS, "both fail": "raise", "tie": OTHER_TIE}
    before = {name: RANKED if name in RANKS else BASE for name in changes} | {"tie": TIE}
    for name, answers in (("old", before | {"both fail": "raise"}), ("new", changes)):
        handler = folder / f"{name}.py"
        handler.write_text(HANDLER.replace("{answers}", repr(answers)))
        write_archive(name, handler=str(handler), output_dir=folder, dry_run=False)
    for name in changes:
        (folder / f"{name}.txt").write_text(name)
    return folder


def test_wrongs_are_caught_and_harmless_changes_pass(folder: Path) -> None:
    requests = [f"--request={file}" for file in sorted(folder.glob("*.txt"))]
    ran = modelyard("diff", folder / "old.mar", folder / "new.mar", *requests, "--json")
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    differing = {
        each["request"].removesuffix(".txt") for each in found["requests"] if each["differs"]
    }
    wrong = {*WRONGS, "ranked otherwise", "tie"}
    assert (wrong - differing, differing - wrong) == (set(), set()), "misses, false alarms"
    relabelled = [each["request"] for each in found["requests"] if each["relabelled"]]
    assert relabelled == ["ranked otherwise.txt", "tie.txt"]
    assert found["summary"].endswith("; 2 with another first label; 1 refused by both")


def test_a_table_fits_a_comment_and_an_archive_agrees_with_itself(folder: Path) -> None:
    old, request = folder / "old.mar", f"--request={folder / 'the same.txt'}"
    ran = modelyard("diff", old, old, request, request, "--markdown")
    assert ran.returncode == 0, ran.stderr
    head, rule, row, _, said = ran.stdout.splitlines()
    assert (head, rule) == (
        "| REQUEST | old.mar 1.0 | old.mar 1.0 | APART | WHERE |", "| --- | --- | --- | --- | --- |"
    )  # fmt: skip
    assert re.match(r"\| the same\.txt \| \{.* \| 0 \|  \|$", row)
    assert said.startswith("1 of 1 answers agree within 0.001; the largest difference is 0; none")


@pytest.mark.nightly
def test_what_cannot_be_compared_is_said(folder: Path, tmp_path: Path) -> None:
    old, new, absent = folder / "old.mar", folder / "new.mar", tmp_path / "absent.txt"
    for arguments, code, said in (
        ((old, new), 3, "neither archive holds a golden request; give --request FILE"),
        ((old, new, f"--request={absent}"), 1, "absent.txt: No such file or directory"),
        ((old, new, f"--request={folder / 'both fail.txt'}"), 3, "no request was answered"),
        ((old, absent), 1, "there is no archive"),
        ((old, new, "--tolerance=-1"), 2, "-1 is below 0"),
        ((old, new, "--device=tpu"), 2, "tpu is not a device"),
    ):
        ran = modelyard("diff", *arguments)
        assert (ran.returncode, said in " ".join(ran.stderr.split())) == (code, True), ran.stderr
