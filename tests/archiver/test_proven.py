"""Versions that an artifact was proven on, compared with those that are here, on every surface."""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modelyard.archiver import open_archive
from modelyard.archiver.cli import archive_app, verify_app
from modelyard.archiver.manifest import Manifest, Seal
from modelyard.archiver.proven import describe_repeated, find_unproven
from tests.archiver.test_replay import rewrite, verified
from tests.serve.live import modelyard, running, start_arguments
from tests.shared import DIGITS

HERE = version("onnxruntime")
SAID = f"digits.onnx was proven with onnxruntime 1.13.1, and {HERE} is here"


def age(report: bytes, package: str = "onnxruntime", other: str | None = "1.13.1") -> bytes:
    """Have a report say that a package had another version, or none."""
    content = json.loads(report)
    content["versions"].pop(package)
    if other is not None:
        content["versions"][package] = other
    return json.dumps(content).encode()


@pytest.fixture
def aged(digits_store: Path, tmp_path: Path) -> Path:
    """Copy the store's archive of an ONNX file, which onnxruntime 1.13.1 is said to have proven."""
    (tmp_path / "store").mkdir()
    path = Path(shutil.copy(digits_store / "onnx.mar", tmp_path / "store" / "onnx.mar"))
    name = "digits.onnx.report.json"
    rewrite(path, lambda content: content.update({name: age(content[name])}))
    return path


@pytest.mark.parametrize(
    ("archive", "change", "said"),
    [
        ("onnx", lambda data: data, None),
        ("onnx", age, SAID),
        ("onnx", lambda data: age(data, "torch", "2.2.0"), None),
        ("onnx", lambda data: age(data, "onnxruntime", f"{HERE}+cu130"), None),
        ("pt2", lambda data: age(data, "torch", "2.2.0"), "digits.pt2 was proven with torch 2.2.0"),
        ("torchscript", lambda data: age(data, "torch", "2.2.0"), "digits.pt was proven with torc"),
        ("pt2", lambda data: age(data, "torch", version("torch").partition("+")[0]), None),
        ("pt2", age, None),
        ("onnx", lambda data: age(data, other=None), "onnxruntime of an unknown version, and"),
        ("onnx", lambda data: data[:40], "its report cannot be read: cannot read the report: digi"),
    ],
    ids=["same", "other", "not-run", "build", "pt2", "script", "plain", "unused", "none", "broken"],
)
def test_only_the_version_of_what_ran_the_proof_is_compared(
    digits_store: Path, archive: str, change: Callable[[bytes], bytes], said: str | None
) -> None:
    with open_archive(digits_store / f"{archive}.mar") as opened:
        seal = opened.manifest.modelyard
        assert seal is not None

        def read(name: str) -> bytes:
            return change(opened.read(name)) if name == seal.report else opened.read(name)

        found = find_unproven(opened.manifest, read)

    assert (found is None) == (said is None)
    assert found is None or (said or "") in found.text


def test_the_version_of_what_explains_is_compared_too(digits_store: Path) -> None:
    with open_archive(digits_store / "onnx.mar") as opened:
        seal = opened.manifest.modelyard
        assert seal is not None and seal.explain is not None
        twin = seal.explain.report
        found = find_unproven(
            opened.manifest,
            lambda name: (
                age(opened.read(name), "torch", "2.2.0") if name == twin else opened.read(name)
            ),
        )

    assert found is not None and "digits.pt2 was proven with torch 2.2.0" in found.text


@pytest.mark.parametrize("seal", [None, Seal({})], ids=["not-ours", "no-report"])
def test_an_archive_without_a_report_was_never_proven(seal: Seal | None) -> None:
    found = find_unproven(Manifest("any", modelyard=seal), lambda name: b"")

    assert found is not None and found.reason == "no_proof"


def test_a_package_that_the_archive_brings_is_what_counts(digits_store: Path) -> None:
    pin = f"onnxruntime==1.13.1 --hash=sha256:{'0' * 64}"
    with open_archive(digits_store / "onnx.mar") as opened:
        seal = opened.manifest.modelyard
        assert seal is not None
        manifest = Manifest("any", modelyard=Seal({}, seal.report, requirements=(pin,)))
        found = find_unproven(manifest, opened.read)

    assert found is not None and found.text.endswith(f"onnxruntime {HERE}, and 1.13.1 is here")


@pytest.mark.parametrize(
    ("golden", "cases", "said"),
    [
        (0, 0, "nothing that could be repeated says whether its answers are still the same"),
        (1, 0, "1 golden request agrees on this machine"),
        (2, 31, "2 golden requests and 31 parity cases agree on this machine"),
    ],
)
def test_what_was_repeated_is_said(golden: int, cases: int, said: str) -> None:
    assert describe_repeated(golden, cases) == said


