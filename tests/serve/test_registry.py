from pathlib import Path
from typing import Any, cast

import pytest

from modelyard.serve.control.model_config import Options
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.errors import Conflict, DefaultVersion, ModelNotFound, VersionNotFound


def version(name: str, number: str) -> ModelVersion:
    """Make an entry of the table; the table never looks into what runs it."""
    nothing = cast("Any", None)
    return ModelVersion(
        name=name,
        version=number,
        file=f"{name}.mar",
        url="",
        digest="",
        manifest={},
        runtime="python",
        options=Options(),
        config=nothing,
        folder=Path(),
        pool=nothing,
        batchers=nothing,
        metrics=nothing,
    )


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    for name, number in (("digits", "1.0"), ("digits", "2.0"), ("cats", "7")):
        registry.add(version(name, number))
    return registry


def test_the_first_version_is_the_default(registry: Registry) -> None:
    assert registry.get("digits").version == "1.0"
    assert registry.get("digits", "2.0").version == "2.0"


def test_another_version_can_be_made_the_default(registry: Registry) -> None:
    registry.set_default("digits", "2.0")
    assert registry.get("digits").version == "2.0"
    assert registry.is_default(registry.get("digits", "2.0"))
    assert not registry.is_default(registry.get("digits", "1.0"))


def test_an_unknown_model_is_named(registry: Registry) -> None:
    with pytest.raises(ModelNotFound, match="dogs") as caught:
        registry.get("dogs", "1.0")
    assert type(caught.value) is ModelNotFound


@pytest.mark.parametrize("number", ["3.0", "", "1", "1.0 "])
def test_an_unknown_version_is_named(registry: Registry, number: str) -> None:
    with pytest.raises(VersionNotFound, match=f"version: {number} does not exist"):
        registry.get("digits", number)


def test_a_default_must_be_registered(registry: Registry) -> None:
    with pytest.raises(VersionNotFound):
        registry.set_default("digits", "3.0")
    assert registry.get("digits").version == "1.0"


def test_a_version_is_registered_once(registry: Registry) -> None:
    with pytest.raises(Conflict, match=r"version 1\.0 is already registered for model digits"):
        registry.add(version("digits", "1.0"))
    assert len(registry) == 3


def test_the_default_version_stays_while_others_are_there(registry: Registry) -> None:
    with pytest.raises(DefaultVersion, match="default version for model digits"):
        registry.remove(registry.get("digits"))
    registry.remove(registry.get("digits", "2.0"))
    registry.remove(registry.get("digits"))
    with pytest.raises(ModelNotFound):
        registry.get("digits")


def test_a_model_that_was_removed_starts_afresh(registry: Registry) -> None:
    registry.remove(registry.get("cats"))
    registry.add(version("cats", "8"))
    assert registry.get("cats").version == "8"


def test_models_come_by_name_and_versions_in_the_order_of_registration(registry: Registry) -> None:
    listed = [(model.name, model.version) for model in registry]
    assert listed == [("cats", "7"), ("digits", "1.0"), ("digits", "2.0")]
    assert [model.version for model in registry.versions("digits")] == ["1.0", "2.0"]


def test_versions_can_be_put_in_an_order(registry: Registry) -> None:
    first, second = registry.versions("digits")
    registry.arrange([second, first])
    assert registry.versions("digits") == [second, first]
    assert registry.is_default(first)
