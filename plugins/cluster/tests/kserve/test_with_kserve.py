"""`modelyard kserve` where KServe's own packages fill the folder and ask.

They want an environment of their own, which `scripts/peers kserve` makes; `KSERVE_PYTHON` names
another Python that has them. The container is a network and a file system of its own: ports are
KServe's, /mnt/models is read-only.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import environment, poll

ROOT = Path(__file__).parents[4]
SCAN = ROOT / "examples" / "digits" / "scans" / "7.png"
CLIENTS = Path(__file__).with_name("clients.py")
_PYTHON = ROOT / ".peers" / "kserve" / "bin" / "python"
KSERVE = os.environ.get("KSERVE_PYTHON") or (str(_PYTHON) if _PYTHON.exists() else None)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not KSERVE, reason="`scripts/peers kserve` has not been run"),
    pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed"),
]
URL = "http://127.0.0.1:8080"
FETCH = """
import sys
from kserve_storage import Storage
Storage.download_files(sys.argv[1:2], sys.argv[2:])
"""
CONFIG = """\
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
number_of_netty_threads=4
enable_envvars_config=true
install_py_dep_per_model=true
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"digits":{"1.0":\
{"defaultVersion":true,"marName":"digits.mar","minWorkers":1,"maxWorkers":5,"batchSize":1,\
"maxBatchDelay":10,"responseTimeout":120}}}}
"""
"""As in KServe's examples of TorchServe."""
TENSORS = {kind: ["logits", [2, 10]] for kind in ("v2", "v2 binary", "grpc", "grpc binary")}
OF_AN_EXPLAINER = "--model_name digits --predictor_host digits-predictor.apart --http_port 8080"
"""As KServe's controller writes them; `--workers` is what containerConcurrency says."""


def fetch(uri: str, folder: Path) -> None:
    """Fill a folder as the storage initializer does."""
    assert KSERVE is not None
    subprocess.run([KSERVE, "-c", FETCH, uri, folder], check=True, timeout=60)


@contextmanager
def container(folder: Path, scratch: Path, *arguments: str) -> Iterator[list[str]]:
    """Run our command; yield what joins another command to its network."""
    state = scratch / "state"
    state.mkdir()
    variables = {"MODELYARD_STATE_DIR": state, "MODELYARD_WORKERS": 1, "TEMP": state}
    command = [
        *("bwrap", "--bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-net"),
        *("--die-with-parent", "--tmpfs", "/mnt", "--ro-bind", str(folder), "/mnt/models"),
        *("--setenv", "TMPDIR", str(state)),
        *(word for name, value in variables.items() for word in ("--setenv", name, str(value))),
    ]
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, sys.executable, "-P", "-m", "modelyard", "kserve", *arguments],
            stdout=log,
            stderr=log,
            env={**environment(), "PYTHONPATH": str(ROOT)},
        )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        (inside,) = poll(lambda: children.read_text().split(), "bubblewrap has started", 10)
        user = ["--preserve-credentials", "--user"] if os.getuid() else []  # bubblewrap makes one
        join = ["nsenter", *user, "--net", "--target", inside]

        def is_ready() -> bool:
            assert process.poll() is None, (scratch / "log").read_text()
            probe = [*join, "curl", "-sf", "-o", "/dev/null", f"{URL}/v2/health/ready"]
            return subprocess.run(probe).returncode == 0

        poll(is_ready, "the container is ready", 120)
        yield join
        os.kill(int(inside), 15)
        assert process.wait(60) == 0, (scratch / "log").read_text()
    finally:
        process.kill()
        process.wait()


