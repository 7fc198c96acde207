"""The command `torch-model-archiver`.

argparse, as TorchServe: prefixes of flags, `-v` for the version's value and exit code 2 are part
of what scripts rely on.
"""

import argparse
import sys
from collections.abc import Sequence

from modelyard.archiver.errors import ArchiveError, ArchiveExists
from modelyard.archiver.manifest import RUNTIMES
from modelyard.plugins.torchserve.archiver.archive import (
    FORMATS,
    ModelArchiverConfig,
    archive_for_torchserve,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one archive; exit code 0 done, 1 the job failed, 2 wrong usage."""
    config = parse_command_line(arguments)
    try:
        archive_for_torchserve(config, warn=_warn)
    except FileNotFoundError as error:
        sys.exit(f"torch-model-archiver: FileNotFoundError: {error}")
    except ArchiveExists as error:
        sys.exit(f"ERROR - {error}")
    except ArchiveError as error:
        sys.exit(str(error))


def parse_command_line(arguments: Sequence[str] | None = None) -> ModelArchiverConfig:
    """Return what the arguments, else those of this process, ask for; exit code 2 if wrong."""
    return ModelArchiverConfig.from_args(_parser().parse_args(arguments))


def _warn(message: str) -> None:
    print(f"WARNING - {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-model-archiver",
        description="Pack a model for TorchServe or Modelyard. `modelyard archive` writes archives "
        "that are sealed, carry golden requests and can be explained.",
        epilog="Example: torch-model-archiver --model-name digits --version 1.0 "
        "--serialized-file digits.pt --handler image_classifier --export-path model_store",
    )
    add = parser.add_argument
    add("--model-name", required=True, help="the model's name; the archive is NAME.mar")
    add("--version", "-v", required=True, help="the model's version")
    add(
        "--handler",
        required=True,
        help="FILE.py, FILE:function, or a built-in name, as image_classifier",
    )
    for flags, text in _FILES.items():
        add(*flags.split(), help=text)
    add("--keep-tree", action="store_true", help="folders of --extra-files keep their own name")
    add("--runtime", default="python", choices=RUNTIMES, help="default: %(default)s")
    add("--export-path", default=".", help="folder for the archive; default: this one")
    add(
        "--archive-format",
        default="default",
        choices=FORMATS,
        help="default: a zip; zip-store: one without compression; tgz: NAME.tar.gz; "
        "no-archive: a folder",
    )
    add("--force", "-f", action="store_true", help="replace an archive that exists")
    add(
        "--check",
        action="store_true",
        help="load the model in a worker's process first; write nothing when that fails",
    )
    return parser


_FILES = {
    "--serialized-file": "weights: .pt, .pth, TorchScript, .onnx, …",
    "--model-file": "Python file with the model's class, for a state dict",
    "--extra-files": "comma-separated files, wildcards and folders (their content lands at the "
    "archive's root); FILE=NAME packs a file under another name",
    "--requirements-file -r": "what the handler imports, as pip reads it",
    "--config-file -c": "the model's configuration, in YAML",
}


if __name__ == "__main__":
    main()
