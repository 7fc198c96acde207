"""The one command. It names the subcommands and imports a package only when its command runs."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperOption

from modelyard.base.plugins import Command, registered

_STATED = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
COMMANDS = {name: Command(**command) for name, command in _STATED.items()}
"""Commands of core; `commands` has those of plug-ins too."""


@cache
def commands() -> dict[str, Command]:
    """Return every subcommand, by name: core's and those that plug-ins register."""
    found = {name: entry.load() for name, entry in registered("commands").items()}
    return {**COMMANDS, **found}


_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_COMPLETE = "_MODELYARD_COMPLETE"
"""What a shell sets to learn how a line may go on; typer's scripts name it so."""


def _show_flags_without_operand() -> None:
    """Have help say `--force` and not `--force <bool>`, as if a value were wanted."""
    shown: Any = TyperOption.display_type_rich

    def display(self: TyperOption, ctx: Any) -> Any:
        return None if self.is_flag else shown(self, ctx)

    setattr(TyperOption, "display_type_rich", display)  # noqa: B010 - mypy refuses a method


def _say_what_was_given() -> None:
    """Have a wrong value be told in our words, in place of pydantic's, which leave it out."""
    format_message: Any = typer.BadParameter.format_message

    def told(self: typer.BadParameter) -> str:
        if (errors := getattr(self.__cause__, "errors", None)) is not None:
            from modelyard.serve.settings import what_is_wrong

            self.message = what_is_wrong(errors()[0])
        return str(format_message(self))

    setattr(typer.BadParameter, "format_message", told)  # noqa: B010 - mypy refuses a method


_show_flags_without_operand()
_say_what_was_given()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one subcommand; exit code 0 done, 1 the job failed, 2 wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if os.environ.get(_COMPLETE):
        _complete()
    if given and given[0] in commands():
        try:
            _load(given[0])(args=given[1:], prog_name=f"modelyard {given[0]}", **_CONTEXT)
        except ImportError as error:
            from modelyard.base.extras import how_to_install

            if advice := how_to_install(error):
                sys.exit(f"error: modelyard {given[0]}: {advice}")
            raise
    else:
        _overview()(args=given, prog_name="modelyard", **_CONTEXT)


def _load(name: str) -> typer.Typer:
    """Import a subcommand's application."""
    command = commands()[name]
    app: typer.Typer = getattr(importlib.import_module(command.module), command.app)
    for info in app.registered_commands:
        info.help = _reflowed(info.help or getattr(info.callback, "__doc__", None) or "")
    return app


def _reflowed(text: str) -> str:
    """Return a text whose sentences break where the terminal ends; indented lines stay."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        each if each.startswith(" ") else " ".join(each.split()) for each in paragraphs
    )


def _complete() -> None:
    """Print how a shell's line may go on; only the command that stands in it is loaded."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    overview: Any = typer.main.get_command(_overview())
    if (words := line.split()[1:2]) and words[0] in commands():
        overview.commands[words[0]] = typer.main.get_command(_load(words[0]))
    overview.main(args=[], prog_name="modelyard", complete_var=_COMPLETE)


def _overview() -> typer.Typer:
    """Return an application that only shows help: its commands are names without code."""
    app = typer.Typer(
        help="Export PyTorch checkpoints, archive them, serve predictions and explanations.",
        no_args_is_help=True,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"modelyard {version('modelyard')}")
            raise typer.Exit

    @app.callback()
    def overview(
        version: bool = typer.Option(
            False,
            "-V",
            "--version",
            callback=show_version,
            is_eager=True,
            help="Print the version.",
        ),
    ) -> None:
        pass

    for name, command in commands().items():
        app.command(name, help=command.help)(lambda: None)
    return app


if __name__ == "__main__":
    main()
