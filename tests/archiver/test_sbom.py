"""The bill of materials, against the rules of CycloneDX 1.6 that concern it."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from modelyard.archiver import open_archive, write_archive
from modelyard.archiver.manifest import Manifest, Seal
from modelyard.archiver.sbom import format_sbom
from modelyard.archiver.untrusted.names import SBOM_NAME

PINS = (f"six==1.17.0 --hash=sha256:{'a' * 64}", f"torch==2.13.0+cpu --hash=sha256:{'b' * 64}")
# Of the schema's enumeration, the types that we write.
TYPES = {"library", "file", "machine-learning-model"}


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
        assert {each["name"]: each["hashes"][0]["content"] for each in listed} == {
            name: digest for name, digest in seal.digests.items() if name != SBOM_NAME
        }
        sbom = archive.read(SBOM_NAME)
        assert seal.digests[SBOM_NAME] == hashlib.sha256(sbom).hexdigest()


def test_nothing_of_this_machine_is_in_it(document: dict[str, Any]) -> None:
    assert "timestamp" not in document["metadata"]
    assert "serialNumber" not in document
