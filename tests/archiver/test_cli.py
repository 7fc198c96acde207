import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from modelyard.archiver import open_archive
from modelyard.archiver.cli import archive_app, verify_app
from modelyard.archiver.untrusted.names import MANIFEST_NAME


def run_archive(inputs: Path, *extra: str, name: str = "digits", **changes: Any) -> Any:
    options = {"artifact": inputs / "digits.onnx", "handler": "image_classifier", "version": "1.0"}
    options.update(changes)
    arguments = [name, *(f"--{key}={value}" for key, value in options.items())]
    # The artifacts are stand-ins that no worker could load.
    arguments += ["-o", str(inputs.parent / "store"), "--no-dry-run", *extra]
    return CliRunner().invoke(archive_app, arguments)


def run_verify(*arguments: str) -> Any:
    return CliRunner().invoke(verify_app, arguments)


def test_archive_writes_and_lists_what_was_packed(inputs: Path) -> None:
    result = run_archive(
        inputs,
        *("--extra-files", f"{inputs}/index_to_name.json,{inputs}/handler.py"),
        *("--extra-files", f"{inputs}/0.png"),
        *("--config-file", f"{inputs}/model-config.yaml"),
        *("--example", f"{inputs}/7.png=7", "--example", f"{inputs}/0.png=0"),
    )

    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["FILE", "BYTES", "SHA256", "ROLE"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:-1]}
    assert rows["handler.py"][2:] == ["extra", "file"]
    assert rows["digits.pt2"][2:] == ["twin"]
    assert len(rows) == 14
    assert len({line.index(rows[line.split()[0]][1]) for line in lines[1:-1]}) == 1  # aligned
    with open_archive(inputs.parent / "store" / "digits.mar") as opened:
        assert lines[-1].endswith(f"digits.mar: 14 files, digest {opened.digest}")
        assert set(rows) == set(opened.names)


def test_archive_as_json_is_data_and_nothing_else(inputs: Path) -> None:
    result = run_archive(inputs, "--json")

    written = json.loads(result.stdout)
    assert result.exit_code == 0
    assert written["archive"] == str(inputs.parent / "store" / "digits.mar")
    assert (written["name"], written["version"], written["warnings"]) == ("digits", "1.0", [])
    assert {"name", "size_bytes", "sha256", "role"} == set(written["files"][0])
    with open_archive(written["archive"]) as opened:
        assert opened.digest == written["digest"]


def test_warnings_go_to_standard_error(inputs: Path) -> None:
    (inputs / "digits.pt2").unlink()

    result = run_archive(inputs, "--json")

    assert result.exit_code == 0
    assert result.stderr.startswith("warning: digits.onnx (onnx) gives no gradients")
    assert len(json.loads(result.stdout)["warnings"]) == 1


def test_existing_archive_is_an_error_until_force_is_given(inputs: Path) -> None:
    run_archive(inputs)

    result = run_archive(inputs)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {inputs.parent}/store/digits.mar already exists; "
        "--force replaces it, -o FOLDER keeps both\n"
    )
    assert run_archive(inputs, "--force").exit_code == 0


def test_missing_file_is_one_line_and_exit_1(inputs: Path) -> None:
    result = run_archive(inputs, artifact=inputs / "lost.onnx")

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: cannot archive digits: artifact {inputs}/lost.onnx: there is no such file\n"
    )


@pytest.mark.parametrize("name", ["a b", "..", "a/b"])
def test_name_outside_the_rule_is_wrong_usage(inputs: Path, name: str) -> None:
    result = run_archive(inputs, name=name)

    assert result.exit_code == 2
    assert result.stderr.startswith(f'error: model name "{name}": expected 1 to 128 letters')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no --artifact is given; give the file that `modelyard export` wrote, or --handler"),
        (["--handler", "text"], "no --artifact is given, which the handler text needs"),
        (["--handler", "mine.py", "--explain-with", "a.pt2"], "--explain-with a.pt2 goes with an"),
        (
            ["--handler", "mine.py:Mine", "--from", "folder"],
            "--from folder goes with an --artifact",
        ),
    ],
    ids=["nothing", "built in", "twin", "folder"],
)
def test_what_needs_an_artifact_is_wrong_usage_without_one(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(archive_app, ["digits", *arguments])

    assert result.exit_code == 2
    assert said in result.stderr


def test_verify_lists_the_files_of_a_sound_archive(inputs: Path) -> None:
    run_archive(inputs)
    file = inputs.parent / "store" / "digits.mar"

    result = run_verify(str(file), "--no-run")

    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["FILE", "BYTES", "SHA256"]
    assert lines[-3:-1] == ["CHECK    RESULT", "digests  all 5 agree with the manifest"]
    found = json.loads(run_verify(str(file), "--no-run", "--json").stdout)
    assert (found["is_sealed"], found["problems"]) == (True, [])


def test_verify_names_every_problem_and_exits_1(inputs: Path) -> None:
    run_archive(inputs)
    file = inputs.parent / "store" / "digits.mar"
    data = bytearray(file.read_bytes())
    for artifact in (b"digits.pt2 digits.pt2 ", b"digits.onnx digits.onnx "):
        data[data.index(artifact)] ^= 1
    file.write_bytes(data)

    result = run_verify(str(file), "--json")

    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["problems"]) == 2
    assert result.stderr.startswith("error: digits.mar is refused: 2 problems\n")
    assert run_verify(str(file)).stdout == ""


def test_verify_does_not_pass_an_archive_whose_digests_were_taken_out(inputs: Path) -> None:
    run_archive(inputs)
    file = inputs.parent / "store" / "digits.mar"
    with zipfile.ZipFile(file) as zipped:
        content = {name: zipped.read(name) for name in zipped.namelist()}
    manifest = json.loads(content[MANIFEST_NAME])
    del manifest["modelyard"]
    content[MANIFEST_NAME] = json.dumps(manifest).encode()
    with zipfile.ZipFile(file, "w") as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)

    result = run_verify(str(file), "--no-run")

    assert result.exit_code == 1
    assert "digests: the manifest holds none, so nothing in the archive is proven" in result.stderr


def test_verify_of_a_missing_file_exits_1(tmp_path: Path) -> None:
    result = run_verify(str(tmp_path / "lost.mar"))

    assert result.exit_code == 1
    assert result.stderr == f"error: there is no archive {tmp_path}/lost.mar\n"


@pytest.mark.parametrize("app", [archive_app, verify_app], ids=["archive", "verify"])
def test_help_shows_an_example(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--help"], terminal_width=200)

    assert result.exit_code == 0
    assert "Example: modelyard" in result.stdout


@pytest.mark.parametrize(("app", "name"), [(archive_app, "archive"), (verify_app, "verify")])
def test_app_is_one_command(app: typer.Typer, name: str) -> None:
    assert typer.main.get_command(app).name == name


def test_importing_the_room_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'typer', 'rich', 'yaml'}"
    code = f"import sys, archiver; print(sorted({heavy} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"
