"""`modelyard recertify`: wrong kernels that it has to find, versions that it has to pass."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver.errors import NothingCompared, WrongUsage
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.plugins.recertify.certify import recertify
from modelyard.plugins.recertify.environments import Environment, existing, plan
from modelyard.plugins.recertify.page import format_page
from modelyard.plugins.recertify.runtimes import ONNXRUNTIME
from plugins.recertify.tests.faults import (
    HARMLESS,
    ONNX_FAULTS,
    ROWS,
    TORCH_FAULTS,
    WHEN,
    interpreter,
)
from tests.adversary.gallery import Row, judge
from tests.archiver.test_replay import rewrite
from tests.archiver.wheels import build_wheel
from tests.serve.live import modelyard

SCALED = "scale of 1.001"


def said(ran: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(ran.stdout)
    return rows


@pytest.fixture
def lean(digits_store: Path, tmp_path: Path) -> Path:
    """Copy the archive of an ONNX file without the twin, which only torch runs."""
    path = Path(shutil.copy(digits_store / "onnx.mar", tmp_path / "onnx.mar"))

    def without_twin(content: dict[str, bytes]) -> None:
        manifest = json.loads(content[MANIFEST_NAME])
        twin = manifest["modelyard"].pop("explain")
        for name in twin.values():
            del content[name]
        content[MANIFEST_NAME] = json.dumps(manifest).encode()

    rewrite(path, without_twin)
    return path


def test_a_wrong_kernel_is_found_and_the_right_one_passes(
    lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter(tmp_path / "a")
    wrong = interpreter(tmp_path / "b", SCALED)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    options = ("--in=a/bin/python", f"--in={wrong}", f"--page={page}", "--json")

    ran = modelyard("recertify", str(lean), *options)

    assert ran.returncode == 1, ran.stderr
    passed, found = said(ran)
    assert (passed["verdict"], passed["share"], passed["first"]) == ("same bits", 0, "")
    assert found["verdict"] == "differs" and found["share"] > 1
    assert found["there"] == "99.0" and (found["golden"], found["further"]) == (2, 40)
    assert "over tolerance" in found["why"]
    assert "(Conv, node_Conv" in found["first"]
    assert "answers change: " in ran.stderr
    text = page.read_text()
    assert 'class="differs"' in text and "http" not in text


KNOWN = frozenset({"onnxruntime: NaN below 1e-37"})
"""No number of this network is so small."""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("runtime", ["onnxruntime", "torch"])
def test_every_wrong_kernel_is_found(
    runtime: str, lean: Path, digits_store: Path, tmp_path: Path
) -> None:
    is_onnx = runtime == "onnxruntime"
    names = ["", *(ONNX_FAULTS if is_onnx else TORCH_FAULTS)]
    made = [existing(interpreter(tmp_path / str(at), name)) for at, name in enumerate(names)]

    (rows,) = recertify([lean if is_onnx else digits_store / "pt2.mar"], made)

    judge(
        [
            Row(runtime, name, bool(name), row.verdict != "same bits")
            for name, row in zip(names, rows, strict=True)
        ],
        KNOWN if is_onnx else frozenset(),
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_kernel_that_is_wrong_for_some_inputs_alone_is_found(lean: Path, tmp_path: Path) -> None:
    names = [*WHEN, *ROWS, *HARMLESS]
    made = [existing(interpreter(tmp_path / str(at), name)) for at, name in enumerate(names)]

    (rows,) = recertify([lean], made)

    judge(
        (
            Row("wrong where", name, name not in HARMLESS, row.verdict == "differs")
            for name, row in zip(names, rows, strict=True)
        ),
        frozenset(
            f"wrong where: the {end} channel alone has something" for end in ("first", "last")
        ),
    )  # a picture of digits has one channel


@pytest.mark.network
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_real_versions_raise_no_alarm(lean: Path) -> None:
    versions = ("1.32.0", "1.30.0", "1.27.0", "1.24.4", "1.22.1")

    ran = modelyard(
        "recertify", lean, *(f"--with=onnxruntime=={each}" for each in versions), timeout_s=800
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_nothing_runs_is_said_and_nothing_starts(digits_store: Path) -> None:
    nowhere = Environment("onnxruntime==1", (ONNXRUNTIME,), Path("/nowhere/bin/python"))

    ((row,),) = recertify([digits_store / "pt2.mar"], [nowhere])

    assert (row.verdict, row.why) == ("untouched", "it holds pt2, which none of that runs")


@pytest.mark.nightly
def test_what_cannot_be_opened_or_run_is_not_called_the_same(lean: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.mar"
    broken.write_bytes(b"no archive")
    build_wheel(tmp_path / "wheels", "onnxruntime", "98.0", "raise ImportError('no such library')")
    ran = subprocess.run(
        [sys.executable, "-m", "modelyard", "recertify", broken, lean,
         "--with=onnxruntime==98.0", "--json"],
        capture_output=True, text=True, check=False,
        env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(_numpy(tmp_path / "wheels")),
             "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip

    assert ran.returncode == 3, ran.stderr
    assert [row["verdict"] for row in said(ran)] == ["not run", "not run"]
    assert [row["why"] for row in said(ran)][1].endswith("ImportError: no such library")
    (made,) = (tmp_path / "cache" / "modelyard" / "environments").glob("*/complete")
    assert made.exists()


def _numpy(wheels: Path) -> Path:
    build_wheel(wheels, "numpy", "99.0")
    return wheels


def test_an_environment_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planned,) = plan(["onnxruntime==0.0.1"])
    environment = replace(planned, python=tmp_path / "own" / "any" / "bin" / "python")
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(NothingCompared, match=r"with onnxruntime==0\.0\.1 can be made: "):
        environment.build()

    assert [path.name for path in (tmp_path / "own").iterdir()] == ["any.lock"]


def test_versions_of_one_package_are_further_environments() -> None:
    planned = plan(["onnxruntime==1.31.0", "torch==2.13.0", "onnxruntime==1.32.0", "numpy==2.1.0"])

    assert [each.name for each in planned] == [
        "onnxruntime==1.31.0 torch==2.13.0 numpy==2.1.0",
        "onnxruntime==1.32.0",
    ]
    assert [[each.name for each in one.runtimes] for one in planned] == [
        ["onnxruntime", "torch"],
        ["onnxruntime"],
    ]
    assert planned[0].requirements[-1] == "numpy==2.1.0"
    assert planned[1].requirements == ("onnxruntime==1.32.0", "numpy")


@pytest.mark.parametrize(
    "given",
    ["onnxruntime", "onnxruntime>=1.2", "onnxruntime==1.*", "onnx runtime==1", "numpy==2.1.0"],
)
def test_only_exact_versions_of_what_runs_artifacts_mean_something(given: str) -> None:
    with pytest.raises(WrongUsage):
        plan([given])


def test_a_runner_reaches_neither_network_nor_files(lean: Path, tmp_path: Path) -> None:
    python = interpreter(tmp_path / "spy")
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    (packages,) = (tmp_path / "spy").glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text(
        "import os, socket, sys\n"
        "if any(each.endswith('on_onnxruntime.py') for each in sys.orig_argv):\n"
        "    tried = []\n"
        f"    for reach in (lambda: open({str(secret)!r}), lambda: socket.socket()):\n"
        "        try:\n"
        "            reach()\n"
        "        except OSError as error:\n"
        "            tried.append(type(error).__name__)\n"
        "    print('tried:', *tried, file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n"
    )
    ((row,),) = recertify([lean], [existing(python)])

    assert (row.verdict, row.why) == ("not run", "tried: PermissionError PermissionError")


def test_a_page_writes_what_archives_say_as_text(tmp_path: Path) -> None:
    from modelyard.plugins.recertify.certify import Row as Found

    row = Found(tmp_path / "<script>.mar", "", "e", "differs", "<b>", why="<i>", share=float("inf"))

    page = format_page([row])

    assert "<script>" not in page and "&lt;script&gt;.mar" in page and "&lt;i&gt;" in page
    assert "without bound" in page
