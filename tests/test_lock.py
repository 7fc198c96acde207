"""The lock files: complete, exact, and the same on every machine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

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
        name, least = requirement.lower().split(">=")
        pinned = PINNED[name]
        assert numbers(pinned) >= numbers(least), requirement


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


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
