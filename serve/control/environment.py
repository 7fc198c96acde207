"""The packages that an archive requires → an interpreter that has them.

An environment is a venv in the state folder that sees the server's own packages too, so torch is
there once. It is named by the digest of what it holds, built once, and shared by the archives and
versions that pin the same. Only its workers use it: nothing is installed where the server runs.
"""

import hashlib
import logging
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from modelyard.archiver import Archive
from modelyard.archiver.proven import installed_version
from modelyard.archiver.requirements import parse_pin
from modelyard.archiver.source_checks import our_modules
from modelyard.archiver.untrusted.names import LOCK_NAME, WHEELS_FOLDER
from modelyard.base.disk import build_once
from modelyard.serve.errors import BadRequest, RequirementsFailed

logger = logging.getLogger(__name__)

SHOWN_LINES = 5
"""Characters of pip's last words in the error; all of them are in the log."""


def interpreter_for(archive: Archive, folder: Path, environments: Path, is_allowed: bool) -> str:
    """Return the interpreter for an archive's workers; build its environment when there is none.

    An archive without requirements, or whose pinned packages the server has at these versions,
    gets the server's own interpreter. Archives that we did not seal do too unless installing is
    allowed.

    Args:
        archive: open; its requirements are read from it.
        folder: where it is unpacked.
        environments: folder of all environments; made when missing.
        is_allowed: the setting `install_requirements`.

    Raises:
        BadRequest: something is missing and may not be installed.
        RequirementsFailed: pip fails.
    """
    seal, name = archive.manifest.modelyard, archive.path.name
    if seal is None:
        file = archive.manifest.requirements_file
        if not file or not is_allowed:
            return sys.executable
        return _environment(name, environments, archive.read(file), ["-r", str(folder / file)])
    pins_of = map(parse_pin, seal.requirements)
    missing = [pin for pin in pins_of if installed_version(pin.name) != pin.version]
    if not missing:
        return sys.executable
    if not is_allowed:
        pins = ", ".join(f"{pin.name} {pin.version}" for pin in missing)
        raise BadRequest(
            f"{name} requires {pins}, not installed here; start the server with "
            "--install-requirements, and it gets an environment of its own"
        )
    arguments = ["--no-deps", "--ignore-installed", "--require-hashes", "--only-binary", ":all:"]
    if (wheels := folder / WHEELS_FOLDER).is_dir():
        arguments += ["--no-index", "--find-links", str(wheels)]
    arguments += ["-r", str(folder / LOCK_NAME)]
    return _environment(name, environments, archive.read(LOCK_NAME), arguments)


def _environment(
    name: str, environments: Path, requirements: bytes, arguments: Sequence[str]
) -> str:
    """Return the interpreter of the environment with these requirements."""
    key = hashlib.sha256(f"{sys.version}\0{sys.prefix}\0".encode() + requirements).hexdigest()
    folder = environments / key[:32]
    python = folder / "bin" / "python"

    def build() -> None:
        count = sum(bool(line.strip()) for line in requirements.splitlines())
        logger.info("%s: installing %d requirements into %s", name, count, folder)
        _build(name, folder, python, arguments)
        logger.info("%s: its environment is ready", name)

    build_once(folder, build)
    return str(python)


def _build(name: str, folder: Path, python: Path, arguments: Sequence[str]) -> None:
    venv.EnvBuilder(symlinks=True).create(folder)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    shared = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    # After the environment's own; `addsitedir` reads the .pth files there as well.
    lines = [f"import site; site.addsitedir({path!r})" for path in shared]
    (packages / "modelyard-server.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [
        *(sys.executable, "-P", "-m", "pip", "--python", str(python), "install", "--no-input"),
        *("--disable-pip-version-check", "--quiet", *arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        logger.error("%s: pip failed:\n%s", name, done.stderr)
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RequirementsFailed(
            f"{name}: its requirements cannot be installed: {' | '.join(said[-SHOWN_LINES:])}"
        )
    taken = {path.name.partition(".")[0] for path in packages.iterdir()} & our_modules()
    if taken:
        raise BadRequest(
            f"{name}: its requirements bring modules named {', '.join(sorted(taken))}, as "
            "Modelyard's own are; a worker with them cannot start"
        )
