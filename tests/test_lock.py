"""The lock files: complete, exact, and the same on every machine."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from modelyard.base import extras

REPO = Path(__file__).parent.parent
LOCK = (REPO / "requirements.lock").read_text()
TORCH = (REPO / "requirements-torch.lock").read_text()
FILE = tomllib.loads((REPO / "pyproject.toml").read_text())
PROJECT = FILE["project"]
CLIENT = tomllib.loads((REPO / "client" / "pyproject.toml").read_text())["project"]
OWN = ("modelyard", "modelyard-client")
"""What is installed from here."""
DEPENDENCIES = [
    line
    for line in [*PROJECT["dependencies"], *CLIENT["dependencies"]]
    if Requirement(line).name not in OWN
]
EXTRAS = PROJECT["optional-dependencies"]
UNLOCKED = ("ray", "s3", "gs", "az")
"""Extras that only those install who know why (docs/decisions/, 0090 and 0122)."""
USERS_EXTRAS = [name for name in EXTRAS if name not in ("all", "dev", *UNLOCKED)]
PINNED = dict(re.findall(r"^([a-z0-9-]+)==([^ \n]+)", LOCK + TORCH, re.M))


_spec = importlib.util.spec_from_file_location(
    "matrix_results", REPO / "scripts" / "matrix_results.py"
)
assert _spec is not None and _spec.loader is not None
matrix_results = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix_results)


def test_every_dependency_of_the_project_is_pinned_at_a_version_that_it_allows() -> None:
    optional = [line for name in EXTRAS.keys() - {*UNLOCKED} for line in EXTRAS[name]]
    for requirement in [*DEPENDENCIES, *optional, *FILE["build-system"]["requires"]]:
        parsed = Requirement(requirement)
        if parsed.name not in OWN:
            assert parsed.specifier.contains(PINNED[parsed.name.lower()]), requirement


def test_the_lock_of_images_is_a_part_of_the_developers() -> None:
    def entries(text: str) -> dict[str, tuple[str, ...]]:
        packages = re.split(r"^(?=[a-z])", text, flags=re.M)[1:]
        return {each.split(" ")[0]: tuple(re.findall(r"sha256:\w+", each)) for each in packages}

    server = entries((REPO / "requirements-server.lock").read_text())
    assert server.items() <= entries(LOCK).items()
    names = {pin.partition("==")[0] for pin in server} | {"torch"}
    assert names >= {Requirement(line).name for line in DEPENDENCIES}
    assert names.isdisjoint({"captum", "matplotlib", "onnxscript", "pytest"})


def test_no_major_version_is_allowed_that_was_not_tested() -> None:
    """Of what users install; developers have the lock."""
    for_users = [line for name in USERS_EXTRAS for line in EXTRAS[name]]
    for requirement in [*DEPENDENCIES, *for_users]:
        parsed = Requirement(requirement)
        if parsed.name not in (*OWN, "torch"):
            beyond = int(PINNED[parsed.name].partition(".")[0]) + 1
            assert f"<{beyond}" in str(parsed.specifier).split(","), requirement


def test_all_is_every_extra_of_users_and_who_misses_one_is_told_its_name() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == set(USERS_EXTRAS)
    assert set(extras.EXTRAS.values()) == {*USERS_EXTRAS, *UNLOCKED} - {"ray"}
    for module, extra in extras.EXTRAS.items():
        brings = [
            line
            for line in EXTRAS[extra]
            if line.startswith(module.partition("_")[0].replace(".", "-"))
        ]
        assert brings, f"{module} is not in modelyard[{extra}]"


def test_the_versions_that_are_allowed_are_those_that_are_tested() -> None:
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(30) if f"3.{minor}" in allowed] == [
        int(version.split(".")[1]) for version in named
    ]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named
    (torch,) = (one for one in PROJECT["dependencies"] if one.startswith("torch"))
    pairs = re.findall(r"3\.(\d+)-2\.(\d+)\.\d+", (REPO / "scripts/matrix").read_text())
    minors = sorted({int(minor) for _, minor in pairs})
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert torch == f"torch>=2.{minors[0]},<2.{minors[-1] + 1}"
    assert PINNED["torch"].startswith(f"2.{minors[0]}.")
    assert {f"3.{python}" for python, _ in pairs} == set(named)


def test_the_install_page_says_what_was_tested_and_when() -> None:
    page = (REPO / "docs" / "install.md").read_text()
    assert matrix_results.BEGIN + matrix_results.format_table() + matrix_results.END in page
    runs = json.loads(matrix_results.TESTED.read_text())
    assert {"lowest", *matrix_pairs()} >= set(runs)
    for name, run in runs.items():
        assert name == "lowest" or run["python"].startswith(name.partition("-")[0])
        assert run["torch"].partition("+")[0] == (
            PINNED["torch"] if name == "lowest" else name.partition("-")[2]
        )


def test_every_lower_bound_has_its_reason_on_the_decisions_page() -> None:
    """And the lock satisfies it, by the first test here."""
    page = (REPO / "docs" / "decisions" / "0108-versions.md").read_text()
    reasons = dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([\d.]+) \|", page, re.M))
    optional = [line for name in USERS_EXTRAS for line in EXTRAS[name]]
    lowest = {
        parsed.name: next(one.version for one in parsed.specifier if one.operator == ">=")
        for parsed in map(Requirement, [*DEPENDENCIES, *optional])
        if parsed.name not in (*OWN, "torch")
    }
    assert reasons == lowest


def matrix_pairs() -> list[str]:
    (line,) = re.findall(r'^PAIRS="(.*)"', (REPO / "scripts/matrix").read_text(), re.M)
    return str(line).split()


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


def test_the_client_and_the_server_are_of_one_version() -> None:
    assert CLIENT["version"] == PROJECT["version"]
    assert f"modelyard-client=={CLIENT['version']}" in PROJECT["dependencies"]
    ours = set(map(str, map(Requirement, DEPENDENCIES)))
    assert set(map(str, map(Requirement, CLIENT["dependencies"]))) <= ours
