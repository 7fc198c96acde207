"""Archives run in a worker's process: before they are written, and when they are verified."""

import json
import os
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.cli import archive_app, verify_app
from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from tests.shared import DIGITS

SCANS = DIGITS / "scans"
ECHO = "def handle(data, context):\n    return [str(row['body']) for row in data or []]\n"


def echo(folder: Path, code: str = ECHO, *examples: str, **changes: Any) -> Path:
    """Archive a handler that needs no model, with the dry run."""
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(b"none")
    (folder / "echo.py").write_text(code)
    (folder / "request.txt").write_text("7")
    arguments: dict[str, Any] = {
        "version": "1.0",
        "artifact": folder / "weights.bin",
        "handler": f"{folder}/echo.py",
        "output_dir": folder / "store",
        "examples": [f"{folder}/{example}" for example in examples],
        "dry_run": True,
    }
    return write_archive("echo", **{**arguments, **changes})


def problems(write: Callable[[], Any]) -> tuple[str, ...]:
    with pytest.raises(CannotArchive) as caught:
        write()
    return caught.value.problems


def archive_digits(artifacts: Mapping[str, Path], store: Path, *options: str) -> Any:
    """Archive the TorchScript, which needs no twin to be explained."""
    arguments = [
        *("digits", f"--artifact={artifacts['torchscript']}", "--handler=image_classifier"),
        *("--version=1.0", f"--extra-files={DIGITS}/index_to_name.json", f"--output-dir={store}"),
        *(f"--config-file={DIGITS}/model-config.yaml", *options),
    ]
    return CliRunner().invoke(archive_app, arguments)


def rewrite(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """Change an archive's files and seal it again, as somebody would who wants it to be served."""
    import hashlib

    with zipfile.ZipFile(path) as zipped:
        content = {name: zipped.read(name) for name in zipped.namelist()}
    change(content)
    manifest = json.loads(content[MANIFEST_NAME])
    manifest["modelyard"]["digests"] = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in content.items()
        if name != MANIFEST_NAME
    }
    content[MANIFEST_NAME] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)


# -- dry run -------------------------------------------------------------------------------------


def test_an_example_without_an_answer_records_what_the_handler_answers(
    digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    result = archive_digits(
        digits_artifacts, tmp_path, f"--example={SCANS}/7.png", f"--example={SCANS}/3.png=3"
    )

    assert result.exit_code == 0, result.stderr
    assert "golden coverage 5 of 6: none sees `resample` (add an example of" in result.stdout
    with open_archive(tmp_path / "digits.mar") as archive:
        recorded = json.loads(archive.read("MAR-INF/golden/0.expected.json"))["answer"]
        labelled = json.loads(archive.read("MAR-INF/golden/1.expected.json"))
    assert labelled["label"] == "3"
    (read,), (gave,) = labelled["model"]["inputs"], labelled["model"]["outputs"]
    assert (read["type"], gave["type"]) == ("float32[1,1,8,8]", "float32[1,10]")
    assert max(recorded, key=recorded.get) == "7"
    assert sum(recorded.values()) == pytest.approx(1)
    assert [path.name for path in tmp_path.iterdir()] == ["digits.mar"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import not_there\n" + ECHO, "ModuleNotFoundError: No module named 'not_there'"),
        (
            "import os, signal\nprint('bye', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "ended with signal SIGKILL and left no result: bye",
        ),
    ],
    ids=["import", "killed"],
)
def test_an_archive_that_does_not_load_is_not_written(tmp_path: Path, code: str, said: str) -> None:
    (problem,) = problems(lambda: echo(tmp_path / "in", code))

    assert said in problem
    assert list((tmp_path / "in" / "store").iterdir()) == []


@pytest.mark.nightly
def test_every_example_that_is_answered_otherwise_is_named(
    digits_artifacts: dict[str, Path], tmp_path: Path
) -> None:
    result = archive_digits(
        digits_artifacts,
        tmp_path / "store",
        *(f"--example={SCANS}/{scan}.png={label}" for scan, label in ((7, 1), (3, 3), (2, 0))),
    )

    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert lines[0] == "error: cannot archive digits, its dry run failed: 2 problems"
    advice = "; correct what is expected, or the labels, the preprocessing or the weights"
    assert lines[1] == f'  - example {SCANS}/7.png: expected the label "1", got "7"{advice}'
    assert lines[2] == f'  - example {SCANS}/2.png: expected the label "0", got "2"{advice}'
    assert list((tmp_path / "store").iterdir()) == []


