"""The command `modelyard web-page`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelyard.archiver.cli import exit_codes
from modelyard.base.terminal import out, step_bar

web_page_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@web_page_app.command(epilog="Example: modelyard web-page model_store/digits.mar -o digits.html")
def web_page(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="It holds an ONNX file.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html")],
) -> None:
    """Write one file that a browser opens: it verifies the archive's model there, then predicts.

    Exit codes: 0 written; 1 the archive cannot be verified in a page; 2 wrong usage.
    """
    from modelyard.plugins.recertify.web_page import format_web_page

    with exit_codes():
        with step_bar() as step:
            step("computing what is expected", 0, 1)
            text, cases = format_web_page(archive)
        output.write_text(text, encoding="utf-8")
        size = f"{output.stat().st_size / 1e6:.1f} MB"
        out.print(f"{output}: {cases} cases, {size}; nothing of it is fetched", soft_wrap=True)
