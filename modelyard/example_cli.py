"""`modelyard example`: the files of an example, for those who have no clone."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

import typer

example_app = typer.Typer()


@example_app.command(epilog="Example: modelyard example digits")
def example(
    name: str = typer.Argument("digits", metavar="NAME", help="Name of the example."),
    output: Path = typer.Option(
        Path("examples"), "-o", "--output", metavar="<dir>", help="Folder that gets it."
    ),
) -> None:
    """Write the files of an example to OUTPUT/NAME, as the README and the docs use them."""
    with as_file(files("modelyard") / "examples") as source:
        names = sorted(each.name for each in source.iterdir() if (each / "README.md").is_file())
        if name not in names:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(names)}")
        target = output / name
        if target.exists():
            typer.echo(f"error: {target} is there already; name another folder with -o", err=True)
            raise typer.Exit(1)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / name, target, ignore=ignored, copy_function=shutil.copyfile)
    typer.echo(f"{target}: {sum(each.is_file() for each in target.rglob('*'))} files")
