import hashlib
import json
import logging
import os
import resource
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.collect import ArchiveRequest, plan_archive
from modelyard.archiver.errors import ArchiveExists, BadName, CannotArchive
from modelyard.archiver.manifest import Explain, Golden


def digits(inputs: Path, output_dir: Path, **changes: Any) -> Path:
    """Archive the inputs as a user would, with some arguments changed."""
    arguments: dict[str, Any] = {
        "version": "1.0",
        "artifact": inputs / "digits.onnx",
        "handler": "image_classifier",
        "output_dir": output_dir,
        "extra_files": [inputs / "index_to_name.json"],
        "config_file": inputs / "model-config.yaml",
        "examples": [f"{inputs}/0.png=0", f"{inputs}/7.png=7"],
    }
    return write_archive("digits", **{**arguments, **changes})


def problems(inputs: Path, output_dir: Path, **changes: Any) -> tuple[str, ...]:
    with pytest.raises(CannotArchive) as caught:
        digits(inputs, output_dir, **changes)
    return caught.value.problems


def change_report(inputs: Path, artifact: str, **changes: Any) -> None:
    file = inputs / f"{artifact}.report.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def foreign_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_archive_holds_artifact_reports_twin_labels_and_golden_requests(
    inputs: Path, tmp_path: Path
) -> None:
    path = digits(inputs, tmp_path / "store")

    assert path == tmp_path / "store" / "digits.mar"
    with zipfile.ZipFile(path) as zipped:
        assert zipped.testzip() is None
        assert zipped.namelist() == [
            "MAR-INF/golden/0.expected.json",
            "MAR-INF/golden/0.request",
            "MAR-INF/golden/1.expected.json",
            "MAR-INF/golden/1.request",
            "digits.onnx",
            "digits.onnx.report.json",
            "digits.pt2",
            "digits.pt2.report.json",
            "index_to_name.json",
            "model-config.yaml",
            "MAR-INF/sbom.cdx.json",
            "MAR-INF/MANIFEST.json",
        ]
        for name in ("digits.onnx", "digits.pt2", "index_to_name.json"):
            assert zipped.read(name) == (inputs / name).read_bytes()
        assert zipped.read("MAR-INF/golden/1.request") == (inputs / "7.png").read_bytes()
        assert json.loads(zipped.read("MAR-INF/golden/1.expected.json")) == {"label": "7"}


