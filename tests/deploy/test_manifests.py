"""Manifests for Kubernetes and KServe, held against schemas, our settings and our own metrics."""

import copy
import importlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.settings import load_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KSERVE = sorted((DEPLOY / "kserve").glob("*.yaml"))
CRDS = os.environ.get("KSERVE_CRDS")
"""Folder of KServe's `config/crd/full`, which is too large to be kept here."""
SCHEMA_OF = {
    "ClusterServingRuntime": "clusterservingruntimes",
    "InferenceService": "inferenceservices",
}


OPEN = {"annotations", "labels", "limits", "matchLabels", "requests", "selector"}
"""Fields of any keys; what `selector` holds is one in a Service."""


@cache
def read(file: Path) -> Any:
    return yaml.load(
        file.read_text(encoding="utf-8"), yaml.CSafeLoader
    )  # safe_load in C: CRDs have megabytes


def misspelt(manifest: Any, *path: Any) -> Iterator[tuple[Any, str]]:
    """Yield the manifest once for each key of its specification, with a letter too much in it."""
    here = manifest
    for key in path:
        here = here[key]
    for key in here if isinstance(here, dict) else range(len(here)):
        if isinstance(here, dict) and not OPEN & set(path):
            wrong = copy.deepcopy(manifest)
            at = wrong
            for each in path:
                at = at[each]
            at[f"{key}x"] = at.pop(key)
            yield wrong, f"{'.'.join(map(str, path))}.{key}"
        if isinstance(here[key], dict | list):
            yield from misspelt(manifest, *path, key)


@pytest.mark.skipif(not CRDS, reason="KSERVE_CRDS does not name KServe's config/crd/full")
@pytest.mark.parametrize("file", KSERVE, ids=lambda file: file.name)
def test_kserve_takes_them_by_its_own_schemas(file: Path) -> None:
    jsonschema = importlib.import_module("jsonschema")
    manifest = read(file)
    assert CRDS is not None
    name = f"serving.kserve.io_{SCHEMA_OF[manifest['kind']]}.yaml"
    (version,) = (
        each
        for each in read(Path(CRDS, name))["spec"]["versions"]
        if manifest["apiVersion"].endswith(f"/{each['name']}")
    )
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.validators.validator_for(schema)(schema)
    validator.validate(manifest)
    for wrong, place in misspelt(manifest, "spec"):
        assert not validator.is_valid(wrong), place


def _strict(schema: Any) -> Any:
    """Refuse keys that a schema does not name, as an API server would drop them."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("type") != "object"
    if "properties" in schema and not is_open:
        strict.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
        strict.pop("pattern", None)
    return strict


@pytest.mark.parametrize(
    "file",
    [each for each in KUBERNETES if "apiVersion" in read(each)],
    ids=lambda file: file.name,
)
def test_kubernetes_takes_them(file: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    manifest = read(file)
    if re.search(r"keda\.sh|kustomize", manifest["apiVersion"]):
        return
    validate.validate(manifest, "1.32", strict=True)
    for wrong, place in misspelt(manifest, "spec"):
        with pytest.raises(validate.ValidationError):
            validate.validate(wrong, "1.32", strict=True)
            pytest.fail(place)


def test_all_of_them_are_applied_and_nothing_else() -> None:
    listed = read(DEPLOY / "kubernetes" / "kustomization.yaml")
    applied = {*listed["resources"], *listed["configMapGenerator"][0]["files"]}
    assert applied == {file.name for file in KUBERNETES} - {
        "kustomization.yaml",
        "scale-by-work.yaml",
    }


def test_they_name_each_other_rightly() -> None:
    """No schema sees that a selector chooses nothing, or that a port has another name."""
    manifests = [read(file) for file in KUBERNETES if file.name != "kustomization.yaml"]
    (deployment,) = (each for each in manifests if each.get("kind") == "Deployment")
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    ports = {each["name"] for each in pod["spec"]["containers"][0]["ports"]}
    selectors, targets, names = [], [], set()
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selectors += [spec[key] for key in ("selector", "podSelector") if key in spec]
        targets += [spec["scaleTargetRef"]] if "scaleTargetRef" in spec else []
        names |= set(re.findall(r"(?:targetPort|- \{port|port): ([a-z]+)", yaml.safe_dump(spec)))
    assert all(each.get("matchLabels", each) == labels for each in selectors)
    assert len(selectors) == 4
    assert {each["name"] for each in targets} == {deployment["metadata"]["name"]}
    assert len(targets) == 2
    assert names == ports - {"management"}


def test_the_settings_are_settings_and_leave_time_to_drain() -> None:
    settings = load_settings({}, DEPLOY / "kubernetes" / "modelyard.yaml", {})
    assert settings.asks_for_tokens
    manifest = read(DEPLOY / "kubernetes" / "deployment.yaml")
    pod = manifest["spec"]["template"]["spec"]
    drain_s = settings.drain_delay_s + settings.drain_timeout_s
    assert drain_s < pod["terminationGracePeriodSeconds"]
    (container,) = pod["containers"]
    mounted = {each["mountPath"] for each in container["volumeMounts"]}
    for path in (settings.model_store, settings.state_dir, settings.token_file):
        assert path is not None
        assert mounted & set(map(str, (path, *path.parents)))
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "http": settings.port,
        "grpc": settings.grpc_port,
        "management": settings.management_port,
        "metrics": settings.metrics_port,
    }


def test_they_scale_by_metrics_that_there_are() -> None:
    text = (DEPLOY / "kubernetes" / "scale-by-work.yaml").read_text(encoding="utf-8")
    known = Metrics().text()
    names = re.findall(r"modelyard_\w+", text)
    assert len(names) == 3
    for name in names:
        assert f"# TYPE {name} " in known
        assert f'{name}{{namespace="models", pod=~"modelyard-.+"}}' in text, "its own pods alone"
