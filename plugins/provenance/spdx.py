"""An archive's bill of materials as SPDX 3.0.1 with the AI profile, made of its CycloneDX.

Format: https://spdx.github.io/spdx-spec/v3.0.1/, JSON-LD. Without the moment of its making, which
the format asks for, the same archive gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from modelyard.archiver.errors import NotProven
from modelyard.archiver.read import Archive
from modelyard.archiver.untrusted.json import Fields, format_json, parse_json
from modelyard.archiver.untrusted.names import SBOM_NAME
from modelyard.plugins.provenance.parity import predicate_of

CONTEXT = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
MOST_BYTES = 64 << 20
KINDS = {"file": "software_File", "machine-learning-model": "ai_AIPackage"}
"""Kind of component → type of element; all others are packages."""


def format_spdx(archive: Archive, created: datetime | None = None) -> bytes:
    """Write an archive's SPDX document.

    Args:
        created: the moment that it states; by default now.

    Raises:
        ValueError: the archive has no bill of materials that can be read.
    """
    if SBOM_NAME not in archive.names:
        raise ValueError(f"{archive.path.name} holds no {SBOM_NAME}")
    document = Fields(parse_json(archive.read(SBOM_NAME), MOST_BYTES))
    metadata = document.object("metadata")
    root = metadata.object("component")
    tools = metadata.object("tools").objects("components")
    parts = document.objects("components")
    ancestors = root.object("pedigree").objects("ancestors") if "pedigree" in root.values else []
    space = f"urn:modelyard:{archive.digest}:"
    moment = (created or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
    model = {**_element(root, space, root.text("name")), **_model(archive, moment, space)}
    elements = [model, *(_element(each, space, each.text("name")) for each in [*parts, *ancestors])]
    agents = [
        {"type": "SoftwareAgent", "spdxId": f"{space}agent:{tool.text('name')}",
         "creationInfo": "_:made", "name": f"{tool.text('name')} {tool.text('version')}"}
        for tool in tools
    ]  # fmt: skip
    document.check()
    made = {"type": "CreationInfo", "@id": "_:made", "specVersion": "3.0.1", "created": moment,
            "createdBy": [each["spdxId"] for each in agents]}  # fmt: skip
    model["suppliedBy"] = agents[0]["spdxId"]
    related = [*_relations(model["spdxId"], elements[1:], len(parts), space)]
    whole = [*agents, *elements, *related]
    bom = {"type": "software_Sbom", "spdxId": f"{space}sbom", "creationInfo": "_:made",
           "rootElement": [model["spdxId"]], "element": [each["spdxId"] for each in whole],
           "profileConformance": ["core", "software", "ai"]}  # fmt: skip
    outer = {**bom, "type": "SpdxDocument", "spdxId": f"{space}document", "name": archive.path.name,
             "rootElement": [bom["spdxId"]]}  # fmt: skip
    return format_json({"@context": CONTEXT, "@graph": [made, outer, bom, *whole]})


def _element(component: Fields, space: str, name: str) -> dict[str, Any]:
    """Return a component of CycloneDX as an element."""
    values = component.values
    kind = KINDS.get(component.text("type"), "software_Package")
    element = {
        "type": kind,
        "spdxId": f"{space}{component.text('bom-ref')}",
        "creationInfo": "_:made",
        "name": name,
        "software_packageVersion": values.get("version"),
        "software_packageUrl": values.get("purl"),
        "verifiedUsing": [
            {"type": "Hash", "algorithm": "sha256", "hashValue": each.text("content")}
            for each in (component.objects("hashes") if "hashes" in values else ())
        ],
    }
    return {key: value for key, value in element.items() if value}


def _model(archive: Archive, moment: str, space: str) -> dict[str, Any]:
    """Return what the AI profile says of the archive's model: how closely it was proven."""
    try:
        artifacts = predicate_of(archive)["artifacts"]
    except NotProven:
        artifacts = []
    outputs = {
        f"parity of {each['name']}, {output}": found
        for each in artifacts for output, found in each["outputs"].items()
    }  # fmt: skip
    return {
        "software_primaryPurpose": "model",
        "software_downloadLocation": f"{space}{archive.path.name}",
        "releaseTime": moment,
        "ai_typeOfModel": sorted({each["format"] for each in artifacts}) or ["unknown"],
        "ai_metric": [_entry(name, found["worst"]) for name, found in outputs.items()],
        "ai_metricDecisionThreshold": [
            _entry(name, found["tolerance"]) for name, found in outputs.items()
        ],
    }


def _entry(key: str, value: object) -> Mapping[str, str]:
    said = "not stated" if value is None else f"{value:g}"
    return {"type": "DictionaryEntry", "key": key, "value": said}


def _relations(
    model: str, elements: list[dict[str, Any]], parts: int, space: str
) -> Iterator[dict[str, Any]]:
    kinds = {"contains": [each for each in elements if each["type"] == "software_File"],
             "dependsOn": [each for each in elements[:parts] if each["type"] != "software_File"],
             "descendantOf": elements[parts:]}  # fmt: skip
    for kind, targets in kinds.items():
        if targets:
            yield {"type": "Relationship", "spdxId": f"{space}{kind}", "creationInfo": "_:made",
                   "relationshipType": kind, "from": model,
                   "to": [each["spdxId"] for each in targets]}  # fmt: skip
