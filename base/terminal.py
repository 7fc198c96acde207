"""What every command line prints with: two consoles, a bar of steps, a table, words of options."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Where nobody looks, in a file or a pipe, lines are as long as their text.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 500)
err = Console(stderr=True, highlight=False, soft_wrap=True)

OnStep = Callable[[str, int, int], None]
"""Called before each step with its name, its number from 0, and the number of steps."""


@contextmanager
def step_bar(*columns: Any) -> Iterator[OnStep]:
    """Show the step at work, on a terminal only, with how far it is in these columns."""
    columns = columns or (MofNCompleteColumn(), TimeElapsedColumn())
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*shown, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda name, done, total: bar.update(
            task, description=name, completed=done, total=total
        )


def described_arguments(function: Callable[..., object]) -> dict[str, str]:
    """Return what the docstring of a function says of each argument, as the help of an option."""
    text = (inspect.getdoc(function) or "").partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    texts = {name: " ".join(words.split()) for name, words in found}
    return {name: f"{text[:1].upper()}{text[1:]}" for name, text in texts.items()}


def plain_table(*columns: tuple[str, Any], show_header: bool = True) -> Table:
    """Return a table without lines; a column is its heading and "left" or "right"."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=show_header)
    for heading, justify in columns:
        table.add_column(heading, justify=justify, overflow="fold")
    return table


def format_bytes(size_bytes: int | None) -> str:
    """Write a number of bytes for a person; nothing for None."""
    if size_bytes is None:
        return ""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"
