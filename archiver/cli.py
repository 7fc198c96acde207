"""The commands `modelyard archive`, `modelyard verify` and `modelyard keygen`."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from modelyard.archiver.errors import ArchiveError, BadName, Differs, NothingCompared, WrongUsage
from modelyard.base.terminal import err

if TYPE_CHECKING:
    from modelyard.archiver.read import Archive
    from modelyard.archiver.verify import Check

archive_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
verify_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
keygen_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

JsonOutput = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Format(StrEnum):
    """What `--archive-format` takes; `default` is our default, `zip-store`."""

    default = "default"
    zip_store = "zip-store"
    tgz = "tgz"
    no_archive = "no-archive"


@archive_app.command(
    epilog="Example: modelyard archive digits --artifact out/digits.onnx "
    "--handler image_classifier --version 1.0 --extra-files index_to_name.json "
    "--example scans/7.png=7 -o model_store"
)
def archive(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The model's name; the archive is NAME.mar.")
    ],
    artifact: Annotated[
        Path | None,
        typer.Option(
            help="Exported file; its report is packed too. Not needed by a FILE.py that does "
            "without one."
        ),
    ] = None,
    handler: Annotated[
        str,
        typer.Option(
            metavar="auto|NAME|FILE.py[:NAME]",
            help="A built-in handler, or a file with a class or a function of yours; `auto` "
            "chooses a built-in one by what the model takes and gives.",
        ),
    ] = "auto",
    version: Annotated[str, typer.Option(help="The model's version.")] = "1.0",
    output_dir: Annotated[
        Path, typer.Option("-o", "--output-dir", help="Folder for the archive; made when missing.")
    ] = Path("model_store"),
    example: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[=EXPECTED]",
            help="A request and its answer: a label, JSON, or a JSON file. Without one, what the "
            "handler answers now. Repeatable.",
        ),
    ] = None,
    explain_with: Annotated[
        Path | None,
        typer.Option(
            help="Artifact with gradients that explains this one. "
            "Default for ONNX: the .pt2 of the same name beside it."
        ),
    ] = None,
    extra_files: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE[,FILE…]", help="Further files to pack. Repeatable."),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="Configuration of the model, as model-config.yaml.")
    ] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(help="What the handler imports, as pip reads it; pinned with hashes now."),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(help="Folder of the requirements' wheels, which then travel inside."),
    ] = None,
    source_folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="The checkpoint's folder, of which the tokenizer, processor and labels are packed "
            "for a built-in handler. Default for `auto`: where the export found it.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON list of requests, or a folder of them, whose explanations are what those of "
            "live predictions are compared with.",
        ),
    ] = None,
    archive_format: Annotated[
        Format,
        typer.Option(help="A zip without compression, NAME.tar.gz, or a folder NAME."),
    ] = Format.default,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY_FILE",
            help="Sign with this key of `modelyard keygen`; default: $MODELYARD_SIGNING_KEY.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="When the signature ends, as 2027-01-31; default: never."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run/--no-dry-run",
            help="Load the archive as a worker does and replay the examples before writing it.",
        ),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an archive that exists.")] = False,
    as_json: JsonOutput = False,
) -> None:
    """Pack an artifact, its handler and extra files into one sealed archive.

    A handler of your own needs no artifact: modelyard archive NAME --handler FILE.py.
    """
    # Here, as in every command: `--help` does not wait for what it does not use.
    from modelyard.archiver.collect import ArchiveRequest, plan_archive
    from modelyard.archiver.signing import read_expiry, read_signing_key
    from modelyard.archiver.write import write_plan

    with _exit_codes():
        key = read_signing_key(sign)
        end = read_expiry(expires, key)
        request = ArchiveRequest(
            name, version, artifact, handler, explain_with, _paths(extra_files or []), config_file,
            example or [], requirements, wheels, source_folder, reference,
        )  # fmt: skip
        plan = plan_archive(request)
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        with _progress("packing") as progress:
            packed = write_plan(
                plan,
                output_dir,
                archive_format="zip-store" if archive_format is Format.default else archive_format,
                dry_run=dry_run,
                key=key,
                expires=end,
                force=force,
                progress=progress,
            )
    if packed.warning:
        print(f"warning: {packed.warning}", file=sys.stderr)
    files = [vars(file) for file in packed.files]
    if as_json:
        described = {
            "archive": str(packed.path),
            "name": name,
            "version": version,
            "digest": packed.digest,
            "handler": plan.manifest.handler,
            "files": files,
            "warnings": [*plan.warnings, *filter(None, [packed.warning])],
            "coverage": packed.coverage,
        }
        print(json.dumps(described, indent=2))
    else:
        _print_files(files, "role")
        for line in filter(None, (plan.choice, packed.coverage)):
            print(line)
        print(f"{packed.path}: {len(files)} files, digest {packed.digest}")


@verify_app.command(epilog="Example: modelyard verify model_store/digits.mar")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive.")],
    public_key: Annotated[
        Path | None,
        typer.Option(help="File of public keys; one of them must have signed the archive."),
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run/--no-run",
            help="Replay the golden requests and the parity check, which runs the archive's code.",
        ),
    ] = True,
    device: Annotated[str, typer.Option(help="Where it runs: auto, cpu, cuda or cuda:N.")] = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest tolerance of the archive's own that is believed."),
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Check an archive here: digests, signature, golden requests, parity."""
    from modelyard.archiver.read import open_archive
    from modelyard.archiver.signing import read_trusted_keys
    from modelyard.archiver.verify import verify_archive

    result: dict[str, Any] = {"archive": str(file)}
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(
            f"{device} is not a device; expected auto, cpu, cuda or cuda:N", param_hint="--device"
        )
    try:
        with _exit_codes(), tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
            trust = read_trusted_keys(public_key) if public_key else None
            # What a key has still to vouch for is not written.
            staging = None if trust or not run else Path(folder)
            with (
                _progress("checking") as progress,
                open_archive(file, progress=progress, staging=staging) as opened,
            ):
                result = _archive_to_json(opened)
                checks = verify_archive(
                    opened, trust=trust, run=run, device=device, tolerance=tolerance
                )
            result["checks"] = [vars(check) for check in checks]
            if not as_json:
                _print_checked(result, checks)
            if problems := [
                f"{check.subject}: {check.problem}" for check in checks if check.problem
            ]:
                if all(check.subject == "nothing" for check in checks if check.problem):
                    raise NothingCompared(f"{file.name}: nothing was compared", problems)
                raise Differs(f"{file.name} is not here what it was", problems)
    except _Failed as failed:
        result["problems"] = failed.problems
        raise
    finally:
        if as_json:
            print(json.dumps(result, indent=2))


