"""Label files altered: what `modelyard archive` refuses, and what `verify` and a worker see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.errors import ArchiveError
from modelyard.archiver.verify import verify_archive
from tests.adversary.gallery import Row, judge
from tests.adversary.test_archives import Files, seal, without_goldens

LABELS = "index_to_name.json"
NAMES = {str(at): str(at) for at in range(10)}


def shifted(by: int) -> dict[str, str]:
    return {str(at): NAMES[str((at + by) % 10)] for at in range(10)}


def named(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {**NAMES, **changes}


WRONG: dict[str, Any] = {
    "0 and 1 exchanged": named({"0": "1", "1": "0"}),
    "7 and 3 exchanged": named({"3": "7", "7": "3"}),
    "all turned": {str(at): str(9 - at) for at in range(10)},
    "off by one": shifted(1),
    "counted from 1": {str(at + 1): str(at) for at in range(10)},
    "one missing": {key: name for key, name in NAMES.items() if key != "4"},
    "the last missing": {key: name for key, name in NAMES.items() if key != "9"},
    "one too many": named({"10": "10"}),
    "one twice": named({"8": "3"}),
    "a name of another letter": named({"7": "\uff17"}),
    "a name with a space": named({"7": "7 "}),
    "a name that cannot be seen": named({"7": "7\u200b"}),
    "null": named({"7": None}),
    "a list of nothing": named({"7": []}),
    "true": named({"7": True}),
    "keys with zeros": {f"0{key}": name for key, name in NAMES.items()},
    "the wrong way round": {f"class {name}": int(key) for key, name in NAMES.items()},
    "a list": list(NAMES.values()),
    "nothing": {},
    "a list in another order": {"object_type_names": [*map(str, range(1, 10)), "0"]},
}
HARMLESS: dict[str, Any] = {
    "as it is": NAMES,
    "in another order": dict(reversed(NAMES.items())),
    "with ids": {key: [f"n0{key}", name] for key, name in NAMES.items()},
    "as a list": {"object_type_names": list(NAMES.values())},
}
PARTS = len(HARMLESS)
"""A harmless row in each, and some wrong ones: a gallery has both."""


def caught(files: Files, labels: Any, folder: Path) -> list[str]:
    """Return what `verify` names, which loads an archive as a worker does."""
    changed = {**files, LABELS: json.dumps(labels).encode()}
    try:
        with open_archive(seal(changed, folder / "x.mar")) as archive:
            return [each.problem for each in verify_archive(archive) if each.problem]
    except ArchiveError as error:
        return [str(error)]


def tried(files: Files, folder: Path, part: int) -> list[Row]:
    return [
        Row("labels", change, is_wrong, bool(caught(files, labels, folder)))
        for is_wrong, changes in ((True, WRONG), (False, HARMLESS))
        for change, labels in list(changes.items())[part::PARTS]
    ]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_altered_label_file_is_seen(digits: Files, tmp_path: Path, part: int) -> None:
    judge(tried(digits, tmp_path, part))


@pytest.mark.nightly
def test_nothing_but_a_golden_request_knows_which_name_is_whose(
    digits: Files, tmp_path: Path
) -> None:
    """A twin has the numbers, and numbers have no names: docs/archive.md says so."""
    files = dict(digits)
    without_goldens(files)
    names = ("7 and 3 exchanged", "off by one")
    rows = [Row("labels", name, True, bool(caught(files, WRONG[name], tmp_path))) for name in names]
    rows.append(Row("labels", "as it is", False, bool(caught(files, NAMES, tmp_path))))
    judge(rows, frozenset(f"labels: {name}" for name in names))
