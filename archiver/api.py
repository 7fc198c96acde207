"""`archive` and `verify`, as a program calls them: the commands of the same names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.archiver.read import Archive
    from modelyard.archiver.signing import Trust
    from modelyard.archiver.untrusted.container import Progress
    from modelyard.archiver.verify import Check

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Verification:
    """What came of checking an archive; it is true where nothing differs."""

    archive: Path
    digest: str
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What differs, a sentence each."""
        return tuple(f"{each.subject}: {each.problem}" for each in self.checks if each.problem)

    def __bool__(self) -> bool:
        return not self.problems


def archive(
    name: str,
    *,
    artifact: str | Path | None = None,
    handler: str | Path = "auto",
    version: str = "1.0",
    output_dir: str | Path = "model_store",
    examples: Mapping[str, object] | Paths = (),
    explain_with: str | Path | None = None,
    extra_files: Paths = (),
    config_file: str | Path | None = None,
    requirements: str | Path | None = None,
    wheels: str | Path | None = None,
    source_folder: str | Path | None = None,
    reference: str | Path | None = None,
    certificate: bool | None = None,
    archive_format: str = "zip-store",
    sign: str | Path | None = None,
    expires: str | None = None,
    dry_run: bool = True,
    force: bool = False,
) -> Path:
    """Pack an artifact, its handler and further files into one sealed archive; return its path.

    It is loaded as a worker loads it, and answers its examples, before it is written. Warnings go
    to the log `modelyard.archiver.write`.

    Args:
        name: the model's name, under which it is served; the archive is NAME.mar.
        artifact: exported file; its report beside it is packed too. Not needed by a handler of
            yours that does without one.
        handler: a built-in handler's name, `FILE.py` or `FILE.py:NAME`; `auto` chooses a built-in
            one by what the model takes and gives.
        version: the model's version.
        output_dir: folder for the archive, made when missing.
        examples: requests and their answers: `{"scans/7.png": "7"}`; or files alone, for which the
            answer is what the handler says now.
        explain_with: artifact with gradients that explains this one; for ONNX the `.pt2` of the
            same name beside it when absent.
        extra_files: files that are packed under their base names.
        config_file: configuration of the model, as model-config.yaml.
        requirements: file of what the handler imports, as pip reads it; pinned with hashes now.
        wheels: folder of the requirements' wheels, which then travel inside.
        source_folder: the checkpoint's folder, of which the tokenizer, processor and labels are
            packed for a built-in handler; by default for `auto`, where the export found it.
        reference: JSON list of requests, or a folder of them, whose explanations are what those of
            live predictions are compared with.
        certificate: measure the explanations on golden requests and on up to 16 rows of the
            reference, which are packed for that, and write nothing where they miss a bound. Absent,
            it is tried where there are four golden requests; False leaves it out.
        archive_format: `zip-store`, a zip without compression, `tgz`, NAME.tar.gz, or
            `no-archive`, a folder.
        sign: file of a private key, of `modelyard keygen`.
        expires: when the signature ends, as 2027-01-31; never by default.
        dry_run: load it as a worker does and answer the examples before it is written; without,
            none of its code runs.
        force: replace an archive that exists.

    Raises:
        ArchiveError: nothing was written; `problems` has every reason.
    """
    from modelyard.archiver.signing import read_expiry, read_signing_key
    from modelyard.archiver.write import write_archive

    key = read_signing_key(_path(sign))
    return write_archive(
        name,
        version=version,
        output_dir=Path(output_dir),
        artifact=_path(artifact),
        handler=str(handler),
        explain_artifact=_path(explain_with),
        extra_files=[Path(file) for file in _several(extra_files)],
        config_file=_path(config_file),
        examples=_examples(examples),
        requirements_file=_path(requirements),
        wheels_dir=_path(wheels),
        source_folder=_path(source_folder),
        reference=_path(reference),
        certificate=certificate,
        archive_format=archive_format,
        dry_run=dry_run,
        key=key,
        expires=read_expiry(expires, key),
        force=force,
    )


def verify(
    file: str | Path,
    *,
    public_key: str | Path | None = None,
    run: bool = True,
    device: str = "auto",
    tolerance: float | None = None,
) -> Verification:
    """Check an archive here: its digests, signature, golden requests and parity.

    Args:
        file: the archive.
        public_key: file of public keys; one of them must have signed the archive.
        run: replay the golden requests and the parity check, which runs the archive's code.
        device: where it runs: auto, cpu, cuda or cuda:N.
        tolerance: largest tolerance of the archive's own that is believed.

    Raises:
        ArchiveError: it is damaged, was changed, is unsafe, or no such key signed it.
    """
    from modelyard.archiver.verify import verify_archive

    with open_to_verify(file, public_key, run) as (opened, trust):
        checks = verify_archive(opened, trust=trust, run=run, device=device, tolerance=tolerance)
        return Verification(opened.path, opened.digest, tuple(checks))


@contextmanager
def open_to_verify(
    file: str | Path, public_key: str | Path | None, run: bool, progress: Progress | None = None
) -> Iterator[tuple[Archive, Trust | None]]:
    """Open an archive to be unpacked and run, and read the keys; errors as `verify`."""
    from modelyard.archiver.read import open_archive
    from modelyard.archiver.signing import read_trusted_keys

    trust = read_trusted_keys(Path(public_key)) if public_key else None
    with tempfile.TemporaryDirectory(prefix="modelyard-") as folder:
        # What a key has still to vouch for is not written.
        staging = None if trust or not run else Path(folder)
        with open_archive(file, progress=progress, staging=staging) as opened:
            yield opened, trust


def _examples(given: Mapping[str, object] | Paths) -> list[str]:
    if not isinstance(given, Mapping):
        return [str(each) for each in _several(given)]
    texts = {
        file: answer if isinstance(answer, str) else json.dumps(answer)
        for file, answer in given.items()
    }
    return [f"{file}={text}" for file, text in texts.items()]


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _several(given: Paths) -> Sequence[str | Path]:
    return [given] if isinstance(given, str | Path) else given
