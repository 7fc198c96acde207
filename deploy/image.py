"""Write Modelyard's container image as an OCI layout, without Docker or a registry.

Four layers, so that an update of Modelyard moves its own: Debian's libraries and Python, torch,
the other packages, Modelyard. Equal inputs give equal bytes: entries are sorted, times are 0,
owners are root, and modules are compiled with hashes in place of times.

Format: OCI image specification 1.1, https://github.com/opencontainers/image-spec
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from packaging.utils import canonicalize_name

from modelyard.archiver.sbom import format_image

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "base-files",
    "ca-certificates",
    "libpython3.11-stdlib",
    "libstdc++6",
    "media-types",
    "python3.11-minimal",
)
"""Debian's, with what they depend on; no shell and no package manager."""
SUITE = "bookworm"
SOURCES = ("archiver", "base", "client", "examples", "exporter", "handlers", "plugins", "serve")
HOME = PurePosixPath("opt/modelyard")
SITE = HOME / "lib/python3.11/site-packages"
FOLDERS = {"models": 0o755, "state": 0o775, "tmp": 0o1777}
"""Folders of the image, empty; the group of an arbitrary user, 0, may write to `state`."""
LEFT_OUT = ("dev/", "proc/", "sys/", "usr/share/doc/", "usr/share/man/", "usr/share/locale/")
USER = "1000:0"
ENVIRONMENT = {
    "PATH": f"/{HOME}/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "MODELYARD_HOST": "::",
    "MODELYARD_MODEL_STORE": "/models",
    "MODELYARD_STATE_DIR": "/state",
}
COMMAND = ["serve", "start", "--foreground"]
PORTS = (8080, 8081, 8082)
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class Layer:
    """One compressed tar among the blobs."""

    digest: str
    size_bytes: int
    diff_id: str
    """Digest of the tar itself."""
    note: str


