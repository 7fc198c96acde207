"""The command `modelyard diff`."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelyard.archiver import api
from modelyard.archiver.cli import check_device, exit_codes
from modelyard.archiver.errors import Differs, NothingCompared
from modelyard.archiver.example import TOLERANCE
from modelyard.base.terminal import out, plain_table

if TYPE_CHECKING:
    from modelyard.plugins.ops.diff import Difference

diff_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

SHOWN = 20
"""Rows of a table: what fits a comment."""


@diff_app.command(epilog="Example: modelyard diff model_store/digits.mar build/digits.mar")
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The archive that is served.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The archive that is to take over.")],
    request: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A request beside the golden ones of both. May be repeated."
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of a number over its unit that agrees.")
    ] = TOLERANCE,
    public_key: Annotated[
        Path | None, typer.Option(help="File of public keys; one must have signed each archive.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where they run: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a table for comments.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Ask two archives the same requests and compare their answers; both archives' code runs.

    Exit codes: 0 all answers agree; 1 some differ, or an archive does not run; 2 wrong usage; 3
    no request was answered.
    """
    # Here, for `--help` does not wait for what it does not use.
    from modelyard.archiver.signing import find_signer
    from modelyard.plugins.ops.diff import diff_archives

    if not tolerance >= 0:
        raise typer.BadParameter(f"{tolerance:g} is below 0", param_hint="--tolerance")
    check_device(device)
    with exit_codes(), ExitStack() as stack:
        opened = []
        for file in (old, new):
            archive, trust = stack.enter_context(api.open_to_verify(file, public_key, True))
            if trust is not None:
                find_signer(archive, trust)
            opened.append(archive)
        found = diff_archives(*opened, requests=request or [], tolerance=tolerance, device=device)
        if as_json:
            print(json.dumps(found.to_json(), indent=2))
        else:
            names = [f"{each.path.name} {each.manifest.model_version}" for each in opened]
            _print(found, ("REQUEST", *names, "APART", "WHERE"), markdown)
        if not found.requests:
            raise NothingCompared("neither archive holds a golden request; give --request FILE")
        if all(each.refused for each in found.requests):
            raise NothingCompared(f"no request was answered: {found.requests[0].old}")
        if found.differing:
            raise Differs(f"{new.name} answers otherwise than {old.name}: {found.summary()}")


def _print(found: Difference, heads: tuple[str, ...], markdown: bool) -> None:
    """Print both answers to each request: other labels first, then what is furthest apart."""
    order = sorted(found.requests, key=lambda each: (not each.relabelled, -each.scaled))
    rows = [
        (each.request, each.old, each.new, f"{each.scaled:.2g}", each.difference)
        for each in order[:SHOWN]
    ]
    if markdown:
        for row in (heads, ("---",) * len(heads), *rows):
            print("| " + " | ".join(re.sub(r"([\\|`<>*_])", r"\\\1", cell) for cell in row) + " |")
    else:
        table = plain_table(*((head, "right" if head == "APART" else "left") for head in heads))
        for row in rows:
            table.add_row(*row)
        out.print(table, markup=False)
    left = len(order) - len(rows)
    print(f"\n{found.summary()}." + (f" {left} more are closer than those shown." if left else ""))
