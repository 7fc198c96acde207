"""The commands `modelyard incident` and `modelyard replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.markup import escape

from modelyard.archiver.cli import check_device, exit_codes
from modelyard.base.terminal import out
from modelyard.serve.cli import asks

if TYPE_CHECKING:
    from modelyard.plugins.incidents.replay import Outcome
    from modelyard.serve.tools.client import Endpoint

incident_app = typer.Typer(add_completion=False)
replay_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@asks(incident_app)
def incident(
    at: Endpoint,
    json_output: bool,
    id: Annotated[str, typer.Argument(metavar="ID", help="The answer's X-Request-Id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")],
    time: Annotated[
        str | None, typer.Option(help="When it was answered, where several have the id.")
    ] = None,
) -> None:
    """Write how an answer came about to a file; the server's setting `incidents` must be on.

    Example: modelyard incident 7f3c-42 -o incident.json
    """
    from modelyard.serve.tools.client import call

    place = f"/incidents/{quote(id, safe='')}"
    body = call(at, "GET", place, query={"at": time}).body
    document = json.loads(body)
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    model, batch = document["model"], document["batch"]
    said = {"file": str(output), "id": id, "at": document["at"], "batch": len(batch)}
    if json_output:
        out.print_json(data={**said, **model})
    else:
        kept = "" if all(each["body"] is not None for each in batch) else ", digests alone"
        text = f"{output}: {model['name']} {model['version']}, a batch of {len(batch)}{kept}"
        out.print(escape(text), soft_wrap=True)


@replay_app.command(epilog="Example: modelyard replay incident.json --model-store model_store")
def replay(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Of `modelyard incident`; or several.")
    ],
    archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The archive that answered.")
    ] = None,
    model_store: Annotated[
        Path, typer.Option(metavar="DIR", help="Where it is looked for, by its digest.")
    ] = Path("model_store"),
    body: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A request or an answer of which the file has the digest alone. May be repeated.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N; by default that of then.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run an incident's batch again, in its order, and compare the answers with those of then.

    The archive's code runs, behind the walls of a worker.

    Exit codes: 0 the same bits, or, on another machine, numbers within the archive's tolerance; 1
    they differ, or the file or archive is another; 2 wrong usage; 3 nothing could be compared.
    """
    from modelyard.plugins.incidents.file import read_incident
    from modelyard.plugins.incidents.replay import replay_incidents

    if device is not None:
        check_device(device)
    with exit_codes():
        found = replay_incidents(
            [read_incident(file) for file in files],
            archive=archive, store=model_store, files=body or (), device=device,
        )  # fmt: skip
    if as_json:
        print(json.dumps([each.to_json() for each in found], indent=2))
    for each in () if as_json else found:
        _print(each)
    raise typer.Exit(any(each.verdict == "differs" for each in found))


def _print(found: Outcome) -> None:
    for at, each in enumerate(found.answers):
        whose = "answer" if at == found.place else "batch-mate"
        text = f": {each.text}" if each.text else ""
        out.print(escape(f"{whose} {each.id}: {each.verdict}{text}"), soft_wrap=True)
    for text in found.elsewhere:
        out.print(escape(f"another machine: {text}"), soft_wrap=True)
    if found.lacking:
        out.print(f"without walls: {', '.join(found.lacking)}")
    out.print({"same": "the same bits", "within": "within the archive's tolerance",
               "differs": "not the same"}[found.verdict])  # fmt: skip