class Blobs:
    """The content-addressed files of a layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "blobs" / "sha256"
        self._folder.mkdir(parents=True)

    def add(self, content: bytes) -> dict[str, Any]:
        """Write a small blob; return its descriptor without a media type."""
        digest = hashlib.sha256(content).hexdigest()
        (self._folder / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def add_layer(self, entries: Iterator[tuple[tarfile.TarInfo, bytes]], note: str) -> Layer:
        """Write a layer of these entries."""
        part = self._folder / "part"
        plain = hashlib.sha256()
        # Level 6: 9 takes three times as long for two parts in a hundred.
        with part.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            sink = cast("IO[bytes]", _Tee(packed, plain))
            with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for info, content in entries:
                    tar.addfile(info, io.BytesIO(content) if info.isreg() else None)
        with part.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        size_bytes = part.stat().st_size
        part.rename(self._folder / digest)
        return Layer(f"sha256:{digest}", size_bytes, f"sha256:{plain.hexdigest()}", note)


class _Tee:
    """Writes to a file, and to a digest of what it was given."""

    def __init__(self, file: gzip.GzipFile, digest: Any) -> None:
        self._file, self._digest = file, digest

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)


def main(arguments: Sequence[str]) -> None:
    """Build the image and print its layers and its digest."""
    parser = argparse.ArgumentParser(prog="scripts/image", description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "image")
    parser.add_argument(
        "--base", type=Path, help="tar of Debian's part, as an earlier run left it beside OUTPUT"
    )
    parser.add_argument("--rootfs", type=Path, help="unpack all layers here, too, to run them")
    given = parser.parse_args(arguments)
    if given.base is not None and not given.base.is_file():
        parser.error(f"--base {given.base} is not a file")
    if given.rootfs is not None and given.rootfs.exists():
        parser.error(f"--rootfs {given.rootfs} is there already; expected a new folder")
    with tempfile.TemporaryDirectory() as scratch:
        write_image(given.output, given.base, given.rootfs, Path(scratch))


def write_image(output: Path, base: Path | None, rootfs: Path | None, scratch: Path) -> None:
    """Write the layout to `output`, and its bill of materials beside it, replacing older ones."""
    layout, sbom = scratch / "layout", output.with_name(f"{output.name}.cdx.json")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    output.parent.mkdir(parents=True, exist_ok=True)
    if base is None:
        base = output.with_name(f"{output.name}-base.tar")
        make_base(base)
    packages = _debian_packages(base)
    folders = install(scratch)
    blobs = Blobs(layout)
    contents = {f"Debian {SUITE}, Python": _base_entries(base)}
    contents |= {note: folder_entries(folder) for note, folder in folders.items()}
    layers = []
    for note, entries in contents.items():
        layers.append(blobs.add_layer(entries, note))
        print(f"{layers[-1].size_bytes / 1e6:8.1f} MB  {note}")
    config = blobs.add(_json(_config(layers, version)))
    manifest = blobs.add(
        _json(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **config},
                "layers": [
                    {
                        "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                        "digest": layer.digest,
                        "size": layer.size_bytes,
                    }
                    for layer in layers
                ],
            }
        )
    )
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                **manifest,
                "platform": {"architecture": "amd64", "os": "linux"},
                "annotations": {"org.opencontainers.image.ref.name": version},
            }
        ],
    }
    (layout / "index.json").write_bytes(_json(index))
    (layout / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    if rootfs is not None:
        _unpack(layout, layers, rootfs)
    shutil.rmtree(output, ignore_errors=True)
    shutil.move(layout, output)
    sites = [str(folder / SITE) for folder in folders.values()]
    python: dict[str, str] = {
        canonicalize_name(each.name): each.read_text("METADATA") or ""
        for each in importlib.metadata.distributions(path=sites)
    }
    sbom.write_bytes(format_image(packages, python, manifest["digest"]))
    print(f"{output}: {manifest['digest']}\n{sbom}")


def make_base(target: Path) -> None:
    """Have mmdebstrap unpack Debian's packages into a tar that lists them.

    Raises:
        SystemExit: it is not installed, or fails.
    """
    if shutil.which("mmdebstrap") is None:
        sys.exit("error: mmdebstrap is not installed; apt-get install mmdebstrap, or give --base")
    part = target.with_name(f"{target.name}.part.tar")
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(PACKAGES)}",
               '--extract-hook=ls "$1"/var/cache/apt/archives >"$1"/etc/packages.txt',
               SUITE, str(part)]  # fmt: skip
    if subprocess.run(command, env={**os.environ, "SOURCE_DATE_EPOCH": "0"}).returncode:
        sys.exit(f"error: mmdebstrap could not make {target.name}; its reason is above")
    part.replace(target)


def install(scratch: Path) -> dict[str, Path]:
    """Install torch, the other packages and Modelyard into folders that are laid out as the root.

    Returns:
        What a layer is → its folder.

    Raises:
        SystemExit: pip takes a torch that would not run.
    """
    source = scratch / "source"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard",
         "pyproject.toml", "README.md", "LICENSE", "modelyard", *SOURCES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, files):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    wheels = scratch / "wheels"
    _pip(
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        wheels,
        source / "client",
        source,
    )
    exact = ("--only-binary", ":all:", "--require-hashes")
    chosen: dict[str, tuple[str | Path, ...]] = {
        "torch": ("-r", ROOT / "requirements-torch.lock"),
        "other packages": (*exact, "-r", ROOT / "requirements-server.lock"),
        "Modelyard": tuple(wheels.iterdir()),
    }
    folders = {}
    for number, (note, what) in enumerate(chosen.items()):
        folder = folders[note] = scratch / f"layer{number}"
        _pip("install", "--no-deps", "--no-compile", "--target", folder / SITE, *what)
        if (folder / SITE / "torch" / "lib" / "libtorch_cuda.so").exists():
            sys.exit(
                "error: pip took torch's build for CUDA, without its libraries; set "
                "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
            )
        _tidy(folder / SITE)
    shutil.copytree(ROOT / "deploy" / "bin", folders["Modelyard"] / HOME / "bin")
    return folders


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, *map(str, arguments)], check=True)


def _tidy(site: Path) -> None:
    """Remove what says where it was installed from, and compile the modules."""
    shutil.rmtree(site / "bin", ignore_errors=True)
    for file in site.glob("*.dist-info/*"):
        if file.name in ("direct_url.json", "REQUESTED"):
            file.unlink()
        elif file.name == "RECORD":
            lines = file.read_text().splitlines(keepends=True)
            gone = ("../../bin/", "bin/")
            file.write_text("".join(
                line for line in lines
                if not line.startswith(gone)
                and not line.partition(",")[0].endswith(("/direct_url.json", "/REQUESTED"))
            ))  # fmt: skip
    command = [sys.executable, "-m", "compileall", "-qq", "--invalidation-mode", "unchecked-hash",
               "-s", str(site), "-p", f"/{SITE}", str(site)]  # fmt: skip
    # Some packages bring files for other versions of Python, which do not compile.
    subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"})


def _base_entries(base: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield Debian's files, one file of all certificates, the environment, and empty folders."""
    certificates = []
    with tarfile.open(base) as tar:
        members = {member.name.removeprefix("./").rstrip("/"): member for member in tar}
        for name in sorted(members):
            member = members[name]
            if name in ("", ".") or f"{name}/".startswith(LEFT_OUT) or name in FOLDERS:
                continue
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            file = tar.extractfile(member) if member.isreg() else None
            content = file.read() if file else b""
            if name.startswith("usr/share/ca-certificates/") and name.endswith(".crt"):
                certificates.append(content)
            member.name = name
            member.linkname = (
                member.linkname.removeprefix("./") if member.islnk() else member.linkname
            )
            yield _plain(member), content
    yield _new(CERTIFICATES, b"".join(certificates))
    for name, mode in FOLDERS.items():
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, mode
        if name == "state":
            folder.uid = int(USER.partition(":")[0])
        yield folder, b""
    for name in ("dev", "proc", "sys"):
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        yield folder, b""
    link = tarfile.TarInfo(str(HOME / "bin/python"))
    link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3.11"
    yield link, b""
    yield _new(str(HOME / "pyvenv.cfg"), b"home = /usr/bin\ninclude-system-site-packages = false\n")


