"""What commands print of much that they know: a template, the text file beside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from modelyard.base.terminal import out


def print_text(file: Path, values: dict[str, Any]) -> None:
    """Print what a template makes of values; the filter `e` is for what is not markup."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["e"] = escape
    environment.filters["share"] = lambda share: f"{share * 100:.4g} %"
    text = environment.from_string(file.read_text(encoding="utf-8")).render(values)
    out.print(text.rstrip(), soft_wrap=True)
