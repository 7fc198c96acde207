"""`make release`: what it refuses, what makes two builds equal, and the whole of it by night."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy import release
from deploy.release import ReleaseError
from tests.shared import ROOT

VERSION = "0.1.0"


def git(folder: Path, *words: str) -> str:
    me = ("-c", "user.name=me", "-c", "user.email=me@localhost")
    ran = subprocess.run(
        ["git", *me, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return ran.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout of what says versions, dated and tagged as a release is."""
    for name in ("pyproject.toml", "client/pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    replace("CHANGELOG.md", r"## \[0.1.0\] - .*", "## [0.1.0] - 2026-12-01")(tmp_path)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "release")
    git(folder, "tag", "--force", f"v{VERSION}")


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text, count = re.subn(old, new, (folder / name).read_text(), count=1)
        assert count == 1, f"{old!r} is not in {name}"
        (folder / name).write_text(text)

    return change


def test_what_agrees_is_a_release(checkout: Path) -> None:
    assert release.check_version(checkout, tagged=True) == VERSION


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            replace("client/pyproject.toml", '"0.1.0"', '"0.2.0"'),
            "client/pyproject.toml says 0.2.0",
        ),
        (
            replace("pyproject.toml", "client==0.1.0", "client>=0.1.0"),
            "have no modelyard-client==0",
        ),
        (replace("CHANGELOG.md", "0.1.0", "0.0.9"), "section of CHANGELOG.md is of 0.0.9"),
        (replace("CHANGELOG.md", "2026-12-01", "unreleased"), "says 'unreleased' of it"),
        (lambda folder: git(folder, "tag", "--delete", "v0.1.0"), "tags are none; expected v0.1.0"),
    ],
    ids=["client", "pin", "changelog", "date", "tag"],
)
def test_what_disagrees_is_refused(
    checkout: Path, change: Callable[[Path], object], said: str
) -> None:
    git(checkout, "tag", "--delete", "v0.1.0")
    if "tags" not in said:
        change(checkout)
        commit(checkout)
    with pytest.raises(ReleaseError, match=re.escape(said)):
        release.check_version(checkout, tagged=True)


def test_what_is_not_committed_is_refused_and_a_rehearsal_needs_no_tag(checkout: Path) -> None:
    replace("CHANGELOG.md", "2026-12-01", "unreleased")(checkout)
    with pytest.raises(ReleaseError, match="1 files are not as committed"):
        release.check_version(checkout, tagged=False)
    git(checkout, "commit", "--quiet", "--all", "--message", "not yet")
    assert release.check_version(checkout, tagged=False) == VERSION


def sdist(file: Path, *, late: bool, content: bytes = b"1") -> None:
    """Write an sdist as setuptools does: with the hour, its user and an order of its own."""
    folder = file.parent.with_name(f"files-of-{file.parent.name}")
    folder.mkdir(exist_ok=True)
    for name in ("b", "a") if late else ("a", "b"):
        (folder / name).write_bytes(content)
    with tarfile.open(file, "w:gz") as tar:
        for name in ("b", "a") if late else ("a", "b"):
            info = tar.gettarinfo(folder / name, name)
            info.mtime, info.uname = (2, "x") if late else (1, "y")
            with (folder / name).open("rb") as opened:
                tar.addfile(info, opened)


def test_an_sdist_depends_on_its_files_alone(tmp_path: Path) -> None:
    for late in (False, True):
        folder = tmp_path / str(late)
        folder.mkdir()
        sdist(folder / "m-1.tar.gz", late=late)
    with pytest.raises(ReleaseError, match=r"m-1.tar.gz \(times or modes of its files\)"):
        release.compare(tmp_path / "False", tmp_path / "True")
    for late in (False, True):
        release.tidy_sdist(tmp_path / str(late) / "m-1.tar.gz", 100)
    release.compare(tmp_path / "False", tmp_path / "True")


def test_two_builds_that_differ_are_told_by_what_differs(tmp_path: Path) -> None:
    for name, content in (("one", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        with zipfile.ZipFile(tmp_path / name / "m.whl", "w") as wheel:
            wheel.writestr("same.py", "")
            wheel.writestr("m.py", content)
        sdist(tmp_path / name / "m-1.tar.gz", late=False, content=content)
        (tmp_path / name / f"{name}.txt").touch()
    with pytest.raises(ReleaseError) as caught:
        release.compare(tmp_path / "one", tmp_path / "other")
    assert str(caught.value) == (
        "two builds of one commit differ: m-1.tar.gz (a, b); m.whl (m.py); "
        "one.txt (in one of them); other.txt (in one of them)"
    )


def test_the_trip_is_the_readmes() -> None:
    steps = release.trip((ROOT / "README.md").read_text())
    for command in ("modelyard export", "modelyard archive", "serve start", "curl", "serve stop"):
        assert command in steps
    assert "make" not in steps
    with pytest.raises(ReleaseError, match="has no commands below '## From a checkpoint"):
        release.trip("# Modelyard\n")


def test_pythons_are_those_of_the_package() -> None:
    assert release.supported_pythons(ROOT) == ["3.11", "3.12", "3.13"]
    with pytest.raises(ReleaseError, match=r"no Python 3.99 with the venv module"):
        release.find_python("3.99")


def test_the_workflow_does_what_make_does_and_waits_for_a_tag() -> None:
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert flow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` so
    (job,) = flow["jobs"].values()
    runs = [step.get("run", "") for step in job["steps"]]
    made = runs.index("make release")
    uploads = [
        at
        for at, step in enumerate(job["steps"])
        if re.search("publish|skopeo copy|release create|attest", f"{step}")
    ]
    assert uploads and min(uploads) > made
    assert not any("${{" in run for run in runs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_installs_and_makes_the_trip(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "release"
    git(tmp_path, "clone", "--quiet", str(ROOT), str(source))
    release.release(source, output, tagged=False, image=False, pythons=["3.11"], torch_index="")
    lines = (output / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert len(sums) == 6 and release.digests(output).items() >= sums.items()
    statement = json.loads((output / "provenance.json").read_text())
    assert {each["name"] for each in statement["subject"]} == {*sums} - {"provenance.json"}
    assert all(sums[each["name"]] == each["digest"]["sha256"] for each in statement["subject"])
    (sbom,) = output.glob("*.cdx.json")
    named = {each["name"] for each in json.loads(sbom.read_text())["components"]}
    assert {"torch", "onnxruntime", "fastapi"} <= named
