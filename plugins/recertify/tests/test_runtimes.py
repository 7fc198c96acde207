"""Other runtimes than a server's: `recertify --runtime`, and wrongs that only they have."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from modelyard.archiver.errors import WrongUsage
from modelyard.plugins.recertify.certify import Row as Outcome
from modelyard.plugins.recertify.certify import recertify
from modelyard.plugins.recertify.environments import Environment, NodeEnvironment
from modelyard.plugins.recertify.environments import plan_other as plan
from modelyard.plugins.recertify.runtimes import HERE, OTHERS, RUNNERS
from plugins.recertify.tests import runtime_faults as seeds
from tests.adversary.gallery import Row, judge
from tests.serve.live import modelyard


def made(name: str) -> Environment:
    """Return a runtime's environment; skip where it is not in the cache, for that asks an index."""
    try:
        environment = plan(name)
    except WrongUsage as error:
        pytest.skip(str(error))
    if not (environment.python.parents[1] / "complete").exists():
        pytest.skip(f"{name} is not installed yet: modelyard recertify STORE --runtime {name}")
    return environment


def outcomes(archive: Path, environments: Sequence[Environment]) -> list[Outcome]:
    return [row for rows in recertify([archive], environments) for row in rows]


@pytest.mark.nightly
def test_an_unknown_runtime_is_refused_with_those_there_are(digits_store: Path) -> None:
    ran = modelyard("recertify", str(digits_store / "onnx.mar"), "--runtime", "openwino")

    assert ran.returncode == 2
    assert all(name in ran.stderr.replace("\n", "") for name in OTHERS), ran.stderr


def test_each_runtime_has_a_runner_and_takes_what_a_server_runs() -> None:
    for name, runtime in OTHERS.items():
        assert (RUNNERS / runtime.program).is_file(), name
        assert set(runtime.formats) <= HERE.keys(), name
        # A server believes lines of these names: no other runtime may write one.
        assert name not in {each.name for each in HERE.values()}


@pytest.mark.parametrize(
    ("name", "package"), [("onnxruntime-web", "nodejs"), ("onnxruntime:no-avx", "qemu-user-static")]
)
def test_a_machine_without_the_program_is_told_its_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(WrongUsage, match=f"apt-get install {package}"):
        plan(name)


def test_environments_are_one_for_each_version_and_interpreter() -> None:
    one, same, other = plan("openvino==1.0"), plan("openvino==1.0"), plan("openvino==1.1")

    assert one == same and one.python != other.python
    assert one.requirements == ("openvino==1.0", "numpy")


def test_an_environment_of_npm_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not here: apt-get install npm")
    nothing = str(tmp_path / "no-such-package")
    runtime = OTHERS["onnxruntime-web"]
    environment = NodeEnvironment("x", (runtime,), tmp_path / "env/bin/node", (nothing,))

    with pytest.raises(Exception, match="no environment with x can be made"):
        environment.build()
    assert not (tmp_path / "env").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_digits_are_proven_on_each_runtime(name: str, digits_store: Path) -> None:
    environment = made(name)
    (runtime,) = environment.runtimes
    format = "onnx" if "onnx" in runtime.formats else "pt2"

    rows = outcomes(digits_store / f"{format}.mar", [environment])

    found = [row for row in rows if row.runtime == name]
    assert found and {row.verdict for row in found} <= {"same bits", "within"}, rows
    assert all(row.there for row in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "wrongs", "harmless"),
    [
        ("onnxruntime-web", seeds.WEB, seeds.WEB_HARMLESS),
        ("openvino", seeds.OPENVINO, seeds.OPENVINO_HARMLESS),
    ],
)
def test_wrongs_of_a_runtime_are_found(
    name: str,
    wrongs: dict[str, str],
    harmless: dict[str, str],
    digits_store: Path,
) -> None:
    right = made(name)
    scratch = right.python.parents[2] / f"seeded-{name}"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        copies = [
            seeds.seeded(right, what, fault, scratch / str(place))
            for place, (what, fault) in enumerate((wrongs | harmless).items())
        ]
        rows = outcomes(digits_store / "onnx.mar", copies)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    of = {row.environment: row for row in rows if row.runtime == name}
    judge(
        Row(name, what, what in wrongs, of[what].verdict == "differs" and bool(of[what].first))
        for what in wrongs | harmless
    )
