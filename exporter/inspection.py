"""A checkpoint, an artifact or an archive → what a person wants to know of it, as JSON.

Nothing that a file holds is run: weights come from `ingest`, a program's description from its own
JSON or protobuf, an archive's from its manifest. What `modelyard verify` refuses of an archive
before it runs anything is refused here too. Its graph is shown by a viewer of somebody else.
"""

import importlib.util
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelyard.archiver.errors import CannotArchive
from modelyard.archiver.read import Archive
from modelyard.archiver.report import read_report
from modelyard.archiver.signature import Signature
from modelyard.archiver.untrusted.json import parse_json
from modelyard.archiver.untrusted.names import MANIFEST_NAME, SIGNING_NAME
from modelyard.exporter.errors import CheckpointError, ExportError, UsageError
from modelyard.exporter.ingest import Checkpoint, choose, parse_checkpoint, take_weights
from modelyard.exporter.ingest.exported_program import PROGRAM, read_exported_program
from modelyard.exporter.ingest.folders import checked_archive, read_weights, serialized_source
from modelyard.exporter.ingest.kinds import danger_notes
from modelyard.exporter.ingest.onnx_file import (
    Value,
    dtype_of,
    inputs_of,
    locations,
    outputs_of,
    parse_onnx,
)
from modelyard.exporter.ingest.plain import Placeholder
from modelyard.exporter.ingest.source import Source, sniff, sniff_source
from modelyard.exporter.ingest.torch_file import read_script
from modelyard.exporter.ingest.value import ParsedCheckpoint, count_parameters, digest_files
from modelyard.handlers.judge.check import load_program
from modelyard.handlers.models.backends import detect_format

_MAX_DEPTH = 12
_MAX_ITEMS = 1000
_MAX_TEXT = 2000
_ELEMENTS_AT_ONCE = 1 << 24


def describe(path: Path, weights_key: str | None = None, *, ema: bool = False) -> dict[str, Any]:
    """Describe a file or folder of any kind, in values of JSON.

    Args:
        path: checkpoint, artifact or archive.
        weights_key: path of the weights to list, in a checkpoint that has several.
        ema: list the averaged weights.

    Raises:
        CheckpointError: it is none of them, or is damaged.
        UsageError: it has no such weights.
    """
    format = sniff(path)
    if format == "TorchServe archive":
        with checked_archive(path) as archive:
            return {"file": path.name, **_archive(archive)}
    if format in _ARTIFACTS:
        content = _ARTIFACTS[format](Source.of_file(path))
        (file,) = digest_files(path, [path])
        proven = _proven(path, file.sha256)
        return {"file": path.name, **content, **proven, "files": [vars(file)]}
    parsed = parse_checkpoint(path)
    notes: tuple[str, ...] = ()
    if weights_key is None and not ema and parsed.default is None:
        key = max(parsed.weights, key=lambda key: parsed.weights[key].parameters)
        notes = (f"nothing tells which weights are meant; these are the largest, {key}",)
    else:
        key = choose(parsed, path.name, weights_key, ema)
    return {"file": path.name, **_checkpoint(take_weights(parsed, path, key), notes)}


def _proven(artifact: Path, sha256: str) -> dict[str, Any]:
    """Return what the report beside an artifact states of its inputs; nothing of another's."""
    try:
        report = read_report(artifact)
    except CannotArchive:
        return {}
    return _takes(report.signature) if report and report.artifact_sha256 == sha256 else {}


def _takes(signature: Signature) -> dict[str, Any]:
    batching = {"batching": str(signature.batching)} if signature.batching else {}
    return {"takes": [str(spec) for spec in signature.inputs], **batching}


def _checkpoint(checkpoint: Checkpoint, notes: tuple[str, ...]) -> dict[str, Any]:
    hint, sets = checkpoint.class_hint, ("parameters", "size_bytes", "alternatives", "ema_key")
    known = ("kind", "writer", "writer_version", "loader", "hyper_parameters", "training", "labels")
    odd = [name for name, value in checkpoint.tensors.items() if not is_finite(value)]
    return {
        "what": "checkpoint",
        **{name: jsonable(getattr(checkpoint, name)) for name in known},
        "hyper_parameters_name": checkpoint.hyper_parameters_name,
        "class": hint and {"name": hint.name, "source": hint.source},
        "weights": {
            "key": checkpoint.weights_key,
            **{name: jsonable(getattr(checkpoint, name)) for name in sets},
            "prefixes_stripped": list(checkpoint.prefixes),
            "tied": [list(names) for names in checkpoint.tied],
            "non_finite": odd,
        },
        **_tensors(checkpoint.tensors),
        "refused": list(checkpoint.refused),
        "notes": [*notes, *checkpoint.notes],
        "sha256": checkpoint.sha256,
        "files": [vars(file) for file in checkpoint.files],
    }


