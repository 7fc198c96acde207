"""The commands `modelyard provenance attest | verify | sbom`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from modelyard.archiver.cli import exit_codes
from modelyard.archiver.errors import ArchiveError, WrongUsage
from modelyard.archiver.untrusted.names import SBOM_NAME

provenance_app = typer.Typer(
    help="State what an archive was proven to do, for others to check.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
ArchiveArgument = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A file, not a folder.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="File to write (JSON).")]


class BillFormat(StrEnum):
    """What `--format` takes."""

    spdx = "spdx"
    cyclonedx = "cyclonedx"


@provenance_app.command(
    epilog="Example: modelyard provenance attest digits.mar --sign release.key -o parity.json"
)
def attest(
    archive: ArchiveArgument,
    output: OutputOption,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY_FILE", help="Private key. Default: $MODELYARD_SIGNING_KEY."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="DATE", help="When it ends to hold; by default never.")
    ] = None,
) -> None:
    """Sign what an archive's reports prove, as an in-toto statement that cosign verifies.

    It repeats the reports, and runs nothing: `modelyard verify` does.
    """
    from modelyard.archiver.read import open_archive
    from modelyard.archiver.signing import read_expiry, read_signing_key
    from modelyard.plugins.provenance import parity

    with exit_codes():
        key = read_signing_key(sign)
        end = read_expiry(expires, key)
        if key is None:
            raise WrongUsage("nothing to sign with; give --sign or MODELYARD_SIGNING_KEY")
        with open_archive(archive) as opened:
            output.write_bytes(parity.attest(opened, key, end))
    print(f"{output}: signed what {archive.name} was proven to do")


@provenance_app.command(
    epilog="Example: modelyard provenance verify parity.json digits.mar --public-key release.pub"
)
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Of `provenance attest`.")],
    archive: ArchiveArgument,
    public_key: Annotated[
        Path, typer.Option(help="File of public keys; one must have signed FILE.")
    ],
) -> None:
    """Check who signed a statement, that it is of this archive, and that the archive says the same.

    Exit codes: 0 it holds; 1 it does not; 2 wrong usage.
    """
    from modelyard.archiver.read import open_archive
    from modelyard.archiver.signing import read_trusted_keys
    from modelyard.plugins.provenance.parity import check_attested

    with exit_codes():
        trust = read_trusted_keys(public_key)
        try:
            bundle = file.read_bytes()
        except OSError as error:
            raise ArchiveError(f"cannot read {file}: {error.strerror}") from error
        with open_archive(archive) as opened:
            signer = check_attested(opened, bundle, trust)
    print(f"{archive.name}: stated by the trusted key {signer}")


@provenance_app.command(
    epilog="Example: modelyard provenance sbom digits.mar --format spdx -o digits.spdx.json"
)
def sbom(
    archive: ArchiveArgument,
    output: OutputOption,
    format: Annotated[BillFormat, typer.Option(help="SPDX 3.0.1 or CycloneDX 1.6.")] = (
        BillFormat.spdx
    ),
) -> None:
    """Write an archive's bill of materials: SPDX with the AI profile, or the CycloneDX inside."""
    from modelyard.archiver.read import open_archive
    from modelyard.plugins.provenance.spdx import format_spdx

    with exit_codes(), open_archive(archive) as opened:
        try:
            is_spdx = format is BillFormat.spdx
            output.write_bytes(format_spdx(opened) if is_spdx else opened.read(SBOM_NAME))
        except (KeyError, ValueError) as error:
            raise ArchiveError(f"{archive.name} holds no bill of materials: {error}") from error
    print(f"{output}: of {archive.name}", file=sys.stderr)
