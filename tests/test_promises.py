"""docs/promises.md, the page of what version 1 promises, beside the code and the last release."""

from __future__ import annotations

import re
import subprocess

import pytest

from modelyard.base.plugins import registered
from scripts import promises
from tests.shared import ROOT

PAGE = ROOT / "docs" / "promises.md"


def test_the_page_is_what_the_code_has() -> None:
    if registered("commands"):
        assert PAGE.read_text() == promises.write(), (
            "python -P scripts/promises.py > docs/promises.md"
        )
    # Without plug-ins the code has less: nothing beside the page.
    page = promises.read(PAGE.read_text())
    assert not promises.broken(promises.promised(), page)
    for heading, line in (
        ("Commands and options", "modelyard serve start --require-proven"),
        ("Settings", "max_request_bytes"),
        ("HTTP", "POST /predictions/{model}"),
        ("Archives", "MAR-INF/MANIFEST.json: modelyard.golden[].expected"),
        ("Python", "modelyard.archive(version)"),
        ("Python", "modelyard_client.Client.infer"),
    ):
        assert line in page[heading]


@pytest.mark.parametrize("heading", promises.read(PAGE.read_text()))
def test_a_line_that_goes_is_told_and_a_new_one_is_none(heading: str) -> None:
    before = promises.read(PAGE.read_text())
    line, *others = before[heading]
    assert promises.broken(before, before | {heading: others}) == [f"{heading}: {line}"]
    assert promises.broken(before, {k: v for k, v in before.items() if k != heading})
    assert not promises.broken(before, before | {heading: [*before[heading], "new"]})


def test_what_the_last_release_promised_is_there() -> None:
    words = ["git", "-C", str(ROOT), "tag", "--merged", "HEAD", "--sort=-version:refname"]
    tags = subprocess.run(words, capture_output=True, text=True).stdout.split()
    version = re.search(r'^version = "(\d+)\.', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    same = [tag for tag in tags if re.fullmatch(rf"v{version[1]}\.\d+\.\d+", tag)]
    if version[1] == "0" or not same:
        pytest.skip("nothing is promised below 1, nor by a major version that is not out yet")
    words = ["git", "-C", str(ROOT), "show", f"{same[0]}:docs/promises.md"]
    page = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert not promises.broken(promises.read(page), promises.promised())
