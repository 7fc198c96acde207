"""`torch-model-archiver`: TorchServe's flags, messages, exit codes and archives."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive
from modelyard.archiver.untrusted.names import MANIFEST_NAME
from modelyard.plugins.torchserve.archiver.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a handler, weights, a model file and a folder of extra files."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "handler.py": "def handle(data, context):\n    return data\n",
        "weights.pt": "weights " * 100,
        "h/net.py": "class Net:\n    pass\n",
        "requirements.txt": "numpy\n",
        "c.yaml": "batchSize: 2\n",
        "ex/a.txt": "a",
        "ex/sub/b.txt": "b",
        "ex/.git/config": "left out",
        "ex/__pycache__/a.pyc": "left out",
        "ex/.env": "kept",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    return tmp_path


def archive(*arguments: str, handler: str = "handler.py") -> int:
    """Run the command in this process; return its exit code, 1 for a message."""
    try:
        main(["--model-name", "m", "--version", "1.0", "--handler", handler, *arguments])
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
            return 1
        return int(ended.code or 0)
    return 0


def manifest(path: str = "m.mar") -> dict[str, Any]:
    with zipfile.ZipFile(path) as zipped:
        found: dict[str, Any] = json.loads(zipped.read(MANIFEST_NAME))
    return found


def names(path: str = "m.mar") -> list[str]:
    with zipfile.ZipFile(path) as zipped:
        return zipped.namelist()


def test_every_flag_ends_in_the_archive_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = archive(
        *("--serialized-file", "weights.pt", "--model-file", "h/net.py"),
        *("-r", "requirements.txt", "-c", "c.yaml", "--runtime", "python3"),
        *("--extra-files", "ex/a.txt,ex/sub/b.txt"),
    )

    assert (code, capfd.readouterr()) == (0, ("", ""))
    assert names()[-1] == MANIFEST_NAME
    assert set(names()[:-1]) == {
        *("handler.py", "weights.pt", "net.py", "requirements.txt", "c.yaml", "a.txt", "b.txt"),
    }
    assert manifest() == {
        "createdOn": "01/01/1980 00:00:00",
        "runtime": "python3",
        "model": {
            "modelName": "m",
            "serializedFile": "weights.pt",
            "handler": "handler.py",
            "modelFile": "net.py",
            "modelVersion": "1.0",
            "requirementsFile": "requirements.txt",
            "configFile": "c.yaml",
        },
        "archiverVersion": "0.12.0",
    }


def test_keys_come_in_torchserves_order() -> None:
    archive("--serialized-file", "weights.pt")

    assert list(manifest()) == ["createdOn", "runtime", "model", "archiverVersion"]
    assert list(manifest()["model"]) == ["modelName", "serializedFile", "handler", "modelVersion"]


def test_the_default_is_a_compressed_zip_and_zip_store_is_not() -> None:
    archive()
    archive("--archive-format", "zip-store", "--export-path", "h")

    for path, method in (("m.mar", zipfile.ZIP_DEFLATED), ("h/m.mar", zipfile.ZIP_STORED)):
        with zipfile.ZipFile(path) as zipped:
            assert {entry.compress_type for entry in zipped.infolist()} == {method}


def test_every_format_opens_with_the_same_files() -> None:
    for archive_format in ("default", "tgz", "no-archive"):
        assert archive("--archive-format", archive_format) == 0

    with tarfile.open("m.tar.gz") as tar:
        assert tar.getnames() == ["m/handler.py", "m/MAR-INF/MANIFEST.json"]
    for path in ("m.mar", "m.tar.gz", "m"):
        with open_archive(path) as opened:
            assert set(opened.names) == {"handler.py", MANIFEST_NAME}
            assert opened.manifest.modelyard is None


def test_the_same_files_give_the_same_bytes() -> None:
    archive()
    os.utime("handler.py", (10**9, 10**9))
    archive("--export-path", "h")

    assert Path("m.mar").read_bytes() == Path("h/m.mar").read_bytes()


@pytest.mark.parametrize(
    ("handler", "recorded", "packed"),
    [
        ("handler.py", "handler.py", ["handler.py"]),
        ("handler", "handler", ["handler.py"]),
        ("handler:handle", "handler:handle", ["handler.py"]),
        ("handler.py:handle", "handler:handle", ["handler.py"]),
        ("h/net.py", "net.py", ["net.py"]),
        ("h/net:go", "net:go", ["net.py"]),
        ("image_classifier", "image_classifier", []),
        ("vllm_handler", "vllm_handler", []),
    ],
)
def test_a_handler_is_recorded_by_its_base_name(
    handler: str, recorded: str, packed: list[str]
) -> None:
    assert archive(handler=handler) == 0
    assert manifest()["model"]["handler"] == recorded
    assert names() == [*packed, MANIFEST_NAME]


def test_handlers_of_the_cpp_backend_are_libraries() -> None:
    Path("libnet.so").write_bytes(b"")

    assert archive("--runtime", "LSP", handler="TorchScriptHandler") == 0
    assert names() == [MANIFEST_NAME]
    assert archive("--runtime", "LSP", "--force", handler="libnet") == 0
    assert names() == ["libnet.so", MANIFEST_NAME]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("ex", [".env", "a.txt", "sub/b.txt"]),
        ("ex/", [".env", "a.txt", "sub/b.txt"]),
        ("ex/*.txt", ["a.txt"]),
        ("ex/sub,c.yaml", ["b.txt", "c.yaml"]),
        (" ex/a.txt , c.yaml ", ["a.txt", "c.yaml"]),
        ("ex/a.txt=notes/first.txt", ["notes/first.txt"]),
    ],
)
def test_extra_files_are_flattened_one_level(extra: str, expected: list[str]) -> None:
    assert archive("--extra-files", extra, handler="image_classifier") == 0
    assert names()[:-1] == expected


def test_a_folder_keeps_its_name_when_asked() -> None:
    assert archive("--extra-files", "ex", "--keep-tree", handler="image_classifier") == 0
    assert names()[:-1] == ["ex/.env", "ex/a.txt", "ex/sub/b.txt"]


def test_of_two_files_of_one_name_the_last_is_packed_and_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("h/a.txt").write_text("other")

    assert archive("--extra-files", "ex/a.txt,h/a.txt") == 0
    assert capfd.readouterr().err == "WARNING - h/a.txt is packed as a.txt, in place of ex/a.txt\n"
    with zipfile.ZipFile("m.mar") as zipped:
        assert zipped.read("a.txt") == b"other"


def test_an_archive_that_exists_is_replaced_by_force_only(
    capfd: pytest.CaptureFixture[str],
) -> None:
    archive()
    before = Path("m.mar").read_bytes()

    assert archive("--version=2") == 1
    assert capfd.readouterr().err == (
        "ERROR - m.mar already exists.\n"
        "Please specify --force/-f option to overwrite the model archive output file.\n"
        "See -h/--help for more details.\n"
    )
    assert Path("m.mar").read_bytes() == before
    assert archive("-f") == 0
    assert capfd.readouterr().err == "WARNING - Overwriting m.mar ...\n"


@pytest.mark.parametrize("archive_format", ["tgz", "no-archive"])
def test_other_formats_are_not_replaced_either(archive_format: str) -> None:
    assert archive("--archive-format", archive_format) == 0
    assert archive("--archive-format", archive_format) == 1
    assert archive("--archive-format", archive_format, "-f") == 0


def missing(flag: str, file: str) -> str:
    """Return what is said of a file that is not there: the program, the flag, the file."""
    said = f"{flag}: [Errno 2] No such file or directory: '{file}'"
    return f"torch-model-archiver: FileNotFoundError: {said}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serialized-file", "no.pt"], missing("--serialized-file", "no.pt")),
        (["--model-file", "no.py"], missing("--model-file", "no.py")),
        (["-r", "no.txt"], missing("--requirements-file", "no.txt")),
        (["-c", "no.yaml"], missing("--config-file", "no.yaml")),
        (["--handler", "no"], missing("--handler", "no.py")),
        (
            ["--extra-files", "no.txt"],
            "torch-model-archiver: FileNotFoundError: --extra-files: File does not exist: no.txt",
        ),
        (["--export-path", "c.yaml"], "Given export-path c.yaml is not a directory. Point"),
        (["--model-name", "_x"], "Model name contains special characters.\nThe allowed re"),
        (
            ["--model-name", "a/b"],
            "Model name contains special characters.\nThe allowed re",
        ),
        (["--version", "1 0"], 'model version "1 0": expected 1 to 64 letters'),
        (["--extra-files", "c.yaml=aux.txt"], 'these files cannot be packed: c.yaml: "aux'),
        (
            ["--extra-files", "c.yaml=../c"],
            "these files cannot be packed: c.yaml: the path",
        ),
        (["--extra-files", "c.yaml=MAR-INF/x"], "these files cannot be packed: c.yaml: "),
        (["--extra-files", "c.yaml=HANDLER.py"], "these files cannot be packed: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_fails_is_one_message_and_nothing_is_written(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(Path().rglob("*"))

    assert archive(*arguments) == 1
    assert capfd.readouterr().err.startswith(message)
    assert set(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [["--archive-format", "rar"], ["--runtime", "java"], ["--nonsense"], ["--model-name"]],
    ids=" ".join,
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    assert archive(*arguments) == 2


@pytest.mark.parametrize("missing", ["--model-name", "--version", "--handler"])
def test_required_flags_are_named(missing: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = {"--model-name": "m", "--version": "1", "--handler": "handler.py"}
    arguments = [text for flag, value in given.items() if flag != missing for text in (flag, value)]

    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert f"required: {missing}" in capfd.readouterr().err


def test_a_wildcard_that_matches_nothing_is_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    assert archive("--extra-files", "zz*.txt") == 0
    assert capfd.readouterr().err == (
        "WARNING - Given wildcard pattern did not match any file: zz*.txt\n"
    )


def test_a_missing_export_path_is_made(capfd: pytest.CaptureFixture[str]) -> None:
    assert archive("--export-path", "new/store") == 0
    assert "new/store does not exist; it is created" in capfd.readouterr().err
    assert Path("new/store/m.mar").is_file()


def test_links_that_leave_an_extra_folder_and_pipes_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("ex/secret").symlink_to("/etc/hostname")
    assert archive("--extra-files", "ex") == 1
    assert "ex/secret is a link that leads out of ex" in capfd.readouterr().err

    Path("ex/secret").unlink()
    os.mkfifo("ex/pipe")
    assert archive("--extra-files", "ex") == 1
    assert "ex/pipe is neither a file nor a folder" in capfd.readouterr().err


def test_a_model_can_be_loaded_before_it_is_archived(capfd: pytest.CaptureFixture[str]) -> None:
    Path("handler.py").write_text("import not_there\n")

    assert archive("--check") == 1
    assert "No module named 'not_there' (handler.py:1)" in capfd.readouterr().err
    assert not Path("m.mar").exists()


# -- import names --------------------------------------------------------------------------------

PROGRAM = """
import json
import sys
from pathlib import Path
from model_archiver import ModelArchiver, ModelArchiverConfig
from model_archiver.arg_parser import ArgParser
from model_archiver.manifest_components.manifest import RuntimeType
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging import generate_model_archive, package_model
from model_archiver.model_packaging_utils import ModelExportUtils
from modelyard.archiver import open_archive