def folder_entries(folder: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield what is in a folder, sorted; files have one of two modes."""
    for path in sorted(folder.rglob("*")):
        info = tarfile.TarInfo(path.relative_to(folder).as_posix())
        if path.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
            yield _plain(info), b""
        elif path.is_dir():
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            yield _plain(info), b""
        else:
            content = path.read_bytes()
            info.size = len(content)
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            yield _plain(info), content


def _new(name: str, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    return info, content


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry of root's, without a time; no program runs with another's rights."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    info.mode &= 0o1777
    info.pax_headers = {}
    return info


def _config(layers: Sequence[Layer], version: str) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "User": USER,
            "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "Entrypoint": ["modelyard"],
            "Cmd": COMMAND,
            "ExposedPorts": {f"{port}/tcp": {} for port in PORTS},
            "Volumes": {"/state": {}},
            "WorkingDir": "/tmp",
            "StopSignal": "SIGTERM",
            "Labels": {
                "org.opencontainers.image.title": "modelyard",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created_by": layer.note} for layer in layers],
    }


def _debian_packages(base: Path) -> list[tuple[str, str]]:
    """Return names and versions of what is in the base, by the names of Debian's files.

    Raises:
        SystemExit: it is not what `make_base` has made.
    """
    try:
        with tarfile.open(base) as tar:
            listed = tar.extractfile("./etc/packages.txt")
            names = listed.read().decode().split() if listed else []
    except (KeyError, OSError, tarfile.TarError):
        sys.exit(f"error: {base} is not a base of an earlier run; leave --base out to make it anew")
    split = (name.removesuffix(".deb").split("_") for name in names if name.endswith(".deb"))
    return [(name, version.replace("%3a", ":")) for name, version, _ in split]


def _unpack(layout: Path, layers: Sequence[Layer], rootfs: Path) -> None:
    """Unpack the layers one over the other, as who runs a container does."""
    rootfs.mkdir(parents=True)
    for layer in layers:
        blob = layout / "blobs" / "sha256" / layer.digest.removeprefix("sha256:")
        with tarfile.open(blob) as tar:
            tar.extractall(rootfs, filter="tar")


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


if __name__ == "__main__":
    main(sys.argv[1:])
