"""The commands `modelyard incident` and `modelyard replay`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.markup import escape

from modelyard.archiver.cli import exit_codes
from modelyard.base.terminal import out
from modelyard.serve.cli import asks

if TYPE_CHECKING:
    from modelyard.serve.tools.client import Endpoint

incident_app = typer.Typer(add_completion=False)
replay_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_AT = "When it was answered, where several have the id."
_RECORDED = "Install the versions of then, and name the first layer that differs on them."
_BODY = "A request or an answer of which FILE has the digest alone. May be repeated."


@asks(incident_app)
def incident(
    at: "Endpoint",
    json_output: bool,
    id: Annotated[str, typer.Argument(metavar="ID", help="The answer's X-Request-Id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")],
    time: Annotated[str | None, typer.Option("--at", metavar="TIME", help=_AT)] = None,
) -> None:
    """Write how an answer came about to a file; the server's setting `incidents` must be on.

    Example: modelyard incident 7f3c-42 -o incident.json
    """
    from modelyard.serve.tools.client import call

    found = call(at, "GET", f"/incidents/{quote(id, safe='')}", query={"at": time})
    output.write_bytes(found.body)
    if json_output:
        out.print_json(data={"file": str(output), "id": id})
    else:
        out.print(escape(f"{output}: how the answer {id} came about"), soft_wrap=True)


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
    body: Annotated[list[Path] | None, typer.Option(metavar="FILE", help=_BODY)] = None,
    with_recorded: Annotated[bool, typer.Option("--with-recorded", help=_RECORDED)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run an incident's batch again, in its order, and compare the answers with those of then.

    The archive's code runs, behind the walls of a worker. Exit codes: 0 the same bits, or, on
    another machine, numbers within the archive's tolerance; 1 they differ, or the file or the
    archive is another; 2 wrong usage; 3 nothing could be compared.
    """
    from modelyard.plugins.incidents.file import read_incident
    from modelyard.plugins.incidents.replay import replay_incidents

    with exit_codes():
        incidents = list(map(read_incident, files))
        found = replay_incidents(incidents, archive, model_store, body or (), with_recorded)
    if as_json:
        out.print_json(json.dumps(found))
    for each in () if as_json else found:
        for at, answer in enumerate(each["answers"]):
            whose = "answer" if at == each["place"] else "batch-mate"
            text = f"{whose} {answer['id']}: {answer['verdict']}"
            out.print(escape(f"{text}; {answer['text']}".rstrip("; ")), soft_wrap=True)
        said = [f"otherwise here: {text}" for text in each["elsewhere"]]
        said += [f"with the versions of then: {text}" for text in each["recorded"]]
        said += [f"the archive's two artifacts here: {text}" for text in each["parity"] or ()]
        for text in (*said, *(f"without the wall {wall}" for wall in each["lacking"])):
            out.print(escape(text), soft_wrap=True)
    raise typer.Exit(any(each["verdict"] == "differs" for each in found))
