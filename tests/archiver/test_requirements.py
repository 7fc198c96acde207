import hashlib
import json
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.errors import CannotArchive, RefusedArchive
from modelyard.archiver.requirements import own_distributions, parse_pin, resolve
from modelyard.archiver.untrusted.names import LOCK_NAME, MANIFEST_NAME, SBOM_NAME
from tests.archiver.conftest import fill
from tests.archiver.wheels import build_wheel


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Build `salt`, and `soup` that requires it."""
    return fill_wheels(tmp_path / "wheels")


def fill_wheels(folder: Path) -> Path:
    build_wheel(folder, "salt", "1.5")
    build_wheel(folder, "salt", "2.0")
    build_wheel(folder, "soup", "3.1", requires="salt<2")
    return folder


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of an archive that requires `soup`."""
    folder = tmp_path_factory.mktemp("pinned")
    path = write_archive(
        "digits",
        version="1.0",
        artifact=fill(folder / "inputs") / "digits.onnx",
        handler=f"{folder}/inputs/handler.py",
        output_dir=folder / "store",
        requirements_file=requirements(folder, "soup\n"),
        wheels_dir=fill_wheels(folder / "wheels"),
    )
    with zipfile.ZipFile(path) as zipped:
        return {name: zipped.read(name) for name in zipped.namelist()}


def requirements(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "requirements.txt").write_text(text)
    return folder / "requirements.txt"


def problems(file: Path, wheels: Path | None) -> str:
    with pytest.raises(CannotArchive) as caught:
        resolve(file, wheels)
    return str(caught.value)


def test_requirements_and_what_they_require_are_pinned_with_their_hashes(
    wheels: Path, tmp_path: Path
) -> None:
    resolved = resolve(requirements(tmp_path, "Soup\n"), wheels)

    expected = [wheels / f"{name}-py3-none-any.whl" for name in ("salt-1.5", "soup-3.1")]
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in expected]
    assert [wheel.resolve() for wheel in resolved.wheels] == expected
    assert resolved.lock.decode() == (
        f"salt==1.5 --hash=sha256:{digests[0]}\nsoup==3.1 --hash=sha256:{digests[1]}\n"
    )


def test_what_every_server_has_is_not_pinned(wheels: Path, tmp_path: Path) -> None:
    build_wheel(wheels, "stew", requires="torch>=2")

    resolved = resolve(requirements(tmp_path, "stew\nnumpy>=2\n"), wheels)

    assert [pin.name for pin in resolved.pins] == ["stew"]


def test_what_only_this_machine_has_is_not_taken_for_granted(wheels: Path, tmp_path: Path) -> None:
    """pytest is installed here, and on no server."""
    assert "No matching distribution found for pytest" in problems(
        requirements(tmp_path, "pytest\n"), wheels
    )
    assert "torch" in own_distributions()
    assert "pytest" not in own_distributions()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soup\nsalt==2.0\n", "pip cannot resolve the requirements"),
        pytest.param(  # by day test_what_only_this_machine_has_is_not_taken_for_granted
            *("nothing-like-this\n", "No matching distribution found for nothing-like-this"),
            marks=pytest.mark.nightly,
        ),
        ("soup ==\n", "pip cannot resolve the requirements"),
    ],
    ids=["conflict", "unknown", "broken"],
)
def test_what_pip_refuses_is_an_error_in_its_words(
    wheels: Path, tmp_path: Path, text: str, said: str
) -> None:
    assert said in problems(requirements(tmp_path, text), wheels)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "there is no such file" in problems(tmp_path / "lost.txt", None)
    assert "there is no such folder" in problems(requirements(tmp_path, ""), tmp_path / "lost")


