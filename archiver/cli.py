"""The commands `modelyard archive`, `modelyard verify` and `modelyard keygen`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from modelyard.archiver import api
from modelyard.archiver.errors import ArchiveError, BadName, Differs, NothingCompared, WrongUsage
from modelyard.base.terminal import described_arguments, step_bar

if TYPE_CHECKING:
    from modelyard.archiver.read import Archive

archive_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
verify_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
keygen_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

JsonOutput = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

_SAID = described_arguments(api.archive) | described_arguments(api.verify)
_AGAIN = " May be repeated."
_BYTES = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())


def _option(field: str, *names: str, metavar: str | None = None, more: str = "") -> Any:
    """Return an option with the words of the function that a program calls."""
    return typer.Option(*names, metavar=metavar, help=f"{_SAID.get(field, '')}{more}")


class Format(StrEnum):
    """What `--archive-format` takes; `default` is our default, `zip-store`."""

    default = "default"
    zip_store = "zip-store"
    tgz = "tgz"
    no_archive = "no-archive"


_File = Path | None


@archive_app.command(
    epilog="Example: modelyard archive digits --artifact out/digits.onnx "
    "--handler image_classifier --version 1.0 --extra-files index_to_name.json "
    "--example scans/7.png=7 -o model_store"
)
def archive(
    name: Annotated[str, typer.Argument(metavar="NAME", help=_SAID.get("name"))],
    artifact: Annotated[_File, _option("artifact")] = None,
    handler: Annotated[str, _option("handler", metavar="auto|NAME|FILE.py[:NAME]")] = "auto",
    version: Annotated[str, _option("version")] = "1.0",
    output_dir: Annotated[Path, _option("output_dir", "-o", "--output-dir")] = Path("model_store"),
    example: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[=EXPECTED]",
            help="A request and its answer: a label, JSON, or a JSON file. Without one, what the "
            "handler answers now. May be repeated.",
        ),
    ] = None,
    explain_with: Annotated[_File, _option("explain_with")] = None,
    extra_files: Annotated[
        list[str] | None, _option("extra_files", metavar="FILE[,FILE…]", more=_AGAIN)
    ] = None,
    config_file: Annotated[_File, _option("config_file")] = None,
    requirements: Annotated[_File, _option("requirements")] = None,
    wheels: Annotated[_File, _option("wheels")] = None,
    source_folder: Annotated[_File, _option("source_folder", "--from", metavar="FOLDER")] = None,
    reference: Annotated[_File, _option("reference", metavar="FILE")] = None,
    certificate: Annotated[
        bool | None, _option("certificate", "--certificate/--no-certificate")
    ] = None,
    archive_format: Annotated[Format, _option("archive_format")] = Format.default,
    sign: Annotated[
        _File, _option("sign", metavar="KEY_FILE", more=" Default: $MODELYARD_SIGNING_KEY.")
    ] = None,
    expires: Annotated[str | None, _option("expires", metavar="DATE")] = None,
    dry_run: Annotated[bool, _option("dry_run", "--dry-run/--no-dry-run")] = True,
    force: Annotated[bool, _option("force", "--force")] = False,
    as_json: JsonOutput = False,
) -> None:
    """Pack an artifact, its handler and extra files into one sealed archive.

    A handler of your own needs no artifact: modelyard archive NAME --handler FILE.py.
    """
    # Here, as in every command: `--help` does not wait for what it does not use.
    from modelyard.archiver.collect import ArchiveRequest, plan_archive
    from modelyard.archiver.explanations import Explanations, to_json
    from modelyard.archiver.signing import read_expiry, read_signing_key
    from modelyard.archiver.write import write_plan

    with exit_codes():
        key = read_signing_key(sign)
        end = read_expiry(expires, key)
        request = ArchiveRequest(
            name, version, artifact, handler, explain_with, _paths(extra_files or []), config_file,
            example or [], requirements, wheels, source_folder, reference,
            certificate,
        )  # fmt: skip
        plan = plan_archive(request)
        for warning in plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        with step_bar(*_BYTES) as step:
            packed = write_plan(
                plan,
                output_dir,
                archive_format="zip-store" if archive_format is Format.default else archive_format,
                dry_run=dry_run,
                key=key,
                expires=end,
                force=force,
                progress=partial(step, "packing"),
            )
    if packed.warning:
        print(f"warning: {packed.warning}", file=sys.stderr)
    files, found = [vars(file) for file in packed.files], packed.explanations
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
            "explanations": found if isinstance(found, str) else to_json(found),
        }
        print(json.dumps(described, indent=2))
    else:
        _print_files(files, "role")
        for line in filter(None, (plan.choice, packed.coverage)):
            print(line)
        if isinstance(found, Explanations):
            _print_columns(list(found.rows()))
        if found and (isinstance(found, str) or found.problems):
            print(f"no certificate of explanations{f': {found}' if isinstance(found, str) else ''}")
        print(f"{packed.path}: {len(files)} files, digest {packed.digest}")


@verify_app.command(epilog="Example: modelyard verify model_store/digits.mar")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_SAID.get("file"))],
    public_key: Annotated[_File, _option("public_key")] = None,
    run: Annotated[bool, _option("run", "--run/--no-run")] = True,
    device: Annotated[str, _option("device")] = "auto",
    tolerance: Annotated[float | None, _option("tolerance")] = None,
    as_json: JsonOutput = False,
) -> None:
    """Check an archive here: digests, signature, golden requests, parity."""
    from modelyard.archiver.verify import verify_archive

    result: dict[str, Any] = {"archive": str(file)}
    check_device(device)
    try:
        with (
            exit_codes(),
            step_bar(*_BYTES) as step,
            api.open_to_verify(file, public_key, run, partial(step, "checking")) as (opened, trust),
        ):
            result = _archive_to_json(opened)
            checks = verify_archive(
                opened, trust=trust, run=run, device=device, tolerance=tolerance
            )
            result["checks"] = [vars(check) for check in checks]
            checked = api.Verification(opened.path, opened.digest, tuple(checks))
        if not as_json:
            _print_files(result["files"])
            print()
            _print_columns([("CHECK", "RESULT"), *((each.subject, each.result) for each in checks)])
            print(f"{file}: {len(opened.files)} files, digest {opened.digest}")
        with exit_codes():
            wrong = [check for check in checks if check.problem]
            if wrong and all(check.subject == "nothing" for check in wrong):
                raise NothingCompared(f"{file.name}: nothing was compared", checked.problems)
            if wrong:
                raise Differs(f"{file.name} is not here what it was", checked.problems)
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
    from modelyard.archiver.keys import generate_keys

    private, public = generate_keys()
    with exit_codes():
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
def exit_codes() -> Iterator[None]:
    """Print an error of the archiver, and leave with its exit code."""
    try:
        yield
    except ArchiveError as error:
        print(f"error: {error}", file=sys.stderr)
        raise _Failed(error) from error


def check_device(device: str) -> None:
    """Refuse what is not a device."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise typer.BadParameter(
            f"{device} is not a device; expected auto, cpu, cuda or cuda:N", param_hint="--device"
        )


def _paths(texts: Iterable[str]) -> list[Path]:
    """Split comma lists; a file may hold a comma itself."""
    paths: list[Path] = []
    for text in texts:
        pieces = [text] if Path(text).exists() else text.split(",")
        paths += [Path(piece.strip()) for piece in pieces if piece.strip()]
    return paths


def _print_files(files: Iterable[Mapping[str, Any]], *columns: str) -> None:
    """Print name, size, the first 12 digits of the SHA-256 and further columns."""
    rows = [
        (f["name"], f"{f['size_bytes']:,}", f["sha256"][:12], *map(f.get, columns)) for f in files
    ]
    _print_columns([("FILE", "BYTES", "SHA256", *map(str.upper, columns)), *rows])


def _print_columns(rows: Sequence[tuple[Any, ...]]) -> None:
    """Print rows of text below each other, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            f"{cell:{'>' if rows[0][at] == 'BYTES' else '<'}{widths[at]}}"
            for at, cell in enumerate(row)
        )
        print("  ".join(cells).rstrip())


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
