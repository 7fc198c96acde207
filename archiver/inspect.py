"""What an archive is and holds, from its own words: nothing of it runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archiver.manifest import Signature, Tensor, signature_to_json
from archiver.names import SIGNATURE_NAME
from archiver.read import open_archive


def describe(path: Path | str) -> dict[str, Any]:
    """Check an archive's names, sizes and digests, and return what its manifest states.

    Raises:
        ArchiveError: it is no archive, or is refused.
    """
    with open_archive(path) as archive:
        manifest, seal = archive.manifest, archive.manifest.modelyard
        return {
            "kind": "archive",
            "path": str(path),
            "digest": archive.digest,
            "name": manifest.model_name,
            "version": manifest.model_version,
            "handler": manifest.handler,
            "artifact": manifest.serialized_file,
            "config_file": manifest.config_file,
            "is_sealed": seal is not None,
            "is_signed": SIGNATURE_NAME in archive.names,
            "signature": signature_to_json(seal.signature) if seal else None,
            "explained_by": seal.explain.artifact if seal and seal.explain else None,
            "golden_requests": len(seal.golden) if seal else 0,
            "requirements": list(seal.requirements) if seal else [],
            "files": [vars(file) for file in archive.files],
            **_typed(seal.signature if seal else None),
        }


def table(description: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a description for a reader: what, and its value."""
    yield "archive", f"{description['name']} {description['version']}"
    yield "digest", description["digest"]
    yield "sealed", "yes" if description["is_sealed"] else "no: TorchServe's archiver wrote it"
    yield "signed", "yes; check it with verify --public-key" if description["is_signed"] else "no"
    yield "handler", description["handler"] or "none"
    yield "artifact", description["artifact"] or "none"
    for way in ("inputs", "outputs"):
        for text in description[way]:
            yield way.removesuffix("s"), text
    yield "explained by", description["explained_by"] or "nothing"
    yield "golden requests", str(description["golden_requests"])
    for requirement in description["requirements"]:
        yield "requires", requirement.partition(" ")[0]
    for file in description["files"]:
        yield "file", f"{file['name']}  {file['size_bytes']:,} bytes  {file['sha256'][:12]}"


def _typed(signature: Signature | None) -> dict[str, list[str]]:
    """Write inputs and outputs as `--input` of export takes them."""
    if signature is None:
        return {"inputs": [], "outputs": []}
    return {
        "inputs": [_tensor(tensor, signature) for tensor in signature.inputs],
        "outputs": [_tensor(tensor, signature) for tensor in signature.outputs],
    }


def _tensor(tensor: Tensor, signature: Signature) -> str:
    dims = ",".join(
        f"{size}={signature.dims[size].min}..{signature.dims[size].max}"
        if isinstance(size, str) and size in signature.dims
        else str(size)
        for size in tensor.shape
    )
    return f"{tensor.name}:{tensor.dtype}[{dims}]"
