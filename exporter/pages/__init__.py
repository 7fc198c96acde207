"""HTML pages that hold their own data, style and script: they open from disk, without a network."""

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

_PLACE = "/*DATA*/"


def fill(template: str, data: Mapping[str, Any]) -> str:
    """Put data into a template of this folder.

    Raises:
        ValueError: a number in it is NaN or infinite, which JSON has no form for.
    """
    page = files(__name__).joinpath(template).read_text(encoding="utf-8")
    style = files(__name__).joinpath("style.css").read_text(encoding="utf-8")
    # A text that ended the script element would be read as HTML.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace("/*STYLE*/", style).replace(_PLACE, text)


def write_page(path: Path, page: str) -> None:
    """Write a page in one step: a reader finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
