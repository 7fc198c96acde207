"""The command `modelyard recertify`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from modelyard.archiver.cli import JsonOutput, exit_codes
from modelyard.archiver.errors import Differs, NothingCompared, WrongUsage
from modelyard.base.terminal import out, plain_table, step_bar

if TYPE_CHECKING:
    from modelyard.plugins.recertify.certify import Row

recertify_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


_Texts = list[str] | None
_Paths = list[Path] | None
_File = Path | None
_ARCHIVES = "Archives, or their stores."
_WITH = (
    "What to install. Of several names comes one environment; a name that is given again makes a "
    "further one."
)
_RUNTIME = "Another runtime: onnxruntime-web, openvino, executorch, …; an unknown name lists all."
_WRITE = (
    "Add a line for each version to MAR-INF/proven.json of the archives, which changes their "
    "digests."
)
_SIGN = "Private key (PEM) that signs what is written."
_KEYS = (
    "File of public keys; one must have signed an archive that is signed anew. By default --sign's "
    "own."
)
_IN, _BASE = "An interpreter that has its packages.", "Interpreter that environments are made with."


@recertify_app.command(epilog="Example: modelyard recertify model_store --with onnxruntime==1.32.0")
def recertify(
    archives: Annotated[list[Path], typer.Argument(metavar="STORE_OR_ARCHIVE...", help=_ARCHIVES)],
    with_: Annotated[_Texts, typer.Option("--with", metavar="NAME==VERSION", help=_WITH)] = None,
    in_: Annotated[_Paths, typer.Option("--in", metavar="PYTHON", help=_IN)] = None,
    runtime: Annotated[_Texts, typer.Option(metavar="NAME[==VERSION]", help=_RUNTIME)] = None,
    python: Annotated[_File, typer.Option(help=_BASE)] = None,
    write: Annotated[bool, typer.Option("--write", help=_WRITE)] = False,
    sign: Annotated[_File, typer.Option(metavar="KEY_FILE", help=_SIGN)] = None,
    public_key: Annotated[_File, typer.Option(help=_KEYS)] = None,
    page: Annotated[
        _File, typer.Option(metavar="FILE.html", help="Write the result as a page.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Run archives on other versions and here, and judge both by the rule of their export.

    Exit codes: 0 all agree; 1 some differ; 2 wrong usage; 3 some could not be run or compared.
    """
    # Here, for `--help` does not wait for what it does not use.
    from modelyard.archiver.read import open_archive
    from modelyard.archiver.signing import read_signing_key, read_trusted_keys
    from modelyard.plugins.recertify import environments, lines
    from modelyard.plugins.recertify.certify import recertify as run
    from modelyard.plugins.recertify.page import format_page

    with exit_codes():
        paths = list(_archives(archives))
        planned = environments.plan(with_ or [], python)
        planned += [environments.existing(each) for each in in_ or []]
        planned += [environments.plan_other(each, python) for each in runtime or []]
        if not planned:
            raise WrongUsage("give --with NAME==VERSION, --in PYTHON or --runtime NAME")
        key = read_signing_key(sign) if write else None
        trust = read_trusted_keys(public_key) if public_key else None
        for path in paths if write else ():
            with open_archive(path) as opened:
                lines.signed_until(opened, key, trust)
        rows: list[Row] = []
        with step_bar() as step:
            step("making environments", 0, len(paths))
            for number, found in enumerate(run(paths, planned)):
                step(paths[number].name, number, len(paths))
                rows += found
                if write and (writable := [*lines.writable(found)]):
                    digest = lines.write(paths[number], writable[0].digest, writable, key, trust)
                    rows[-len(found) :] = [
                        replace(row, written=digest if row in writable else "") for row in found
                    ]
        if page is not None:
            page.write_text(format_page(rows), encoding="utf-8")
        if as_json:
            print(json.dumps([lines.to_json(row) for row in rows], indent=2))
        else:
            _print(rows)
        _end(rows)


def _archives(given: Sequence[Path]) -> Iterator[Path]:
    from modelyard.serve.control.store import is_archive, list_archives

    for path in given:
        if is_archive(path):
            yield path
        elif names := list_archives(path):
            yield from (path / name for name in names)
        else:
            raise WrongUsage(f"{path} is neither an archive nor a store that holds one")


def _print(rows: Sequence[Row]) -> None:
    from modelyard.plugins.recertify.page import HEADS, cells, details

    table = plain_table(*((head, "left") for head in HEADS))
    for row in rows:
        table.add_row(*cells(row))
    out.print(table, markup=False)
    for row in rows:
        for text in details(row):
            out.print(f"{row.archive.name} {row.artifact}: {text}", markup=False)


def _end(rows: Sequence[Row]) -> None:
    """Choose the exit code.

    Raises:
        Differs: an answer changes.
        NothingCompared: something could not be run, or nothing was.
    """
    from modelyard.plugins.recertify.page import describe_counts

    of, said = {row.verdict for row in rows}, describe_counts(rows)
    if "differs" in of:
        raise Differs(f"answers change: {said}")
    if "not run" in of or of <= {"untouched"}:
        raise NothingCompared(f"not everything was compared: {said}")