@keygen_app.command(epilog="Example: modelyard keygen release")
def keygen(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="Writes NAME.key and NAME.pub (PEM).")
    ],
    as_json: JsonOutput = False,
) -> None:
    """Make a key pair (ECDSA, P-256) to sign archives with."""
    from modelyard.archiver.signing import generate_keys

    private, public = generate_keys()
    with _exit_codes():
        _write_new(name.with_name(f"{name.name}.key"), private, 0o600)
        _write_new(name.with_name(f"{name.name}.pub"), public, 0o644)
    if as_json:
        print(json.dumps({"private_key": f"{name}.key", "public_key": f"{name}.pub"}, indent=2))
    else:
        print(f"{name}.key signs: keep it secret; {name}.pub is what --trusted-keys takes")


def _write_new(file: Path, data: bytes, mode: int) -> None:
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise ArchiveError(f"cannot write {file}: {error.strerror}") from error
    with os.fdopen(fd, "wb") as opened:
        opened.write(data)


_CODES: dict[type[ArchiveError], int] = {BadName: 2, WrongUsage: 2, NothingCompared: 3}
"""Error → exit code; 1, a job that failed, for all others. 2 is wrong usage."""


class _Failed(typer.Exit):
    """Leave with an exit code after the error was printed."""

    def __init__(self, error: ArchiveError) -> None:
        super().__init__(
            next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)
        )
        self.problems = list(error.problems)


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except ArchiveError as error:
        print(f"error: {error}", file=sys.stderr)
        raise _Failed(error) from error


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error when it is a terminal; it disappears at the end."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        TextColumn(verb), *columns, console=err, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _paths(texts: Iterable[str]) -> list[Path]:
    """Split comma lists; a file may hold a comma itself."""
    paths: list[Path] = []
    for text in texts:
        pieces = [text] if Path(text).exists() else text.split(",")
        paths += [Path(piece.strip()) for piece in pieces if piece.strip()]
    return paths


def _print_files(files: Iterable[Mapping[str, Any]], *columns: str) -> None:
    """Print name, size, the first 12 digits of the SHA-256 and further columns."""
    lines = [
        (f["name"], f"{f['size_bytes']:,}", f["sha256"][:12], *(f[name] for name in columns))
        for f in files
    ]
    lines.insert(0, ("FILE", "BYTES", "SHA256", *map(str.upper, columns)))
    name_width, size_width = (max(len(line[column]) for line in lines) for column in range(2))
    for name, size, digest, *rest in lines:
        print(f"{name:<{name_width}}  {size:>{size_width}}  {digest:<12}  {''.join(rest)}".rstrip())


def _print_checked(result: dict[str, Any], checks: Iterable[Check]) -> None:
    """Print the files, then what was checked and what came of it."""
    _print_files(result["files"])
    lines = [("CHECK", "RESULT"), *((check.subject, check.result) for check in checks)]
    width = max(len(subject) for subject, _ in lines)
    print()
    for subject, outcome in lines:
        print(f"{subject:<{width}}  {outcome}")
    print(f"{result['archive']}: {len(result['files'])} files, digest {result['digest']}")


def _archive_to_json(opened: Archive) -> dict[str, Any]:
    return {
        "archive": str(opened.path),
        "name": opened.manifest.model_name,
        "version": opened.manifest.model_version,
        "digest": opened.digest,
        "is_sealed": opened.manifest.modelyard is not None,
        "files": [vars(file) for file in opened.files],
        "problems": [],
    }