config = ModelArchiverConfig(
    model_name="m", handler="handler.py", version="1.0", runtime=RuntimeType.PYTHON.value
)
ModelArchiver.generate_model_archive(config)
try:
    ModelArchiver.generate_model_archive(config)
except ModelArchiverError as error:
    print(str(error).splitlines()[0])
try:
    generate_model_archive(config)
except SystemExit as ended:
    print(ended.code)
config.force = True
manifest = ModelExportUtils.generate_manifest_json(config)
package_model(config, manifest)
print(json.loads(manifest)["model"])
folder = ModelExportUtils.check_mar_already_exists("m", ".", True, "tgz")
copied = ModelExportUtils.copy_artifacts("m", "python", handler="handler.py", model_file=None)
ModelExportUtils.archive(folder, "m", copied, manifest, "tgz")
print(open_archive(Path("m.tar.gz")).names)
sys.argv[1:] = ["--model-name", "n", "--version", "2.0", "--handler", "handler.py"]
print(ArgParser.export_model_args_parser().model_name)
generate_model_archive()
print(Path("n.mar").is_file())
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder as `site-packages` is, with what the wheel puts at its top."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "model_archiver.py").write_text((ROOT / "model_archiver.py").read_text())
    (folder / "modelyard").symlink_to(ROOT / "modelyard")
    return folder


def run_program(code: str, site: Path) -> tuple[int, list[str], str]:
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=False,
    )
    return ran.returncode, ran.stdout.splitlines(), ran.stderr


def test_torchserves_import_names_work_where_modelyard_is_installed(
    tmp_path: Path, site: Path
) -> None:
    code, printed, errors = run_program(PROGRAM, site)
    assert (code, printed) == (
        0,
        [
            f"{tmp_path}/m.mar already exists.",
            "1",
            "{'modelName': 'm', 'handler': 'handler.py', 'modelVersion': '1.0'}",
            "('handler.py', 'MAR-INF/MANIFEST.json')",
            "n",
            "True",
        ],
    ), errors


def test_an_installed_model_archiver_of_torchserve_comes_before_ours(site: Path) -> None:
    (site / "model_archiver").mkdir()
    (site / "model_archiver" / "__init__.py").write_text("print('theirs')")
    assert run_program("import model_archiver", site)[:2] == (0, ["theirs"])