def _artifact(parsed: ParsedCheckpoint) -> dict[str, Any]:
    """Return what is known of an artifact of torch's."""
    tensors, hint = parsed.weights[""].tensors, parsed.class_hint
    about = dict(parsed.about)
    schema = about.pop("schema_version", None)
    return {
        **_head(*(getattr(parsed, name) for name in _HEAD)),
        **({"class": vars(hint)} if hint else {}),
        "weights": {
            "parameters": count_parameters(tensors.values()),
            "size_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        },
        **_tensors(tensors),
        **about,
        "refused": list(parsed.refused),
        "notes": [
            *([f"schema version {schema}"] if schema else []),
            *(f"not safe to load: {finding}" for finding in parsed.findings),
            *danger_notes(parsed.refused),
            *([_DEPRECATED] if "code" in about else []),
            *parsed.notes,
        ],
    }


_HEAD = ("kind", "writer", "writer_version", "loader")
_DEPRECATED = "TorchScript is deprecated upstream: serve it, and export anew to pt2 or onnx"


def _head(*known: str | None) -> dict[str, Any]:
    return {"what": "artifact", **dict(zip(_HEAD, known, strict=True)), "refused": []}


def _onnx(source: Source) -> dict[str, Any]:
    model = parse_onnx(source)
    graph = model.graph
    tensors = [_onnx_tensor(tensor) for tensor in graph.initializer]
    outside = sorted({place for tensor in graph.initializer for place in locations(tensor)})
    return {
        **_head("ONNX", model.producer_name or None, model.producer_version or None, "protobuf"),
        "weights": {
            "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors),
            "size_bytes": None if outside else source.size,
        },
        "dtypes": dict(Counter(tensor["dtype"] for tensor in tensors)),
        "tensors": tensors,
        "inputs": [_onnx_value(value) for value in inputs_of(model)],
        "outputs": [_onnx_value(value) for value in outputs_of(model)],
        "operators": len(graph.node),
        "opset": [f"{each.domain or 'ai.onnx'} {each.version}" for each in model.opset_import],
        "notes": [
            f'weights lie in a file beside it: "{place}"'
            if place == Path(place).name and "\\" not in place
            else f'weights lie outside of its folder, which is refused: "{place}"'
            for place in outside
        ],
    }


def _onnx_tensor(tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": dtype_of(tensor.data_type),
        "shape": [int(size) for size in tensor.dims],
        "size_bytes": len(tensor.raw_data) or None,
    }


def _onnx_value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "dtype": value.kind, "shape": [s or 0 for s in value.shape or ()]}


def _archive(archive: Archive) -> dict[str, Any]:
    manifest, seal = archive.manifest, archive.manifest.modelyard
    notes = [] if seal else ["it holds no digests: not made by modelyard"]
    inside: dict[str, Any] = {}
    source = serialized_source(archive)
    if source is None:
        notes.append("it names no file of weights: its handler makes the model itself")
    else:
        try:
            inside = _describe_inside(archive, source)
        except CheckpointError as error:
            notes.append(str(error))
    notes += inside.pop("notes", [])
    return {
        **inside,
        "what": "archive",
        "kind": f"model archive ({archive.kind})",
        "writer": "modelyard" if seal else "torch-model-archiver",
        # A sealed archive states the archiver that it is compatible with.
        "writer_version": None if seal else manifest.archiver_version,
        "model": {
            "name": manifest.model_name,
            "version": manifest.model_version,
            "handler": manifest.handler,
            "digest": archive.digest if seal else None,
            "is_signed": SIGNING_NAME in archive.names,
            "explained_by": seal.explain.artifact if seal and seal.explain else None,
            "golden_requests": len(seal.golden) if seal else 0,
            "requirements": list(seal.requirements) if seal else [],
        },
        "manifest": jsonable(parse_json(archive.read(MANIFEST_NAME))),
        **(_takes(seal.signature) if seal and seal.signature else {}),
        "serialized": {"name": source and source.name, "kind": inside.get("kind")},
        "notes": notes,
        "files": [vars(file) for file in sorted(archive.files, key=lambda file: file.name)],
    }


