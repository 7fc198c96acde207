"""The command `modelyard migrate`."""

import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from modelyard.base.terminal import err, format_bytes, out, plain_table
from modelyard.serve.cli import known_errors

if TYPE_CHECKING:
    from modelyard.plugins.torchserve.migrate.examine import Finding, Report

MOST_INDENT = 24
"""Widest column of what stands beside a key or model; a longer one has a line of its own."""

migrate_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@migrate_app.command("migrate")
def migrate(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", exists=True, dir_okay=False, help="config.properties."),
    ],
    model_store: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL_STORE",
            exists=True,
            file_okay=False,
            help="Folder of the archives; default: model_store in it.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE or FILE, as for torchserve --models; or ALL; repeatable."),
    ] = None,
    tries: Annotated[
        bool, typer.Option("--try", help="Start a worker for each archive: its code runs.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what works, what changes and what will not when a TorchServe installation moves here.

    Configuration and archives are read as `torchserve` reads them; no code of the archives is run.

    --try also starts a worker for each archive, behind the walls of the server.

    For example:

        modelyard migrate config.properties model_store

    Exit codes: 0 everything works, maybe with changes; 1 something will not work; 2 wrong usage.
    """
    from modelyard.plugins.torchserve.arguments import parse_command_line
    from modelyard.plugins.torchserve.migrate.examine import examine

    arguments = ["--start", "--ncs", "--ts-config", str(config.absolute())]
    if model_store is not None:
        arguments += ["--model-store", str(model_store.absolute())]
    if named := [each for option in models or [] for each in option.split(",") if each]:
        arguments += ["--models", *named]
    with known_errors(), err.status("looking") as status:
        report = examine(
            parse_command_line(arguments),
            os.environ,
            Path.cwd(),
            tries,
            lambda text: status.update(f"looking at {text}"),
        )
    if json_output:
        out.print_json(json.dumps({"can_move": not report.count("fails"), **asdict(report)}))
    else:
        for part in _for_people(report):
            out.print(part)
    if report.count("fails"):
        raise typer.Exit(1)


WORDS = {
    "fails": ("will not work", "red"),
    "changes": ("changes", "yellow"),
    "works": ("works", "green"),
}


def _for_people(report: "Report") -> Iterator[Table | Text]:
    for status, (heading, style) in WORDS.items():
        if found := [each for each in report.findings if each.status == status]:
            yield Text(heading, style=style)
            yield from _lines(found)
            yield Text()
    if report.models:
        counts = ((each, "right") for each in ("workers", "batch", "memory"))
        table = plain_table(("model", "left"), ("file", "left"), *counts)
        for model in report.models:
            memory = ("" if model.is_measured else "~") + format_bytes(model.memory_bytes)
            name, workers = f"{model.name} {model.version}", str(model.workers)
            table.add_row(name, model.file, workers, str(model.batch_size), memory)
        yield table
        yield Text()
    yield Text(", ".join(f"{report.count(each)} {words}" for each, (words, _) in WORDS.items()))


def _lines(findings: Sequence["Finding"]) -> Iterator[Text]:
    """Yield findings, subject by subject; lines are as long as the terminal is wide."""
    width = min(MOST_INDENT, max(len(each.subject) for each in findings))
    indent, before = " " * (width + 4), ""
    for each in findings:
        subject = "" if each.subject == before else each.subject
        before = each.subject
        if len(subject) > width:
            yield Text(f"  {subject}")
            subject = ""
        first = f"  {subject:{width}}  "
        for text in filter(None, (each.text, each.advice and f"→ {each.advice}")):
            for line in textwrap.wrap(" ".join(text.split()), max(20, out.width - width - 5)):
                yield Text(f"{first}{line}")
                first = indent
