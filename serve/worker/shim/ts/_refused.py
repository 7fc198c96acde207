"""Names of TorchServe that import and refuse when they are used: what they need is not served."""

from __future__ import annotations

from typing import Any, NoReturn

from modelyard.handlers.errors import LoadError
from ts.torch_handler.base_handler import BaseHandler

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


def refused_handler(name: str) -> type[BaseHandler]:
    """Return a class of handlers that do not load."""

    class Refused(BaseHandler):
        """A handler that archives name; it does not load."""

        def initialize(self, context: Any) -> None:
            """Refuse.

            Raises:
                LoadError: always.
            """
            raise LoadError(f"the handler {name} is not served: {REASONS[name]}")

    return Refused


def refused_function(name: str) -> Any:
    """Return a function that raises LoadError whatever it is called with."""

    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise LoadError(f"{name} is not served: {REASONS[name]}")

    return refuse