def _describe_inside(archive: Archive, source: Source) -> dict[str, Any]:
    format = sniff_source(source)
    if format in _ARTIFACTS:
        return _ARTIFACTS[format](source)
    parsed = read_weights(archive)
    key = choose(parsed, source.name)
    described = _checkpoint(take_weights(parsed, archive.path, key), ())
    return {key: value for key, value in described.items() if key not in ("files", "sha256")}


def _tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    listed = [
        {
            "name": name,
            "dtype": _dtype(tensor),
            "shape": list(tensor.shape),
            "size_bytes": tensor.numel() * tensor.element_size(),
        }
        for name, tensor in tensors.items()
    ]
    return {"dtypes": dict(Counter(each["dtype"] for each in listed)), "tensors": listed}


def _dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    is_dense = tensor.layout is torch.strided
    return name if is_dense else f"{name} ({str(tensor.layout).removeprefix('torch.')})"


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity, a part at a time."""
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return True
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if 0 in tensor.stride():  # repeated values: once is enough
        tensor = tensor[tuple(slice(None if step else 1) for step in tensor.stride())]
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    parts = torch.split(tensor.reshape(-1), _ELEMENTS_AT_ONCE)
    return all(bool(part.isfinite().all()) for part in parts)


def jsonable(value: Any, depth: int = 0) -> Any:
    """Return a value of JSON for anything that a checkpoint keeps; long ones are cut."""
    if depth > _MAX_DEPTH:
        return "…"
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else f"{value[:_MAX_TEXT]}…"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        items = list(value.items())[:_MAX_ITEMS]
        return {str(key)[:_MAX_TEXT]: jsonable(item, depth + 1) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item, depth + 1) for item in list(value)[:_MAX_ITEMS]]
    if isinstance(value, Tensor):
        return f"tensor {_dtype(value)}{list(value.shape)}"
    if isinstance(value, Placeholder):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return f"<{jsonable(type(value)) if isinstance(value, nn.Module) else type(value).__name__}>"


_ARTIFACTS: Mapping[str, Callable[[Source], dict[str, Any]]] = {
    PROGRAM: lambda source: _artifact(read_exported_program(source)),
    "TorchScript": lambda source: _artifact(read_script(source)),
    "ONNX": _onnx,
}


# -- an artifact in a graph viewer of somebody else, on this machine only --------------------------

_HERE = "127.0.0.1"


def show_graph(artifact: Path, announce: Callable[[str], None]) -> None:
    """Open an artifact in Netron, else in Model Explorer, until Ctrl-C.

    Raises:
        ExportError: no viewer is installed that shows the format.
        UsageError: the format keeps no graph.
        LoadError: it is not an artifact, or an exported program holds more than a program.
    """
    format = detect_format(artifact)
    if format == "aoti":
        raise UsageError(f"{artifact.name} is native code, which has no graph; look at a pt2 file")
    if importlib.util.find_spec("netron"):
        announce(f"Netron: {start_netron(artifact)} until Ctrl-C")
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    elif importlib.util.find_spec("model_explorer") and format != "torchscript":
        _run_model_explorer(artifact, format)
    else:
        raise ExportError(
            f"no viewer of {format} graphs is installed; run `pip install netron`"
            + (", or `pip install ai-edge-model-explorer`" if format != "torchscript" else "")
        )


def start_netron(artifact: Path, *, browse: bool = True) -> str:
    """Serve an artifact in Netron until this process ends; return the page's address."""
    import netron

    host, port = netron.start(str(artifact), address=(_HERE, 0), browse=browse)
    return f"http://{host}:{port}"


def _run_model_explorer(artifact: Path, format: str) -> None:
    import model_explorer  # type: ignore[import-not-found]

    config = model_explorer.config()
    if format == "onnx":
        config.add_model_from_path(str(artifact))
    else:
        config.add_model_from_pytorch(artifact.name, with_fixed_shapes(artifact))
    model_explorer.visualize_from_config(config, host=_HERE)


def with_fixed_shapes(artifact: Path) -> torch.export.ExportedProgram:
    """Trace an exported program anew with sizes of two: Model Explorer cannot show others.

    Raises:
        UnsafeProgram: the file holds more than a program.
    """
    program = load_program(artifact)
    inputs = tuple(
        _example(node.meta["val"])
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in program.graph_signature.user_inputs
    )
    args, kwargs = torch.utils._pytree.tree_unflatten(inputs, program.call_spec.in_spec)
    return torch.export.export(program.module(check_guards=False), args, kwargs)


def _example(value: Any) -> Any:
    """Return a value of the type that a placeholder was traced with, at a size of two."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = [size if isinstance(size, int) else 2 for size in value.shape]
    return torch.zeros(shape, dtype=value.dtype, device=value.device)
