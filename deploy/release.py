"""Build a release twice, compare, install and try what was built, and write down how it came about.

What is written to the output folder, equal for equal commits: wheels and sdists of server and
client, the image as an OCI layout, a bill of materials for each environment that was tried, the
provenance and SHA256SUMS. Nothing is uploaded.

Formats: in-toto statement 1 with SLSA provenance 1, https://slsa.dev/spec/v1.0/provenance
"""

from __future__ import annotations

import argparse
import email.parser
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TYPE, BUILDER = "urn:modelyard:release:1", "urn:modelyard:scripts/release"
LOCKS = ("requirements.lock", "requirements-server.lock", "requirements-torch.lock")
SECTION = "## From a checkpoint to an answer"
"""Section of the README whose commands are run with what was installed."""
BUILD = """\
import sys, setuptools.build_meta as backend
folder = sys.argv[1]  # setuptools puts a command line of its own there
backend.build_sdist(folder)
backend.build_wheel(folder)
"""
"""What builds a project in the folder where it runs."""


class ReleaseError(Exception):
    """A release is not what it has to be; the message says all that was seen."""


def main(arguments: Sequence[str]) -> None:
    """Make a release in a folder."""
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "release")
    parser.add_argument(
        "--untagged", action="store_true", help="a rehearsal: neither tag nor date are asked for"
    )
    parser.add_argument("--no-image", action="store_true", help="leave the container image out")
    parser.add_argument(
        "--python", action="append", metavar="3.N", help="try these alone; repeatable"
    )
    parser.add_argument(
        "--torch-index", default=CPU_INDEX, help="where torch comes from; '' is pip's own index"
    )
    given = parser.parse_args(arguments)
    try:
        release(
            ROOT,
            given.output,
            tagged=not given.untagged,
            image=not given.no_image,
            pythons=given.python,
            torch_index=given.torch_index,
        )
    except ReleaseError as error:
        sys.exit(f"error: {error}")