def test_a_handler_that_refuses_an_example_is_not_recorded(tmp_path: Path) -> None:
    code = "def handle(data, context):\n    return [1 / 0 for row in data or []]\n"

    (problem,) = problems(lambda: echo(tmp_path / "in", code, "request.txt"))

    assert problem.endswith(
        "request.txt: got status 500: ZeroDivisionError: division by zero (echo.py:2)"
    )


class Chances(nn.Module):
    """Two probabilities of two numbers."""

    def forward(self, row: Tensor) -> Tensor:
        return row.softmax(1)


def test_probabilities_under_a_softmax_are_not_archived(tmp_path: Path) -> None:
    (said,) = problems(lambda: archive_chances(tmp_path, examples=["row.json"]))
    assert "the model's numbers are not negative and add up to 1 already" in said
    assert "output_kind: probabilities" in said
    assert "or output_kind: logits" in said
    assert not (tmp_path / "chances.mar").exists()


def archive_chances(folder: Path, *, settings: str = "", examples: Sequence[str] = ()) -> Path:
    """Archive a model of `Chances` that has no report, as one of another tool."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", DeprecationWarning)
        torch.jit.save(torch.jit.script(Chances()), folder / "chances.pt")
    (folder / "features.json").write_text('{"features": [{"name": "a"}, {"name": "b"}]}')
    (folder / "index_to_name.json").write_text('{"0": "yes", "1": "no"}')
    (folder / "row.json").write_text("[0.5, 2]")
    (folder / "model-config.yaml").write_text(settings)
    return write_archive(
        "chances",
        version="1.0",
        artifact=folder / "chances.pt",
        handler="tabular",
        output_dir=folder,
        extra_files=[folder / "features.json", folder / "index_to_name.json"],
        config_file=folder / "model-config.yaml",
        examples=[f"{folder}/{example}" for example in examples],
        dry_run=True,
    )


def test_what_nothing_says_is_asked_and_not_guessed(tmp_path: Path) -> None:
    (said,) = problems(lambda: archive_chances(tmp_path))
    assert "nothing says whether the model's numbers are logits or probabilities" in said
    assert "give an --example, or say `handler: {output_kind: probabilities}`" in said


@pytest.mark.nightly
def test_what_is_said_is_enough(tmp_path: Path) -> None:
    assert archive_chances(tmp_path, settings="handler: {output_kind: probabilities}").is_file()


def test_the_dry_run_is_skipped_when_asked(tmp_path: Path) -> None:
    path = echo(tmp_path / "in", "raise OSError('no licence')\n", dry_run=False)

    with open_archive(path) as archive:
        assert "echo.py" in archive.names


def test_an_answer_cannot_be_recorded_without_the_dry_run(tmp_path: Path) -> None:
    (problem,) = problems(lambda: echo(tmp_path / "in", ECHO, "request.txt", dry_run=False))

    assert "an example without an expected answer is answered in the dry run" in problem


def test_the_dry_run_works_on_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_SANDBOX", "0")  # behind the walls it would change nothing
    code = "open('echo.py', 'a').write('# changed')\nopen('new', 'w').close()\n" + ECHO

    with open_archive(echo(tmp_path / "in", code, "request.txt")) as archive:
        assert archive.read("echo.py").decode() == code
        assert "new" not in archive.names
        assert json.loads(archive.read("MAR-INF/golden/0.expected.json")) == {"answer": 7}
    assert (tmp_path / "in" / "echo.py").read_text() == code


def test_a_file_that_changes_after_the_dry_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_SANDBOX", "0")
    code = f"open({str(tmp_path / 'in' / 'weights.bin')!r}, 'wb').write(b'evil')\n" + ECHO

    (problem,) = problems(lambda: echo(tmp_path / "in", code))

    assert problem.startswith("weights.bin is not the file that the dry run saw (SHA-256 ")
    assert list((tmp_path / "in" / "store").iterdir()) == []


RED_TEAM = """
import os, pathlib, socket, subprocess

