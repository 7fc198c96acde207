"""The lock files: complete, exact, and the same on every machine."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

REPO = Path(__file__).parent.parent
LOCK = (REPO / "requirements.lock").read_text()
TORCH = (REPO / "requirements-torch.lock").read_text()
PINNED = dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", LOCK + TORCH, re.M))


def test_every_dependency_of_the_project_is_pinned_at_a_version_that_it_allows() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["build-system"]["requires"],
    ]
    for requirement in wanted:
        parsed = Requirement(requirement)
        assert parsed.specifier.contains(PINNED[parsed.name.lower()]), requirement


def test_the_versions_that_are_allowed_are_those_that_are_tested() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    allowed = SpecifierSet(project["requires-python"])
    assert [minor for minor in range(30) if f"3.{minor}" in allowed] == [
        int(version.split(".")[1]) for version in named
    ]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named
    (torch,) = (one for one in project["dependencies"] if one.startswith("torch"))
    release = re.match(r"\d+\.\d+", PINNED["torch"])
    assert release is not None
    major, minor = map(int, release[0].split("."))
    assert torch == f"torch>={major}.{minor},<{major}.{minor + 1}"


def test_every_package_but_torch_has_hashes() -> None:
    packages = re.split(r"^(?=[a-z])", LOCK, flags=re.M)[1:]
    assert [package.split("==")[0] for package in packages if "--hash=sha256:" not in package] == []
    assert "torch" not in {package.split("==")[0] for package in packages}


def test_torch_is_pinned_without_naming_a_build() -> None:
    assert re.findall(r"^[^#\n].*", TORCH, re.M) == ["torch==2.13.0"]


def test_the_locks_name_no_index_host_or_folder() -> None:
    for text in (LOCK, TORCH):
        assert re.findall(r"https?://|file:|--(?:extra-)?index|--find-links|--trusted", text) == []
        assert re.findall(r"(?:^|\s)/\w+", text) == []


def test_no_package_is_for_one_kind_of_graphics_card() -> None:
    assert [name for name in PINNED if name.startswith(("nvidia", "cuda", "triton"))] == []