def release(
    root: Path,
    output: Path,
    *,
    tagged: bool,
    image: bool,
    pythons: Sequence[str] | None,
    torch_index: str,
) -> None:
    """Make a release of a checkout's commit.

    Args:
        root: the checkout; nothing of it may differ from its commit.
        output: folder that is made, or made anew, when everything went well.
        tagged: the commit has to carry the version's tag, the changelog the version's date.
        pythons: versions that are tried, as `3.12`; those that `pyproject.toml` names by default.
        torch_index: index that torch is installed from; pip's own where empty.

    Raises:
        ReleaseError: version, changelog and tag disagree; two builds differ; something that was
            built cannot be installed, or the README's trip fails with it.
    """
    version = check_version(root, tagged=tagged)
    commit = _git(root, "rev-parse", "HEAD")
    interpreters = {each: find_python(each) for each in pythons or supported_pythons(root)}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        built = [scratch / "built-1", scratch / "built-2"]
        for target in built:
            source = scratch / f"source-{target.name}"
            _run("git", "clone", "--quiet", root, source)
            _run("git", "-C", source, "checkout", "--quiet", "--detach", commit)
            build(source, target, int(_git(root, "log", "-1", "--format=%ct")), image=image)
        compare(*built)
        for python, interpreter in interpreters.items():
            print(f"== Python {python}: installed and tried", flush=True)
            sbom = try_out(interpreter, built[0], scratch / f"python{python}", torch_index)
            (built[0] / f"modelyard-{version}-python{python}.cdx.json").write_bytes(sbom)
        subjects = digests(built[0])
        made = provenance(root, subjects, commit=commit, version=version, tagged=tagged)
        (built[0] / "provenance.json").write_text(json.dumps(made, indent=1) + "\n")
        sums = {**subjects, **digests(built[0], "provenance.json")}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
        (built[0] / "SHA256SUMS").write_text(lines)
        shutil.rmtree(output, ignore_errors=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(built[0], output)
    print(lines + f"{output}: version {version}" + ("" if tagged else ", not to be published"))


# -- what is released ----------------------------------------------------------------------------


def check_version(root: Path, *, tagged: bool) -> str:
    """Return the version that server, client, changelog and tag agree on.

    Raises:
        ReleaseError: they do not, or the checkout is not its commit; all of it is said at once.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((root / "client" / "pyproject.toml").read_text())["project"]
    version = str(project["version"])
    wrong = []
    if client["version"] != version:
        wrong.append(f"client/pyproject.toml says {client['version']}; expected {version}")
    if (pin := f"modelyard-client=={version}") not in project["dependencies"]:
        wrong.append(f"pyproject.toml's dependencies have no {pin}")
    heading = re.search(r"^## \[(.*?)\] - (.*)$", (root / "CHANGELOG.md").read_text(), re.M)
    newest, date = heading.groups() if heading else ("nothing", "")
    if newest != version:
        wrong.append(f"the newest section of CHANGELOG.md is of {newest}; expected {version}")
    if changed := _git(root, "status", "--porcelain"):
        wrong.append(f"{len(changed.splitlines())} files are not as committed; commit them")
    if tagged:
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            wrong.append(f"CHANGELOG.md says {date!r} of it; expected the day, as 2026-12-01")
        if f"v{version}" not in (tags := _git(root, "tag", "--points-at", "HEAD").split()):
            wrong.append(f"the commit's tags are {', '.join(tags) or 'none'}; expected v{version}")
    if wrong:
        raise ReleaseError(f"version {version} cannot be released: " + "; ".join(wrong))
    return version


def supported_pythons(root: Path) -> list[str]:
    """Return the versions of Python that the package names as its own, as `3.12`."""
    named = tomllib.loads((root / "pyproject.toml").read_text())["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)$", "\n".join(named), re.M)


def find_python(version: str) -> Path:
    """Return an interpreter of a version, from PATH or pyenv.

    Raises:
        ReleaseError: there is none that can make environments.
    """
    pyenv = Path.home() / ".pyenv" / "versions"
    on_path = shutil.which(f"python{version}")
    for each in [*([Path(on_path)] if on_path else []), *pyenv.glob(f"{version}.*/bin/python")]:
        if not subprocess.run(
            [each, "-c", "import ensurepip, venv"], capture_output=True
        ).returncode:
            return each
    raise ReleaseError(f"no Python {version} with the venv module; install it or use --python")


# -- building ------------------------------------------------------------------------------------


def build(source: Path, target: Path, epoch: int, *, image: bool) -> None:
    """Build wheels, sdists and, when asked, the image of a clean clone.

    Args:
        epoch: seconds since 1970 that every file gets as its time.
    """
    print(f"== {target.name}: wheels, sdists" + (", image" if image else ""), flush=True)
    target.mkdir()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    for project in (source / "client", source):
        _run(sys.executable, "-c", BUILD, target, cwd=project, env=environment)
    for sdist in target.glob("*.tar.gz"):
        tidy_sdist(sdist, epoch)
        unpacked, again = source.parent / f"{target.name}-sdist", source.parent / "again"
        with tarfile.open(sdist) as tar:
            tar.extractall(unpacked, filter="data")
        again.mkdir()
        project = unpacked / sdist.name.removesuffix(".tar.gz")
        _run(sys.executable, "-c", BUILD, again, cwd=project, env=environment)
        for wheel in again.glob("*.whl"):
            if wheel.read_bytes() != (target / wheel.name).read_bytes():
                differing = ", ".join(differences(wheel, target / wheel.name)[:5])
                raise ReleaseError(f"{sdist.name} builds another {wheel.name}: {differing}")
        shutil.rmtree(again)
        shutil.rmtree(unpacked)
    if image:
        _run(sys.executable, "-P", "-m", "deploy.image", "-o", target / "image",
             cwd=source, env={**environment, "PYTHONPATH": str(source)})  # fmt: skip


def tidy_sdist(sdist: Path, epoch: int) -> None:
    """Write an sdist anew whose bytes depend on its files alone: setuptools notes the hour."""
    with tarfile.open(sdist) as old:
        members = [
            (each, file.read() if (file := old.extractfile(each)) else b"")
            for each in sorted(old.getmembers(), key=lambda each: each.name)
        ]
    with (
        sdist.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member, content in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.size, info.mtime = member.type, len(content), epoch
            info.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(info, io.BytesIO(content))


def compare(first: Path, second: Path) -> None:
    """Check that two builds hold the same files.

    Raises:
        ReleaseError: they do not; it names the files, and within wheels and sdists what differs.
    """
    one, other = digests(first), digests(second)
    if differing := sorted({name for name, _ in one.items() ^ other.items()}):
        inside = [
            f"{name} ({', '.join(differences(first / name, second / name)[:3])})"
            if name in one and name in other
            else f"{name} (in one of them)"
            for name in differing
        ]
        raise ReleaseError(f"two builds of one commit differ: {'; '.join(inside)}")
    print(f"== equal twice: {len(one)} files", flush=True)


def digests(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """Return the SHA-256 of each file below a folder; an image counts by its index alone.

    The index names the manifest by its digest, which names config and layers by theirs.
    """
    found = {}
    for file in sorted(folder.glob(pattern)):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not name.startswith("image/blobs/"):
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs between two wheels or sdists: files, or how they are packed."""
    contents = []
    for file in (one, other):
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                contents.append({name: wheel.read(name) for name in wheel.namelist()})
        elif file.name.endswith(".tar.gz"):
            with tarfile.open(file) as tar:
                contents.append(
                    {m.name: r.read() for m in tar if (r := tar.extractfile(m)) is not None}
                )
        else:
            return ["its bytes"]
    a, b = contents
    changed = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))
    return changed or ["times or modes of its files"]