@pytest.mark.parametrize("text", ["six", "six==1", "six==1 --hash=md5:1", "-e .", "../x==1"])
def test_only_pins_are_read(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME==VERSION"):
        parse_pin(text)


def test_lock_wheels_and_pins_are_in_the_archive(
    inputs: Path, wheels: Path, tmp_path: Path
) -> None:
    file = requirements(tmp_path / "req", "soup\n")
    path = write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler=f"{inputs}/handler.py",
        output_dir=tmp_path / "store",
        requirements_file=file,
        wheels_dir=wheels,
    )

    with open_archive(path) as archive:
        seal = archive.manifest.modelyard
        assert seal is not None
        assert archive.manifest.requirements_file == "requirements.txt"
        assert archive.read("requirements.txt") == b"soup\n"
        assert archive.read(LOCK_NAME).decode().splitlines() == list(seal.requirements)
        for name in ("salt-1.5", "soup-3.1"):
            wheel = f"{name}-py3-none-any.whl"
            assert archive.read(f"MAR-INF/wheels/{wheel}") == (wheels / wheel).read_bytes()
        bill = json.loads(archive.read(SBOM_NAME))["components"]
    assert {each["purl"] for each in bill if "purl" in each} == {
        "pkg:pypi/salt@1.5",
        "pkg:pypi/soup@3.1",
        *(f"pkg:pypi/{name}@{quote(version(name))}" for name in ("onnxruntime", "torch")),
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda lock: b"--index-url https://elsewhere.example/simple\n" + lock,
        lambda lock: lock + b"--find-links /tmp\n",
        lambda lock: lock.replace(b"soup==3.1", b"soup==9.9"),
        lambda lock: b"",
        None,
    ],
    ids=["index", "folder", "version", "empty", "missing"],
)
def test_a_lock_that_says_more_than_the_manifest_is_refused(
    pinned: dict[str, bytes], tmp_path: Path, change: Callable[[bytes], bytes] | None
) -> None:
    """As its author could write it: all digests agree."""
    content, path = dict(pinned), tmp_path / "digits.mar"
    manifest = json.loads(content[MANIFEST_NAME])
    lock = content.pop(LOCK_NAME)
    del manifest["modelyard"]["digests"][LOCK_NAME]
    if change is not None:
        content[LOCK_NAME] = change(lock)
        digest = hashlib.sha256(content[LOCK_NAME]).hexdigest()
        manifest["modelyard"]["digests"][LOCK_NAME] = digest
    content[MANIFEST_NAME] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in content.items():
            zipped.writestr(name, data)

    with pytest.raises(RefusedArchive, match=r"MAR-INF/requirements\.lock (holds|is missing)"):
        open_archive(path)


def test_wheels_without_requirements_are_an_error(inputs: Path, wheels: Path) -> None:
    with pytest.raises(CannotArchive, match="--wheels needs --requirements"):
        write_archive(
            "digits",
            version="1.0",
            artifact=inputs / "digits.onnx",
            handler="image_classifier",
            output_dir=inputs,
            wheels_dir=wheels,
        )


@pytest.mark.network
def test_an_index_gives_versions_and_hashes(tmp_path: Path) -> None:
    resolved = resolve(requirements(tmp_path, "six==1.17.0\n"))

    assert str(resolved.pins[0]) == (
        "six==1.17.0 --hash=sha256:4721f391ed90541fddacab5acf947aa0d3dc7d27b2e1e8eda2be8970586c3274"
    )
    assert resolved.wheels == ()


def test_what_comes_through_an_extra_is_a_servers_own_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's build for CUDA requires `cuda-toolkit[cudart,…]`, whose extras name the libraries."""
    for name, requires in {
        "modelyard": ["broth[hot]"],
        "broth": ['pepper; extra == "hot"', 'ice; extra == "cold"', 'tin; sys_platform == "none"'],
        "pepper": [],
        "ice": [],
        "tin": [],
    }.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
        (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert own_distributions().keys() == {"modelyard", "broth", "pepper"}


def test_an_index_that_is_not_reached_is_one_problem_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    said = problems(requirements(tmp_path, "salt\n"), None)
    assert said == (
        "the requirements cannot be pinned: pip does not reach its package index (Connection "
        "refused); give a folder of their wheels with --wheels, as `pip download -r "
        "requirements.txt -d wheels` fills it elsewhere"
    )
