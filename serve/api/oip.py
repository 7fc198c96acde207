"""The Open Inference Protocol's view of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve.registry import ModelVersion

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
"""Names of element types: the signature's → the protocol's."""


def describe_signature(model: ModelVersion, versions: Sequence[str]) -> dict[str, Any]:
    """Return a model's metadata: inputs and outputs as its archive states them, -1 where they vary.

    An archive without a seal states none.

    Args:
        versions: all that are registered.
    """
    seal = (model.manifest or {}).get("modelyard") or {}
    signature = seal.get("signature") or {}
    return {
        "name": model.name,
        "versions": list(versions),
        "platform": "pytorch",
        "inputs": [_tensor(tensor) for tensor in signature.get("inputs", ())],
        "outputs": [_tensor(tensor) for tensor in signature.get("outputs", ())],
    }


def _tensor(tensor: dict[str, Any]) -> dict[str, Any]:
    dtype = tensor["dtype"]
    return {
        "name": tensor["name"],
        "datatype": DATATYPES.get(dtype, dtype),
        "shape": [size if isinstance(size, int) else -1 for size in tensor["shape"]],
    }