def ask(join: list[str], name: str, kind: str) -> Any:
    """Return what KServe's clients were answered."""
    assert KSERVE is not None
    given = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [*join, KSERVE, CLIENTS, name, SCAN, kind], capture_output=True, text=True, env=given
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def source(digits_store: Path, digits_artifacts: dict[str, Path], tmp_path: Path) -> Path:
    """Return a folder with what users have in their storage."""
    source = tmp_path / "source"
    for name in ("one", "bare", "torchserve/config", "torchserve/model-store"):
        (source / name).mkdir(parents=True)
    shutil.copy(digits_store / "onnx.mar", source / "one")
    shutil.copy(digits_store / "torchscript.mar", source / "torchserve/model-store/digits.mar")
    (source / "torchserve/config/config.properties").write_text(CONFIG)
    for format in ("onnx", "pt2", "torchscript"):
        shutil.copy(digits_artifacts[format], source / "bare")
    return source


def packed(source: Path, how: str) -> str:
    """Return the URI of one file, packed in some way."""
    if how == "zip":
        with zipfile.ZipFile(source / "one.zip", "w") as file:
            file.write(source / "one" / "onnx.mar", "onnx.mar")
        return f"file://{source}/one.zip"
    if how == "unpacked":
        with zipfile.ZipFile(source / "one" / "onnx.mar") as archive:
            archive.extractall(source / "digits")
        return "file://" + shutil.make_archive(str(source / how), "gztar", source / "digits")
    folder = {"one.tar.gz": source / "one", "torchserve.tar.gz": source / "torchserve"}[how]
    place = source if how == "torchserve.tar.gz" else folder
    inside = "." if place == folder else folder.name
    return "file://" + shutil.make_archive(str(folder), "gztar", place, inside)


@pytest.mark.parametrize("how", ["folder", "zip", "one.tar.gz", "unpacked"])
def test_an_archive_is_served_by_the_services_name(source: Path, tmp_path: Path, how: str) -> None:
    fetch(f"file://{source}/one" if how == "folder" else packed(source, how), tmp_path / "models")
    with container(tmp_path / "models", tmp_path, "--model_name", "digits") as join:
        said = ask(join, "digits", "picture")
    assert said["ready"] == [True] * 7 and said["alive"]
    assert said["b64"] == ["7", "7"] and said["explained"] == "7"
    assert said.items() >= TENSORS.items()


def test_an_explainer_answers_from_its_own_copy(source: Path, tmp_path: Path) -> None:
    """The predictor that KServe names is not there, and not asked."""
    fetch(f"file://{source}/one", tmp_path / "models")
    arguments = [*OF_AN_EXPLAINER.split(), "--workers", "2"]
    with container(tmp_path / "models", tmp_path, *arguments) as join:
        said = ask(join, "digits", "picture")
    assert said["explained"] == "7" and said["b64"] == ["7", "7"]


@pytest.mark.parametrize("how", ["folder", "torchserve.tar.gz"])
def test_torchserves_folders_answer_both_protocols_and_end_in_order(
    source: Path, tmp_path: Path, how: str
) -> None:
    """Its file as it is: 8085 named, no envelope, the Open Inference Protocol off."""
    fetch(f"file://{source}/torchserve" if how == "folder" else packed(source, how),
          tmp_path / "models")  # fmt: skip
    with container(tmp_path / "models", tmp_path, "--model_name", "digits") as join:
        said = ask(join, "digits", "torchserve")
    assert said["ready"] == [True] * 7
    assert said["data"] == ["7", "7"] and said["explained"] == "7"
    assert said.items() >= TENSORS.items()
    assert "requests are taken for 5 s more" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("file", ["digits.onnx", "digits.pt2", "digits.pt"])
def test_an_artifact_without_an_archive(source: Path, tmp_path: Path, file: str) -> None:
    fetch(f"file://{source}/bare/{file}", tmp_path / "models")
    with container(tmp_path / "models", tmp_path, "--model_name", "digits") as join:
        said = ask(join, "digits", "row")
    assert said["ready"] == [True] * 7
    assert said["row"][0] == said["row"][1]
    assert [said[kind][1] for kind in TENSORS] == [[2, 10]] * 4
