"""Bills of materials, as CycloneDX: of an archive, and of Modelyard as it is installed.

Nothing of this machine and no time is in them: the same inputs give the same bytes.

Format: CycloneDX 1.6, JSON, https://cyclonedx.org/docs/1.6/json/
"""

import email.parser
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from modelyard.archiver.manifest import Manifest
from modelyard.archiver.report import Report
from modelyard.archiver.requirements import own_distributions, parse_pin
from modelyard.archiver.untrusted.json import format_json

SPEC_VERSION = "1.6"


def format_sbom(
    manifest: Manifest, digests: Mapping[str, str], report: Report | None = None
) -> bytes:
    """Write the bill of materials of an archive.

    Args:
        manifest: manifest with the pinned requirements.
        digests: SHA-256 of every file, by name.
        report: report of the artifact: what it was made from, and with.
    """
    requirements = manifest.modelyard.requirements if manifest.modelyard else ()
    pins = map(parse_pin, requirements)
    packages = [{**_package(*pin.release), "hashes": _sha256(pin.sha256)} for pin in pins]
    pinned = {package["name"] for package in packages}
    versions = dict(report.versions) if report else {}
    packages += [
        _package(name, version)
        for name, version in sorted(versions.items())
        if name not in pinned and name != "python"
    ]
    if "python" in versions:
        packages.append(_component("platform", "python", versions["python"]))
    files = [
        {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": _sha256(digest)}
        for name, digest in sorted(digests.items())
    ]
    root: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": f"pkg:generic/{manifest.model_name}@{manifest.model_version}",
        "name": manifest.model_name,
        "version": manifest.model_version,
    }
    if report:
        root["pedigree"] = {"ancestors": [_checkpoint(report)]}
    return _document(root, packages + files, tools=[_own()])


def format_product() -> bytes:
    """Write the bill of materials of Modelyard and what it needs, as installed here."""
    return _document(_own(), _distributions(own_distributions()))


def format_image(
    debian: Sequence[tuple[str, str]], distributions: Mapping[str, str], digest: str
) -> bytes:
    """Write the bill of materials of a container image.

    Args:
        debian: name and version of each of Debian's packages in it.
        distributions: name of each distribution of Python in it → its METADATA.
        digest: digest of the image, `sha256:…`.
    """
    root = {
        **_component("container", "modelyard", importlib.metadata.version("modelyard")),
        "bom-ref": f"pkg:oci/modelyard@{quote(digest)}",
        "purl": f"pkg:oci/modelyard@{quote(digest)}",
        "hashes": _sha256(digest.removeprefix("sha256:")),
    }
    libraries = []
    for name, version in sorted(debian):
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}"
        libraries.append({**_component("library", name, version), "bom-ref": purl, "purl": purl})
    packages = [_own(), *_distributions(distributions)]
    return _document(root, [*libraries, *packages])


def _distributions(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the components of Python's distributions, by their METADATA, but ours."""
    packages = []
    for name, text in sorted(texts.items()):
        if name == "modelyard":
            continue
        metadata = email.parser.HeaderParser().parsestr(text)
        package = _package(name, str(metadata["Version"]))
        if licence := metadata["License-Expression"] or metadata["License"]:
            # An expression is by SPDX; the older field is anything, at times the whole text.
            line = str(licence).strip().splitlines()[0]
            is_expression = metadata["License-Expression"] is not None
            package["licenses"] = [
                {"expression": line} if is_expression else {"license": {"name": line}}
            ]
        packages.append(package)
    return packages


def _document(
    root: Mapping[str, Any],
    components: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    metadata = {"tools": {"components": tools}} if tools else {}
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {**metadata, "component": root},
        "components": components,
        "dependencies": [
            {"ref": root["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}
        ],
    }
    return format_json(document)


def _own() -> dict[str, Any]:
    return _package("modelyard", importlib.metadata.version("modelyard"), "application")


def _checkpoint(report: Report) -> dict[str, Any]:
    """Return what the artifact was made from."""
    stated = {
        "kind": report.checkpoint_kind,
        "model": report.model,
        "command": report.command,
    }
    return {
        "type": "machine-learning-model",
        "bom-ref": f"checkpoint:{report.checkpoint_sha256}",
        "name": report.checkpoint or "checkpoint",
        "hashes": _sha256(report.checkpoint_sha256),
        "properties": [
            {"name": f"modelyard:{name}", "value": value} for name, value in stated.items() if value
        ],
    }


def _package(name: str, version: str, kind: str = "library") -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{quote(version)}"
    return {**_component(kind, name, version), "bom-ref": purl, "purl": purl}


def _component(kind: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "bom-ref": f"{name}@{version}", "name": name, "version": version}


def _sha256(digest: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": digest}]


if __name__ == "__main__":
    sys.stdout.buffer.write(format_product())
