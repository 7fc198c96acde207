import pytest

from modelyard.archiver.errors import BadName
from modelyard.archiver.untrusted.names import (
    check_name,
    check_version,
    collisions,
    file_name_problem,
)


@pytest.mark.parametrize("name", ["digits", "a", "0", "a.b_c-1", "A" * 128])
def test_names_inside_the_rule_pass(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", ".a", "-rf", "_a", "a/b", "a\\b", "a%2Fb", "a\0", "a b", "a\n", "é", "A" * 129),
        pytest.param("ａ", id="full width"),
        pytest.param("аpple", id="Cyrillic a"),
    ],
)
def test_names_outside_the_rule_are_refused(name: str) -> None:
    with pytest.raises(BadName, match=r"model name .*: expected 1 to 128 letters"):
        check_name(name)


@pytest.mark.parametrize("version", ["1.0", "1", "2024-01-01", "1.0+cpu", "v1_2", "1" * 64])
def test_versions_inside_the_rule_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["", ".1", "+1", "1/0", "1 0", "1.0\n", "1" * 65])
def test_versions_outside_the_rule_are_refused(version: str) -> None:
    with pytest.raises(BadName, match=r"model version .*: expected 1 to 64 letters"):
        check_version(version)


@pytest.mark.parametrize("name", ["a", "a/b.txt", ".hidden", "ä ö.json", "console.py", "a" * 255])
def test_ordinary_file_names_pass(name: str) -> None:
    assert file_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "the name is empty"),
        ("a\0b", "the name holds a NUL"),
        ("a\\..\\x", "the name holds a backslash"),
        ("/abs", "the name is an absolute path"),
        ("//host/x", "the name is an absolute path"),
        ("../x", 'the path holds the part ".."'),
        ("a/../../x", 'the path holds the part ".."'),
        (".", 'the path holds the part "."'),
        ("a/./b", 'the path holds the part "."'),
        ("a//b", 'the path holds the part ""'),
        ("C:x", "the path names a drive"),
        ("a\nb", "the name holds control or invisible characters"),
        ("a\u202egnp", "the name holds control or invisible characters"),
        ("a.", "a part of the path ends with a dot or a space"),
        ("a /b", "a part of the path ends with a dot or a space"),
        ("aux.txt", '"aux.txt" is a device on Windows'),
        ("x/NUL", '"NUL" is a device on Windows'),
        ("a" * 256, "a part of the path is longer than 255 bytes"),
        ("a/" * 600 + "a", "the name is longer than 1024 bytes"),
    ],
)
def test_file_names_that_leave_or_confuse_are_refused(name: str, problem: str) -> None:
    assert file_name_problem(name) == problem


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b", "c/a", "c/b"], []),
        (["c/", "c/a"], []),
        (["a", "a"], ['"a" is there twice']),
        (["A.py", "a.py"], ['"A.py" and "a.py" are one name where case does not count']),
        (["ß", "SS"], ['"\\xdf" and "SS" are one name where case does not count']),
        (["é", "e\u0301"], ['"\\xe9" and "e\\u0301" are one name where case does not count']),
        (["a", "a/b"], ['"a" is a file, and a folder in "a/b"']),
        (["a/b", "A"], ['"A" is a file, and a folder in "a/b"']),
    ],
)
def test_names_that_meet_in_one_file_are_found(names: list[str], expected: list[str]) -> None:
    assert list(collisions(names)) == expected