@pytest.mark.nightly
def test_archive_names_both_versions_and_what_agrees_here(
    digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    for format in ("onnx", "pt2"):
        artifact = digits_artifacts[format]
        report = artifact.with_name(f"{artifact.name}.report.json")
        shutil.copy(artifact, tmp_path)
        (tmp_path / report.name).write_bytes(
            age(report.read_bytes()) if format == "onnx" else report.read_bytes()
        )
    arguments = [
        *("digits", f"--artifact={tmp_path}/digits.onnx", "--handler=image_classifier"),
        *(f"--config-file={DIGITS}/model-config.yaml", f"--output-dir={tmp_path}"),
        *(f"--extra-files={DIGITS}/index_to_name.json", f"--example={DIGITS}/scans/7.png=7"),
    ]
    ran = CliRunner().invoke(archive_app, arguments)

    assert ran.exit_code == 0
    warning = next(line for line in ran.stderr.splitlines() if SAID in line)
    assert "1 golden request and " in warning
    assert warning.endswith("parity cases agree on this machine")


def test_verify_names_both_versions_and_what_agrees_here(aged: Path) -> None:
    code, found = verified(aged, "--device=cpu")

    checks = {check["subject"]: check["result"] for check in found["checks"]}
    assert (code, found["problems"]) == (0, [])
    assert list(checks) == ["digests", "loading", "golden 0", "golden 1", "parity", "proof"]
    assert checks["loading"] == "as a worker, on cpu"
    assert checks["golden 1"].startswith("answered as expected")
    assert "onnx and digits.pt2 agree in 40 cases" in checks["parity"]
    assert SAID in checks["proof"] and "2 golden requests and " in checks["proof"]
    assert checks["proof"].endswith("parity cases agree on this machine")
    unrun = CliRunner().invoke(verify_app, [str(aged), "--no-run"])
    assert f"{SAID}; nothing was run" in unrun.stdout


@pytest.mark.nightly
def test_verify_says_where_the_answers_are_others(aged: Path) -> None:
    wrong = json.dumps({"label": "9"}).encode()
    rewrite(aged, lambda content: content.update({"MAR-INF/golden/0.expected.json": wrong}))

    ran = CliRunner().invoke(verify_app, [str(aged)])

    assert ran.exit_code == 1
    assert f"{SAID}; its answers are others here" in ran.stdout


def test_a_server_names_both_versions_at_its_start_and_in_a_metric(
    aged: Path, digits_store: Path, tmp_path: Path
) -> None:
    shutil.copy(digits_store / "torchscript.mar", aged.parent / "other.mar")
    models = ("--models", "onnx", "--models", "other", "--workers=1")
    arguments = start_arguments(tmp_path / "state", aged.parent)
    planned = modelyard(*arguments, *models, "--explain-plan")
    assert SAID in " ".join(planned.stderr.split())

    with running(tmp_path / "state", aged.parent, *models) as server:
        said = f"onnx 1.0: {SAID}; 2 golden requests agree on this machine; `modelyard verify onnx"
        assert [said in warning for warning in server.about["warnings"]] == [True]
        server.logs(said)
        assert server.metric("modelyard_model_unproven", model="onnx", reason="versions") == 1
        assert 'modelyard_model_unproven{model="other"' not in server.metrics.get("/metrics").text


@pytest.mark.nightly
def test_a_server_that_requires_proof_refuses_what_others_proved(
    aged: Path, digits_store: Path, tmp_path: Path
) -> None:
    arguments = (*start_arguments(tmp_path / "state", aged.parent), "--require-proven")
    ran = modelyard(*arguments, "--models=onnx")
    assert ran.returncode == 1
    assert SAID in " ".join(ran.stderr.split())
    assert (
        "install that version, `modelyard recertify`, or export and archive it again here"
        in " ".join(ran.stderr.split())
    )

    shutil.copy(digits_store / "pt2.mar", aged.parent / "pt2.mar")
    rewrite(
        Path(shutil.copy(aged, aged.parent / "bare.mar")),
        lambda content: _without_report(content),
    )
    options = ("--require-proven", "--models=pt2", "--workers=1")
    with running(tmp_path / "state", aged.parent, *options) as server:
        for file, said in (("onnx.mar", SAID), ("bare.mar", "no report is in the archive")):
            refused = server.register(file, initial_workers=1)
            assert refused.status_code == 400
            assert said in refused.json()["message"]


def _without_report(content: dict[str, bytes]) -> None:
    manifest = json.loads(content["MAR-INF/MANIFEST.json"])
    for key in ("report", "explain"):
        del manifest["modelyard"][key]
    content["MAR-INF/MANIFEST.json"] = json.dumps(manifest).encode()