# -- trying --------------------------------------------------------------------------------------


def try_out(python: Path, built: Path, folder: Path, torch_index: str) -> bytes:
    """Install wheels into empty environments, and make the README's trip with nothing else.

    Returns:
        The environment's bill of materials.

    Raises:
        ReleaseError: something cannot be installed, or a command of the trip fails.
    """
    (wheel,) = built.glob("modelyard-*.whl")
    (client,) = built.glob("modelyard_client-*.whl")
    alone = _environment(python, folder / "client")
    _run(alone / "pip", "install", "--quiet", client, cwd=folder)
    _run(alone / "python", "-c", "import modelyard_client", cwd=folder)
    index = ["--index-url", torch_index] if torch_index else []
    bin = _environment(python, folder / "server")
    (torch,) = (
        line for line in (ROOT / LOCKS[2]).read_text().split() if line.startswith("torch==")
    )
    _run(bin / "pip", "install", "--quiet", torch, *index, cwd=folder)
    _run(bin / "pip", "install", "--quiet", client, f"{wheel}[all]", cwd=folder)
    home = folder / "home"
    home.mkdir()
    (home / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
    environment = {
        "PATH": f"{bin}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "COLUMNS": "120",
        # Free ones: who makes a release may serve something on the default ones.
        "MODELYARD_PORT": str(port := _free_port()),
        "MODELYARD_MANAGEMENT_PORT": "0",
        "MODELYARD_METRICS_PORT": "0",
    }
    steps = trip(readme(wheel)).replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    try:
        _run("bash", "-euo", "pipefail", "-c", f"modelyard example\n{steps}",
             cwd=home, env=environment)  # fmt: skip
    finally:
        subprocess.run([bin / "modelyard", "serve", "stop"], env=environment, capture_output=True)
    if not (home / "build" / "heatmap.png").read_bytes().startswith(b"\x89PNG"):
        raise ReleaseError("the README's trip left no picture at build/heatmap.png")
    command = [str(bin / "python"), "-P", "-m", "modelyard.archiver.sbom"]
    sbom = subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    shutil.rmtree(folder)
    return sbom


def readme(wheel: Path) -> str:
    """Return the README that a wheel carries as its description."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        return str(email.parser.Parser().parsestr(files.read(name).decode()).get_payload())


def trip(text: str) -> str:
    """Return the commands of the README's trip.

    Raises:
        ReleaseError: the README has none.
    """
    _, _, section = text.partition(f"\n{SECTION}\n")
    section = re.split(r"^## ", section, maxsplit=1, flags=re.M)[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    if not blocks:
        raise ReleaseError(f"the wheel's README has no commands below {SECTION!r}")
    return "".join(blocks)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _environment(python: Path, folder: Path) -> Path:
    """Make an empty environment; return the folder of its commands."""
    _run(python, "-m", "venv", folder)
    return folder / "bin"


# -- provenance ----------------------------------------------------------------------------------


def provenance(
    root: Path, subjects: Mapping[str, str], *, commit: str, version: str, tagged: bool
) -> dict[str, object]:
    """Return a statement of what was built from what; it holds no time and nothing of this machine.

    Args:
        subjects: SHA-256 of each file that was built, by its name.
    """
    locks = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in LOCKS}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": each}} for name, each in subjects.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": version, "tagged": tagged},
                "resolvedDependencies": [
                    {"name": "modelyard", "digest": {"gitCommit": commit}},
                    *({"name": name, "digest": {"sha256": each}} for name, each in locks.items()),
                ],
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _run(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run a command whose output is shown only where it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-20:])
        raise ReleaseError(
            f"`{' '.join(map(str, command[:6]))} …` ended by {done.returncode}:\n{end}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