def test_manifest_has_torchserves_keys_and_the_seal(inputs: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(digits(inputs, tmp_path)) as zipped:
        manifest = json.loads(zipped.read("MAR-INF/MANIFEST.json"))
        expected = {
            name: hashlib.sha256(zipped.read(name)).hexdigest() for name in zipped.namelist()[:-1]
        }
    seal = manifest.pop("modelyard")

    assert manifest == {
        "createdOn": "01/01/1980 00:00:00",
        "runtime": "python",
        "model": {
            "modelName": "digits",
            "serializedFile": "digits.onnx",
            "handler": "image_classifier",
            "modelVersion": "1.0",
            "configFile": "model-config.yaml",
        },
        "archiverVersion": "0.12.0",
    }
    assert seal.pop("digests") == expected
    assert seal == {
        "schema": 1,
        "report": "digits.onnx.report.json",
        "signature": json.loads((inputs / "digits.onnx.report.json").read_text())["signature"],
        "explain": {"artifact": "digits.pt2", "report": "digits.pt2.report.json"},
        "golden": [
            {
                "request": f"MAR-INF/golden/{i}.request",
                "content_type": "image/png",
                "expected": f"MAR-INF/golden/{i}.expected.json",
                "tolerance": 1e-3,
            }
            for i in range(2)
        ],
        "requirements": [],
    }


@pytest.mark.usefixtures("foreign_umask")
def test_same_inputs_give_the_same_bytes_in_another_folder_time_zone_and_umask(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.umask(0o022)
    first = digits(inputs, tmp_path / "first").read_bytes()
    os.umask(0o077)
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    moved = shutil.copytree(inputs, tmp_path / "elsewhere" / "moved")
    for i, file in enumerate(sorted(moved.iterdir())):
        os.utime(file, (10**9 + i, 10**9 + i))
        file.chmod(0o700)
    monkeypatch.chdir(moved)

    second = digits(Path(), tmp_path / "second")

    assert second.read_bytes() == first
    monkeypatch.undo()
    time.tzset()


def test_archive_is_readable_as_the_umask_says(inputs: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = digits(inputs, tmp_path / "store")
    finally:
        os.umask(before)

    assert path.stat().st_mode & 0o777 == 0o640


def test_source_date_epoch_sets_the_creation_time(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")

    with open_archive(digits(inputs, tmp_path)) as archive:
        assert archive.manifest.created_on == "14/11/2023 22:13:20"


def test_source_date_epoch_that_is_no_number_is_refused(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")

    assert problems(inputs, tmp_path)[0].startswith('SOURCE_DATE_EPOCH is "today"')


@pytest.mark.parametrize("artifact", ["digits.pt", "digits.pt2"])
def test_artifact_with_gradients_explains_itself(
    inputs: Path, tmp_path: Path, artifact: str
) -> None:
    with open_archive(digits(inputs, tmp_path, artifact=inputs / artifact)) as archive:
        assert archive.manifest.modelyard is not None
        assert archive.manifest.modelyard.explain == Explain(artifact, f"{artifact}.report.json")
        assert not {"digits.onnx", "digits.pt", "digits.pt2"} - {artifact} & set(archive.names)


def test_twin_of_another_name_is_taken_when_asked_for(inputs: Path, tmp_path: Path) -> None:
    path = digits(inputs, tmp_path, explain_artifact=inputs / "digits.pt")

    with open_archive(path) as archive:
        assert archive.manifest.modelyard is not None
        assert archive.manifest.modelyard.explain == Explain("digits.pt", "digits.pt.report.json")


def test_native_code_finds_its_twin_beside_it(inputs: Path, tmp_path: Path) -> None:
    (inputs / "digits.onnx").rename(inputs / "digits.aoti.pt2")
    (inputs / "digits.onnx.report.json").rename(inputs / "digits.aoti.pt2.report.json")

    with open_archive(digits(inputs, tmp_path, artifact=inputs / "digits.aoti.pt2")) as archive:
        assert archive.manifest.modelyard is not None
        assert archive.manifest.modelyard.explain == Explain("digits.pt2", "digits.pt2.report.json")


def test_a_decoder_brings_no_twin_and_no_warning(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("digits.onnx", "digits.pt2"):
        signature = json.loads((inputs / f"{name}.report.json").read_text())["signature"]
        cache = {"name": "past_mask", "dtype": "int64", "shape": ["batch", "past"]}
        signature["inputs"].append(cache)
        signature["dims"]["past"] = {"min": 1, "max": 64}
        change_report(inputs, name, signature=signature)

    with caplog.at_level(logging.WARNING), open_archive(digits(inputs, tmp_path)) as archive:
        assert archive.manifest.modelyard is not None
        assert archive.manifest.modelyard.explain is None
        assert "digits.pt2" not in archive.names
    assert "gives no gradients" not in caplog.text


def test_labels_of_the_report_are_packed_where_no_file_has_others(
    inputs: Path, tmp_path: Path
) -> None:
    change_report(inputs, "digits.onnx", details={"labels": {"0": "zero", "1": "one"}})

    with open_archive(digits(inputs, tmp_path / "given")) as archive:
        assert archive.read("index_to_name.json") == b'{"0": "0"}'
    with open_archive(digits(inputs, tmp_path / "none", extra_files=[])) as archive:
        assert json.loads(archive.read("index_to_name.json")) == {"0": "zero", "1": "one"}


def test_twin_of_another_checkpoint_is_refused(inputs: Path, tmp_path: Path) -> None:
    change_report(inputs, "digits.pt2", checkpoint={"sha256": "f" * 64})

    (problem,) = problems(inputs, tmp_path)

    assert problem.startswith("digits.pt2 cannot explain digits.onnx: their checkpoints differ")


def test_twin_with_another_input_is_refused(inputs: Path, tmp_path: Path) -> None:
    signature = {
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["n", 3, 8, 8]}],
        "outputs": [],
        "dims": {"n": {"min": 1, "max": 8}},
    }
    change_report(inputs, "digits.pt2", signature=signature)

    (problem,) = problems(inputs, tmp_path)

    assert "it takes float32[*,3,8,8] instead of float32[*,1,8,8]" in problem


def test_twin_without_gradients_is_refused(inputs: Path, tmp_path: Path) -> None:
    artifact, twin = inputs / "digits.pt", inputs / "digits.onnx"

    (problem,) = problems(inputs, tmp_path, artifact=artifact, explain_artifact=twin)

    assert problem == (
        "digits.onnx cannot explain digits.pt: onnx gives no gradients; expected pt2 or torchscript"
    )


def test_twin_without_report_is_refused(inputs: Path, tmp_path: Path) -> None:
    (inputs / "digits.pt.report.json").unlink()

    (problem,) = problems(inputs, tmp_path, explain_artifact=inputs / "digits.pt")

    assert "digits.pt has no report" in problem


def test_onnx_without_twin_is_archived_with_a_warning(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (inputs / "digits.pt2").unlink()

    with caplog.at_level(logging.WARNING), open_archive(digits(inputs, tmp_path)) as archive:
        assert archive.manifest.modelyard is not None
        assert archive.manifest.modelyard.explain is None
    assert (
        "digits.onnx (onnx) gives no gradients: only methods that take parts of the input away"
        in caplog.text
    )


def test_artifact_without_report_is_archived_with_a_warning(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (inputs / "digits.onnx.report.json").unlink()

    with caplog.at_level(logging.WARNING), open_archive(digits(inputs, tmp_path)) as archive:
        seal = archive.manifest.modelyard
        assert seal is not None
        assert (seal.report, seal.signature, seal.explain) == (None, None, None)
    assert "digits.onnx has no report beside it" in caplog.text


def test_artifact_of_a_quick_export_is_archived_with_a_warning(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = inputs / "digits.onnx.report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    report["parity"]["plan"] = {"extent": "quick"}
    path.write_text(json.dumps(report), encoding="utf-8")
    with caplog.at_level(logging.WARNING), open_archive(digits(inputs, tmp_path)):
        pass
    assert "digits.onnx was compared with its checkpoint on few inputs" in caplog.text


@pytest.mark.parametrize("changed", ["digits.onnx", "digits.pt2"])
def test_artifact_that_is_not_its_reports_is_refused_and_nothing_stays(
    inputs: Path, tmp_path: Path, changed: str
) -> None:
    (inputs / changed).write_bytes(b"trained again")

    (problem,) = problems(inputs, tmp_path / "store")

    assert problem.startswith(f"{changed} is not the file that its report describes (SHA-256 ")
    assert list((tmp_path / "store").iterdir()) == []


def test_report_that_lacks_fields_names_them(inputs: Path, tmp_path: Path) -> None:
    change_report(inputs, "digits.onnx", artifact_sha256="abc", checkpoint={})

    assert problems(inputs, tmp_path) == (
        "digits.onnx.report.json: artifact_sha256: expected 64 lower-case hexadecimal digits, "
        'found "abc"',
        "digits.onnx.report.json: checkpoint.sha256: expected a string that is not empty, "
        "found nothing",
    )


@pytest.mark.parametrize(
    ("handler", "recorded"), [("handler.py", "handler.py"), ("handler.py:DigitsHandler",) * 2]
)
def test_handler_file_is_packed_and_recorded(
    inputs: Path, tmp_path: Path, handler: str, recorded: str
) -> None:
    with open_archive(digits(inputs, tmp_path, handler=f"{inputs}/{handler}")) as archive:
        assert archive.manifest.handler == recorded
        assert archive.read("handler.py") == (inputs / "handler.py").read_bytes()


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (
            "image_clasifier",
            "expected FILE.py, FILE.py:Class, or one of ",
        ),
        ("{inputs}/lost.py", "lost.py: there is no such file"),
        ("{inputs}/handler.py:Lost", "handler.py has no Lost; it has: DigitsHandler"),
        ("{inputs}/handler.py:1x", '"1x" is not a name'),
        ("{inputs}/handler.py:", '"" is not a name'),
        ("{inputs}/broken.py", "broken.py, line 2: "),
        ("{inputs}", "expected FILE.py, FILE.py:Class, or one of "),
    ],
)
def test_wrong_handler_says_what_is_expected(
    inputs: Path, tmp_path: Path, handler: str, problem: str
) -> None:
    (inputs / "broken.py").write_text("import os\nclass :\n")

    assert problem in problems(inputs, tmp_path, handler=handler.format(inputs=inputs))[0]


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("7.png=7", {"label": "7"}),
        ("7.png=-1.5", {"label": "-1.5"}),
        ("7.png=a cat", {"label": "a cat"}),
        ("7.png=nan", {"label": "nan"}),
        ('7.png={"7": 0.9}', {"answer": {"7": 0.9}}),
        ("7.png=[1, 2]", {"answer": [1, 2]}),
        ('7.png="7"', {"answer": "7"}),
        ("7.png=answer.json", {"answer": {"x": [1]}}),
        ("a=b.png=x=y", {"label": "x=y"}),
    ],
)
def test_expected_answer_is_a_label_json_or_a_json_file(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, expected: Any
) -> None:
    monkeypatch.chdir(inputs)
    Path("answer.json").write_text('{"x": [1]}')
    Path("a=b.png").write_bytes(b"")

    with open_archive(digits(inputs, tmp_path, examples=[example])) as archive:
        assert json.loads(archive.read("MAR-INF/golden/0.expected.json")) == expected


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        ("=7", 'example "=7": expected FILE or FILE=EXPECTED'),
        ("lost.png", "example lost.png: there is no such file"),
        ("7.png=", 'example "7.png=": nothing is expected'),
        ("lost.png=7", "example lost.png: there is no such file"),
        ("7.png=lost.json", "expected answer lost.json: there is no such file"),
        ('7.png={"7": ', 'expected answer "{\\"7\\": ": not JSON'),
        ("7.png=0.json", "expected answer 0.json: not JSON"),
    ],
)
def test_wrong_example_says_why(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, problem: str
) -> None:
    monkeypatch.chdir(inputs)
    Path("0.json").write_text("seven")

    assert problems(inputs, tmp_path, examples=[example])[0].startswith(problem)


def test_content_type_follows_the_suffix(inputs: Path) -> None:
    (inputs / "a.JPG").write_bytes(b"")
    plan = plan_archive(
        ArchiveRequest(
            "digits",
            version="1",
            artifact=inputs / "digits.pt",
            handler="base_handler",
            examples=[f"{inputs}/a.JPG=1", f"{inputs}/digits.pt=1"],
        )
    )

    assert plan.manifest.modelyard is not None
    assert plan.manifest.modelyard.golden[0].content_type == "image/jpeg"
    assert plan.manifest.modelyard.golden[1] == Golden(
        "MAR-INF/golden/1.request",
        "application/octet-stream",
        "MAR-INF/golden/1.expected.json",
        1e-3,
    )


def test_files_that_would_meet_in_the_flat_archive_are_all_named(
    inputs: Path, tmp_path: Path
) -> None:
    other = inputs / "other"
    other.mkdir()
    for name in ("index_to_name.json", "DIGITS.onnx", "MAR-INF"):
        (other / name).write_bytes(b'{"0": "cat"}')

    found = problems(
        inputs, tmp_path, extra_files=[inputs / "index_to_name.json", *other.iterdir()]
    )

    assert sorted(problem.partition(":")[0] for problem in found) == [
        '"MAR-INF" is a file, and a folder in "MAR-INF/golden/0.request"',
        '"digits.onnx" and "DIGITS.onnx" are one name where case does not count',
        '"index_to_name.json" is there twice',
    ]


def test_file_named_twice_is_packed_once(inputs: Path, tmp_path: Path) -> None:
    extra_files = [inputs / "index_to_name.json", inputs / "." / "index_to_name.json"]
    extra_files.append(inputs / "digits.onnx.report.json")

    with open_archive(digits(inputs, tmp_path, extra_files=extra_files)) as archive:
        assert "index_to_name.json" in archive.names


def test_all_problems_of_the_inputs_are_reported_at_once(inputs: Path, tmp_path: Path) -> None:
    found = problems(
        inputs,
        tmp_path / "store",
        artifact=inputs / "lost.onnx",
        handler="nobody.py",
        extra_files=[inputs, inputs / "lost.txt"],
        config_file=inputs / "lost.yaml",
        examples=["x"],
    )

    assert len(found) == 6
    assert not (tmp_path / "store").exists()


def test_pipe_is_refused_instead_of_waited_for(inputs: Path, tmp_path: Path) -> None:
    os.mkfifo(inputs / "pipe")

    (problem,) = problems(inputs, tmp_path, extra_files=[inputs / "pipe"])

    assert problem.endswith("pipe is not a regular file")


@pytest.mark.parametrize("name", ["..", "a/b", ""])
def test_name_outside_the_rule_is_refused(inputs: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadName):
        write_archive(
            name,
            version="1",
            artifact=inputs / "digits.pt",
            handler="base_handler",
            output_dir=tmp_path,
        )


def test_existing_archive_is_kept_unless_force_is_given(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "digits.mar").write_bytes(b"precious")

    with pytest.raises(
        ArchiveExists, match=r"already exists; --force replaces it, -o FOLDER keeps both"
    ):
        digits(inputs, tmp_path)
    assert (tmp_path / "digits.mar").read_bytes() == b"precious"

    with open_archive(digits(inputs, tmp_path, force=True)) as archive:
        assert archive.manifest.model_name == "digits"


def test_failed_replacement_keeps_the_old_archive(inputs: Path, tmp_path: Path) -> None:
    old = digits(inputs, tmp_path / "store").read_bytes()
    (inputs / "digits.pt2").write_bytes(b"changed")

    problems(inputs, tmp_path / "store", force=True)

    (left,) = (tmp_path / "store").iterdir()
    assert left.read_bytes() == old


def test_disk_that_is_full_leaves_nothing(inputs: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CannotArchive, match=r"cannot write .*digits.mar: File too large"):
            digits(inputs, tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert list((tmp_path / "store").iterdir()) == []


def test_output_folder_that_is_a_file_is_an_error(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")

    with pytest.raises(CannotArchive, match=r"cannot write .*store/digits.mar: "):
        digits(inputs, tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("modelyard.py", "modelyard.py has the name of a module of modelyard"),
        ("json.py", "json.py hides the standard library's json"),
    ],
)
def test_module_that_shadows_another_is_packed_with_a_warning(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, warning: str
) -> None:
    (inputs / name).write_text("")

    with (
        caplog.at_level(logging.WARNING),
        open_archive(digits(inputs, tmp_path, extra_files=[inputs / name])) as archive,
    ):
        assert name in archive.names
    assert warning in caplog.text


def test_ordinary_inputs_give_no_warning(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digits(inputs, tmp_path, handler=f"{inputs}/handler.py")

    assert caplog.text == ""
