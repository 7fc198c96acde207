"""The image of `scripts/image`, its root file system run as a container engine would.

Built anew it takes minutes, Debian's mirror and a package index. IMAGE_ROOTFS names one that
`scripts/image --rootfs` has unpacked before.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.image import (
    COMMAND,
    ENVIRONMENT,
    HOME,
    PORTS,
    SITE,
    SOURCES,
    SUITE,
    USER,
    Blobs,
    folder_entries,
    main,
)
from modelyard.serve.settings import load_settings
from tests.serve.live import poll
from tests.shared import DIGITS, ROOT

SCAN = (DIGITS / "scans" / "7.png").read_bytes()
ANSWERED, REFUSED, LOST = "answered", "refused at connect", "lost"
BUILD_PACKAGES = ("ca-certificates", "python3-pip", "python3-venv")
"""Debian's, of a base on which the Dockerfile builds as on python:3.11-slim."""
PIP_FILES = (Path.home() / ".config" / "pip" / "pip.conf", Path("/etc/pip.conf"))
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"


@pytest.fixture(scope="module")
def rootfs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    if subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]).returncode:
        pytest.skip("bubblewrap cannot make user namespaces here")
    if given := os.environ.get("IMAGE_ROOTFS"):
        return Path(given)
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    folder = tmp_path_factory.mktemp("image")
    script = str(ROOT / "scripts" / "image")
    subprocess.run([script, "-o", folder / "image", "--rootfs", folder / "rootfs"], check=True)
    return folder / "rootfs"


class Cell:
    """A running container: `bwrap` with the image's variables and a read-only root.

    It has no rights, unless its user is root: of this namespace, which has no other user.
    """

    def __init__(self, rootfs: Path, folder: Path, store: Path, user: int) -> None:
        self.state, self.tmp = folder / "state", folder / "tmp"
        for each in (self.state, self.tmp):
            each.mkdir()
        variables = {**ENVIRONMENT, "MODELYARD_HOST": "127.0.0.1", "MODELYARD_MODELS": "onnx",
                     "MODELYARD_PORT": "0", "MODELYARD_MANAGEMENT_PORT": "0",
                     "MODELYARD_METRICS_PORT": "0", "MODELYARD_WORKERS": "1"}  # fmt: skip
        self._command = [
            *("bwrap", "--unshare-all", "--share-net", "--die-with-parent", "--as-pid-1"),
            *("--uid", str(user), "--gid", "0", "--cap-drop" if user else "--cap-add", "ALL"),
            "--clearenv",
            *("--ro-bind", str(rootfs), "/", "--proc", "/proc", "--dev", "/dev"),
            *("--ro-bind", str(store), "/models", "--bind", str(self.state), "/state"),
            *("--bind", str(self.tmp), "/tmp", "--chdir", "/tmp"),
            *(word for pair in variables.items() for word in ("--setenv", *pair)),
        ]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self._command, "modelyard", *COMMAND], stdout=log, stderr=log
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container of its own with the same folders."""
        return subprocess.run([*self._command, *command], capture_output=True, text=True)

    def wait_until_ready(self) -> None:
        """Wait for the file that says where the server listens, which it writes when it is."""
        about = self.state / "server.json"

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return about.exists() and self.ask("GET", "/health/ready")[0] == 200

        poll(is_ready, "the container is ready", 180)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Send one request over a connection of its own."""
        url = json.loads((self.state / "server.json").read_text())["inference"]
        return ask(url.removeprefix("http://"), method, path, body)

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as container engines do: the child of what bwrap is here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (inside,) = children.read_text().split()
        os.kill(int(inside), signal.SIGTERM)


