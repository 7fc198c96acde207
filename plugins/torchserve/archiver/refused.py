"""What TorchServe's handlers import that is not served here, and what to do instead.

Workers read it (`ts._refused`), and whoever looks at a handler without running it.
"""

import ast
from collections.abc import Iterator

_BATCHES = "it answers several batches at once, and a worker here answers one; serve the model with"
_RANKS = "it spreads a model over several processes, and a worker here is one; serve the model with"
_DALI = (
    "workers have no NVIDIA DALI; use a handler that decodes images on the CPU, as image_classifier"
)
REASONS = {
    "dali_handler": _DALI,
    "dali_image_classifier": _DALI,
    "get_dali_pipeline": _DALI,
    "get_ds_engine": f"{_RANKS} DeepSpeed's own server",
    "get_pipeline_driver": f"{_RANKS} a server for models of several devices, as vLLM",
    "initialize_rpc_workers": f"{_RANKS} a server for models of several devices, as vLLM",
    "BaseDeepSpeedHandler": f"{_RANKS} DeepSpeed's own server",
    "BasePippyHandler": f"{_RANKS} a server for models of several devices, as vLLM",
    "trt_llm_handler": f"{_BATCHES} TensorRT-LLM's own server",
    "vllm_handler": f"{_BATCHES} vLLM's own server",
}
"""Handler, base class or function → why it is not served, and what to do instead."""


def refused_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of `REASONS` that a file imports from `ts`, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ts":
            named = [alias.name for alias in node.names]
            module = str(node.module).rpartition(".")[2]
            yield from ((name, node.lineno) for name in [module, *named] if name in REASONS)
