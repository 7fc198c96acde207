"""What a handler imports beside the archive and the server's own packages → pinned wheels.

pip resolves, in a process of its own that sees Modelyard and what Modelyard needs as installed,
and nothing else of this machine: torch is shared with the server, everything else is pinned. Only
wheels are taken, so no package's code runs.
"""

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.manifest import PIN

# Run pip with a path of its own: -I and -S keep every installed package off it.
_PIP = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); del sys.argv[1]; "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)
_SHOWN_LINES = 10
_RETRIES = re.compile(r"Retrying .* after connection broken by")
_REASON = re.compile(r"\[Errno -?\d+\] ([^'\")]+)")


@dataclass(frozen=True)
class Pin:
    """One package at one version, in one file."""

    name: str
    version: str
    sha256: str
    """Digest of its wheel."""

    @property
    def release(self) -> tuple[str, str]:
        """Name and version."""
        return self.name, self.version

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Resolved:
    """What pip chose."""

    pins: tuple[Pin, ...]
    """Sorted by name."""
    wheels: tuple[Path, ...]
    """Paths of the wheels, when they come from a folder; in the order of the pins."""

    @property
    def lock(self) -> bytes:
        """A requirements file that only these wheels satisfy."""
        return "".join(f"{pin}\n" for pin in self.pins).encode()


def parse_pin(text: str) -> Pin:
    """Read a line of the lock.

    Raises:
        ValueError: it pins no version and hash.
    """
    if not (match := PIN.fullmatch(text)):
        raise ValueError("expected NAME==VERSION --hash=sha256:DIGEST")
    return Pin(**match.groupdict())


def resolve(requirements: Path, wheels_dir: Path | None = None) -> Resolved:
    """Choose a wheel for every requirement and what it requires in turn, for this Python.

    Args:
        requirements: requirements as pip reads it.
        wheels_dir: take wheels from this folder only; else from pip's index.

    Raises:
        CannotArchive: there is no pip, no solution, or something that is not a wheel.
    """
    if not requirements.is_file():
        raise CannotArchive(f"requirements {requirements}: there is no such file")
    if wheels_dir is not None and not wheels_dir.is_dir():
        raise CannotArchive(f"wheels {wheels_dir}: there is no such folder")
    source = ["--no-index", "--find-links", str(wheels_dir.absolute())] if wheels_dir else []
    report = _run_pip(["-r", str(requirements), *source])
    chosen = sorted(map(_chosen, report["install"]), key=lambda pair: pair[0].name)
    wheels = [wheel for _, wheel in chosen if wheel is not None]
    return Resolved(tuple(pin for pin, _ in chosen), tuple(wheels) if wheels_dir else ())


def own_distributions() -> dict[str, str]:
    """Return what a server has because Modelyard needs it: normalised name → METADATA."""
    found: dict[str, str] = {}
    seen = {"modelyard"}
    waiting = [Requirement("modelyard")]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or an older Python
        found[name] = distribution.read_text("METADATA") or str(distribution.metadata)
        for requirement in _required(distribution, wanted.extras):
            key = f"{canonicalize_name(requirement.name)}{sorted(requirement.extras)}"
            if key not in seen:
                seen.add(key)
                waiting.append(requirement)
    return found


def _required(
    distribution: importlib.metadata.Distribution, extras: Iterable[str]
) -> Iterator[Requirement]:
    """Yield what a distribution requires here, with these of its extras (PEP 508)."""
    for line in distribution.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _run_pip(arguments: Sequence[str]) -> Any:
    """Resolve without installing; return pip's report.

    Format: https://pip.pypa.io/en/stable/reference/installation-report/
    """
    with tempfile.TemporaryDirectory(prefix="modelyard-") as name:
        folder = Path(name)
        _furnish(folder)
        report = folder / "report.json"
        command = [
            *(sys.executable, "-I", "-S", "-c", _PIP, name, "install", "--dry-run", "--quiet"),
            *("--only-binary", ":all:", "--no-input", "--disable-pip-version-check"),
            *("--report", str(report), *arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            if broken := [line for line in lines if _RETRIES.search(line)]:
                found = _REASON.search(broken[0])
                raise CannotArchive(
                    "the requirements cannot be pinned: pip does not reach its package index"
                    f"{f' ({found[1]})' if found else ''}; give a folder of their wheels with "
                    "--wheels, as `pip download -r requirements.txt -d wheels` fills it elsewhere"
                )
            raise CannotArchive("pip cannot resolve the requirements", lines[-_SHOWN_LINES:])
        return json.loads(report.read_bytes())


def _furnish(folder: Path) -> None:
    """Make a folder of packages in which pip itself works, and finds what every server has."""
    try:
        import pip
    except ImportError as error:
        raise CannotArchive(
            "requirements are pinned with pip, which is not in this environment; "
            "install it with `python -m ensurepip`"
        ) from error
    (folder / "pip").symlink_to(Path(str(pip.__file__)).parent)
    for name, metadata in own_distributions().items():
        version = next(line[9:] for line in metadata.splitlines() if line.startswith("Version: "))
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata, encoding="utf-8")


def _chosen(item: Any) -> tuple[Pin, Path | None]:
    """Read one entry of the report; a file of this machine is hashed here."""
    info, metadata = item["download_info"], item["metadata"]
    name, version = canonicalize_name(metadata["name"]), metadata["version"]
    url = urlparse(info["url"])
    if "archive_info" not in info or not url.path.endswith(".whl"):
        raise CannotArchive(
            f"{name} {version} comes from {info['url']}, which is not a wheel; build one with "
            "`pip wheel` and give its folder with --wheels"
        )
    wheel = Path(unquote(url.path)) if url.scheme == "file" else None
    hashes = info["archive_info"].get("hashes", {})
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else hashes.get("sha256")
    if digest is None:
        raise CannotArchive(f"{name} {version}: the index gives no SHA-256 of {info['url']}")
    return Pin(name, version, digest), wheel
