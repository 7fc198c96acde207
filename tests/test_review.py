"""`scripts/review`, which the GitHub action and the pre-commit hook run, where archives lie."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.shared import ROOT


def review(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [ROOT / "scripts" / "review", *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.slow
def test_archives_are_verified_and_compared_with_those_of_another_commit(
    digits_store: Path, tmp_path: Path
) -> None:
    def git(*words: str) -> None:
        me = ("-c", "user.name=me", "-c", "user.email=me@localhost")
        subprocess.run(["git", *me, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet", "--initial-branch", "main")
    shutil.copy(digits_store / "onnx.mar", tmp_path / "digits.mar")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    shutil.copy(digits_store / "pt2.mar", tmp_path / "digits.mar")
    shutil.copy(digits_store / "pt2.mar", tmp_path / "added.mar")
    (tmp_path / "broken.mar").write_bytes((digits_store / "onnx.mar").read_bytes()[:-500])

    summary = tmp_path / "summary.md"
    code, said = review(tmp_path, "main", "digits.mar", GITHUB_STEP_SUMMARY=str(summary))
    assert code == 0, said
    assert said.startswith("**digits.mar** verified\n\n| REQUEST | digits.mar 1.0 |"), said
    assert "2 of 2 answers agree within 0.001" in said
    assert summary.read_text() == said
    code, said = review(tmp_path, "main", "added.mar", "broken.mar")
    assert code == 1
    assert "**added.mar** verified\nIt is new since main.\n" in said
    assert re.search(r"\*\*broken.mar\*\* is not what it says:\n```\nerror: ", said)


def test_action_and_hook_name_what_is_there() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    used = set(re.findall(r"inputs\.([a-z-]+)", str(steps)))
    assert used == set(action["inputs"])
    runs = " ".join(step.get("run", "") for step in steps)
    for file in ("scripts/review", "requirements-torch.lock", "client"):
        assert file in runs and (ROOT / file).exists()
    # Text of a workflow's inputs never becomes a part of a script.
    assert "${{" not in runs
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"].split()[0] == "scripts/review"
    assert re.search(hook["files"], "model_store/digits.mar")