def attempt(name, act):
    try:
        return {"got": str(act())}
    except (OSError, KeyError) as error:
        return {"refused": type(error).__name__}

def first_variables():
    if b"HUB_TOKEN" not in pathlib.Path("/proc/self/environ").read_bytes():
        raise KeyError("HUB_TOKEN")

def handle(data, context):
    target = pathlib.Path(PLACE)
    acts = {
        "read": lambda: (target / "secret").read_text(),
        "write": lambda: (target / "written").write_text("x"),
        "own": lambda: pathlib.Path("echo.py").write_text(""),
        "variable": lambda: os.environ["HUB_TOKEN"],
        "first variables": first_variables,
        "network": lambda: socket.socket(),
        "others": lambda: os.kill(os.getppid(), 0),
    }
    found = {name: attempt(name, act) for name, act in acts.items()}
    subprocess.Popen(["sleep", "3141.59"], start_new_session=True)
    leave_a_deep_folder(os.environ["HOME"])
    return [found for _ in data or []]

def leave_a_deep_folder(home):
    if os.path.basename(home) != "own":
        return  # without walls it is the user's
    here = os.open(home, os.O_RDONLY)
    for _ in range(1500):  # more than Python's functions call themselves
        os.mkdir("deeper", dir_fd=here) if "deeper" not in os.listdir(here) else None
        above, here = here, os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(above)
