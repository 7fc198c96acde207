"""A folder that MLflow wrote → its weights or program, what it takes, and a request saved with it.

Of its flavors, `pytorch` (a pickled module, an exported program or a state dict) and `onnx`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelyard.archiver.signature import DTYPES
from modelyard.archiver.untrusted.yaml import parse_yaml
from modelyard.exporter.errors import CheckpointError
from modelyard.exporter.ingest.single_file import Announce, read_file
from modelyard.exporter.ingest.source import PLAIN_NAME, Source, inside
from modelyard.exporter.ingest.value import ParsedCheckpoint, as_dict, as_text

_MAX_BYTES = 2**20
_NAMES = ("model.pth", "model.pt2", "state_dict.pth", "model.pt")


def read_mlflow(folder: Path, announce: Announce | None) -> ParsedCheckpoint:
    """Read the file of weights, or the program, that `MLmodel` names.

    Raises:
        CheckpointError: it names none, or one of another flavor.
    """
    described = inside(folder, "MLmodel")
    content = as_dict(_parsed(described, parse_yaml, "YAML"))
    path = _file(folder, as_dict(content.get("flavors")))
    parsed = read_file(Source.of_file(path), announce)
    signature = as_dict(content.get("signature"))
    inputs, columns = _inputs(signature)
    params = signature.get("params")
    said = f"its signature has parameters, which the artifact has at their defaults: {params}"
    return replace(
        parsed,
        kind=parsed.kind if parsed.is_program else f"MLflow model ({parsed.kind})",
        paths=(*parsed.paths, described),
        writer="MLflow",
        writer_version=as_text(content.get("mlflow_version")),
        program=path if parsed.is_program else None,
        inputs=parsed.inputs or inputs,
        columns=columns,
        notes=(*parsed.notes, *([said] if params not in (None, "[]") else [])),
        example=_example(folder, as_dict(content.get("saved_input_example_info"))),
    )


def _file(folder: Path, flavors: Mapping[str, Any]) -> Path:
    names: tuple[Any, ...]
    if "pytorch" in flavors:
        data, names = as_dict(flavors["pytorch"]).get("model_data") or "data", _NAMES
    elif "onnx" in flavors:
        data, names = "", (as_dict(flavors["onnx"]).get("data") or "model.onnx",)
    else:
        raise CheckpointError(
            f'"{folder.name}" is an MLflow model of {", ".join(map(str, flavors)) or "no flavor"}; '
            "expected the flavor pytorch or onnx"
        )
    for name in filter(None, (data, *names)):
        if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f'"{folder.name}/MLmodel" names {name!r}, which is not the name of a file or folder'
            )
    found = (f"{data}/{name}" if data else name for name in names)
    path = next((inside(folder, name) for name in found if (folder / name).is_file()), None)
    if path is None:
        place = f"{folder.name}/{data}".removesuffix("/")
        raise CheckpointError(f'"{place}" has none of {", ".join(names)}')
    return path


def _inputs(signature: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the signature says, as `--input` is written, and the names of a table's columns.

    An input is without a name where the signature has none.
    """
    try:
        specs = json.loads(signature["inputs"])
        if "tensor" not in {spec["type"] for spec in specs}:
            names = [spec.get("name") for spec in specs]
            # Columns of a table, which MLflow hands over as one tensor.
            columns = () if None in names else tuple(map(str, names))
            return (f":float32[batch,{len(specs)}]",), columns
        lines = []
        for place, spec in enumerate(specs):
            tensor = spec["tensor-spec"]
            name = spec.get("name") or ("" if len(specs) == 1 else f"input_{place}")
            named = re.sub(r"\W", "_", name)
            sizes = [
                ("batch" if axis == 0 else f"dim_{axis}") if size == -1 else int(size)
                for axis, size in enumerate(tensor["shape"])
            ]
            if tensor["dtype"] not in DTYPES:
                return (), ()
            lines.append(f"{named}:{tensor['dtype']}[{','.join(map(str, sizes))}]")
        return tuple(lines), ()
    # A signature of objects or parameters, or one that a person wrote.
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return (), ()


def _example(folder: Path, info: Mapping[str, Any]) -> Any:
    """Return the request that was saved with the model: numbers, or numbers by name."""
    name = info.get("artifact_path")
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name) or not (folder / name).is_file():
        return None
    content = _parsed(inside(folder, name), json.loads, "JSON")
    if isinstance(content, Mapping) and set(content) == {"columns", "data"}:
        return content["data"]
    return content.get("inputs", content) if isinstance(content, Mapping) else content


def _parsed(path: Path, parse: Callable[[bytes], Any], form: str) -> Any:
    place = f"{path.parent.name}/{path.name}"
    if path.stat().st_size > _MAX_BYTES:
        raise CheckpointError(f'"{place}" has more than {_MAX_BYTES} bytes')
    try:
        return parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f'"{place}" is not valid {form} ({error})') from error
