"""What Java's description of .properties says, line by line."""

import pytest

from modelyard.plugins.torchserve.properties import (
    fill_variables,
    format_properties,
    parse_properties,
)
from modelyard.serve.errors import StartError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": "1"}),
        ("a:1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("a\t=  1", {"a": "1"}),
        ("  a \t : 1 ", {"a": "1 "}),
        ("a==1", {"a": "=1"}),
        ("a = = 1", {"a": "= 1"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("=1", {"": "1"}),
        ("# c\n! d\n  # e\n\n \t\na=#1", {"a": "#1"}),
        ("a=1\na=2", {"a": "2"}),
        ("A=1\na=2", {"A": "1", "a": "2"}),
        ("a=1,\\\n   2,\\\n\t3\nb=4", {"a": "1,2,3", "b": "4"}),
        ("a=1\\\n#b=2", {"a": "1#b=2"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\\n", {"a": "1"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("a\\ b\\=c\\:d=e", {"a b=c:d": "e"}),
        ("a=http\\://h\\:1", {"a": "http://h:1"}),
        (r"a=\t\n\r\f\"\q", {"a": '\t\n\r\f"q'}),
        (r"a=\u00e9\uD83D\uDE00", {"a": "é😀"}),
        (r"a=\\u00e9", {"a": r"\u00e9"}),
        ("load_models = a.mar , b=b.mar", {"load_models": "a.mar , b=b.mar"}),
    ],
)
def test_text_is_read_as_java_reads_it(text: str, expected: dict[str, str]) -> None:
    assert parse_properties(text) == expected


def test_a_broken_unicode_escape_is_refused() -> None:
    with pytest.raises(StartError, match="Malformed"):
        parse_properties(r"a=\u12")


def test_what_is_written_is_read_back() -> None:
    values = {
        "plain": "value",
        " key with = : # ! ": " leading and trailing ",
        "lines": 'one\ntwo\r\n\t"three"\\',
        "words": "ü 😀 \x7f",
        "": "",
        "address": "http://127.0.0.1:8080",
    }
    text = format_properties(values)
    assert text.isascii()
    assert parse_properties(text) == values


def test_variables_are_put_in() -> None:
    environment = {"HOST": "h", "PORT": "1"}
    assert fill_variables({"a": "http://$$HOST$$:$$PORT$$/$x"}, environment) == {
        "a": "http://h:1/$x"
    }


def test_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(StartError, match="Invalid Environment Variable HOST"):
        fill_variables({"a": "$$HOST$$"}, {})