"""


def _daemons() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith("sleep 3141.59")]


@pytest.mark.parametrize("has_walls", [True, False], ids=["walls", "no walls"])
def test_an_archives_code_runs_behind_the_walls_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_walls: bool
) -> None:
    """Before it is written, and when it is verified; without the walls it gets all of it."""
    monkeypatch.setenv("HUB_TOKEN", "of the user")
    monkeypatch.setenv("MODELYARD_SANDBOX", str(int(has_walls)))
    (tmp_path / "secret").write_text("of the user")
    code = RED_TEAM.replace("PLACE", repr(str(tmp_path)))

    path = echo(tmp_path / "in", code, "request.txt")

    (tmp_path / "written").unlink(missing_ok=True)
    with open_archive(path) as archive:
        got = json.loads(archive.read("MAR-INF/golden/0.expected.json"))["answer"]
    expected = "refused" if has_walls else "got"
    assert {name: next(iter(each)) for name, each in got.items()} == dict.fromkeys(got, expected)
    assert len(got) == 7
    verified = CliRunner().invoke(verify_app, [str(path)])
    assert verified.exit_code == 0, verified.output  # it gets the same again
    assert (tmp_path / "written").exists() is not has_walls
    assert _daemons() == []


def test_requests_for_the_mean_reasons_are_read_behind_the_walls(tmp_path: Path) -> None:
    """They lie outside of the archive."""
    code = ECHO + "def explain(data, context):\n    return []\n"
    (tmp_path / "rows.json").write_text("[1]")

    said = problems(lambda: echo(tmp_path / "in", code, reference=tmp_path / "rows.json"))

    assert "rows.json" in said[0] and "Permission" not in said[0], said


def test_a_recorded_archive_has_the_same_bytes_again(tmp_path: Path) -> None:
    paths = [echo(tmp_path / name, ECHO, "request.txt") for name in ("one", "two")]

    assert paths[0].read_bytes() == paths[1].read_bytes()


# -- verify --------------------------------------------------------------------------------------


@pytest.fixture
def digits(digits_store: Path, tmp_path: Path) -> Path:
    """Copy the ONNX archive, which has a twin and two golden requests."""
    path = tmp_path / "digits.mar"
    path.write_bytes((digits_store / "onnx.mar").read_bytes())
    return path


def verified(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(verify_app, [str(path), "--json", *options])
    found: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, found


@pytest.mark.nightly  # by day test_proven.py sees the same of one that was proven elsewhere
def test_verify_replays_digests_golden_requests_and_parity(digits: Path) -> None:
    code, found = verified(digits, "--device=cpu")

    checks = {check["subject"]: check["result"] for check in found["checks"]}
    assert (code, found["problems"]) == (0, [])
    assert list(checks) == ["digests", "loading", "golden 0", "golden 1", "parity"]
    assert checks["loading"] == "as a worker, on cpu"
    assert checks["golden 1"].startswith("answered as expected")
    assert "onnx and digits.pt2 agree in 40 cases" in checks["parity"]


@pytest.mark.nightly
def test_verify_prints_an_aligned_table(digits: Path) -> None:
    result = CliRunner().invoke(verify_app, [str(digits)])

    lines = result.stdout.splitlines()
    table = lines[lines.index("") + 1 : -1]
    assert table[0] == "CHECK     RESULT"
    assert {line[10] != " " and line[9] == " " for line in table} == {True}


def test_verify_without_running_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_SANDBOX", "0")  # else nothing of it is seen outside
    canary = tmp_path / "canary"
    path = echo(tmp_path / "in", f"open({str(canary)!r}, 'w')\n" + ECHO, dry_run=False)

    code, found = verified(path, "--no-run")

    assert (code, [check["subject"] for check in found["checks"]]) == (0, ["digests"])
    assert not canary.exists()
    code, found = verified(path)
    assert (code, found["problems"][0][:9]) == (3, "nothing: ")
    assert canary.exists()


@pytest.mark.nightly
def test_changed_labels_are_found(digits: Path) -> None:
    def swap(content: dict[str, bytes]) -> None:
        names = json.loads(content["index_to_name.json"])
        content["index_to_name.json"] = json.dumps({**names, "7": "2", "2": "7"}).encode()

    rewrite(digits, swap)
    code, found = verified(digits)

    assert code == 1
    assert found["problems"] == [
        'golden 0: MAR-INF/golden/0.request: expected the label "2", got "7"',
        'golden 1: MAR-INF/golden/1.request: expected the label "7", got "2"',
    ]


@pytest.mark.nightly  # by day tests/adversary/test_archives.py changes one
def test_a_changed_artifact_is_found_by_parity(
    digits: Path, digits_artifacts: dict[str, Path]
) -> None:
    def change(content: dict[str, bytes]) -> None:
        import onnx
        from onnx import numpy_helper

        model = onnx.load_from_string(content["digits.onnx"])
        tensor = next(each for each in model.graph.initializer if each.name.endswith("bias"))
        values = numpy_helper.to_array(tensor) + 0.01
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        content["digits.onnx"] = model.SerializeToString()

    rewrite(digits, change)
    code, found = verified(digits)

    proof, problem = found["problems"]
    assert code == 1
    assert proof.startswith("proof: digits.onnx.report.json is the proof of another file than ")
    assert problem.startswith('parity: digits.onnx and digits.pt2: output "logits": max_abs ')
    assert " over tolerance 0.0002 at batch=" in problem


def test_an_archive_that_does_not_load_here_says_the_workers_error(tmp_path: Path) -> None:
    path = echo(tmp_path / "in", "import not_there\n", dry_run=False)

    result = CliRunner().invoke(verify_app, [str(path)])

    assert result.exit_code == 1
    assert result.stderr == (
        "error: echo.mar is not here what it was: loading: ModuleNotFoundError: No module named "
        "'not_there' (echo.py:1)\n"
    )


def test_an_archive_of_torchserve_is_checked_for_safety_and_not_proven(tmp_path: Path) -> None:
    manifest = {"runtime": "python", "model": {"modelName": "noop", "handler": "noop.py"}}
    with zipfile.ZipFile(tmp_path / "noop.mar", "w") as zipped:
        zipped.writestr("noop.py", "raise SystemExit\n")
        zipped.writestr(MANIFEST_NAME, json.dumps(manifest))

    code, found = verified(tmp_path / "noop.mar")

    assert (code, found["is_sealed"], len(found["checks"])) == (1, False, 1)


def test_verify_names_the_code_whose_word_its_comparison_is(tmp_path: Path) -> None:
    """A handler can replace what compares it, and nothing that runs beside it can know."""
    forger = ECHO + (
        "from modelyard.serve.worker import check\ncheck.compare_golden = lambda *_: None\n"
    )
    path = echo(tmp_path / "in", forger, "request.txt=7")

    code, found = verified(path)

    assert code == 0
    assert found["checks"][-1] == {
        "subject": "code",
        "result": "echo.py ran in the process that compares: believe whoever wrote it",
        "problem": None,
    }


def test_verify_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = echo(tmp_path / "in", ECHO, "request.txt=7")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    assert verified(path)[0] == 0
    assert os.listdir(temporary) == []  # noqa: PTH208
