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

from modelyard.plugins.cluster.kserve.cli import DEFAULTS
from modelyard.serve.dataplane.metrics import Metrics
from modelyard.serve.settings import load_settings
from tests.serve.collectors import text_of

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


KNATIVE = read(Path(__file__).with_name("knative.yaml"))
STANDARD = "serving.kserve.io/deploymentMode"
OF_KNATIVE = [
    each
    for each in KSERVE
    if read(each)["metadata"].get("annotations", {}).get(STANDARD) != "Standard"
]


def pods_of(manifest: Any) -> Iterator[Any]:
    """Yield the specification of each pod that KServe hands to Knative."""
    runtime = read(DEPLOY / "kserve" / "runtime.yaml")["spec"]
    pod = {key: value for key, value in runtime.items() if key not in KNATIVE["runtime"]}
    for component in manifest["spec"].values() if manifest["kind"] == "InferenceService" else [{}]:
        own = {key: each for key, each in component.items() if key not in KNATIVE["component"]}
        if "containers" in own:
            yield own
            continue
        model = component.get("model", {})
        container = {key: each for key, each in model.items() if key not in KNATIVE["model"]}
        yield {**pod, **own, "containers": [{**pod["containers"][0], **container}]}


def refusals(pod: Any) -> Iterator[str]:
    """Yield what Knative's validation says of a pod."""

    def only(kind: str, given: Any, place: str) -> Iterator[str]:
        yield from (f"{place}.{key}" for key in given if key not in KNATIVE[kind])

    yield from only("pod", pod, "spec")
    if pod.get("automountServiceAccountToken"):
        yield "spec.automountServiceAccountToken"
    volumes = {each["name"] for each in pod.get("volumes", ())}
    mounts = [each for one in pod["containers"] for each in one.get("volumeMounts", ())]
    if volumes != {each["name"] for each in mounts}:
        yield "spec.volumes: each is to be mounted, and each mount to have one"
    for each in pod.get("volumes", ()):
        yield from only("volume", each, "volumes")
    for each in mounts:
        yield from only("volumeMount", each, "volumeMounts")
        if each["mountPath"] in KNATIVE["reserved paths"]:
            yield f"volumeMounts: {each['mountPath']}"
    ports = [each for one in pod["containers"] for each in one.get("ports", ())]
    if len(ports) > 1:
        yield "ports: one for all containers"
    for each in ports:
        yield from only("port", each, "ports")
        if each.get("name", "http1") not in KNATIVE["port names"]:
            yield f"ports: {each['name']}"
        if each["containerPort"] in KNATIVE["reserved ports"]:
            yield f"ports: {each['containerPort']}"
    for one in pod["containers"]:
        yield from only("container", one, "containers")
        yield from only("resources", one.get("resources", {}), "resources")
        context = one.get("securityContext", {})
        yield from only("securityContext", context, "securityContext")
        yield from only("capabilities", context.get("capabilities", {}), "capabilities")
        if context.get("privileged"):
            yield "securityContext.privileged"
        for each in one.get("env", ()):
            yield from only("env", each, "env")
            if each["name"] in KNATIVE["reserved variables"]:
                yield f"env: {each['name']}"
            yield from (f"env.valueFrom.{key}" for key in each.get("valueFrom", ())
                        if key not in ("configMapKeyRef", "secretKeyRef"))  # fmt: skip
        for name in ("livenessProbe", "readinessProbe", "startupProbe"):
            yield from only("probe", one.get(name, {}), name)


@pytest.mark.parametrize("file", OF_KNATIVE, ids=lambda file: file.name)
def test_knative_takes_them_by_its_own_validation(file: Path) -> None:
    assert [list(refusals(pod)) for pod in pods_of(read(file))] in ([[]], [[], []])


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("terminationGracePeriodSeconds", 45),
        ("nodeSelector", {"disk": "fast"}),
        ("automountServiceAccountToken", True),
        ("volumes", [{"name": "more", "hostPath": {"path": "/"}}]),
        ("containers.0.lifecycle", {"preStop": {"sleep": {"seconds": 5}}}),
        ("containers.0.ports", [{"containerPort": 8080}, {"containerPort": 7070}]),
        ("containers.0.ports.0.name", "grpc"),
        ("containers.0.ports.0.hostPort", 80),
        ("containers.0.ports.0.containerPort", 8012),
        ("containers.0.env", [{"name": "PORT", "value": "8080"}]),
        ("containers.0.env.0.valueFrom", {"fieldRef": {"fieldPath": "metadata.name"}}),
        ("containers.0.securityContext.privileged", True),
        ("containers.0.securityContext.capabilities.add", ["NET_RAW"]),
        ("containers.0.volumeMounts.0.mountPath", "/dev"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_knative_refuses_is_refused(place: str, value: Any) -> None:
    (pod,) = copy.deepcopy(list(pods_of(read(DEPLOY / "kserve" / "runtime.yaml"))))
    at = pod
    *path, last = place.split(".")
    for each in path:
        at = at[int(each)] if each.isdecimal() else at[each]
    at[last] = value
    assert list(refusals(pod))


def test_standard_pods_alone_say_how_long_they_may_take_to_end() -> None:
    """All others drain within what Kubernetes gives by itself, 30 s."""
    for file in set(KSERVE) - set(OF_KNATIVE):
        pod = read(file)["spec"]["predictor"]
        (drains,) = (int(each["value"]) for each in pod["model"]["env"])
        assert 5 + drains < pod["terminationGracePeriodSeconds"]
    assert DEFAULTS["drain_delay_s"] + DEFAULTS["drain_timeout_s"] < 30


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
    known = text_of(Metrics())
    names = re.findall(r"modelyard_\w+", text)
    assert len(names) == 3
    for name in names:
        assert f"# TYPE {name} " in known
        assert f'{name}{{namespace="models", pod=~"modelyard-.+"}}' in text, "its own pods alone"
