import errno
import json
import os
import platform
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from modelyard.plugins.cluster.doctor import checks as doctor
from modelyard.plugins.cluster.doctor.checks import FAIL, OK, WARN, Check
from modelyard.plugins.cluster.doctor.cli import doctor_app
from modelyard.serve.settings import Settings, load_settings
from tests.serve.live import LiveServer, modelyard


def settings(tmp_path: Path, **given: Any) -> Settings:
    return load_settings({"state_dir": tmp_path / "state", **given}, None, {})


def test_here_everything_that_serving_needs_works(tmp_path: Path) -> None:
    ran = modelyard("doctor", "--json", f"--state-dir={tmp_path / 'state'}")
    found = json.loads(ran.stdout)
    failed = [check for check in found["checks"] if check["status"] == FAIL]
    assert (ran.returncode, found["works"], failed) == (0, True, []), ran.stderr
    assert all(bool(check["advice"]) == (check["status"] != OK) for check in found["checks"])
    names = {check["name"]: check["found"] for check in found["checks"]}
    assert names["python"].startswith(platform.python_version())
    assert {"torch", "onnx", "captum", "pillow", "python-multipart", "tokenizers"} <= names.keys()
    assert {"cuda", "compiler", "cores", "memory", "open files", "kernel"} <= names.keys()
    assert list(tmp_path.iterdir()) == [], "it leaves nothing where the server would run"


def test_what_fails_is_said_with_what_to_do_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_packages", lambda: iter(()))  # the test above tries them
    (tmp_path / "file").touch()
    ran = CliRunner().invoke(doctor_app, [f"--state-dir={tmp_path / 'file' / 'state'}"])
    assert ran.exit_code == 1
    text = " ".join(ran.stdout.split())  # lines are folded where the folder's name is long
    _, _, found = text.partition(" fail state folder ")
    assert "Not a directory → give a folder of yours: --state-dir, or MODELYARD_STATE_DIR" in found
    assert ran.stdout.splitlines()[-1].startswith("1 of ")


def test_the_first_release_of_python_3_13_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.13.0")
    check = doctor.check_python()
    assert (check.status, check.advice) == (WARN, "take a later 3.13 where models are exported")


# -- packages ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_library_that_ends_its_process_is_named_and_the_others_are_still_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashes.py").write_text("import os; os.kill(os.getpid(), 11)")
    (tmp_path / "breaks.py").write_text("raise OSError('libfoo.so.1: cannot open')")
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    tried = doctor.try_modules(["json", "crashes", "breaks", "uvloop"])
    assert {name: result["error"] for name, result in tried.items()} == {
        "json": None,
        "crashes": "it ended the process with signal SIGSEGV",
        "breaks": "OSError: libfoo.so.1: cannot open",
        "uvloop": None,
        "cuda": None,
    }


@pytest.mark.parametrize(
    ("requirement", "needed_for", "error", "status", "found", "advice"),
    [
        ("numpy>=2", "", None, OK, "", ""),
        ("numpy>=99", "", None, FAIL, ", expected >=99", "pip install 'numpy>=99'"),
        ("numpy>=99", "a thing", None, WARN, ", expected >=99", "pip install 'numpy>=99'"),
        ("no-such>=1", "", None, FAIL, "not installed", "pip install 'no-such>=1'"),
        ("no-such>=1", "for a thing", None, OK, "not installed; only for a thing", ""),
        ("numpy", "", "OSError: x", FAIL, "does not work: OSError: x", "pip install --force"),
    ],
)
def test_a_package_is_held_to_its_bound_and_to_its_trial(
    requirement: str, needed_for: str, error: str | None, status: str, found: str, advice: str
) -> None:
    tried = {"numpy": {"error": error}}
    check = doctor._check_package(Requirement(requirement), tried, needed_for)
    assert check.status == status
    assert check.found.endswith(found)
    assert check.advice.startswith(advice) and bool(check.advice) == bool(advice)


@pytest.mark.parametrize(
    ("found", "error", "driver", "has_devices", "status", "words"),
    [
        ({"built_for": None}, None, None, False, OK, "no device; models run on the CPU"),
        ({"built_for": "13.0"}, None, None, False, OK, "no device; models run on the CPU"),
        (
            {"built_for": "13.0", "devices": ["H200", "H200"]},
            None,
            "580.1",
            True,
            OK,
            "H200, H200; driver 580.1, torch for CUDA 13.0",
        ),
        ({"built_for": None}, None, "580.1", True, WARN, "built for the CPU"),
        (
            {"built_for": "13.0", "warnings": ["The NVIDIA driver is too old"]},
            None,
            "470.1",
            True,
            WARN,
            "driver 470.1, torch for CUDA 13.0 says: The NVIDIA driver is too old",
        ),
        ({"built_for": "13.0"}, None, "580.1", False, WARN, "no /dev/nvidia0"),
        ({}, "RuntimeError: ECC", "580.1", True, WARN, "torch says: RuntimeError: ECC"),
    ],
)
def test_cuda_driver_and_torch_must_fit(
    found: dict[str, Any],
    error: str | None,
    driver: str | None,
    has_devices: bool,
    status: str,
    words: str,
) -> None:
    check = doctor.check_cuda({"found": found, "error": error}, driver, has_devices)
    assert check.status == status
    assert words in check.found
    assert bool(check.advice) == (status != OK)


@pytest.mark.parametrize("script", [None, "#!/bin/sh\necho no omp.h >&2; exit 1\n"])
def test_a_compiler_that_is_missing_or_broken_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    compiler = tmp_path / "c++"
    if script:
        compiler.write_text(script)
        compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    check = doctor.check_compiler()
    assert check.status == WARN
    assert ("no omp.h" if script else "only for `export --format aoti`") in check.found


# -- the machine -------------------------------------------------------------------------------


def test_few_open_files_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(soft: int) -> Check:
        monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
        return doctor.check_open_files()

    assert limited(1024).status == WARN
    assert "ulimit -n 4096" in limited(1024).advice
    assert limited(65536).status == limited(resource.RLIM_INFINITY).status == OK


def test_without_pidfd_nothing_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert doctor.check_kernel().status == FAIL


def test_a_temporary_folder_that_cannot_be_used_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.check_temporary_folder().status == OK
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nope"))
    check = doctor.check_temporary_folder()
    assert (check.status, "TMPDIR" in check.advice) == (WARN, True)


# -- where the server would run ----------------------------------------------------------------


def test_a_port_that_is_taken_names_the_process(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = settings(tmp_path, port=0, management_port=port, metrics_port=0)
        inference, management, metrics = doctor.check_ports(given)
    assert (inference.status, management.status, metrics.status) == (OK, WARN, OK)
    assert f"http://127.0.0.1:{port}: taken by pid {os.getpid()} (" in management.found
    assert "--management-port N" in management.advice


def test_an_address_of_another_machine_is_said(tmp_path: Path) -> None:
    check = next(doctor.check_ports(settings(tmp_path, host="192.0.2.1")))
    assert (check.status, check.advice) == (WARN, "give another --host")


def test_ports_of_the_own_server_are_no_trouble(shared_server: LiveServer) -> None:
    _, port = shared_server.address
    given = settings(shared_server.state_dir.parent, port=port, management_port=0, metrics_port=0)
    check = next(doctor.check_ports(given))
    assert check.status == OK
    assert f"the server of this state folder, pid {shared_server.pid}" in check.found
