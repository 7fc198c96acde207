"""Folders that build container images with archives inside."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from modelyard.archiver.errors import ArchiveError
from modelyard.plugins.cluster.dockerize import base_image, dockerize
from modelyard.serve.errors import BadRequest
from modelyard.serve.explain_plan import plan_start
from modelyard.serve.settings import load_settings
from tests.serve.live import build_archive


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    for name, version in (("echo", "1.0"), ("echo", "2.0"), ("other", "1.0")):
        made = build_archive(folder, "echo", name=name, version=version)
        made.rename(folder / f"{name}-{version}.mar")
    return folder


def variables(folder: Path) -> dict[str, str]:
    lines = (folder / "Dockerfile").read_text().splitlines()
    pairs = (line.removeprefix("ENV ").partition("=") for line in lines if line.startswith("ENV "))
    return {name: value for name, _, value in pairs}


def test_the_image_serves_what_was_given_by_its_own_names(store: Path, tmp_path: Path) -> None:
    given = [store / "echo-1.0.mar", store / "other-1.0.mar"]
    folder = tmp_path / "made" / "image"
    packed = dockerize(given, folder, base_image(), False)
    assert [(each.name, each.version) for each in packed] == [("echo", "1.0"), ("other", "1.0")]
    files = sorted(file.name for file in (folder / "models").iterdir())
    assert files == ["echo-1.0.mar", "other-1.0.mar"]
    for file in given:
        assert (folder / "models" / file.name).read_bytes() == file.read_bytes()
    settings = {"model_store": folder / "models", "state_dir": tmp_path / "state"}
    plan = plan_start(load_settings(settings, None, variables(folder)))
    assert [start.name for start in plan.models] == ["echo", "other"]
    text = (folder / "Dockerfile").read_text()
    assert f"ARG BASE={base_image()}\n" in text
    assert all(each.digest in text for each in packed)
    (service,) = yaml.safe_load((folder / "compose.yaml").read_text())["services"].values()
    assert service["read_only"] is True
    assert [each.name for each in folder.parent.iterdir()] == ["image"]


def test_what_cannot_be_one_image_is_refused_and_leaves_nothing(
    store: Path, tmp_path: Path
) -> None:
    target = tmp_path / "made" / "image"
    one, two = store / "echo-1.0.mar", store / "echo-2.0.mar"
    (tmp_path / "elsewhere").mkdir()
    same_file = Path(shutil.copy(two, tmp_path / "elsewhere" / one.name))
    same_model = Path(shutil.copy(one, tmp_path / "elsewhere" / "again.mar"))
    odd_name = Path(shutil.copy(one, tmp_path / "elsewhere" / "a,b.mar"))
    damaged = tmp_path / "damaged.mar"
    damaged.write_bytes(one.read_bytes()[:-9])
    for archives, message in (
        ([one, same_file], "would be one file of the image"),
        ([one, same_model], "both hold echo 1.0"),
        ([one, tmp_path / "nothing.mar"], "is not a file"),
        ([damaged], "is refused"),
        ([odd_name], "a,b.mar"),
    ):
        with pytest.raises((BadRequest, ArchiveError), match=message):
            dockerize(archives, target, base_image(), False)
    assert not target.parent.exists()
    dockerize([one, two], target, base_image(), False)
    with pytest.raises(BadRequest, match="is there already; --force replaces it"):
        dockerize([one], target, base_image(), False)
    dockerize([one], target, "registry/modelyard:1", True)
    assert [file.name for file in (target / "models").iterdir()] == [one.name]
    assert "ARG BASE=registry/modelyard:1\n" in (target / "Dockerfile").read_text()
    with pytest.raises(BadRequest, match="is there already; name a new folder"):
        dockerize([one], store, base_image(), True)
    assert one.is_file()