def ask(address: str, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, body, {"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@contextmanager
def running(rootfs: Path, folder: Path, store: Path, user: int) -> Iterator[Cell]:
    cell = Cell(rootfs, folder, store, user)
    try:
        cell.wait_until_ready()
        yield cell
    finally:
        cell.process.kill()
        cell.process.wait()


def runs_the_image(test: Any) -> Any:
    """Mark a test that takes minutes."""
    return pytest.mark.nightly(pytest.mark.timeout(1800)(test))


@runs_the_image
@pytest.mark.parametrize(
    "user",
    [1000, 1000660000, 0],
    ids=["its-own-user", "any-user", "root-of-an-engine-without-root"],
)
def test_it_serves_and_stops_under_load_and_writes_to_its_state_only(
    rootfs: Path, digits_store: Path, tmp_path: Path, user: int
) -> None:
    with running(rootfs, tmp_path, digits_store, user) as cell:
        status, answer = cell.ask("POST", "/predictions/onnx", SCAN)
        assert (status, max(answer, key=answer.__getitem__)) == (200, "7")
        status, answer = cell.ask("POST", "/explanations/onnx", SCAN)
        assert (status, answer["label"], answer["tolerance_met"]) == (200, "7", True)
        url = json.loads((cell.state / "server.json").read_text())["inference"]
        outcomes: Counter[str] = Counter()
        with ThreadPoolExecutor(8) as threads:
            clients = [
                threads.submit(load, url.removeprefix("http://"), outcomes) for _ in range(8)
            ]
            poll(lambda: outcomes[ANSWERED] > 50, "the load runs")
            cell.terminate()
            for each in clients:
                each.result()
        assert cell.process.wait(60) == 0, cell.log.read_text()
        assert (outcomes[LOST], outcomes[REFUSED]) == (0, 8), outcomes
        assert list(cell.tmp.iterdir()) == []
        assert "Traceback" not in cell.log.read_text()
        refused = cell.run("python", "-c", "open('/opt/modelyard/x', 'w')")
        assert "Read-only file system" in refused.stderr


def load(address: str, outcomes: Counter[str]) -> None:
    """Ask until there is nobody to connect to."""
    while True:
        try:
            status, _ = ask(address, "POST", "/predictions/onnx", SCAN)
        except ConnectionRefusedError:
            outcomes[REFUSED] += 1
            return
        except (OSError, http.client.HTTPException):
            outcomes[LOST] += 1
        else:
            outcomes[ANSWERED if status == 200 else LOST] += 1


@runs_the_image
def test_walls_stand_in_it(rootfs: Path, digits_store: Path, tmp_path: Path) -> None:
    with running(rootfs, tmp_path, digits_store, 1000) as cell:
        said = json.loads(cell.run("modelyard", "doctor", "--json").stdout)
    walls = {each["name"]: each for each in said["checks"] if each["name"].startswith("wall: ")}
    expected = {"files", "network", "system calls", "signals", "privileges", "environment"}
    assert {f"wall: {name}" for name in expected} <= walls.keys()
    assert all(each["status"] == "ok" for each in walls.values()), walls


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """Build the Dockerfile twice, on Debian's Python; return its root file system and the ids."""
    if missing := [
        tool for tool in ("buildah", "bwrap", "mmdebstrap") if shutil.which(tool) is None
    ]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    if os.getuid():
        pytest.skip("buildah's isolation by chroot needs root")
    folder = tmp_path_factory.mktemp("buildah")
    buildah = ["buildah", "--root", str(folder / "store"), "--runroot", str(folder / "run"),
               "--storage-driver", "vfs"]  # fmt: skip

    def run(*words: str) -> str:
        done = subprocess.run([*buildah, *words], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    try:
        base = os.environ.get("IMAGE_BUILD_BASE") or str(folder / "base.tar")
        if not Path(base).exists():
            link = 'ln -s ../../bin/python3 "$1/usr/local/bin/python"'
            subprocess.run(
                ["mmdebstrap", "--variant=minbase", f"--include={','.join(BUILD_PACKAGES)}",
                 f"--customize-hook={link}", SUITE, base], check=True
            )  # fmt: skip
        container = run("from", "scratch")
        run("add", "-q", container, base, "/")
        run("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", container)
        run("commit", "-q", container, "localhost/base:1")
        # torch's index has one file: what pip takes here, which must be the build for CPUs.
        (index := folder / "index" / "torch").mkdir(parents=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", index,
             "-r", ROOT / "requirements-torch.lock"], check=True
        )  # fmt: skip
        (wheel,) = index.iterdir()
        (index / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
        (folder / "tree").mkdir()  # both builds see one, whoever works in ours
        for name in ("Dockerfile", ".dockerignore", *copied_names()):
            subprocess.run(["cp", "-a", "--parents", name, folder / "tree"], cwd=ROOT, check=True)
        mounts = [f"{index.parent}:/index", f"{AUTHORITIES}:{AUTHORITIES}"]
        mounts += [f"{file}:/etc/pip.conf" for file in PIP_FILES if file.exists()][:1]
        ids = []
        for name in ("first", "second"):
            run("build", "--isolation", "chroot", "--timestamp", "315532800", "--layers=false",
                "--pull-never", "--build-arg", "BASE=localhost/base:1",
                "--build-arg", "TORCH_INDEX=file:///index", "--iidfile", str(folder / name),
                *(word for each in mounts for word in ("-v", f"{each}:ro")),
                str(folder / "tree"))  # fmt: skip
            ids.append((folder / name).read_text())
        yield Path(run("mount", run("from", ids[0]))), ids
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@runs_the_image
def test_the_dockerfile_builds_one_image_that_serves(
    built: tuple[Path, list[str]], digits_store: Path, tmp_path: Path
) -> None:
    rootfs, (first, second) = built
    assert first == second  # the digest of its configuration, which has the layers'
    site = {each.name for each in (rootfs / SITE).iterdir()}
    assert "torch" in site and not [name for name in site if name.startswith(("nvidia", "triton"))]
    with running(rootfs, tmp_path, digits_store, 1000) as cell:
        assert cell.ask("GET", "/ping")[0] == 200
        status, answer = cell.ask("POST", "/predictions/onnx", SCAN)
        assert (status, max(answer, key=answer.__getitem__)) == (200, "7")
        (health,) = re.findall(r"(?m)^HEALTHCHECK .* CMD (.*)$", (ROOT / "Dockerfile").read_text())
        assert cell.run(*json.loads(health)).returncode == 0
        cell.terminate()
        assert cell.process.wait(60) == 0, cell.log.read_text()


def test_a_layer_has_the_same_bytes_whenever_and_by_whomever_it_is_made(tmp_path: Path) -> None:
    layers = []
    for number in range(2):
        folder = tmp_path / f"content{number}"
        # Created in another order, at another time, with what another umask leaves.
        for name in ("bin/tool", "lib/a.txt")[:: 1 - 2 * number]:
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(name)
            (folder / name).chmod(0o777 - 0o20 * number if name == "bin/tool" else 0o666)
            os.utime(folder / name, (number, number))
        (folder / "link").symlink_to("lib/a.txt")
        blobs = Blobs(tmp_path / f"layout{number}")
        layers.append(blobs.add_layer(folder_entries(folder), "test"))
    assert layers[0] == layers[1]
    blob = tmp_path / "layout0" / "blobs" / "sha256" / layers[0].digest.removeprefix("sha256:")
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    plain = gzip.decompress(blob.read_bytes())
    assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == layers[0].diff_id
    with tarfile.open(blob) as tar:
        modes = {each.name: each.mode for each in tar if each.isreg()}
        assert {(each.uid, each.gid, each.mtime) for each in tar} == {(0, 0, 0)}
    assert modes == {"bin/tool": 0o755, "lib/a.txt": 0o644}


def test_a_base_that_is_none_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "base.tar").write_bytes(b"no tar")
    with tarfile.open(tmp_path / "other.tar", "w"):
        pass
    for name in ("base.tar", "other.tar"):
        with pytest.raises(SystemExit, match=f"{name} is not a base of an earlier run"):
            main(["--base", str(tmp_path / name), "-o", str(tmp_path / "out" / "image")])
    assert not list((tmp_path / "out").iterdir())


def test_the_dockerfile_makes_the_same_image_as_the_script() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    (last,) = text.split("\nFROM ")[2:]
    words = dict(pair.split("=", 1) for pair in re.findall(r"\b[A-Z_]+=\S+", last))
    assert words["PATH"].startswith(f"/{HOME}/bin:")
    assert {name: words.get(name) for name in ENVIRONMENT if name != "PATH"} == {
        name: value for name, value in ENVIRONMENT.items() if name != "PATH"
    }
    assert f"USER {USER}\n" in last
    assert f"EXPOSE {' '.join(map(str, PORTS))}\n" in last
    assert json.loads(last.partition("\nCMD ")[2]) == COMMAND


def copied_names() -> set[str]:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    return {name for names in lines for name in names if not names[0].startswith("--from")}


def test_what_the_dockerfile_copies_is_there_and_reaches_the_build() -> None:
    copied = copied_names()
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied and all((ROOT / name).exists() for name in copied)
    packages = {link.name for link in (ROOT / "modelyard").iterdir() if link.is_symlink()}
    assert {*packages, "client"} == set(SOURCES) <= copied
    assert {line[1:] for line in ignore if line.startswith("!")} == copied


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say() -> None:
    subprocess.run(["hadolint", str(ROOT / "Dockerfile")], check=True)


def test_the_compose_file_is_as_the_page_says() -> None:
    (service,) = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"].values()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert service["image"] == f"modelyard:{version}"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    load_settings({}, None, service["environment"])
