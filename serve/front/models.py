"""What is asked of models beside their answers: is one ready, and what does it take and give."""

from typing import Any

from modelyard.archiver.signature import OIP_DATATYPES
from modelyard.serve.control.registry import ModelVersion, Registry
from modelyard.serve.front.begin import ServerState

RETRY = {"Retry-After": "1"}
"""Header of answers that say not ready."""
EXTENSIONS = ("model_repository", "binary_tensor_data", "parameters", "classification")
"""What clients of the Open Inference Protocol test for; Triton's names."""


def is_model_ready(model: ModelVersion, state: ServerState) -> bool:
    """Return whether a version answers predictions, and will for a while."""
    return model.takes_requests and not state.is_draining


def readiness(
    model: ModelVersion, state: ServerState
) -> tuple[dict[str, Any], int, dict[str, str] | None]:
    """Return whether a version answers predictions now, and status and headers that say so."""
    is_ready = is_model_ready(model, state)
    headers = None if is_ready else RETRY
    return {"name": model.name, "ready": is_ready}, 200 if is_ready else 503, headers


def why_not_ready(registry: Registry, state: ServerState) -> str | None:
    """Return why predictions cannot be answered now, or None when they can."""
    if state.is_starting or state.is_draining:
        return f"the server is {'starting' if state.is_starting else 'being stopped'}"
    if registry.lacks_all:
        return "no model of the start could be loaded; the log says why"
    if sick := without_worker(registry):
        return f"no worker is ready for {', '.join(sick)}"
    return None


def without_worker(registry: Registry) -> list[str]:
    """Return the models whose default version should have workers but has none ready.

    One that is loaded on demand is not among them.
    """
    return [
        model.name
        for model in registry
        if model.pool.slots and not model.takes_requests and registry.is_default(model)
    ]


def describe_signature(registry: Registry, model: ModelVersion) -> dict[str, Any]:
    """Return a model's metadata: inputs and outputs as its archive states them, -1 where they vary.

    An archive without a seal states none.
    """
    signature = ((model.manifest or {}).get("modelyard") or {}).get("signature") or {}
    return {
        "name": model.name,
        "versions": [each.version for each in registry.versions(model.name)],
        "platform": "pytorch",
        "inputs": [_tensor(tensor) for tensor in signature.get("inputs", ())],
        "outputs": [_tensor(tensor) for tensor in signature.get("outputs", ())],
    }


def _tensor(tensor: dict[str, Any]) -> dict[str, Any]:
    dtype = tensor["dtype"]
    values = tensor.get("values")
    return {
        "name": tensor["name"],
        "datatype": OIP_DATATYPES.get(dtype, dtype),
        "shape": [size if isinstance(size, int) else -1 for size in tensor["shape"]],
        **({"parameters": {"values": values}} if values else {}),
    }
