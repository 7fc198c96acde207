"""Manifests for Kubernetes and KServe, held against schemas, our settings and our own metrics."""

import importlib
import os
import re
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


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


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
    jsonschema.validate(manifest, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**manifest, "spec": {**manifest["spec"], "storageUrl": ""}}, schema)


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
    if not re.search(r"keda\.sh|kustomize", manifest["apiVersion"]):
        validate.validate(manifest, "1.32", strict=True)


def test_all_of_them_are_applied_and_nothing_else() -> None:
    listed = read(DEPLOY / "kubernetes" / "kustomization.yaml")
    applied = {*listed["resources"], *listed["configMapGenerator"][0]["files"]}
    assert applied == {file.name for file in KUBERNETES} - {
        "kustomization.yaml",
        "scale-by-work.yaml",
    }


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
        "management": settings.management_port,
        "metrics": settings.metrics_port,
    }


def test_they_scale_by_metrics_that_there_are() -> None:
    text = (DEPLOY / "kubernetes" / "scale-by-work.yaml").read_text(encoding="utf-8")
    known = Metrics().text()
    for name in re.findall(r"modelyard_\w+", text):
        assert f"# TYPE {name} " in known
