"""What is read of a request's headers; and files, for those who import that."""

import re
from collections.abc import Mapping
from typing import Any

_CONTENT_TYPE = re.compile("[Cc]ontent-?[Tt]ype")


def read_file(path: Any, mode: str = "r") -> Any:
    """Return what a file holds."""
    with open(path, mode) as file:  # noqa: PTH123 - objects are given in place of paths, too
        return file.read()


def write_file(path: Any, data: Any, mode: str = "w") -> None:
    """Write a file."""
    with open(path, mode) as file:  # noqa: PTH123
        file.write(data)


def retrieve_content_type_header(request_property: Mapping[str, Any]) -> Any:
    """Return the media type of a request, None where it says none."""
    return next(
        (request_property[key] for key in request_property if _CONTENT_TYPE.match(key)), None
    )


def parse_accept(accept: str) -> list[str]:
    """Return the media types that a header names."""
    return accept.replace(" ", "").split(",")


def remove_crlf(illegal_string: str) -> str:
    """Return a text in one line."""
    return illegal_string.replace("\r", " ").replace("\n", " ")
