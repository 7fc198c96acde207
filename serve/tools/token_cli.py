"""The commands `modelyard token new | list | remove`, which keep tokens that stay."""

import secrets
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from modelyard.base.terminal import err, out, plain_table
from modelyard.serve.cli import JsonOption, known_errors, show
from modelyard.serve.control.state import write_file
from modelyard.serve.errors import StartError, WrongUsage
from modelyard.serve.http.tokens import RIGHTS, Grant, make_grant, parse_grants, read_token_file

token_app = typer.Typer(
    help="Make tokens that stay, and keep their hashes in a file.",
    no_args_is_help=True,
    add_completion=False,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose token it is; shown in messages.")
]
TokenFileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A token file.")]


@token_app.command()
def new(
    name: NameArgument,
    rights: Annotated[str, typer.Option(help=f"Some of {','.join(RIGHTS)}.")],
    file: Annotated[
        Path | None, typer.Option(help="Add the line to this token file, made if need be.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second for answers that it may send.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(help="Such requests that it may have at once.")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Take the token from standard input; make none.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Print a new token, and the line that stands for it.

    The token goes to standard output and is kept nowhere; the line has its hash only.

    Example: modelyard token new app --rights predict,explain --file tokens.txt
    """
    quota = {"rate": rate and f"{rate:.9f}", "concurrent": concurrent}
    words = [f"{name}={value}" for name, value in quota.items() if value is not None]
    token = sys.stdin.read().strip() if stdin else secrets.token_urlsafe(32)
    with known_errors():
        try:
            line = str(make_grant(name, rights, token, words))
        except ValueError as error:
            raise WrongUsage(str(error)) from error
        if file is not None:
            _rewrite(file, lambda lines: [*lines, line])
    if json_output:
        out.print_json(data={"token": None if stdin else token, "line": line})
        return
    if not stdin:
        typer.echo(token)
    what = f"added to {file}" if file is not None else "for the setting tokens, or a token file"
    err.print(f"{what}: {escape(line)}")


@token_app.command("list")
def list_tokens(file: TokenFileArgument, json_output: JsonOption = False) -> None:
    """Show the tokens of a file: names, rights, the first digits of the hash.

    Example: modelyard token list tokens.txt
    """
    with known_errors():
        grants = read_token_file(file)
    found = [
        {"name": grant.name, "rights": sorted(grant.rights), "sha256": grant.digest.hex(),
         "rate": grant.rate or None, "concurrent": grant.at_once or None}
        for grant in grants
    ]  # fmt: skip
    show(found, json_output, lambda _: _print_grants(grants))


def _print_grants(grants: Iterable[Grant]) -> None:
    table = plain_table(("name", "left"), ("rights", "left"), ("sha256", "left"),
                        ("a second", "right"), ("at once", "right"))  # fmt: skip
    for grant in grants:
        rate, at_once = f"{grant.rate:g}" if grant.rate else "", str(grant.at_once or "")
        digest = f"{grant.digest.hex()[:12]}…"
        table.add_row(grant.name, " ".join(sorted(grant.rights)), digest, rate, at_once)
    out.print(table)


@token_app.command()
def remove(
    name: NameArgument,
    file: TokenFileArgument,
    keep_last: Annotated[
        bool, typer.Option("--keep-last", help="Leave the newest token of that name.")
    ] = False,
) -> None:
    """Remove the tokens of a name from a file; a running server notices within a second.

    Example: modelyard token remove app tokens.txt --keep-last
    """
    with known_errors():
        count = sum(grant.name == name for grant in read_token_file(file))
        if not count:
            raise StartError(
                f"{file} has no token {name!r}; `modelyard token list {file}` shows them"
            )
        removed = count - keep_last

        def without(lines: list[str]) -> list[str]:
            places = [at for at, line in enumerate(lines) if line.split()[:1] == [name]][:removed]
            return [line for at, line in enumerate(lines) if at not in places]

        _rewrite(file, without)
    out.print(f"removed {removed} of {count} from {file}", soft_wrap=True)


def _rewrite(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Replace a token file, which stays whole; comments stay, and so does who may read it.

    Raises:
        StartError: it cannot be read or written, or a line is wrong.
    """
    try:
        is_there = file.exists()
        lines = file.read_text(encoding="utf-8").splitlines() if is_there else []
        mode = file.stat().st_mode & 0o777 if is_there else 0o600
        lines = change(lines)
        parse_grants(lines)
        write_file(file.resolve(), "".join(f"{line}\n" for line in lines).encode(), mode)
    except OSError as error:
        raise StartError(f"cannot write {file}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{file}: {error}") from error
