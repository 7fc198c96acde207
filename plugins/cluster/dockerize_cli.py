"""The command `modelyard dockerize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modelyard.base.terminal import format_bytes, out, plain_table
from modelyard.serve.cli import JsonOption, known_errors

dockerize_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dockerize_app.command("dockerize")
def dockerize(
    archives: Annotated[list[Path], typer.Argument(metavar="ARCHIVE", help="Archives.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="Image to build on; default modelyard:VERSION.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a folder that this command has written.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Write a folder that builds a container image with archives inside.

    It holds a Dockerfile, a compose.yaml and copies of the archives, of which names, sizes and
    digests are checked before. The image builds on Modelyard's own, which `docker build -t
    modelyard:VERSION .` makes in a clone.

    For example:

        modelyard dockerize model_store/digits.mar -o build/digits-image
    """
    from modelyard.plugins.cluster.dockerize import base_image, dockerize

    with known_errors():
        packed = dockerize(archives, output, base or base_image(), force)
    build = f"docker build -t {packed[0].name.lower()} {output}"
    if json_output:
        models = [{"name": e.name, "version": e.version, "file": e.path.name} for e in packed]
        out.print_json(data={"folder": str(output), "models": models, "build": build})
        return
    table = plain_table(("MODEL", "left"), ("VERSION", "left"), ("FILE", "left"), ("SIZE", "right"))
    for each in packed:
        size = format_bytes(each.path.stat().st_size)
        table.add_row(each.name, each.version, each.path.name, size)
    out.print(table)
    out.print(build, highlight=False, markup=False)
