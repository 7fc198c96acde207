"""The command `modelyard doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from modelyard.base.terminal import err, out
from modelyard.serve.cli import known_errors

doctor_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@doctor_app.command("doctor")
def doctor(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings, as for serve start.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder that the server would use.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report what is installed, what works here, and what to do about what does not.

    Packages are imported and tried, not only looked up.

    For example:

        modelyard doctor --json

    Exit codes: 0 serving works, maybe with warnings; 1 something that is needed fails; 2 wrong
    usage.
    """
    from modelyard.plugins.cluster.doctor.checks import FAIL, WARN, Check, examine
    from modelyard.serve.settings import load_settings

    with known_errors():
        settings = load_settings({"state_dir": state_dir}, config)
    checks: list[Check] = []
    with err.status("looking at packages") as status:
        for check in examine(settings):
            checks.append(check)
            status.update(f"after {check.name}")
    failed = sum(check.status == FAIL for check in checks)
    warned = sum(check.status == WARN for check in checks)
    if json_output:
        report = {"works": not failed, "checks": [vars(check) for check in checks]}
        out.print_json(json.dumps(report))
    else:
        grid = Table.grid(padding=(0, 2))
        for check in checks:
            mark = Text(check.status, style=STYLES[check.status])
            grid.add_row(mark, Text(check.name), Text(check.found))
            if check.advice:
                grid.add_row("", "", Text(f"→ {check.advice}"))
        out.print(grid)
        if failed:
            out.print(f"[red]{failed} of {len(checks)} checks fail[/red], {warned} warn")
        else:
            out.print(f"serving works: {len(checks)} checks, {warned} warn")
    if failed:
        raise typer.Exit(1)
