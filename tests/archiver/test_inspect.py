from pathlib import Path

import pytest

from archiver import write_archive
from archiver.errors import ArchiveNotFound
from archiver.inspect import describe, table


def test_an_archive_is_described_by_its_own_words(inputs: Path, tmp_path: Path) -> None:
    path = write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler="image_classifier",
        output_dir=tmp_path,
        examples=[f"{inputs}/7.png=7"],
    )

    found = describe(path)
    rows = list(table(found))

    assert (found["kind"], found["name"], found["version"]) == ("archive", "digits", "1.0")
    assert (found["is_sealed"], found["is_signed"], found["golden_requests"]) == (True, False, 1)
    assert found["inputs"] == ["image:float32[batch=1..8,1,8,8]"]
    assert found["outputs"] == ["logits:float32[batch=1..8,10]"]
    assert ("explained by", "digits.pt2") in rows
    assert ("artifact", "digits.onnx") in rows
    assert len([row for row in rows if row[0] == "file"]) == len(found["files"])


def test_what_is_no_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArchiveNotFound):
        describe(tmp_path / "lost.mar")
