from pathlib import Path

import pytest

from modelyard.archiver.errors import BadName
from modelyard.plugins.torchserve.policy import (
    check_torchserve_name,
    find_as_torchserve,
    name_of_file,
)
from modelyard.serve.control.store import file_stem


@pytest.mark.parametrize(
    ("file", "name"),
    [("noop.tar.gz", "noop_tar_gz"), ("a-b.mar", "a_b"), ("_x.mar", "_x"), ("m.model", "m")],
)
def test_torchserve_names_an_archive_by_its_file(file: str, name: str) -> None:
    assert name_of_file(file) == name


@pytest.mark.parametrize("name", ["a b", "é", "x:y", "digits", "..."])
def test_torchserves_names_are_freer_and_make_plain_file_names(name: str) -> None:
    check_torchserve_name(name)
    assert not set(file_stem(name)) & set("/\\ %\0") - {"%"}


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "a/b", "a\\b", "a\0", "a\n", "x" * 201, "é" * 40]
)
def test_a_name_that_is_no_part_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(BadName, match="model name"):
        check_torchserve_name(name)


@pytest.mark.parametrize(
    "location", ["a.mar", "/anywhere/a.mar", "C:/a.mar", "sub/a.mar", "a.mar/"]
)
def test_of_a_path_torchserve_takes_the_last_part(tmp_path: Path, location: str) -> None:
    (tmp_path / "a.mar").write_bytes(b"x")
    assert find_as_torchserve(tmp_path, location) == tmp_path / "a.mar"
