"""The bill of materials: the archive's files and its handler's pinned packages, as CycloneDX.

Nothing of this machine and no time is in it: the same inputs give the same bytes.

Format: CycloneDX 1.6, JSON, https://cyclonedx.org/docs/1.6/json/
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from modelyard.archiver.manifest import Manifest
from modelyard.archiver.requirements import parse_pin
from modelyard.archiver.untrusted.json import format_json

SPEC_VERSION = "1.6"


def format_sbom(manifest: Manifest, digests: Mapping[str, str]) -> bytes:
    """Write the bill of materials of an archive.

    Args:
        manifest: with the pinned requirements.
        digests: SHA-256 of every file, by name.
    """
    requirements = manifest.modelyard.requirements if manifest.modelyard else ()
    packages = [_package(pin) for pin in requirements]
    files = [_file(name, digest) for name, digest in sorted(digests.items())]
    root = f"pkg:generic/{manifest.model_name}@{manifest.model_version}"
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {
            "component": {
                "type": "machine-learning-model",
                "bom-ref": root,
                "name": manifest.model_name,
                "version": manifest.model_version,
            }
        },
        "components": packages + files,
        "dependencies": [
            {"ref": root, "dependsOn": [component["bom-ref"] for component in packages + files]}
        ],
    }
    return format_json(document)


def _package(text: str) -> dict[str, Any]:
    pin = parse_pin(text)
    purl = f"pkg:pypi/{pin.name}@{quote(pin.version)}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": pin.name,
        "version": pin.version,
        "hashes": [{"alg": "SHA-256", "content": pin.sha256}],
        "purl": purl,
    }


def _file(name: str, digest: str) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": f"file:{name}",
        "name": name,
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }
