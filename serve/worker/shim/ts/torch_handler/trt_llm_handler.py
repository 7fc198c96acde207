"""`from ts.torch_handler.trt_llm_handler import TRTLLMHandler`."""

from __future__ import annotations

from modelyard.handlers.context import Context
from modelyard.handlers.errors import LoadError
from ts.torch_handler.base_handler import BaseHandler


class TRTLLMHandler(BaseHandler):
    """A name that archives ask for; it does not load."""

    def initialize(self, context: Context) -> None:
        """Refuse.

        Raises:
            LoadError: always.
        """
        raise LoadError(
            "the handler trt_llm_handler is not served: it answers several batches at once, and a "
            "worker here answers one; serve the model with TensorRT-LLM's own server"
        )
