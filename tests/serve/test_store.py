from pathlib import Path

import pytest

from modelyard.archiver.errors import BadName
from modelyard.serve.control.store import (
    find_archive,
    list_archives,
    parse_model_option,
)
from modelyard.serve.errors import BadRequest, FileNotInStore


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    for name in ("digits.mar", "cats.mar", ".hidden.mar", "notes.txt"):
        (store / name).write_bytes(b"")
    (store / "folder.mar").mkdir()
    (tmp_path / "outside.mar").write_bytes(b"")
    return store


@pytest.mark.parametrize("location", ["digits.mar", "digits"])
def test_an_archive_is_found_with_and_without_its_suffix(store: Path, location: str) -> None:
    assert find_archive(store, location) == store / "digits.mar"


@pytest.mark.parametrize(
    "location",
    [
        "",
        ".",
        "..",
        "../outside.mar",
        "../outside",
        "..\\outside.mar",
        "..%2foutside.mar",
        "%2e%2e/outside.mar",
        "%252e%252e%252foutside.mar",
        "x/../digits.mar",
        "./digits.mar",
        ";x/../digits.mar",
        "/etc/passwd",
        "//host/share.mar",
        "\\\\host\\share.mar",
        "C:\\digits.mar",
        "C:digits.mar",
        "file:///etc/passwd",
        "file://localhost/etc/passwd",
        "http://127.0.0.1/digits.mar",
        "https://example.org/digits.mar",
        "s3://bucket/digits.mar",
        "digits.mar\0.txt",
    ],
)
def test_anything_but_a_plain_file_name_is_refused(store: Path, location: str) -> None:
    with pytest.raises(BadRequest, match="expected the name of a file in the model store"):
        find_archive(store, location)


@pytest.mark.parametrize("location", ["dogs", "dogs.mar", "folder.mar", "DIGITS"])
def test_a_missing_archive_is_named_with_what_is_there(store: Path, location: str) -> None:
    with pytest.raises(FileNotInStore) as caught:
        find_archive(store, location)
    assert location in str(caught.value)
    assert "cats.mar, digits.mar" in str(caught.value)


def test_a_store_that_is_not_there_holds_no_archives(tmp_path: Path) -> None:
    assert list_archives(tmp_path / "nowhere") == []
    with pytest.raises(FileNotInStore, match="is not a folder"):
        find_archive(tmp_path / "nowhere", "digits")


def test_the_archives_of_a_store_are_listed_in_order(store: Path) -> None:
    assert list_archives(store) == ["cats.mar", "digits.mar"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("digits", (None, "digits")),
        ("digits.mar", (None, "digits.mar")),
        ("numbers=digits.mar", ("numbers", "digits.mar")),
        ("a=b=c.mar", ("a", "b=c.mar")),
    ],
)
def test_a_model_option_is_a_file_or_a_name_and_a_file(
    option: str, expected: tuple[str | None, str]
) -> None:
    assert parse_model_option(option) == expected


@pytest.mark.parametrize("option", ["=digits.mar", "../x=digits.mar", "a b=digits.mar"])
def test_a_model_option_with_a_bad_name_is_refused(option: str) -> None:
    with pytest.raises(BadName):
        parse_model_option(option)
