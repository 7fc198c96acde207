"""The commands `modelyard audit verify | show | export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from modelyard.base.terminal import out
from modelyard.serve.cli import JsonOption, StateDirOption, known_errors, state_folder

if TYPE_CHECKING:
    from modelyard.plugins.audit.chain import Chain

audit_app = typer.Typer(
    help="Check, show and export who changed what is served.",
    no_args_is_help=True,
    add_completion=False,
)


@audit_app.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="An export; by default the state folder's trail."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="EXPORT", help="An earlier export, from which it must go on."),
    ] = None,
    trusted_keys: Annotated[
        Path | None, typer.Option(help="Public keys (PEM), one of which must have signed FILE.")
    ] = None,
    state_dir: StateDirOption = None,
    json_output: JsonOption = False,
) -> None:
    """Follow the chain from its first entry, and say at which line it breaks; 1 where it does.

    Example: modelyard audit verify --against january.json
    """
    from modelyard.archiver.signing import read_trusted_keys
    from modelyard.plugins.audit.chain import check_head
    from modelyard.plugins.audit.export import check_signature, read_export

    with known_errors():
        chain, signature, problem, whose = _read(file, state_dir)
        signer = ""
        if trusted_keys is not None and file is not None:
            signer = check_signature(file, chain, signature, read_trusted_keys(trusted_keys))
        if against is not None and not problem:
            earlier, _ = read_export(against)
            problem = earlier.broken or check_head(chain, earlier.head.to_json(), str(against))
    if json_output:
        found = {**chain.head.to_json(), "broken": problem or None, "signer": signer or None}
        out.print_json(data={**found, "torn_bytes": len(chain.torn)})
    else:
        _say(chain, problem, whose, signer)
    raise typer.Exit(1 if problem else 0)


def _say(chain: Chain, problem: str, whose: str, signer: str) -> None:
    if problem:
        out.print(f"[red]broken:[/red] {escape(whose)}: {escape(problem)}", soft_wrap=True)
        return
    head = chain.head
    out.print(
        f"{escape(whose)}: {head.entries} entries, each follows the one before", soft_wrap=True
    )
    out.print(f"head: {head.sha256}", soft_wrap=True)
    if signer:
        out.print(f"signed by {escape(signer)}", soft_wrap=True)
    if chain.torn:
        out.print(f"after them {len(chain.torn)} bytes of a line that was never whole")


@audit_app.command()
def show(
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page that prints, instead.")
    ] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="EXPORT", help="An export; by default the trail.")
    ] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Show every entry, oldest first; as far as the chain holds.

    Example: modelyard audit show --html audit.html
    """
    from modelyard.plugins.audit.export import make_page

    with known_errors():
        chain, _, problem, whose = _read(file, state_dir)
        if html is not None:
            html.write_bytes(make_page(chain, whose))
            return
    for entry in chain.entries:
        what = " ".join(str(entry[name]) for name in ("what", "model", "version") if name in entry)
        text = f"{entry['at']} {entry['who']}: {what}; {entry.get('text', '')}".rstrip("; ")
        out.print(escape(f"{entry['n']} {text}"), soft_wrap=True)
    if problem:
        out.print(f"[red]broken:[/red] {escape(problem)}", soft_wrap=True)


@audit_app.command()
def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")],
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Private key to sign with; or MODELYARD_SIGNING_KEY."),
    ] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Write the trail as JSON, signed with the keys of archives; it is verified first.

    Kept elsewhere, it also shows later whether entries were taken from the end.

    Example: modelyard audit export --sign release.key -o january.json
    """
    from modelyard.archiver.signing import read_signing_key
    from modelyard.plugins.audit.export import BrokenTrail, make_export

    with known_errors():
        chain, _, problem, whose = _read(None, state_dir)
        if problem:
            raise BrokenTrail(f"{whose}: {problem}; nothing is exported")
        output.write_bytes(make_export(chain, read_signing_key(sign)))
    out.print(f"{output}: {chain.head.entries} entries, head {chain.head.sha256}", soft_wrap=True)


def _read(file: Path | None, state_dir: Path | None) -> tuple[Chain, object, str, str]:
    """Return a chain, its signature, how it is broken, and whose it is."""
    from modelyard.plugins.audit.chain import check_head, read_chain
    from modelyard.plugins.audit.export import BrokenTrail, read_export
    from modelyard.plugins.audit.observer import NOTE, file_of
    from modelyard.serve.control.state import read_json

    if file is not None:
        chain, signature = read_export(file)
        return chain, signature, chain.broken, str(file)
    state = state_folder(state_dir)
    trail = file_of(state)
    try:
        # The head first: a server that runs may append meanwhile, and never goes back.
        known = read_json(state.models_file).get(NOTE) if state.models_file.exists() else None
        chain = read_chain(trail.read_bytes())
    except (OSError, ValueError) as error:
        raise BrokenTrail(f"cannot read the audit trail {trail}: {error}") from error
    problem = chain.broken
    if not problem and isinstance(known, dict):
        problem = check_head(chain, known, "the state file")
    for entry in chain.entries if not problem else ():
        if entry["what"] == "broken":
            problem = f"line {entry['n']}: a start of the server found then: {entry.get('text')}"
    return chain, None, problem, str(trail)
