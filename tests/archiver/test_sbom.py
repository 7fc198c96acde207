"""The bill of materials, against the rules of CycloneDX 1.6 that concern it."""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.manifest import Manifest, Seal
from modelyard.archiver.sbom import format_product, format_sbom
from modelyard.archiver.untrusted.names import SBOM_NAME

PINS = (f"six==1.17.0 --hash=sha256:{'a' * 64}", f"torch==2.13.0+cpu --hash=sha256:{'b' * 64}")
# Of the schema's enumeration, the types that we write.
TYPES = {"library", "file", "machine-learning-model", "application", "platform"}


def bill(manifest: Manifest, digests: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(format_sbom(manifest, digests))
    return document


@pytest.fixture
def document() -> dict[str, Any]:
    manifest = Manifest("digits", "1.0", modelyard=Seal(digests={}, requirements=PINS))
    return bill(manifest, {"digits.onnx": "c" * 64, "handler.py": "d" * 64})


def test_the_document_has_what_the_schema_requires(document: dict[str, Any]) -> None:
    allowed = {
        *("$schema", "bomFormat", "specVersion", "serialNumber", "version", "metadata"),
        *("components", "services", "dependencies"),
    }
    assert set(document) <= allowed
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert isinstance(document["version"], int) and document["version"] >= 1
    for component in [document["metadata"]["component"], *document["components"]]:
        assert component["type"] in TYPES
        assert component["name"]
        for digest in component.get("hashes", ()):
            assert digest["alg"] == "SHA-256"
            assert re.fullmatch(r"[a-fA-F0-9]{64}", digest["content"])


def test_references_are_unique_and_lead_somewhere(document: dict[str, Any]) -> None:
    references = [document["metadata"]["component"]["bom-ref"]]
    references += [component["bom-ref"] for component in document["components"]]
    assert len(references) == len(set(references))
    for dependency in document["dependencies"]:
        assert {dependency["ref"], *dependency["dependsOn"]} <= set(references)


def test_packages_have_their_version_hash_and_purl(document: dict[str, Any]) -> None:
    libraries = [each for each in document["components"] if each["type"] == "library"]
    assert [(each["name"], each["version"], each["purl"]) for each in libraries] == [
        ("six", "1.17.0", "pkg:pypi/six@1.17.0"),
        ("torch", "2.13.0+cpu", "pkg:pypi/torch@2.13.0%2Bcpu"),
    ]
    assert libraries[0]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]


def test_an_archive_lists_every_file_it_holds(inputs: Path, tmp_path: Path) -> None:
    path = write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler=f"{inputs}/handler.py",
        output_dir=tmp_path,
    )

    with open_archive(path) as archive:
        seal = archive.manifest.modelyard
        listed = json.loads(archive.read(SBOM_NAME))["components"]
        assert seal is not None
        found = {each["name"]: each for each in listed if each["type"] == "file"}
        assert {name: each["hashes"][0]["content"] for name, each in found.items()} == {
            name: digest for name, digest in seal.digests.items() if name != SBOM_NAME
        }
        sbom = archive.read(SBOM_NAME)
        assert seal.digests[SBOM_NAME] == hashlib.sha256(sbom).hexdigest()


def test_an_archive_says_what_its_artifact_was_made_from_and_with(
    inputs: Path, tmp_path: Path
) -> None:
    report_file = inputs / "digits.onnx.report.json"
    report = json.loads(report_file.read_text())
    report["checkpoint"] |= {"kind": "state dict"}
    report |= {"versions": {"python": "3.11.7", "torch": "2.13.0+cpu"}, "model": "net:Digits"}
    report_file.write_text(json.dumps(report))
    path = write_archive(
        "digits",
        version="1.0",
        artifact=inputs / "digits.onnx",
        handler=f"{inputs}/handler.py",
        output_dir=tmp_path,
    )

    with open_archive(path) as archive:
        document = json.loads(archive.read(SBOM_NAME))
    (checkpoint,) = document["metadata"]["component"]["pedigree"]["ancestors"]
    assert checkpoint["name"] == "digits.pt"
    assert checkpoint["hashes"][0]["content"] == report["checkpoint"]["sha256"]
    stated = {each["name"]: each["value"] for each in checkpoint["properties"]}
    assert stated == {"modelyard:kind": "state dict", "modelyard:model": "net:Digits"}
    made_with = {each["bom-ref"] for each in document["components"]}
    assert {"pkg:pypi/torch@2.13.0%2Bcpu", "python@3.11.7"} <= made_with
    (tool,) = document["metadata"]["tools"]["components"]
    assert (tool["type"], tool["name"]) == ("application", "modelyard")


def test_the_product_lists_what_it_needs_with_versions_and_licences() -> None:
    document = json.loads(format_product())
    test_references_are_unique_and_lead_somewhere(document)
    test_the_document_has_what_the_schema_requires(document)
    packages = {each["name"]: each for each in document["components"]}
    assert document["metadata"]["component"]["name"] == "modelyard"
    assert packages["torch"]["version"] == importlib.metadata.version("torch")
    assert {"typer", "cryptography", "pydantic"} <= packages.keys()
    assert sum("licenses" in each for each in packages.values()) > len(packages) / 2
    assert "pytest" not in packages


def test_nothing_of_this_machine_is_in_it(document: dict[str, Any]) -> None:
    assert "timestamp" not in document["metadata"]
    assert "serialNumber" not in document
